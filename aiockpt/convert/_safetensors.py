"""The safetensors format: headers read with every rule of it, files planned by it. No I/O but the header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from .._dtypes import BY_NAME, NAME, safetensors_name
from .._plan import dotted
from ..errors import ForeignFormatError, UnsupportedStateError, UsageError
from ._files import Member, Range
from ._leaf import Content, Leaf, Piece, row_major
from ._torch_names import sizes
from ._walk import Columns

__all__ = ["Header", "Plan", "decode_json", "plan_files", "read_header"]

_HEADER_LIMIT: Final = 100_000_000
"""Bytes of a header that the reference library accepts."""
_METADATA: Final = "__metadata__"
_DTYPES: Final = {
    short: dtype for name, dtype in BY_NAME.items() if (short := safetensors_name(name)) is not None
}
_SHARD_BYTES: Final = 5_000_000_000
_PAGE: Final = 64


@dataclass(slots=True)
class Header:
    """What one file holds."""

    file: str
    leaves: dict[str, Leaf] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """Names without bytes of their own, and the tensors they mean; as `save_model` notes them."""


def decode_json(data: bytes, file: str) -> Any:
    """JSON in which no key stands twice.

    Raises:
        ForeignFormatError: it is none.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ForeignFormatError(f"{file}: damaged JSON: {str(error)[:200]}", file=file) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def read_header(member: Member) -> Header:
    """Read and check a file's header.

    Raises:
        ForeignFormatError: it breaks a rule of the format.
    """
    name = member.name
    size = int.from_bytes(Range(member, 0, 8, name).read(0, 8), "little")
    if size > _HEADER_LIMIT or 8 + size > member.nbytes:
        raise ForeignFormatError(
            f"{name}: a header of {size} bytes is longer than the file, or than allowed", file=name
        )
    table = decode_json(Range(member, 8, size, name).read(0, size), name)
    if not isinstance(table, dict):
        raise ForeignFormatError(f"{name}: the header is no object", file=name)
    notes = table.pop(_METADATA, {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ForeignFormatError(f"{name}: {_METADATA} holds more than text", file=name)
    if "DCP_SHARDING_INFO" in notes:
        why = f"{name}: holds shards of tensors, written by Distributed Checkpoint; consolidate them first"
        raise ForeignFormatError(why, file=name)
    found = Header(name)
    data = Range(member, 8 + size, member.nbytes - 8 - size, name)
    ends: list[tuple[int, int, str]] = []
    for key, entry in table.items():
        found.leaves[key], begin, end = _leaf(key, entry, data)
        ends.append((begin, end, key))
    _check_gaps(sorted(ends), data)
    notes.pop("format", None)  # `pt` says who wrote the file, also where a tensor is called so
    found.tied = {
        key: first for key, first in notes.items() if first in found.leaves and key not in found.leaves
    }
    return found


def _leaf(key: str, entry: Any, data: Range) -> tuple[Leaf, int, int]:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape = _DTYPES.get(str(fields.get("dtype"))), sizes(fields.get("shape"))
    span = sizes(fields.get("data_offsets"))
    if (
        dtype is None
        or shape is None
        or span is None
        or len(span) != 2
        or set(fields) != {"dtype", "shape", "data_offsets"}
    ):
        kind = str(fields.get("dtype"))[:20]
        why = f"{data.name}: the entry of {key[:200]} is damaged, or of a dtype that is not read ({kind})"
        raise ForeignFormatError(why, file=data.name, path=key[:200])
    if not span[0] <= span[1] <= data.nbytes or span[1] - span[0] != math.prod(shape) * dtype.itemsize:
        why = f"{data.name}: the bytes of {key[:200]} do not fit its shape, or lie outside of the file"
        raise ForeignFormatError(why, file=data.name, path=key[:200])
    piece = Piece((0,) * len(shape), shape, row_major(shape), span[0], data)
    return Leaf(Content(dtype, shape, [piece])), span[0], span[1]


def _check_gaps(spans: Iterable[tuple[int, int, str]], data: Range) -> None:
    at = 0
    for begin, end, key in spans:
        if begin != at:
            why = f"{data.name}: the bytes of {key[:200]} overlap others, or leave a hole"
            raise ForeignFormatError(why, file=data.name, path=key[:200])
        at = end
    if at != data.nbytes:
        raise ForeignFormatError(f"{data.name}: it holds bytes of no tensor", file=data.name)


# ---------------------------------------------------------------- written


@dataclass(slots=True)
class Plan:
    """The files to be written."""

    state: dict[str, Leaf]
    """As it will be read back."""
    dropped: list[str]
    files: list[tuple[str, bytes, list[Content]]] = field(default_factory=list)
    """Name, header with its length, and contents in order."""
    index: bytes | None = None


def plan_files(columns: Columns, most: int | None, alone: bool, drop: bool) -> Plan:
    """Name the tensors, and lay them out.

    Args:
        columns: the state.
        most: bytes of one file at the most, a larger tensor apart.
        alone: whether everything goes into one file.
        drop: leave out what cannot be held.

    Raises:
        UnsupportedStateError: a dtype has no name, or two tensors have one.
        UsageError: `most` is no size.
    """
    if most is not None and (alone or most <= 0):
        raise UsageError("max_shard_bytes= is a positive number, and goes with a folder, not with one file")
    names, problems = _names(columns)
    if problems and not drop:
        raise UnsupportedStateError(problems)
    groups, tied = _groups(columns, names, math.inf if alone else most or _SHARD_BYTES)
    count = len(groups)
    plan = Plan({}, [path for path, _ in problems])
    listed: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        notes = {name: first for name, first in tied.items() if first in group}
        plan.files.append((file, _header(group, notes), list(group.values())))
        listed |= dict.fromkeys((*group, *notes), file)
    plan.state = _reread(groups, tied)
    if count > 1:
        total = sum(content.nbytes for group in groups for content in group.values())
        facts = {"metadata": {"total_size": total}, "weight_map": listed}
        plan.index = json.dumps(facts, indent=2).encode()
    return plan


def _names(columns: Columns) -> tuple[dict[str, Content], list[tuple[str, str]]]:
    """Content by name, and (path, why) of what has none."""
    names: dict[str, Content] = {}
    problems: list[tuple[str, str]] = []
    for path, leaf in zip(columns.table.path, columns.leaves, strict=True):
        name = dotted(path)
        if name in names or name in ("", _METADATA):
            problems.append((path, f"another tensor is called {name!r} too, or nothing may be called that"))
        elif safetensors_name(NAME[leaf.content.dtype]) is None:
            problems.append((path, f"safetensors has no name for {leaf.content.dtype}"))
        else:
            names[name] = leaf.content
    return names, problems


def _groups(
    columns: Columns, names: dict[str, Content], most: float
) -> tuple[list[dict[str, Content]], dict[str, str]]:
    """The tensors of each file, and the names that mean another's tensor."""
    groups: list[dict[str, Content]] = [{}]
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    size = 0
    for name, content in names.items():
        known = first.setdefault(id(content), name)
        if known != name:
            tied[name] = known
            continue
        if groups[-1] and size + content.nbytes > most:
            groups.append({})
            size = 0
        groups[-1][name] = content
        size += content.nbytes
    # Largest items first, so that each begins at a multiple of its item size.
    order = [dict(sorted(group.items(), key=lambda pair: -pair[1].dtype.itemsize)) for group in groups]
    return order, tied


def _header(group: dict[str, Content], notes: dict[str, str]) -> bytes:
    table: dict[str, Any] = {_METADATA: {"format": "pt", **notes}}
    at = 0
    for name, content in group.items():
        span = [at, at + content.nbytes]
        at = span[1]
        table[name] = {
            "dtype": safetensors_name(content.name()),
            "shape": list(content.shape),
            "data_offsets": span,
        }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _reread(groups: list[dict[str, Content]], tied: dict[str, str]) -> dict[str, Leaf]:
    """The state as it will be read back: files in the order of their names."""
    state = {name: Leaf(content) for group in groups for name, content in group.items()}
    for group in groups:
        state |= {name: Leaf(state[first].content) for name, first in tied.items() if first in group}
    return state
