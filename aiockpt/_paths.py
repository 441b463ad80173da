"""Paths: where a leaf sits in the state, as text.

A path is the keys from the root to the leaf, each as text, joined by `/`; the root is
the empty path. `key_text` and `parse_key` turn a key into text and back without loss:
a plain string stands as it is (`layers.0.weight`), any other as a JSON string in quotes
with every odd character escaped, so that `/` only ever separates and `1`, `"1"`, `True`,
`None`, `1.5`, `np.int64(1)` and `(1,"a")` are all different. Surrogates, which UTF-8
cannot hold, are among the odd characters: a path can always be encoded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

__all__ = [
    "Key",
    "Selection",
    "ancestors",
    "escape",
    "in_order",
    "item_of",
    "join",
    "key_text",
    "parse_key",
    "selects",
    "split",
    "unescape",
]

Key = Hashable
"""A key that a path can hold: str, int, bool, None, float, a numpy integer, or a tuple of these."""

MAX_NESTING: Final = 16
"""How deep tuples may sit in each other within one key."""

_NUMBER: Final = r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_WORDS: Final[dict[str, Key]] = {
    "True": True,
    "False": False,
    "None": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
}
_ODD: Final = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_PLAIN: Final = re.compile(rf'(?!\(|np\.|(?:True|False|None|-?nan|-?inf|{_NUMBER})\Z)[^"/{_ODD}]+\Z')
_ESCAPED: Final = re.compile(rf'["/\\{_ODD}]')
_ESCAPE: Final = re.compile(r"\\u([0-9a-f]{4})")
_TOKEN: Final = re.compile(
    rf'"(?P<text>[^"]*)"|(?P<word>True|False|None|nan|-?inf)|np\.(?P<kind>\w+)\((?P<np>-?[0-9]+)\)|(?P<number>{_NUMBER})'
)
_NUMPY_INTEGERS: Final = frozenset(
    f"{sign}{kind}"
    for sign in ("", "u")
    for kind in (
        "int8",
        "int16",
        "int32",
        "int64",
        "long",
        "longlong",
        "intc",
        "int",
        "short",
        "byte",
        "intp",
    )
)


def escape(text: str) -> str:
    r"""Write every odd character as `\uXXXX`: any str becomes one that UTF-8 and JSON can hold."""
    return _ESCAPED.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def unescape(text: str) -> str:
    """Undo `escape`.

    Raises:
        ValueError: `text` is nothing that `escape` writes.
    """
    plain = _ESCAPE.sub(lambda m: chr(int(m[1], 16)), text)
    if escape(plain) != text:
        raise ValueError("not an escaped text")
    return plain


def key_text(key: Key) -> str:
    """Write a key as one component of a path.

    Raises:
        TypeError: a key of this type cannot be stored.
        ValueError: the key is an integer of thousands of digits, or a tuple nested too deeply.
    """
    return key if type(key) is str and _PLAIN.match(key) else _odd_text(key, 0)


def _odd_text(key: Key, depth: int) -> str:
    kind = type(key)
    if kind is str:
        return f'"{escape(str(key))}"'
    if kind in (int, bool, float, type(None)):
        return repr(key)
    if isinstance(key, tuple) and kind is tuple:
        if depth >= MAX_NESTING:
            raise ValueError(f"the key is nested deeper than {MAX_NESTING} tuples")
        inside = ",".join(_odd_text(part, depth + 1) for part in key)
        return f"({inside},)" if len(key) == 1 else f"({inside})"
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(key, numpy.integer) and kind.__name__ in _NUMPY_INTEGERS:
        number: Any = key
        return f"np.{kind.__name__}({int(number)})"
    raise TypeError(f"a key of type {kind.__module__}.{kind.__qualname__}")


def parse_key(text: str) -> Key:
    """Read one component of a path; a numpy integer comes back as an int where numpy is missing.

    Raises:
        ValueError: `text` is nothing that `key_text` writes.
    """
    if _PLAIN.match(text):
        return text
    key, end = _read(text, 0, 0)
    # Quotes are for what needs them: a plain string has its one spelling without.
    if end != len(text) or (type(key) is str and _PLAIN.match(key)):
        raise ValueError(f"not a key: {text[:80]!r}")
    return key


def _read(text: str, at: int, depth: int) -> tuple[Key, int]:
    """The key that starts at `at`, and where it ends."""
    if text.startswith("(", at):
        return _read_tuple(text, at + 1, depth + 1)
    found = _TOKEN.match(text, at)
    if found is None:
        raise ValueError(f"not a key: {text[:80]!r}")
    key = _token(found)
    # The one spelling that key_text writes: two texts never mean one key.
    if not _same_spelling(key, found):
        raise ValueError(f"not a key: {text[:80]!r}")
    return key, found.end()


def _token(found: re.Match[str]) -> Key:
    if found["text"] is not None:
        return unescape(found["text"])
    if found["word"] is not None:
        return _WORDS[found["word"]]
    if found["np"] is not None:
        return _numpy_integer(found["kind"], int(found["np"]))
    number = found["number"]
    return float(number) if "." in number or "e" in number else int(number)


def _same_spelling(key: Key, found: re.Match[str]) -> bool:
    if found["np"] is not None:
        return str(int(found["np"])) == found["np"]
    return found["text"] is not None or repr(key) == found[0]


def _numpy_integer(name: str, number: int) -> Key:
    if name not in _NUMPY_INTEGERS:
        raise ValueError(f"not a numpy integer: {name[:40]!r}")
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return number
    try:
        key: Key = getattr(numpy, name)(number)
    except (AttributeError, OverflowError) as error:
        raise ValueError(f"not a numpy integer: {error}") from error
    return key


def _read_tuple(text: str, at: int, depth: int) -> tuple[Key, int]:
    if depth > MAX_NESTING:
        raise ValueError("the key is nested too deeply")
    parts: list[Key] = []
    while not text.startswith(")", at):
        part, at = _read(text, at, depth)
        parts.append(part)
        # A comma follows each part but the last, and the only one: `(1,)`, `(1,2)`.
        if text.startswith(",", at) and (len(parts) == 1 or not text.startswith(",)", at)):
            at += 1
        elif len(parts) == 1 or not text.startswith(")", at):
            raise ValueError(f"not a key: {text[:80]!r}")
    return tuple(parts), at + 1


def join(parent: str, text: str) -> str:
    """The path of the component `text` under `parent`."""
    return f"{parent}/{text}" if parent else text


def split(path: str) -> list[str]:
    """The components of a path; none for the root."""
    return path.split("/") if path else []


def item_of(path: str) -> str:
    """The item (top-level entry) a path belongs to; the root's is the empty text."""
    return path.partition("/")[0]


