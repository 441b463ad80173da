"""Where every byte will lie: tensors to shards, shards to blocks. Pure.

A shard is a plain safetensors file. Its tensors are sorted by item size, largest first,
so that without any gap (the format forbids gaps) every tensor begins at a multiple of
its item size; the header is padded with spaces to a multiple of a page, so that the
data section begins on one. Blocks are cut from the data section at fixed offsets: a
block *is* the file's bytes, and since a block is a whole number of pieces, no piece
lies in two blocks.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ._dtypes import itemsize, safetensors_name
from ._names import shard_name
from ._table import TensorTable
from .errors import UnsupportedStateError
from .layouts import Group, Layout

PAGE: Final = 4096
HEADER_LIMIT: Final = 64 << 20
"""Bytes of the largest header we make; stock readers refuse above 100 MB."""
AT_ONCE: Final = 2
"""Files that are written at the same time: one alone does not keep a disk busy."""
WORTH: Final = 64 << 20
"""Bytes from which on a group is cut only so that there are files to write at once."""
_ENTRY: Final = 96
"""Bytes of a header entry beside its name and shape, at the most."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One data file, before it is written."""

    name: str
    rows: list[int]
    """Rows of the table in file order; row i lies at `table.begin[i]`."""
    header: bytes
    """Everything before the data section; a multiple of a page long."""
    nbytes: int
    """Bytes of the data section."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.nbytes


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What one block of a shard's data section is made of."""

    shard: int
    offset: int
    """Of the block in the data section."""
    nbytes: int
    parts: list[tuple[int, int, int, int]]
    """(row, first byte of the tensor, bytes, first byte in the block), in order."""


def plan_shards(table: TensorTable, layout: Layout, *, rank: int = 0, prefix: str = "") -> list[ShardPlan]:
    """Give every stored row its place; fills `table.shard` and `table.begin`.

    Args:
        table: the tensors; the two columns are written in place.
        layout: which row goes with which.
        rank: part of the files' names.
        prefix: put in front of the files' names.

    Raises:
        UnsupportedStateError: one tensor's name alone is too long for a header.
    """
    shards: list[ShardPlan] = []
    for group in layout.assign(table):
        names = tensor_names(table, group)
        for number, rows in enumerate(_split(table, group, names, layout.shard_bytes)):
            name = prefix + shard_name(group.stem, rank, number)
            shards.append(_lay_out(table, rows, names, name, len(shards)))
    return shards


def tensor_names(table: TensorTable, group: Group) -> dict[int, str]:
    """What the rows are called inside their files: as in a state dict, `layers.0.weight`.

    Where that would be ambiguous (or is the format's own `__metadata__`), the row is
    called by its whole path, which is unique.
    """
    plain = {row: dotted(table.path[row].removeprefix(group.strip)) for row in group.rows}
    count: dict[str, int] = {}
    for name in plain.values():
        count[name] = count.get(name, 0) + 1
    taken = {name for name, n in count.items() if n == 1 and name not in ("", "__metadata__")}
    names = {}
    for row, name in plain.items():
        names[row] = name if name in taken else _unique(table.path[row], taken)
    return names


def dotted(path: str) -> str:
    """The components joined by dots; a quoted one as the string it means, if it has one."""
    return ".".join(_unquoted(part) for part in path.split("/"))


def _unquoted(component: str) -> str:
    if not component.startswith('"'):
        return component
    text = str(json.loads(component))
    # A lone surrogate is no UTF-8, which a header must be: keep the escapes.
    return component if any("\ud800" <= c <= "\udfff" for c in text) else text


def _unique(path: str, taken: set[str]) -> str:
    name = path or '""'
    while name in taken or name == "__metadata__":
        name += "'"
    taken.add(name)
    return name


