"""Plain values as JSON that comes back exactly.

JSON's own types stand as they are: None, bool, str, finite float, int of 64 bits, list,
and dict with str keys. Everything else is an object marked by the key `~`:

    {"~": tag, "m": meta, "k": [keys as in paths], "v": [children]}

`tag` names the codec, `m` what the codec wants to remember (absent: null), `v` the
children (absent: none) and `k` their keys (absent: 0, 1, 2, ...). A dict that JSON cannot
hold has the tag `dict`. Numbers and strings are kept apart from what JSON libraries do to
them silently: NaN becomes null, a lone surrogate an error, a long integer a float.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, TypeAlias

from ._paths import Key, parse_key
from .errors import CorruptCheckpointError

__all__ = ["MARK", "MAX_DEPTH", "Json", "Opened", "all_native", "is_native", "pack", "pack_dict", "unpack"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MARK: Final = "~"
"""The key that makes a JSON object something other than a dict with str keys."""
MAX_DEPTH: Final = 100
"""How many components a path may have."""

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
_ATOMS: Final = frozenset({str, int, float, bool, type(None)})
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


class Opened(NamedTuple):
    """A JSON list or object taken apart."""

    tag: str
    meta: Json
    keys: list[Key]
    children: list[Json]


def is_native(value: object) -> bool:
    """Whether `value` is None, bool, int, float or str, and JSON holds it exactly."""
    if type(value) is str:
        return value.isascii() or not _SURROGATE.search(value)
    if type(value) is int:
        return INT_MIN <= value <= INT_MAX
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) is bool


def all_native(values: Collection[object]) -> bool:
    """Whether `is_native` holds for all; quick for long lists."""
    kinds = set(map(type, values))
    # The set of types alone settles it for most: a state's dicts hold tensors.
    return kinds <= _ATOMS and (kinds <= {bool, type(None)} or all(map(is_native, values)))


def pack(tag: str, meta: Json, texts: Sequence[str] | None, children: list[Json]) -> Json:
    """Write a value as JSON; without `texts` the children are numbered."""
    if tag == "list":
        return children
    packed: dict[str, Json] = {MARK: tag}
    if meta is not None:
        packed["m"] = meta
    if texts is not None and any(text != str(i) for i, text in enumerate(texts)):
        packed["k"] = list(texts)
    if children:
        packed["v"] = children
    return packed


def pack_dict(keys: Sequence[Key], texts: Sequence[str], children: list[Json]) -> Json:
    """Write a dict as JSON: as an object where that holds the keys, else tagged."""
    plain = {key: child for key, child in zip(keys, children, strict=True) if type(key) is str}
    if len(plain) == len(keys) and MARK not in plain and all_native(plain):
        return plain
    return pack("dict", None, texts, children)


def unpack(json: list[Json] | dict[str, Json], path: str) -> Opened:
    """Take a JSON list or object apart, checking its form.

    Raises:
        CorruptCheckpointError: nothing that `pack` writes.
    """
    if isinstance(json, list):
        return Opened("list", None, list(range(len(json))), json)
    if MARK not in json:
        return Opened("dict", None, list(json), list(json.values()))
    tag, texts, children = json[MARK], json.get("k"), json.get("v", [])
    if not isinstance(tag, str) or not isinstance(children, list):
        raise CorruptCheckpointError("a plain value has a wrong form", path=path)
    keys: list[Key] = list(range(len(children))) if texts is None else _keys(texts, len(children), path)
    return Opened(tag, json.get("m"), keys, children)


def _keys(texts: Json, count: int, path: str) -> list[Key]:
    if not isinstance(texts, list) or len(texts) != count:
        raise CorruptCheckpointError("a plain value has a wrong number of keys", path=path)
    try:
        keys = [parse_key(text) for text in texts if isinstance(text, str)]
    except ValueError as error:
        raise CorruptCheckpointError(f"a plain value has a bad key: {error}", path=path) from error
    if len(keys) != count or len(set(texts)) != count:
        raise CorruptCheckpointError("a plain value has a key twice, or one that is no text", path=path)
    return keys
