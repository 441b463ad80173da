"""What a checkpoint holds: manifest and parts decoded, and an outline of the state.

`_decode` makes it and checks every number once, so that no later code needs to doubt one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._manifest import Manifest, ShardRecord
from ._plain import Json
from ._spread import Spread
from ._table import TensorTable
from ._tree import ancestors, join, key_text, split
from .errors import CorruptCheckpointError

__all__ = ["NOTHING", "Outline", "Saved", "located"]

Kind = Literal["tensor", "plain", "container"]


@dataclass(slots=True)
class Saved:
    """One checkpoint without its tensors' bytes; its columns are what `_tree.rebuild` reads."""

    manifest: Manifest
    table: TensorTable
    shards: list[ShardRecord]
    value_seq: list[int] = field(default_factory=list)
    value_paths: list[str] = field(default_factory=list)
    values: list[Json] = field(default_factory=list)
    node_seq: list[int] = field(default_factory=list)
    node_paths: list[str] = field(default_factory=list)
    node_tags: list[str] = field(default_factory=list)
    node_metas: list[Json] = field(default_factory=list)
    spread: Spread | None = None
    """Where the tensors' bytes lie, if one row a tensor does not say it."""

    @property
    def stored(self) -> TensorTable:
        """The rows as they lie in the shards: whole tensors, and chunks of what several ranks wrote."""
        return self.table if self.spread is None else self.spread.stored

    @property
    def tensor_seq(self) -> Sequence[int]:
        """Places of the tensors in the state."""
        return self.table.seq

    @property
    def tensor_paths(self) -> Sequence[str]:
        """Their paths."""
        return self.table.path

    @property
    def tensor_flags(self) -> Sequence[int]:
        """Their flags."""
        return self.table.flags

    @property
    def tensor_alias(self) -> Sequence[int]:
        """The rows they are tied to, or -1."""
        return self.table.alias

    def base(self, row: int) -> int:
        """The row that holds the bytes of `row`."""
        alias = self.table.alias[row]
        return row if alias < 0 else alias


def located(error: CorruptCheckpointError, step: int, file: str) -> CorruptCheckpointError:
    """The same error with step and file where it lacks them; the message is made of these."""
    if error.step is not None and error.file is not None:
        return error
    step = step if error.step is None else error.step
    return CorruptCheckpointError(error.reason, step=step, file=error.file or file, path=error.path)


NOTHING: Any = object()
"""Stands for a value that is not there."""


class Outline:
    """Where the state has what, by path; plain values are looked into."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._rows = {path: row for row, path in enumerate(saved.table.path)}
        self._values = {path: i for i, path in enumerate(saved.value_paths)}
        self._nodes = {path: i for i, path in enumerate(saved.node_paths)}
        self._children: dict[str, dict[str, None]] = {}
        places = sorted(
            [
                *zip(saved.table.seq, saved.table.path, strict=True),
                *zip(saved.value_seq, saved.value_paths, strict=True),
                *zip(saved.node_seq, saved.node_paths, strict=True),
            ]
        )
        for _, path in places:
            self._enter(path)

    def _enter(self, path: str) -> None:
        """Make the path known to its parents."""
        while path:
            parent, _, text = path.rpartition("/")
            siblings = self._children.setdefault(parent, {})
            if text in siblings:
                return
            siblings[text] = None
            path = parent

    def row(self, path: str) -> int | None:
        """The tensor at the path, as its row."""
        return self._rows.get(path)

    def kind(self, path: str) -> Kind | None:
        """What is at the path: a tensor, something without any tensor, or something with some."""
        if path in self._rows:
            return "tensor"
        if path in self._nodes or path in self._children:
            return "container"
        return None if self.inside(path) is NOTHING else "plain"

    def tag(self, path: str) -> str:
        """The codec of what is at the path, for messages and for values of one kind."""
        at = self._nodes.get(path)
        if at is not None:
            return self._saved.node_tags[at]
        json = self.inside(path)
        if json is NOTHING or (isinstance(json, dict) and "~" not in json):
            return "dict"
        return str(json["~"]) if isinstance(json, dict) else type(json).__name__

    def meta(self, path: str) -> Json:
        """What the codec of the container at the path remembers."""
        at = self._nodes.get(path)
        return None if at is None else self._saved.node_metas[at]

    def children(self, path: str) -> Iterable[str]:
        """The components below the path, in order; none for a leaf."""
        if path in self._rows:
            return ()
        known = self._children.get(path)
        return _texts(self.inside(path), path) if known is None else known

    def inside(self, path: str) -> Any:
        """The JSON of the plain value at the path, or NOTHING."""
        for place in ancestors(path):
            at = self._values.get(place)
            if at is not None:
                rest = split(path)[len(split(place)) :]
                return _walk(self._saved.values[at], place, rest)
        return NOTHING


def _walk(json: Any, path: str, texts: Sequence[str]) -> Any:
    for text in texts:
        children = dict(zip(_texts(json, path), _members(json), strict=False))
        if text not in children:
            return NOTHING
        json, path = children[text], join(path, text)
    return json


def _texts(json: Any, path: str) -> list[str]:
    """The components of a JSON container."""
    if isinstance(json, list):
        return [str(i) for i in range(len(json))]
    if not isinstance(json, dict):
        return []
    if "~" not in json:
        return [key_text(key) for key in json]
    texts = json.get("k")
    return [str(i) for i in range(len(_members(json)))] if texts is None else [str(text) for text in texts]


def _members(json: Any) -> list[Any]:
    """The children of a JSON container."""
    if isinstance(json, list):
        return json
    if not isinstance(json, dict):
        return []
    if "~" not in json:
        return list(json.values())
    members = json.get("v", [])
    return members if isinstance(members, list) else []
