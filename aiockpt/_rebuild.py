"""Columns back to a state: containers, values and tensors put together again.

The columns list tensors, plain values and the containers that are not plain dicts, each
with its path and its number in the state's pre-order. Merged by that number they are
read once from front to back; a stack holds the containers still open.

Everything here may have been written by an enemy: wrong columns are damage, reported by
path, and nothing is imported or called because a file says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ._paths import Key, Selection, ancestors, join, key_text, parse_key, split
from ._plain import MAX_DEPTH, Json, unpack
from .errors import CorruptCheckpointError
from .values import Children, codec_of, restore
from .values.torch_ import flagged

__all__ = ["Columns", "Rebuilt", "decode_value", "find", "host_tensors", "rebuild", "wanted_tensors"]

_ATOMS = frozenset({str, int, float, bool, type(None)})
_DICTS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})


class Columns(Protocol):
    """The three tables, column by column; `_tree.Flat` is one."""

    @property
    def tensor_seq(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def tensor_paths(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def tensor_flags(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def tensor_alias(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def value_seq(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def value_paths(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def values(self) -> Sequence[Json]: ...  # noqa: D102
    @property
    def node_seq(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def node_paths(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def node_tags(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def node_metas(self) -> Sequence[Json]: ...  # noqa: D102


@dataclass(slots=True)
class Rebuilt:
    """A state, or the selected parts of it."""

    state: Any
    missing: tuple[str, ...] = ()
    """Selected paths that are nowhere in the columns."""


@dataclass(slots=True)
class _Context:
    """What codecs may ask for while they decode."""

    allow_pickle: bool
    path: str = ""

    def plain(self, json: Json) -> Any:
        """Decode JSON that a codec keeps in its meta."""
        return _decode(json, self.path, self, len(split(self.path)))


def decode_value(json: Json, path: str = "", *, allow_pickle: bool = False) -> Any:
    """Turn the JSON of one value row back into the value.

    Raises:
        CorruptCheckpointError: nothing that a save writes.
        PickleRefusedError: something in it is pickled and `allow_pickle` is false.
    """
    return _decode(json, path, _Context(allow_pickle), len(split(path)))


def _decode(json: Json, path: str, ctx: _Context, depth: int) -> Any:
    if type(json) in _ATOMS:
        return json
    _check_depth(path, depth)
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
    return _restore(opened.tag, opened.meta, children, len(opened.children), path, ctx)


def _composite(json: Json, path: str) -> list[Json] | dict[str, Json]:
    if not isinstance(json, (list, dict)):
        raise CorruptCheckpointError("a plain value is no JSON", path=path)
    return json


def _check_depth(path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"nested deeper than {MAX_DEPTH} levels", path=f"{path[:200]}...")


def _restore(tag: str, meta: Json, children: Children, count: int, path: str, ctx: _Context) -> Any:
    if len(children) != count:
        raise CorruptCheckpointError("two keys of a container are equal", path=path)
    ctx.path = path
    return restore(tag, meta, children, ctx)


def _pick(json: Json, path: str, selection: Selection, ctx: _Context) -> Any:
    """The selected parts of one value row that itself is not selected; _NOTHING if there are none."""
    if not isinstance(json, (list, dict)):
        return _NOTHING
    _check_depth(path, len(split(path)))
    opened = unpack(json, path)
    found: Children = {}
    for key, child in zip(opened.keys, opened.children, strict=True):
        place = join(path, key_text(key))
        if selection.selects(place):
            found[key] = _select_inside(child, place, selection, ctx)
        elif selection.leads(place):
            part = _pick(child, place, selection, ctx)
            if part is not _NOTHING:
                found[key] = part
    return _partial(opened.tag, opened.meta, found, path, ctx)


def _select_inside(json: Json, path: str, selection: Selection, ctx: _Context) -> Any:
    """A selected value, whole; notes selected paths within it too."""
    if selection.leads(path):
        _pick(json, path, selection, ctx)
    return _decode(json, path, ctx, len(split(path)))


_NOTHING: Any = object()


def _partial(tag: str, meta: Json, found: Children, path: str, ctx: _Context) -> Any:
    """Part of a container: a dict of its kind, or a plain dict by index or field name."""
    if not found:
        return _NOTHING
    return _restore(tag, meta, found, len(found), path, ctx) if tag in _DICTS else found


def wanted_tensors(columns: Columns, select: Collection[str] | None = None) -> list[int]:
    """The tensor rows whose bytes must be read for `select`, ascending; tied ones by their first."""
    chosen = None if select is None else frozenset(select)
    rows = set()
    for i, path in enumerate(columns.tensor_paths):
        if chosen is None or any(place in chosen for place in ancestors(path)):
            alias = columns.tensor_alias[i]
            rows.add(i if alias < 0 else alias)
    return sorted(rows)


def host_tensors(columns: Columns) -> frozenset[int]:
    """The tensor rows that belong in host memory whatever `map_location` says: parts of arrays, RNGs, bytes."""
    nodes = zip(columns.node_paths, columns.node_tags, strict=True)
    holders = {path for path, tag in nodes if (codec := codec_of(tag)) is not None and codec.host}
    if not holders:
        return frozenset()
    paths = enumerate(columns.tensor_paths)
    rows = [i for i, path in paths if any(place in holders for place in ancestors(path))]
    firsts = [columns.tensor_alias[i] for i in rows]
    return frozenset(rows) | frozenset(i for i in firsts if i >= 0)


def find(state: Any, path: str) -> Any:
    """The value at `path` in a rebuilt state (or part of one).

    Raises:
        KeyError: there is none.
    """
    for text in split(path):
        try:
            key = parse_key(text)
            # Classes with fields are walked by attribute, everything else by key.
            state = (
                state[key]
                if hasattr(state, "__getitem__") and not hasattr(state, "_fields")
                else vars_of(state, key)
            )
        except (LookupError, TypeError, ValueError) as error:
            raise KeyError(path) from error
    return state


def vars_of(state: Any, key: Key) -> Any:
    """An attribute by name; KeyError when there is none."""
    if not isinstance(key, str) or not hasattr(state, key):
        raise KeyError(key)
    return getattr(state, key)


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

    def __init__(self, ctx: _Context, selection: Selection | None) -> None:
        self.ctx = ctx
        self.selection = selection
        self.stack: list[_Open] = []
        self.result: Any = _NOTHING

    def open(self, path: str, tag: str, meta: Json) -> None:
        """A container begins."""
        whole = self.selection is None or self.selection.selects(path)
        self._descend(path)
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
        _check_depth(path, len(texts))
        above = len(split(self.stack[-1].path)) + 1 if self.stack else 0
        for n in range(above, len(texts) + 1):
            place = "/".join(texts[:n])
            whole = self.selection is None or self.selection.selects(place)
            self.stack.append(_Open(place, self._key(place), whole=whole))

    def close(self) -> None:
        """The innermost container is complete."""
        node = self.stack.pop()
        if node.whole:
            value = _restore(node.tag, node.meta, node.children, len(node.children), node.path, self.ctx)
        else:
            value = _partial(node.tag, node.meta, node.children, node.path, self.ctx)
        if value is not _NOTHING:
            self._add(node.path, node.key, value)

    def _add(self, path: str, key: Key, value: Any) -> None:
        if not path:
            if self.result is not _NOTHING or self.stack:
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
        return {} if self.result is _NOTHING else self.result


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
    ctx = _Context(allow_pickle)
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
        value = _select_inside(json, path, selection, ctx)
    elif selection.leads(path):
        value = _pick(json, path, selection, ctx)
    else:
        return
    if value is not _NOTHING:
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
