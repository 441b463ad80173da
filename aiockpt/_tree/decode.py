"""Plain values back from JSON, whole or in part.

The JSON may have been written by an enemy: what no save writes is damage, reported by
path; depth is bounded; nothing is imported or called because a file says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from .._paths import Selection, join, key_text, split
from .._plain import MAX_DEPTH, Json, unpack
from ..errors import CorruptCheckpointError
from ..values import Children, restore

NOTHING: Any = object()
"""No value at all: nothing of it was selected."""

_ATOMS: Final = frozenset({str, int, float, bool, type(None)})
_DICTS: Final = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})


@dataclass(slots=True)
class Context:
    """What codecs may ask for while they decode."""

    allow_pickle: bool
    path: str = ""
    depth: int = 0

    def plain(self, json: Json) -> Any:
        """Decode JSON that a codec keeps in its meta; as deep as a child of the value."""
        return _decode(json, self.path, self, self.depth + 1)


def decode_value(json: Json, path: str = "", *, allow_pickle: bool = False) -> Any:
    """Turn the JSON of one value row back into the value.

    Raises:
        CorruptCheckpointError: nothing that a save writes.
        PickleRefusedError: something in it is pickled and `allow_pickle` is false.
    """
    return _decode(json, path, Context(allow_pickle), len(split(path)))


def _decode(json: Json, path: str, ctx: Context, depth: int) -> Any:
    if type(json) in _ATOMS:
        return json
    check_depth(path, depth)
    if type(json) is list:
        return [
            child if type(child) in _ATOMS else _decode(child, join(path, str(i)), ctx, depth + 1)
            for i, child in enumerate(json)
        ]
    opened = unpack(_composite(json, path), path)
    children = {
        key: child if type(child) in _ATOMS else _decode(child, join(path, key_text(key)), ctx, depth + 1)
        for key, child in zip(opened.keys, opened.children, strict=True)
    }
    if len(children) != len(opened.children):
        raise CorruptCheckpointError("two keys of a container are equal", path=path)
    return assemble(opened.tag, opened.meta, children, path, ctx, depth)


def _composite(json: Json, path: str) -> list[Json] | dict[str, Json]:
    if not isinstance(json, (list, dict)):
        raise CorruptCheckpointError("a plain value is no JSON", path=path)
    return json


def check_depth(path: str, depth: int) -> None:
    """Refuse a place deeper than any save goes."""
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"nested deeper than {MAX_DEPTH} levels", path=f"{path[:200]}...")


def assemble(tag: str, meta: Json, children: Children, path: str, ctx: Context, depth: int) -> Any:
    """Put a container together."""
    ctx.path, ctx.depth = path, depth
    return restore(tag, meta, children, ctx)


def pick(json: Json, path: str, selection: Selection, ctx: Context) -> Any:
    """The selected parts of one value row that itself is not selected; NOTHING if there are none."""
    if not isinstance(json, (list, dict)):
        return NOTHING
    check_depth(path, len(split(path)))
    opened = unpack(json, path)
    found: Children = {}
    for key, child in zip(opened.keys, opened.children, strict=True):
        place = join(path, key_text(key))
        if selection.selects(place):
            found[key] = decode_selected(child, place, selection, ctx)
        elif selection.leads(place):
            part = pick(child, place, selection, ctx)
            if part is not NOTHING:
                found[key] = part
    return partial(opened.tag, opened.meta, found, path, ctx)


def decode_selected(json: Json, path: str, selection: Selection, ctx: Context) -> Any:
    """A selected value, whole; notes selected paths within it too."""
    if selection.leads(path):
        pick(json, path, selection, ctx)
    return _decode(json, path, ctx, len(split(path)))


def partial(tag: str, meta: Json, found: Children, path: str, ctx: Context) -> Any:
    """Part of a container: a dict of its kind, or a plain dict by index or field name."""
    if not found:
        return NOTHING
    return assemble(tag, meta, found, path, ctx, len(split(path))) if tag in _DICTS else found
