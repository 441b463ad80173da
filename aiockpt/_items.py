"""Tensors that need not exist yet: what a save is made of when there is no state."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from . import _tree
from ._capture import Captured, Source
from ._dtypes import NAME
from ._table import TensorTable
from .errors import UnsupportedStateError, UsageError

__all__ = ["TensorItem", "TensorSpec", "captured_items"]


class TensorItem(Protocol):
    """What `CheckpointWriter.plan` needs to know of a tensor before it exists."""

    @property
    def path(self) -> str:
        """Where it sits in the state, such as `model/layers.0.weight`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A ready-made `TensorItem`."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def captured_items(
    items: Sequence[TensorItem],
    resolve: Callable[[Any], torch.Tensor],
    values: Any,
    *,
    step: int,
    allow_pickle: bool,
) -> Captured:
    """What a capture of a state with these tensors and values would be.

    Raises:
        UnsupportedStateError: naming every item and value that cannot be stored.
        UsageError: `values` holds tensors, or is no dict.
    """
    if values is not None and type(values) is not dict:
        raise UsageError(f"`values` must be a dict, not {type(values).__name__}", step=step)
    plain = dict(_split({} if values is None else values, "", _parents(item.path for item in items)))
    problems = _problems(items, plain)
    if problems:
        raise UnsupportedStateError(problems, step=step)
    flat, table = _tree.Flat(), TensorTable()
    sources: list[Source | None] = []
    by_path = {item.path: item for item in items}
    for seq, path in enumerate(_in_order([*plain, *by_path])):
        item = by_path.get(path)
        if item is None:
            flat.value_seq.append(seq)
            flat.value_paths.append(path)
            flat.values.append(_tree.encode_value(plain[path], path, allow_pickle=allow_pickle))
        else:
            table.add(seq, path, NAME[item.dtype], tuple(item.shape))
            sources.append(lambda item=item: resolve(item))
    return Captured(table, sources, flat)


def _split(values: dict[Any, Any], above: str, parents: set[str]) -> Iterator[tuple[str, Any]]:
    """(path, value) of the largest parts of `values` that no tensor lies in."""
    for key, value in values.items():
        path = _tree.join(above, key)
        if path in parents and type(value) is dict:
            yield from _split(value, path, parents)
        else:
            yield path, value


def _parents(paths: Iterable[str]) -> set[str]:
    return {parent for path in paths for parent in _above(path)}


def _above(path: str) -> Iterator[str]:
    for at, letter in enumerate(path):
        if letter == "/":
            yield path[:at]


def _in_order(paths: Sequence[str]) -> list[str]:
    """What lies in one container side by side, in order of first appearance: a walk over the state."""
    rank: dict[str, int] = {}
    for path in paths:
        for place in (*_above(path), path):
            rank.setdefault(place, len(rank))
    return sorted(paths, key=lambda path: [rank[place] for place in (*_above(path), path)])


def _problems(items: Sequence[TensorItem], plain: Container[str]) -> list[tuple[str, str]]:
    """Why the tensors cannot be stored: (path, reason)."""
    parents = _parents(item.path for item in items)
    problems = []
    seen: set[str] = set()
    for item in items:
        if item.path in seen or item.path in plain:
            problems.append((item.path, "something else has this path"))
        elif item.path in parents or any(place in plain for place in _above(item.path)):
            problems.append((item.path, "something else has this path, or one above it or below it"))
        elif item.dtype not in NAME:
            problems.append((item.path, f"dtype {item.dtype} cannot be stored"))
        seen.add(item.path)
    return problems
