"""One rank's plan to the rows of its part: tensors by reference, objects without pickle.

Runs in a thread; looks at objects at once, at tensors when their turn to be copied has
come.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from aiockpt import _tree
from aiockpt._capture import Captured, Source
from aiockpt._dtypes import NAME
from aiockpt._paths import join
from aiockpt._table import TensorTable
from aiockpt.errors import SaveError, UnsupportedStateError

from ._shares import SPACING, Share, held

__all__ = ["collect"]


def collect(share: Share, items: Iterable[WriteItem], planner: SavePlanner, allow_pickle: bool) -> Captured:
    """What a capture of this rank's share would be.

    Raises:
        UnsupportedStateError: naming every object that cannot be stored.
        Exception: whatever the planner raised.
    """
    rows = _Rows(allow_pickle)
    for item in items:
        number, path = share.places[item.index.fqn]
        if item.type == WriteItemType.BYTE_IO:
            rows.add_object(number, path, partial(_object, planner, item, allow_pickle))
        else:
            rows.add_tensor(number, path, item, planner)
    for number, path in share.lists:
        rows.add_list(number, path)
    for number, path in share.holes:
        rows.add_value(number, path, None)
    if rows.problems:
        raise UnsupportedStateError(rows.problems, step=share.ticket.step)
    return Captured(rows.table, rows.sources, rows.flat)


class _Rows:
    """The tables of a part in the making."""

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.table = TensorTable()
        self.sources: list[Source | None] = []
        self.flat = _tree.Flat()
        self.problems: list[tuple[str, str]] = []
        self._chunks: dict[str, int] = {}

    def add_tensor(self, number: int, path: str, item: WriteItem, planner: SavePlanner) -> None:
        """A whole tensor, or a chunk of one."""
        share = held(item, path)
        assert share is not None
        _, dtype, whole, offsets, sizes = share
        if sizes != whole:
            self.table.chunks[len(self.table)] = (whole, offsets)
        # Several chunks of one tensor share its place; each row has a number of its own.
        nth = self._chunks[path] = self._chunks.get(path, -1) + 1
        self.table.add(number + nth, path, dtype, sizes)
        self.sources.append(partial(_resolve, planner, item, path))

    def add_object(self, number: int, path: str, get: Callable[[], Any]) -> None:
        """Anything else; tensors in it become rows of their own."""
        try:
            found = _tree.flatten(get(), allow_pickle=self.allow_pickle)
        except UnsupportedStateError as error:
            self.problems += [(join(path, where) if where else path, why) for where, why in error.problems]
            return
        if len(found.tensors) + len(found.values) + len(found.node_seq) > SPACING:
            self.problems.append((path, f"an object of more than {SPACING} parts"))
            return
        first = len(self.table)
        for i, tensor in enumerate(found.tensors):
            alias, shape = found.tensor_alias[i], tuple(tensor.shape)
            where = _below(path, found.tensor_paths[i])
            base = alias if alias < 0 else alias + first
            self.table.add(
                number + found.tensor_seq[i], where, NAME[tensor.dtype], shape, found.tensor_flags[i], base
            )
            self.sources.append(tensor if alias < 0 else None)
        for i, value in enumerate(found.values):
            self.add_value(number + found.value_seq[i], _below(path, found.value_paths[i]), value)
        for i, tag in enumerate(found.node_tags):
            where = _below(path, found.node_paths[i])
            self._add_node(number + found.node_seq[i], where, tag, found.node_metas[i])

    def add_value(self, number: int, path: str, json: _tree.Json) -> None:
        """A row of plain JSON."""
        self.flat.value_seq.append(number)
        self.flat.value_paths.append(path)
        self.flat.values.append(json)

    def add_list(self, number: int, path: str) -> None:
        """A list on the way to leaves."""
        self._add_node(number, path, "list", None)

    def _add_node(self, number: int, path: str, tag: str, meta: _tree.Json) -> None:
        self.flat.node_seq.append(number)
        self.flat.node_paths.append(path)
        self.flat.node_tags.append(tag)
        self.flat.node_metas.append(meta)


def _below(path: str, inner: str) -> str:
    return join(path, inner) if inner else path


def _resolve(planner: SavePlanner, item: WriteItem, path: str) -> torch.Tensor:
    """The planner's tensor, if it is what was planned."""
    data = planner.resolve_data(item)
    planned = item.tensor_data
    assert planned is not None
    sizes, dtype = tuple(planned.chunk.sizes), planned.properties.dtype
    if not isinstance(data, torch.Tensor):
        raise SaveError(f"{path}: the planner gave a {type(data).__name__} for a tensor", path=path)
    if tuple(data.shape) != sizes or data.dtype != dtype or data.is_meta:
        raise SaveError(
            f"{path}: the planner gave {data.dtype} {tuple(data.shape)} on {data.device}, planned were "
            f"{dtype} {sizes}",
            path=path,
        )
    return data.detach()


def _object(planner: SavePlanner, item: WriteItem, allow_pickle: bool) -> Any:
    """The object of an item; pickle is only met where a planner of the user's makes one."""
    if isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "transform_object")
    ):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        return data
    try:
        # The planner's own archive, made just now; not one from a disk.
        return torch.load(io.BytesIO(data.getbuffer()), weights_only=not allow_pickle)  # noqa: TID251
    except pickle.UnpicklingError as error:
        why = "the planner pickles it; pass allow_pickle=True, or let lookup_object give the object"
        raise UnsupportedStateError([("", why)]) from error
