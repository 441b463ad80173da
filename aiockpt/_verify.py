"""Read every byte of a checkpoint and compare it with what was written.

Beyond the checksums, each data file's own header is parsed, since other tools believe it
and not our parts: it must name exactly the tensors the part names, each once, with the
same dtype, shape and place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ._dtypes import itemsize, safetensors_name
from ._fetch import Fetch, in_parallel
from ._manifest import FileRecord, ShardRecord, digest
from ._plan import dotted, header_bytes
from ._reads import whole_shard
from ._saved import Saved
from ._table import TensorTable
from ._threads import offload

__all__ = ["VerifyReport", "header_problem", "verify_files"]

_ENTRY: Final = 128
"""Bytes of a header's entry beside its name and shape, at the most."""
_FIXED: Final = 8192
"""Bytes of a header's padding and metadata, at the most."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A checkpoint of which every byte is what was written."""

    step: int
    files: int
    """Files read, the manifest included."""
    nbytes: int
    """Bytes read, the manifest not counted."""
    tensors: int
    """Tensors stored, tied ones counted once."""


async def verify_files(fetch: Fetch, saved: Saved, block_bytes: int) -> VerifyReport:
    """Read all data files and the user's files; the parts were checked when decoded.

    Raises:
        FileNotFoundError: a file is gone.
        CorruptCheckpointError: a byte is not what was written.
        StorageError: the store failed.
    """
    users = [record for record in saved.manifest.files if record.kind == "user"]
    await in_parallel(lambda record: _check_file(fetch, record), users)
    await in_parallel(lambda number: _check_header(fetch, saved, number), range(len(saved.shards)))
    runs = [
        run for number, shard in enumerate(saved.shards) for run in whole_shard(number, shard, block_bytes)
    ]
    await fetch.fill(runs)
    return VerifyReport(
        saved.manifest.step,
        len(saved.manifest.files) + 1,
        sum(record.size for record in saved.manifest.files),
        len(saved.table.stored()),
    )


async def _check_file(fetch: Fetch, record: FileRecord) -> None:
    source = await fetch.place.open(record.name)
    try:
        fetch.place.check_size(source, record.name, record.size)
        if await fetch.stream_digest(source, record.name, record.size) != record.digest:
            raise fetch.place.corrupt("the file does not match its checksum", record.name)
    finally:
        await fetch.place.close(source)


async def _check_header(fetch: Fetch, saved: Saved, number: int) -> None:
    record = saved.shards[number]
    source = await fetch.place.open(record.name)
    try:
        fetch.place.check_size(source, record.name, record.size)
        rows = [row for row in saved.stored.stored() if saved.stored.shard[row] == number]
        if record.header > _longest(saved, rows):
            raise fetch.place.corrupt(
                f"a header of {record.header} bytes is too long for its tensors", record.name
            )
        data = bytearray(record.header)
        await fetch.place.read(source, record.name, 0, [memoryview(data)])
    finally:
        await fetch.place.close(source)
    await offload(_check_header_bytes, fetch, saved, rows, record, data)


def _longest(saved: Saved, rows: Sequence[int]) -> int:
    """Bytes of the longest sound header: what a hostile one makes us parse has a bound."""
    table = saved.stored
    return _FIXED + sum(_ENTRY + 6 * len(table.path[row]) + 20 * len(table.shape[row]) for row in rows)


def _check_header_bytes(
    fetch: Fetch, saved: Saved, rows: Sequence[int], record: ShardRecord, data: bytearray
) -> None:
    if digest(data) != record.header_digest:
        raise fetch.place.corrupt("the header does not match its checksum", record.name)
    problem = header_problem(bytes(data), saved, rows)
    if problem:
        raise fetch.place.corrupt(problem, record.name)


def header_problem(data: bytes, saved: Saved, rows: Sequence[int]) -> str | None:
    """What is wrong with a shard's header, or None. Pure; bounded by the header's length.

    Args:
        data: everything before the data section.
        saved: the checkpoint.
        rows: the rows that the part puts into this shard.
    """
    if _is_as_written(data, saved.stored, rows):
        return None
    if len(data) < 8 or int.from_bytes(data[:8], "little") != len(data) - 8:
        return "the header's length field is wrong"
    try:
        entries = json.loads(data[8:].decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        return f"the header is no JSON object with distinct keys: {str(error)[:200]}"
    if not isinstance(entries, dict):
        return "the header is no JSON object"
    extra = entries.pop("__metadata__", {})
    if not isinstance(extra, dict) or not all(isinstance(value, str) for value in extra.values()):
        return "the header's metadata are not text"
    try:
        found = {name: _fact(entry) for name, entry in entries.items()}
    except (TypeError, KeyError, ValueError):
        return "an entry of the header is none"
    return _compare(found, saved, rows)


def _is_as_written(data: bytes, table: TensorTable, rows: Sequence[int]) -> bool:
    """Whether it is, byte for byte, the header that we write: a quick answer, and the usual one.

    The other way to find out makes some objects a tensor, which in their tens of thousands
    are a gap in the event loop.
    """
    try:
        names = list(msgspec.json.decode(data[8:], type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if len(names) != len(rows) + 1:
        return False
    # As the planner put them; empty tensors lie at the same place as what follows them.
    places = [(table.begin[row], table.nbytes[row], -itemsize(table.dtype[row]), row) for row in rows]
    order = [place[-1] for place in sorted(places)]
    called = dict(zip(order, names[1:], strict=True))
    named = all(_means(name, table.path[row]) for row, name in called.items())
    return named and header_bytes(table, order, called) == data


Fact = tuple[str, tuple[int, ...], int, int]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of the pairs; JSON lets a key come twice, and readers disagree on what that means."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key comes twice")
    return made


def _fact(entry: Any) -> Fact:
    if set(entry) != {"dtype", "shape", "data_offsets"} or not isinstance(entry["dtype"], str):
        raise ValueError("not an entry")
    begin, end = entry["data_offsets"]
    numbers = [*entry["shape"], begin, end]
    if not all(type(number) is int for number in numbers):
        raise TypeError("not a number")
    return entry["dtype"], tuple(entry["shape"]), begin, end


def _compare(found: dict[str, Fact], saved: Saved, rows: Sequence[int]) -> str | None:
    """The header's entries against the part's rows, one to one."""
    table = saved.stored
    open_rows: dict[Fact, list[int]] = {}
    for row in rows:
        dtype = safetensors_name(table.dtype[row])
        shape = table.shape[row] if dtype else (table.nbytes[row],)
        end = table.begin[row] + table.nbytes[row]
        open_rows.setdefault((dtype or "U8", shape, table.begin[row], end), []).append(row)
    for name, fact in found.items():
        there = open_rows.get(fact, [])
        meant = [row for row in there if _means(name, table.path[row])]
        if not meant:
            return f"the header's {name[:200]!r} is no tensor of the part"
        there.remove(meant[0])
    left = [row for there in open_rows.values() for row in there]
    return f"the header lacks {table.path[left[0]]!r}" if left else None


def _means(name: str, path: str) -> bool:
    """Whether a name in a file can stand for the tensor at the path: the path or the end of it, dotted."""
    if name.rstrip("'") in (path, '""'):
        return True
    components = path.split("/")
    return any(name == dotted("/".join(components[at:])) for at in range(len(components)))
