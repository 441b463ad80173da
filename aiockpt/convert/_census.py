"""Bounds for values out of a pickle: how much they may unfold to, how deep they and their keys may go.

A pickle of a kilobyte can share a list so often that walking over it never ends, or nest
a key so deeply that hashing it overruns the stack. Both are looked for without recursion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ..errors import ForeignFormatError

__all__ = ["ALWAYS", "PER_BYTE", "census", "check_key", "checked_keys", "shown"]

ALWAYS: Final = 1 << 16
"""Values that any pickle may unfold to; more, in proportion to its size."""
PER_BYTE: Final = 4
"""Values that a pickle may unfold to for each of its bytes."""
_DEPTH: Final = 200
_KEY_PARTS: Final = 64
"""Values in a key of a dict, all its tuples taken together."""
_BOXES: Final = (dict, list, tuple, set, frozenset)


def check_key(key: Any) -> None:
    """Refuse a key whose hash would be a walk without end, or through the C stack."""
    todo, left = [key], _KEY_PARTS
    while todo:
        part = todo.pop()
        left -= 1
        if left < 0:
            raise ValueError("a key is too large")
        if isinstance(part, (tuple, frozenset)):
            if len(part) > left:
                raise ValueError("a key is too large")
            todo.extend(part)


def checked_keys(values: Iterable[Any]) -> Iterable[Any]:
    """The values one by one, each looked at by `check_key` before anything hashes it."""
    for value in values:
        check_key(value)
        yield value


def shown(value: Any) -> str:
    """A value out of a pickle for a message: of a container only its type, its text may be endless."""
    if isinstance(value, str):
        return value[:80]
    if value is None or type(value) is bool or (type(value) is int and value.bit_length() < 100):
        return str(value)
    return f"a {type(value).__qualname__}"


def census(value: Any, size: int, *, file: str) -> None:
    """Refuse a state that unfolds to far more values than its pickle can have meant, or has no end.

    Raises:
        ForeignFormatError: it does.
    """
    left = ALWAYS + PER_BYTE * size
    stack = [(value, 0)]
    while stack:
        one, depth = stack.pop()
        left -= 1
        if left < 0 or depth > _DEPTH:
            raise ForeignFormatError(f"{file}: the state contains itself, or unfolds without end", file=file)
        if isinstance(one, dict):
            left -= len(one)
            # The versions that a module's state dict carries.
            stack.extend((child, depth + 1) for child in getattr(one, "__dict__", {}).values())
            stack.extend((child, depth + 1) for child in one.values() if isinstance(child, _BOXES))
        elif isinstance(one, (list, tuple, set, frozenset)):
            left -= len(one)
            stack.extend((child, depth + 1) for child in one if isinstance(child, _BOXES))
