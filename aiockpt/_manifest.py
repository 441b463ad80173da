"""What stands on disk about a checkpoint: the root manifest and the parts.

A step is a checkpoint if and only if its root manifest is there and valid. The
manifest is small: it names every file of the step with size and digest. The parts,
one a rank, hold the tables: tensors, plain values, containers. They are columnar
(lists of numbers and strings, no object a leaf) and split into pages, so that a
reader can decode them a page at a time: a hundred thousand small objects at once
would make the garbage collector stop the event loop.

Everything here is pure: bytes in, records out. Digests are XXH3, 64 bit, in hex.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeVar

import msgspec
import xxhash

from .errors import CorruptCheckpointError, UnsupportedFormatError

FORMAT: Final = 0
"""The format version this code writes and the newest it reads."""
MANIFEST: Final = "manifest.json"
PIECE_BYTES: Final = 1 << 20
"""The unit of checksums: this much of a shard's data section."""
PAGE_ROWS: Final = 4096
"""Rows in one page of a table."""
HEX: Final = 16
"""Characters of a digest."""
MANIFEST_LIMIT: Final = 64 << 20
"""Bytes of the largest root manifest anybody reads."""
PART_LIMIT: Final = 4 << 30
"""Bytes of the largest part anybody reads."""

_TAIL_HEAD: Final = b',\n  "checksum": "'
_TAIL_END: Final = b'"\n}\n'
_TAIL: Final = len(_TAIL_HEAD) + HEX + len(_TAIL_END)


class FileRecord(msgspec.Struct, frozen=True, gc=False):
    """One file of a step, as the root manifest names it."""

    name: str
    """Its name in the step's folder, without any folder."""
    kind: str
    """`part`, `shard` or `user`."""
    size: int
    """Bytes."""
    digest: str
    """Of the whole file; of header and piece digests for a shard."""


class ItemRecord(msgspec.Struct, frozen=True, gc=False):
    """One top-level entry of the state, for people and tools to read."""

    name: str
    tensors: int
    nbytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The root manifest."""

    format: int
    step: int
    save_id: str
    run_id: str
    time: float
    """Seconds since 1970 on the writer's clock; information only."""
    metrics: Any
    """Plain values, tagged as in a part."""
    meta: Any
    """The user's own, tagged as in a part."""
    items: list[ItemRecord]
    files: list[FileRecord]
    writer: str = ""
    """The library's version that wrote it."""
    markers: list[str] = []
    """Empty files that may appear in the step's folder after the commit."""


class ShardRecord(msgspec.Struct, frozen=True, gc=False):
    """One data file and the digests of its pieces."""

    name: str
    header: int
    """Bytes before the data section: length field, header, padding."""
    nbytes: int
    """Bytes of the data section; the file ends there."""
    header_digest: str
    pieces: str
    """The digests of every PIECE_BYTES of the data section, concatenated."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.header + self.nbytes

    def digest(self) -> str:
        """One digest for the file, made of those of its header and pieces."""
        return digest((self.header_digest + self.pieces).encode())


class TensorPage(msgspec.Struct, gc=False):
    """Some rows of the tensor table; column by column, same order."""

    seq: list[int] = []
    """Place in the state, counted before descending; shared with values and nodes."""
    path: list[str] = []
    dtype: list[int] = []
    """Index into the part's `dtypes`."""
    ndim: list[int] = []
    dims: list[int] = []
    """The shapes, one after the other."""
    flags: list[int] = []
    """1: requires grad; 2: a Parameter."""
    shard: list[int] = []
    """Index into the part's `shards`; -1 for a tied tensor."""
    begin: list[int] = []
    """Byte offset in the shard's data section."""
    alias: list[int] = []
    """Row of the tensor this one is tied to, or -1."""
    chunk: list[int] = []
    """Rows of this page that are chunks of a larger tensor; their `dims` are the chunk's own."""
    whole: list[int] = []
    """For these: the shapes of the whole tensors, one after the other."""
    offsets: list[int] = []
    """For these: where they lie in them, one after the other."""


class ValuePage(msgspec.Struct, gc=False):
    """Some rows of the table of plain values."""

    seq: list[int] = []
    path: list[str] = []
    value: list[Any] = []


class NodePage(msgspec.Struct, gc=False):
    """Some rows of the table of containers that are not plain dicts."""

    seq: list[int] = []
    path: list[str] = []
    tag: list[str] = []
    meta: list[Any] = []


class Part(msgspec.Struct, kw_only=True):
    """One rank's share of the manifest; a plain picklable record."""

    format: int
    rank: int
    world: int
    save_id: str
    dtypes: list[str]
    shards: list[ShardRecord]
    tensors: list[msgspec.Raw]
    values: list[msgspec.Raw]
    nodes: list[msgspec.Raw]


_RAGGED: Final = frozenset({"dims", "chunk", "whole", "offsets"})
"""Columns of a page that do not have one entry a row."""

P = TypeVar("P", TensorPage, ValuePage, NodePage)


def digest(data: bytes | bytearray | memoryview) -> str:
    """The digest of `data` in hex; releases the GIL for anything large."""
    return xxhash.xxh3_64_hexdigest(data)


def piece_digests(view: memoryview) -> str:
    """The digests of every piece of `view`, concatenated; the last may be short."""
    return "".join(digest(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES))


