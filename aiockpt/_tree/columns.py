"""The tables as a reader sees them, and questions about them that need no data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from .._paths import Key, ancestors, parse_key, split
from .._plain import Json
from ..values import codec_of


class Columns(Protocol):
    """The three tables, column by column; `_tree.Flat` is one."""

    @property
    def tensor_seq(self) -> Sequence[int]: ...
    @property
    def tensor_paths(self) -> Sequence[str]: ...
    @property
    def tensor_flags(self) -> Sequence[int]: ...
    @property
    def tensor_alias(self) -> Sequence[int]: ...
    @property
    def value_seq(self) -> Sequence[int]: ...
    @property
    def value_paths(self) -> Sequence[str]: ...
    @property
    def values(self) -> Sequence[Json]: ...
    @property
    def node_seq(self) -> Sequence[int]: ...
    @property
    def node_paths(self) -> Sequence[str]: ...
    @property
    def node_tags(self) -> Sequence[str]: ...
    @property
    def node_metas(self) -> Sequence[Json]: ...


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
    """The tensor rows that belong in host memory, whatever `map_location` says: arrays, RNGs, bytes."""
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
            state = _child(state, key)
        except (LookupError, TypeError, ValueError) as error:
            raise KeyError(path) from error
    return state


def _child(state: Any, key: Key) -> Any:
    """One step down: by key or index, in a namedtuple or an object by field name."""
    if hasattr(state, "__getitem__") and not (isinstance(key, str) and hasattr(state, "_fields")):
        return state[key]
    if not isinstance(key, str) or not hasattr(state, key):
        raise KeyError(key)
    return getattr(state, key)
