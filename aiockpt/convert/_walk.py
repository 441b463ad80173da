"""States of leaves: to columns, to what a format can hold, and two of them compared."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .. import _tree
from .._capture import bits
from .._table import TensorTable
from ..errors import ForeignFormatError, UnsupportedStateError
from ._leaf import Content, Leaf, Piece, Room, row_major, view_of

__all__ = ["DROPPED", "Columns", "Held", "columns_of", "compare", "digests", "hold", "leaf_of", "picked"]

DROPPED: Final = object()
"""Stands for a value that was left out."""


class _Walk(_tree.Walk):
    """Takes leaves for tensors; those of one content are tied."""

    def __init__(self) -> None:
        super().__init__(allow_pickle=False)
        self.rows: dict[int, int] = {}

    def visit(self, value: Any, path: str, depth: int) -> None:
        """Write the rows of a value."""
        if type(value) is not Leaf:
            super().visit(value, path, depth)
            return
        flat: Any = self.flat
        row = len(flat.tensors)
        first = self.rows.setdefault(id(value.content), row)
        flat.tensor_seq.append(self.seq)
        flat.tensor_paths.append(path)
        flat.tensors.append(value)
        flat.tensor_flags.append(value.flags)
        flat.tensor_alias.append(-1 if first == row else first)
        self.seq += 1


@dataclass(slots=True)
class Columns:
    """A state as a checkpoint of our own would list it."""

    flat: _tree.Flat
    leaves: list[Leaf]
    table: TensorTable = field(default_factory=TensorTable)


def columns_of(state: Any) -> Columns:
    """Turn a state into columns; tensors in memory become leaves.

    Raises:
        UnsupportedStateError: listing every path that cannot be stored.
    """
    walk = _Walk()
    walk.visit(state, "", 0)
    if walk.problems:
        raise UnsupportedStateError(walk.problems) from walk.cause
    flat = walk.flat
    found = Columns(flat, [leaf_of(value) for value in flat.tensors])
    for row, leaf in enumerate(found.leaves):
        seq, path, alias = flat.tensor_seq[row], flat.tensor_paths[row], flat.tensor_alias[row]
        found.table.add(seq, path, leaf.content.name(), leaf.content.shape, flat.tensor_flags[row], alias)
    return found


@dataclass(slots=True)
class _Memory:
    """Bytes of a tensor that is in memory."""

    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        view[:] = view_of(self.tensor)[offset : offset + len(view)]


def leaf_of(value: Any) -> Leaf:
    """A leaf, or the leaf of a tensor in memory."""
    if isinstance(value, Leaf):
        return value
    tensor = bits(value.detach()).contiguous()
    shape = tuple(value.shape)
    piece = Piece((0,) * len(shape), shape, row_major(shape), 0, _Memory(tensor))
    flags = (2 if isinstance(value, torch.nn.Parameter) else 0) | (1 if value.requires_grad else 0)
    return Leaf(Content(value.dtype, shape, [piece]), flags)


# ---------------------------------------------------------------- what a format can hold


@dataclass(slots=True)
class Held:
    """What of a state a format can hold, and what was left out.

    Args:
        atom: why a value that is no container cannot be held, or None.
        drop: leave such values out; by default they are refused.
    """

    atom: Callable[[Any], str | None]
    drop: bool
    dropped: list[tuple[str, str]] = field(default_factory=list)

    def take(self, value: Any, path: str = "") -> Any:
        """The state without what cannot be held; in a sequence None stands in its place."""
        kind = type(value)
        if kind in (dict, OrderedDict):
            return self._dict(value, path)
        if kind in (list, tuple):
            inside = (self.take(child, _tree.join(path, str(i))) for i, child in enumerate(value))
            return kind(None if child is DROPPED else child for child in inside)
        if kind is Leaf or _plain(value):
            return leaf_of(value)
        why = self.atom(value)
        if why is None:
            return value
        self.dropped.append((path, why))
        return DROPPED

    def _dict(self, value: Any, path: str) -> Any:
        made: Any = type(value)()
        if isinstance(value, OrderedDict):
            vars(made).update(vars(value))
        for key, child in value.items():
            try:
                place = _tree.join(path, _tree.key_text(key))
            except (TypeError, ValueError) as error:
                self.dropped.append((path, f"a key cannot be written: {error}"))
                continue
            taken = self.take(child, place)
            if taken is not DROPPED:
                made[key] = taken
        return made

    def check(self) -> None:
        """Raise UnsupportedStateError for what was left out, unless that was asked for."""
        if self.dropped and not self.drop:
            error = UnsupportedStateError(self.dropped)
            error.add_note("The target of the conversion has no place for them; drop=True leaves them out.")
            raise error


def _plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided


def hold(state: Any, atom: Callable[[Any], str | None], *, drop: bool) -> tuple[Any, tuple[str, ...]]:
    """(what a format can hold of the state, paths of what it cannot).

    Raises:
        UnsupportedStateError: there is such a thing, and `drop` was not said.
    """
    held = Held(atom, drop)
    kept = held.take(state)
    held.check()
    if kept is DROPPED:
        raise UnsupportedStateError(held.dropped)
    return kept, tuple(path for path, _ in held.dropped)


_SIMPLE: Final = (type(None), bool, float, str, bytearray, complex, torch.Size, torch.dtype, torch.device)


def picked(value: Any) -> str | None:
    """Why `torch.load(weights_only=True)` would refuse a plain value, or None."""
    kind = type(value)
    if kind in _SIMPLE:
        return None
    if kind is int:
        return None if value.bit_length() < 2032 else "an integer of more than 254 bytes"
    if kind is bytes:
        return None if value else "empty bytes, which weights_only=True cannot read"
    if kind in (set, Counter):
        parts = [*value.keys(), *value.values()] if isinstance(value, Counter) else value
        return next((why for part in parts if (why := picked(part))), None)
    if kind is tuple:  # inside a set or a key
        return next((why for part in value if (why := picked(part))), None)
    return f"a {kind.__module__}.{kind.__qualname__}, which weights_only=True does not read"


# ---------------------------------------------------------------- compared


def digests(leaves: list[Leaf], buffer: torch.Tensor, room: Room) -> Iterator[int]:
    """Read every content once, in the order of the disk, so that its digest is known."""
    contents = {id(leaf.content): leaf.content for leaf in leaves}
    for content in sorted(contents.values(), key=lambda content: content.place):
        if not content.digest:
            yield from stream(content, buffer, room, lambda part: None)


def stream(
    content: Content, buffer: torch.Tensor, room: Room, put: Callable[[memoryview], object]
) -> Iterator[int]:
    """Read a content from front to back, and hand on each part of it."""
    for first in range(0, content.nbytes, len(buffer)):
        part = buffer[: min(len(buffer), content.nbytes - first)]
        content.read(first, part, room)
        put(view_of(part))
        yield len(part)


def compare(written: Columns, found: Columns, file: str) -> None:
    """Compare what was to be written with what can be read.

    Raises:
        ForeignFormatError: they differ; naming the first path.
    """
    left, right = written.table, found.table
    for name, one, other in (
        ("paths", left.path, right.path),
        ("dtypes", left.dtype, right.dtype),
        ("shapes", left.shape, right.shape),
        ("flags", left.flags, right.flags),
        ("ties", left.alias, right.alias),
        ("paths of values", written.flat.value_paths, found.flat.value_paths),
        ("values", written.flat.values, found.flat.values),
        ("containers", written.flat.node_tags, found.flat.node_tags),
        ("places of containers", written.flat.node_paths, found.flat.node_paths),
    ):
        if one != other:
            raise ForeignFormatError(f"{file}: what was written reads back with other {name}", file=file)
    for path, leaf, other_leaf in zip(left.path, written.leaves, found.leaves, strict=True):
        if leaf.content.digest != other_leaf.content.digest:
            why = f"{file}: the bytes of {path} read back are not those that were written"
            raise ForeignFormatError(why, file=file, path=path)
