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

__all__ = ["ChunkSpec", "TensorItem", "TensorSpec", "captured_items"]


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


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A `TensorItem` of which this process holds a part."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the part lies in it."""
    sizes: tuple[int, ...]
    """The part's own shape: what `resolve` gives."""

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offsets) == len(self.sizes) or min(self.offsets, default=0) < 0:
            raise UsageError(f"{self.path}: offsets {self.offsets} and sizes {self.sizes} of {self.shape}")


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
    by_path: dict[str, list[TensorItem]] = {}
    for item in items:
        by_path.setdefault(item.path, []).append(item)
    seq = 0
    for path in _tree.in_order([*plain, *by_path]):
        if path not in by_path:
            flat.value_seq.append(seq)
            flat.value_paths.append(path)
            flat.values.append(_tree.encode_value(plain[path], path, allow_pickle=allow_pickle))
            seq += 1
        for item in by_path.get(path, ()):
            _add(table, seq, item)
            sources.append(lambda item=item: resolve(item))
            seq += 1
    return Captured(table, sources, flat)


def _add(table: TensorTable, seq: int, item: TensorItem) -> None:
    """A row of the item."""
    whole = tuple(item.shape)
    sizes = item.sizes if isinstance(item, ChunkSpec) else whole
    if isinstance(item, ChunkSpec) and sizes != whole:
        table.chunks[len(table)] = (whole, item.offsets)
    table.add(seq, item.path, NAME[item.dtype], sizes)


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


def _problems(items: Sequence[TensorItem], plain: Container[str]) -> list[tuple[str, str]]:
    """Why the tensors cannot be stored: (path, reason)."""
    parents = _parents(item.path for item in items)
    problems = []
    seen: dict[str, bool] = {}
    for item in items:
        cut = isinstance(item, ChunkSpec) and item.sizes != item.shape
        if seen.get(item.path, cut) is not cut or (item.path in seen and not cut) or item.path in plain:
            problems.append((item.path, "something else has this path"))
        elif item.path in parents or any(place in plain for place in _above(item.path)):
            problems.append((item.path, "something else has this path, or one above it or below it"))
        elif item.dtype not in NAME:
            problems.append((item.path, f"dtype {item.dtype} cannot be stored"))
        seen[item.path] = cut
    return problems
