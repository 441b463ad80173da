"""The tensor table in memory: one column a fact, one row a tensor.

Rows are in the order of the state. A row that is tied to an earlier one (`alias`)
has no bytes of its own. A row may be a chunk of a larger tensor; its shape is then the
chunk's own, and several rows may have its path. The pages of a part are slices of these
columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from ._chunks import Chunk
from ._dtypes import BY_NAME
from ._manifest import PAGE_ROWS, Part, TensorPage, decode_page, encode_page
from .errors import CorruptCheckpointError

Shape = tuple[int, ...]


@dataclass(slots=True)
class TensorTable:
    """Columns of equal length; `dtype` holds names, `shape` tuples."""

    seq: list[int] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    shape: list[Shape] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    alias: list[int] = field(default_factory=list)
    shard: list[int] = field(default_factory=list)
    """-1 while unplanned, and for tied rows."""
    begin: list[int] = field(default_factory=list)
    chunks: dict[int, Chunk] = field(default_factory=dict)
    """For the rows that are not whole tensors: the shape of the whole, and where they lie in it."""

    def __len__(self) -> int:
        return len(self.path)

    def add(self, seq: int, path: str, dtype: str, shape: Shape, flags: int = 0, alias: int = -1) -> None:
        """Append a row that no shard holds yet."""
        self.seq.append(seq)
        self.path.append(path)
        self.dtype.append(dtype)
        self.shape.append(shape)
        self.nbytes.append(math.prod(shape) * BY_NAME[dtype].itemsize)
        self.flags.append(flags)
        self.alias.append(alias)
        self.shard.append(-1)
        self.begin.append(0)

    def whole(self, row: int) -> Shape:
        """The shape of the tensor that a row is (a chunk of)."""
        chunk = self.chunks.get(row)
        return self.shape[row] if chunk is None else chunk[0]

    def offsets(self, row: int) -> Shape:
        """Where a row lies in its tensor."""
        chunk = self.chunks.get(row)
        return (0,) * len(self.shape[row]) if chunk is None else chunk[1]

    def stored(self) -> list[int]:
        """The rows that some shard must hold, those without bytes included."""
        return [i for i, alias in enumerate(self.alias) if alias < 0]

    def total(self) -> int:
        """Bytes of all stored rows."""
        return sum(self.nbytes[i] for i in self.stored())


def to_pages(table: TensorTable, dtypes: list[str]) -> list[TensorPage]:
    """Cut the table into pages; `dtypes` is the part's list the rows point into."""
    number = {name: i for i, name in enumerate(dtypes)}
    pages = []
    for at in range(0, len(table), PAGE_ROWS):
        cut = slice(at, at + PAGE_ROWS)
        shapes = table.shape[cut]
        chunks = {row - at: table.chunks[row] for row in table.chunks if at <= row < at + PAGE_ROWS}
        pages.append(
            TensorPage(
                seq=table.seq[cut],
                path=table.path[cut],
                dtype=[number[name] for name in table.dtype[cut]],
                ndim=[len(shape) for shape in shapes],
                dims=[size for shape in shapes for size in shape],
                flags=table.flags[cut],
                shard=table.shard[cut],
                begin=table.begin[cut],
                alias=table.alias[cut],
                chunk=list(chunks),
                whole=[size for whole, _ in chunks.values() for size in whole],
                offsets=[size for _, offsets in chunks.values() for size in offsets],
            )
        )
    return pages


def encode_table(table: TensorTable) -> tuple[list[str], list[msgspec.Raw]]:
    """The part's dtype names and encoded pages for the table."""
    dtypes = sorted(set(table.dtype))
    return dtypes, [encode_page(page) for page in to_pages(table, dtypes)]


def decode_table(part: Part, *, file: str, step: int | None = None) -> TensorTable:
    """Put a part's pages together again and check every number in them.

    Raises:
        CorruptCheckpointError: a dtype nobody knows, an extent outside its shard, an
            alias of a later or different row.
    """
    table = TensorTable()
    for raw in part.tensors:
        _append(table, decode_page(raw, TensorPage, file=file), part, file)
    _check(table, part, file, step)
    return table


def _append(table: TensorTable, page: TensorPage, part: Part, file: str) -> None:
    at, first = 0, len(table)
    for i, ndim in enumerate(page.ndim):
        shape = tuple(page.dims[at : at + ndim])
        at += ndim
        number = page.dtype[i]
        name = part.dtypes[number] if 0 <= number < len(part.dtypes) else "?"
        if name not in BY_NAME:
            raise CorruptCheckpointError(
                f"dtype {name[:40]!r} is unknown to this torch", file=file, path=page.path[i]
            )
        table.add(page.seq[i], page.path[i], name, shape, page.flags[i], page.alias[i])
    table.shard[-len(page.path) :] = page.shard
    table.begin[-len(page.path) :] = page.begin
    at = 0
    for i in page.chunk:
        end = at + page.ndim[i]
        table.chunks[first + i] = (tuple(page.whole[at:end]), tuple(page.offsets[at:end]))
        at = end


def _check(table: TensorTable, part: Part, file: str, step: int | None) -> None:
    """Bounds of everything, so that no later code needs to doubt a number."""
    whole = {path for i, path in enumerate(table.path) if i not in table.chunks}
    if len(whole) + len(table.chunks) != len(table.path) or any(table.path[i] in whole for i in table.chunks):
        raise CorruptCheckpointError("two tensors have one path", step=step, file=file)
    for i, nbytes in enumerate(table.nbytes):
        problem = _row_problem(table, part, i, nbytes)
        if problem:
            raise CorruptCheckpointError(problem, step=step, file=file, path=table.path[i])


def _row_problem(table: TensorTable, part: Part, i: int, nbytes: int) -> str | None:
    alias = table.alias[i]
    if alias >= 0 and (i in table.chunks or alias in table.chunks):
        return "a part of a tensor is tied to something"
    if alias >= 0:
        same = alias < i and table.alias[alias] < 0 and table.dtype[alias] == table.dtype[i]
        return None if same and table.shape[alias] == table.shape[i] else "it is tied to no such tensor"
    shard, begin = table.shard[i], table.begin[i]
    if not 0 <= shard < len(part.shards) or begin < 0 or begin + nbytes > part.shards[shard].nbytes:
        return "its bytes lie outside its shard"
    return "its bytes are not aligned" if begin % BY_NAME[table.dtype[i]].itemsize else None