def ancestors(path: str) -> Iterator[str]:
    """The path itself, its parent, and so on up to the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def in_order(paths: Sequence[str]) -> list[str]:
    """What lies in one container side by side, in order of first appearance: a walk over the state."""
    rank: dict[str, int] = {}
    for path in paths:
        for place in _downwards(path):
            rank.setdefault(place, len(rank))
    return sorted(paths, key=lambda path: [rank[place] for place in _downwards(path)])


def _downwards(path: str) -> list[str]:
    """The paths of what holds it, outermost first, and the path itself."""
    return [*reversed([place for place in ancestors(path) if place]), *([] if path else [""])]


def selects(prefixes: Collection[str], path: str) -> bool:
    """Whether `path` is one of `prefixes` or lies under one; pass a set when there are many."""
    return any(place in prefixes for place in ancestors(path))


class Selection:
    """A wish for parts of a state, which notes what it met.

    Attributes:
        wanted: the paths wished for.
        leading: all paths above them.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.wanted = frozenset(paths)
        self.leading = frozenset(up for path in self.wanted for up in ancestors(path) if up != path)
        self._order = tuple(dict.fromkeys(paths)) if isinstance(paths, Collection) else tuple(self.wanted)
        self._met: set[str] = set()

    def selects(self, path: str) -> bool:
        """Whether `path` lies at or under a wanted path; notes which ones it met."""
        met = [place for place in ancestors(path) if place in self.wanted]
        self._met.update(met)
        return bool(met)

    def leads(self, path: str) -> bool:
        """Whether something wanted may lie below `path`."""
        return path in self.leading

    @property
    def missing(self) -> tuple[str, ...]:
        """What was wanted and never met, in the order it was asked for."""
        return tuple(path for path in self._order if path not in self._met)