def count_pieces(nbytes: int) -> int:
    """How many pieces a data section of `nbytes` has."""
    return -(-nbytes // PIECE_BYTES)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes, readable by people, ending in a digest of all before it."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    body = text[: -len(b"\n}")]
    return body + _TAIL_HEAD + digest(body).encode() + _TAIL_END


def decode_manifest(data: bytes, *, file: str = MANIFEST, step: int | None = None) -> Manifest:
    """Check and decode a root manifest.

    Args:
        data: the whole file.
        file: its name, for errors.
        step: the step its folder claims; a manifest of another step is damage.

    Raises:
        CorruptCheckpointError: damaged, or not a manifest.
        UnsupportedFormatError: undamaged, but of a version this code does not read.
    """

    def bad(why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(why, step=step, file=file)

    if len(data) < _TAIL or not data.endswith(_TAIL_END):
        raise bad("the manifest is incomplete")
    body, tail = data[:-_TAIL], data[-_TAIL:]
    if not tail.startswith(_TAIL_HEAD) or tail[len(_TAIL_HEAD) : -len(_TAIL_END)] != digest(body).encode():
        raise bad("the manifest's checksum does not match")
    # The version comes before the schema: a newer manifest may have other fields.
    _check_version(data, file, step)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad(f"not a manifest: {error}") from error
    if step is not None and manifest.step != step:
        raise bad(f"the manifest is of step {manifest.step}")
    problem = _file_problem(manifest)
    if problem:
        raise bad(problem)
    return manifest


def _check_version(data: bytes, file: str, step: int | None) -> None:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"not a manifest: {error}", step=step, file=file) from error
    version = found.get("format") if isinstance(found, dict) else None
    if type(version) is not int or not 0 <= version <= FORMAT:
        raise UnsupportedFormatError(version, FORMAT, step=step, file=file)


def _file_problem(manifest: Manifest) -> str | None:
    """Why the list of files cannot be true, or None."""
    if manifest.step < 0 or not math.isfinite(manifest.time):
        return "step or time is out of range"
    seen: set[str] = set()
    for record in manifest.files:
        if not is_plain_name(record.name) or record.name == MANIFEST or record.name in seen:
            return f"bad file name {record.name[:80]!r}"
        if record.size < 0 or len(record.digest) != HEX or record.kind not in ("part", "shard", "user"):
            return f"bad record of file {record.name!r}"
        seen.add(record.name)
    for name in manifest.markers:
        if not is_plain_name(name) or name == MANIFEST or name in seen:
            return f"bad name of a marker {name[:80]!r}"
    return None


def is_plain_name(name: str) -> bool:
    """Whether `name` is a file name that cannot leave its folder."""
    return 0 < len(name) <= 255 and name not in (".", "..") and not any(c in name for c in "/\\\0")


def encode_part(part: Part) -> bytes:
    """The part's bytes; the root manifest holds their digest."""
    return msgspec.json.encode(part)


def decode_part(data: bytes, record: FileRecord, *, step: int | None = None) -> Part:
    """Check a part against the root manifest's record of it and decode it, pages aside.

    Raises:
        CorruptCheckpointError: damaged, or not a part.
    """
    if len(data) != record.size or digest(data) != record.digest:
        raise CorruptCheckpointError("the part's checksum does not match", step=step, file=record.name)
    try:
        part = msgspec.json.decode(data, type=Part)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"not a part: {error}", step=step, file=record.name) from error
    for shard in part.shards:
        sound = shard.header > 0 and shard.nbytes >= 0 and len(shard.header_digest) == HEX
        if (
            not sound
            or len(shard.pieces) != HEX * count_pieces(shard.nbytes)
            or not is_plain_name(shard.name)
        ):
            raise CorruptCheckpointError(
                f"bad record of shard {shard.name[:80]!r}", step=step, file=record.name
            )
    return part


def decode_page(raw: msgspec.Raw, kind: type[P], *, file: str) -> P:
    """Decode one page; columns of unequal length are damage."""
    try:
        page = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"not a page: {error}", file=file) from error
    columns = {len(getattr(page, name)) for name in kind.__struct_fields__ if name not in _RAGGED}
    if len(columns) != 1 or not _dims_fit(page):
        raise CorruptCheckpointError("a page's columns do not fit together", file=file)
    return page


def _dims_fit(page: TensorPage | ValuePage | NodePage) -> bool:
    if not isinstance(page, TensorPage):
        return True
    lowest = min([*page.ndim, *page.dims, *page.chunk, *page.whole, *page.offsets], default=0)
    if lowest < 0 or sum(page.ndim) != len(page.dims):
        return False
    if max(page.chunk, default=-1) >= len(page.ndim) or len(set(page.chunk)) != len(page.chunk):
        return False
    return sum(page.ndim[i] for i in page.chunk) == len(page.whole) == len(page.offsets)


def encode_page(page: TensorPage | ValuePage | NodePage) -> msgspec.Raw:
    """One page as it stands in a part."""
    return msgspec.Raw(msgspec.json.encode(page))


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the one who commits: its files, durable already. Plain and picklable."""

    rank: int
    world: int
    save_id: str
    part: FileRecord
    files: list[FileRecord]
    """Its shards, and the user's files if it wrote them."""
    items: list[ItemRecord]
    shares: list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    """Where ranks share the tensors: (path, dtype, shape of the whole, offsets, sizes) of what it holds."""
