"""Columns back to a state: containers, values and tensors put together again.

The columns list tensors, plain values and the containers that are not plain dicts, each
with its path and its number in the state's pre-order. Merged by that number they are
read once from front to back; a stack holds the containers still open.

Everything here may have been written by an enemy: wrong columns are damage, reported by
path, and nothing is imported or called because a file says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._paths import Key, Selection, parse_key, split
from .._plain import Json
from ..errors import CorruptCheckpointError
from ..values import Children
from ..values.torch_ import flagged
from .columns import Columns
from .decode import NOTHING, Context, assemble, check_depth, decode_selected, decode_value, partial, pick


@dataclass(slots=True)
class Rebuilt:
    """A state, or the selected parts of it."""

    state: Any
    missing: tuple[str, ...] = ()
    """Selected paths that are nowhere in the columns."""


@dataclass(slots=True)
class _Open:
    """A container whose children are being read."""

    path: str
    key: Key
    tag: str = "dict"
    meta: Json = None
    whole: bool = True
    children: Children = field(default_factory=dict)


class _Builder:
    """Reads the rows in order and keeps the stack of open containers."""

    def __init__(self, ctx: Context, selection: Selection | None) -> None:
        self.ctx = ctx
        self.selection = selection
        self.stack: list[_Open] = []
        self.result: Any = NOTHING

    def open(self, path: str, tag: str, meta: Json) -> None:
        """A container begins."""
        whole = self.selection is None or self.selection.selects(path)
        self._descend(path)
        check_depth(path, len(self.stack))
        self.stack.append(_Open(path, self._key(path), tag, meta, whole))

    def leaf(self, path: str, value: Any) -> None:
        """A leaf, ready."""
        self._descend(path)
        self._add(path, self._key(path), value)

    def _key(self, path: str) -> Key:
        try:
            return parse_key(path.rpartition("/")[2]) if path else ""
        except ValueError as error:
            raise CorruptCheckpointError(f"a path cannot be read: {error}", path=path[:200]) from error

    def _descend(self, path: str) -> None:
        """Close what does not hold `path`, open the plain dicts on the way to it."""
        stack = self.stack
        while stack and not (path.startswith(f"{stack[-1].path}/") or (not stack[-1].path and path)):
            self.close()
        if not path or (stack and stack[-1].path == path.rpartition("/")[0]):
            return
        self._open_dicts(path)

    def _open_dicts(self, path: str) -> None:
        texts = split(path)[:-1]
        check_depth(path, len(texts))
        above = len(split(self.stack[-1].path)) + 1 if self.stack else 0
        for n in range(above, len(texts) + 1):
            place = "/".join(texts[:n])
            whole = self.selection is None or self.selection.selects(place)
            self.stack.append(_Open(place, self._key(place), whole=whole))

    def close(self) -> None:
        """The innermost container is complete."""
        node = self.stack.pop()
        if node.whole:
            value = assemble(node.tag, node.meta, node.children, node.path, self.ctx, len(self.stack))
        else:
            value = partial(node.tag, node.meta, node.children, node.path, self.ctx)
        if value is not NOTHING:
            self._add(node.path, node.key, value)

    def _add(self, path: str, key: Key, value: Any) -> None:
        if not path:
            if self.result is not NOTHING or self.stack:
                raise CorruptCheckpointError("two values for the whole state", path=path)
            self.result = value
            return
        children = self.stack[-1].children
        if key in children:
            raise CorruptCheckpointError("two values have this path", path=path)
        children[key] = value

    def finish(self) -> Any:
        """Close everything; the state."""
        while self.stack:
            self.close()
        return {} if self.result is NOTHING else self.result


def rebuild(
    columns: Columns,
    tensors: Sequence[Any] | Mapping[int, Any],
    *,
    select: Iterable[str] | None = None,
    allow_pickle: bool = False,
) -> Rebuilt:
    """Put a state together again.

    Args:
        columns: the tables.
        tensors: the loaded tensors by row; those of tied rows are not asked for. They end up
            in the state themselves: the caller gives them away.
        select: only what lies at or under these paths, in the same nesting. A container of
            which only a part is selected comes as a dict of its kind, or, being no dict, as a
            plain one by index or field name. None: everything.
        allow_pickle: whether pickled values are unpickled.

    Raises:
        CorruptCheckpointError: the columns are nothing that a save writes.
        PickleRefusedError: a selected value is pickled and `allow_pickle` is false.
    """
    selection = None if select is None else Selection(list(select))
    ctx = Context(allow_pickle)
    builder = _Builder(ctx, selection)
    made = _Tensors(columns, tensors)
    nt, nv = len(columns.tensor_seq), len(columns.value_seq)
    for row in _in_order(columns):
        if row < nt:
            path = columns.tensor_paths[row]
            if selection is None or selection.selects(path):
                builder.leaf(path, made.get(row))
        elif row < nt + nv:
            _add_value(builder, columns.value_paths[row - nt], columns.values[row - nt])
        else:
            _add_node(builder, columns, row - nt - nv)
    return Rebuilt(builder.finish(), selection.missing if selection else ())


def _in_order(columns: Columns) -> Iterator[int]:
    """Rows of all three tables (tensors, values, nodes, numbered through) in the state's order."""
    t, v, n = columns.tensor_seq, columns.value_seq, columns.node_seq
    sizes = (
        (len(t), (columns.tensor_paths, columns.tensor_flags, columns.tensor_alias)),
        (len(v), (columns.value_paths, columns.values)),
        (len(n), (columns.node_paths, columns.node_tags, columns.node_metas)),
    )
    if any(len(column) != size for size, table in sizes for column in table):
        raise CorruptCheckpointError("columns of one table differ in length")
    numbers = [*t, *v, *n]
    if len(set(numbers)) != len(numbers):
        raise CorruptCheckpointError("two rows have one place in the state")
    return iter(sorted(range(len(numbers)), key=numbers.__getitem__))


