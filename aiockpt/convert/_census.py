"""Bounds for values out of a pickle: how much they may unfold to, how deep they and their keys may go.

A pickle of a kilobyte can share a list so often that walking over it never ends, or nest
a key so deeply that hashing it overruns the stack. Both are looked for without recursion.
"""

from __future__ import annotations

from typing import Any, Final

from ..errors import ForeignFormatError

__all__ = ["ALWAYS", "PER_BYTE", "census", "check_key"]

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
            stack.extend((child, depth + 1) for child in one.values() if isinstance(child, _BOXES))
        elif isinstance(one, (list, tuple, set, frozenset)):
            left -= len(one)
            stack.extend((child, depth + 1) for child in one if isinstance(child, _BOXES))