def _split(table: TensorTable, group: Group, names: dict[int, str], most: int) -> Iterator[list[int]]:
    """Cut a group into shards, by bytes and by the size of the header."""
    share = max(WORTH, sum(table.nbytes[row] for row in group.rows) // AT_ONCE)
    rows = sorted(group.rows, key=lambda row: -itemsize(table.dtype[row]))
    shard: list[int] = []
    nbytes = header = 0
    for row in rows:
        entry = _ENTRY + 6 * len(names[row]) + 20 * len(table.shape[row])
        if entry > HEADER_LIMIT:
            why = f"its name is too long for a safetensors header of {HEADER_LIMIT >> 20} MiB"
            raise UnsupportedStateError([(table.path[row][:200], why)])
        size = table.nbytes[row]
        # A share is met as nearly as whole tensors allow; `most` is a limit.
        over = nbytes + size > most or nbytes + size // 2 > share or header + entry > HEADER_LIMIT
        if shard and over:
            yield shard
            shard, nbytes, header = [], 0, 0
        shard.append(row)
        nbytes += size
        header += entry
    if shard:
        yield shard


def _lay_out(table: TensorTable, rows: list[int], names: dict[int, str], name: str, number: int) -> ShardPlan:
    at = 0
    for row in rows:
        table.shard[row] = number
        table.begin[row] = at
        at += table.nbytes[row]
    return ShardPlan(name, rows, header_bytes(table, rows, names), at)


def header_bytes(table: TensorTable, rows: Sequence[int], names: dict[int, str]) -> bytes:
    """A safetensors header for the rows, with its length field and padding.

    Written as text: a dict a tensor would be garbage for the collector, and a full
    collection is a gap in the event loop.
    """
    entries = ['"__metadata__":{"format":"pt","writer":"aiockpt"}']
    for row in rows:
        dtype = safetensors_name(table.dtype[row])
        shape = list(table.shape[row]) if dtype else [table.nbytes[row]]
        begin = table.begin[row]
        entries.append(
            f'{json.dumps(names[row], ensure_ascii=False)}:{{"dtype":"{dtype or "U8"}","shape":'
            f'{str(shape).replace(" ", "")},"data_offsets":[{begin},{begin + table.nbytes[row]}]}}'
        )
    text = ("{" + ",".join(entries) + "}").encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def plan_blocks(table: TensorTable, shards: Sequence[ShardPlan], block_bytes: int) -> Iterator[BlockPlan]:
    """Cut every shard's data section into blocks.

    In order within each file; the blocks of a few files take turns, so that these files
    are written at the same time.

    Args:
        table: with `begin` filled in.
        shards: as planned.
        block_bytes: a multiple of a piece.
    """
    rest = (_shard_blocks(table, number, shard, block_bytes) for number, shard in enumerate(shards))
    turns = deque(itertools.islice(rest, AT_ONCE))
    while turns:
        blocks = turns.popleft()
        block = next(blocks, None)
        if block is not None:
            yield block
            turns.append(blocks)
        else:
            turns.extend(itertools.islice(rest, 1))


def _shard_blocks(table: TensorTable, number: int, shard: ShardPlan, block_bytes: int) -> Iterator[BlockPlan]:
    parts: list[tuple[int, int, int, int]] = []
    offset = 0
    for row in shard.rows:
        done, nbytes, begin = 0, table.nbytes[row], table.begin[row]
        while done < nbytes:
            at = begin + done - offset
            take = min(nbytes - done, block_bytes - at)
            parts.append((row, done, take, at))
            done += take
            if at + take == block_bytes:
                yield BlockPlan(number, offset, block_bytes, parts)
                offset, parts = offset + block_bytes, []
    if parts:
        yield BlockPlan(number, offset, shard.nbytes - offset, parts)


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[slice | int, ...], int]]:
    """Cut the elements [first, last) of a row-major tensor into rectangular boxes, in order.

    Yields (index, count): `tensor[index]` holds the next `count` elements. At most two
    boxes a dimension: what is left of a started row, whole rows, the start of the next.
    """
    if first >= last:
        return
    if not shape:
        yield (), 1
        return
    inner = 1
    for size in shape[1:]:
        inner *= size
    row, rest = divmod(first, inner)
    if rest:
        stop = min(inner, rest + last - first)
        for index, count in boxes(shape[1:], rest, stop):
            yield (row, *index), count
        first += stop - rest
        row += 1
    whole = (last - first) // inner
    if whole > 0:
        yield (slice(row, row + whole),), whole * inner
        first += whole * inner
        row += whole
    if first < last:
        for index, count in boxes(shape[1:], 0, last - first):
            yield (row, *index), count