def _add_value(builder: _Builder, path: str, json: Json) -> None:
    selection, ctx = builder.selection, builder.ctx
    if selection is None:
        value = decode_value(json, path, allow_pickle=ctx.allow_pickle)
    elif selection.selects(path):
        value = decode_selected(json, path, selection, ctx)
    elif selection.leads(path):
        value = pick(json, path, selection, ctx)
    else:
        return
    if value is not NOTHING:
        builder.leaf(path, value)


def _add_node(builder: _Builder, columns: Columns, row: int) -> None:
    path = columns.node_paths[row]
    selection = builder.selection
    if selection is None or selection.selects(path) or selection.leads(path):
        builder.open(path, columns.node_tags[row], columns.node_metas[row])


class _Tensors:
    """Tensors by row with their flags; tied rows give the same object again."""

    def __init__(self, columns: Columns, loaded: Sequence[Any] | Mapping[int, Any]) -> None:
        self.columns = columns
        self.loaded = loaded
        self.tied = frozenset(first for first in columns.tensor_alias if first >= 0)
        self.known: dict[tuple[int, int], torch.Tensor] = {}

    def get(self, row: int) -> torch.Tensor:
        """The tensor of a row."""
        first, flags = self.columns.tensor_alias[row], self.columns.tensor_flags[row]
        first = row if first < 0 else first
        if first not in self.tied:
            return self._make(first, flags)
        found = self.known.get((first, flags))
        if found is None:
            found = self.known[first, flags] = self._make(first, flags)
        return found

    def _make(self, row: int, flags: int) -> torch.Tensor:
        path = self.columns.tensor_paths[row] if 0 <= row < len(self.columns.tensor_paths) else None
        try:
            tensor: torch.Tensor = self.loaded[row]
            return flagged(tensor, flags) if flags else tensor
        except (LookupError, ValueError, RuntimeError, TypeError) as error:
            raise CorruptCheckpointError(f"a tensor cannot be made: {error}", path=path) from error
