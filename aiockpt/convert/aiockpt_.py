"""Checkpoints of aiockpt itself, from either side of a conversion."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from .. import _tree
from .._capture import Captured, Ranged
from .._finding import Finder
from .._listing import Candidate
from .._memory import BlockPool, ByteBudget
from .._names import StepNames
from .._place import as_step, open_run
from .._runfiles import RunFiles
from .._saved import Saved
from .._threads import Lane, offload
from ..errors import StepNotFoundError, UsageError
from ..reader import CheckpointReader, block_bytes
from ..storage import MANIFEST, Store, open_store
from ..writer import CheckpointWriter
from . import Opened, Options, Written
from ._drive import Desk
from ._leaf import Content, Leaf, Piece, Room, row_major
from ._shards import Shards
from ._walk import columns_of

__all__ = ["open_source", "write"]

_STRUCTURE = frozenset(
    {"dict", "list", "tuple", "OrderedDict", "defaultdict", "deque", "namedtuple", "dataclass"}
)
"""Containers that can be made with leaves in them; the rest (arrays, generators) needs real tensors."""


async def open_source(path: str, options: Options) -> Opened:
    """Open a step's folder, or the newest valid step of a run.

    Raises:
        StepNotFoundError: there is no such step.
        CorruptCheckpointError: it is damaged.
        PickleRefusedError: it holds pickled values.
    """
    store, candidate = await _find(path, options.step)
    shards: Shards | None = None

    async def close() -> None:
        if shards is not None:
            await shards.close()
        await store.aclose()

    try:
        reader = CheckpointReader(store, candidate.name, step=candidate.step)
        saved = await reader.metadata()
        shards = Shards(reader.place, saved, Desk(options.budget).share, options.verify)
        # Arrays are read here, which takes threads of the bulk lane: not from one of them.
        state = await offload(_state, saved, shards, options.budget, lane=Lane.STAGE)
    except BaseException:
        await close()
        raise
    return Opened(state, candidate.step, close)


async def _find(path: str, step: int | None) -> tuple[Store, Candidate]:
    path = await offload(os.path.abspath, path)
    if await offload(os.path.exists, os.path.join(path, MANIFEST)):
        run, name = os.path.split(path)
        store = open_store(run)
        found = [c for c in await Finder(store, None).candidates() if c.name == name]
        if not found:
            raise UsageError(
                f"{path} is named as no step of its run; give the run's folder and step=", file=path
            )
        return store, found[0]
    store = open_store(path)
    finder = Finder(store, None)
    if step is not None:
        checkpoint = (await finder.get(as_step(step)))[0]
    else:
        newest = await finder.newest(_any)
        if newest is None:
            raise StepNotFoundError(f"{path} has no checkpoint", file=path)
        checkpoint = newest[0]
    return store, Candidate(checkpoint.step, checkpoint.generation, checkpoint.name)


async def _any(*_: Any) -> None:
    """Every checkpoint whose manifest is sound will do."""


def _state(saved: Saved, shards: Shards, budget: int) -> Any:
    """The state, with leaves for its tensors; in a thread, since arrays are read."""
    table = saved.table
    contents = {row: _content(saved, row, shards) for row in table.stored()}
    real = _needed(saved)
    if sum(contents[row].nbytes for row in real) > budget:
        path = table.path[min(real)]
        raise UsageError(
            f"{path} and its like (arrays, generators, sparse tensors) come to more than the budget of "
            f"{budget} bytes: give a larger one",
            path=path,
        )
    tensors: dict[int, Any] = {
        row: _read(content) if row in real else Leaf(content, table.flags[row])
        for row, content in contents.items()
    }
    tied = [row for row, alias in enumerate(table.alias) if alias >= 0 and alias not in real]
    alone = list(table.alias)
    for row in tied:  # a leaf of its own, with its own flags, of the same content
        tensors[row] = Leaf(contents[table.alias[row]], table.flags[row])
        alone[row] = -1
    columns: Any = _Columns(saved, [0] * len(table), alone)
    return _tree.rebuild(columns, tensors).state


@dataclass(slots=True)
class _Columns:
    """The columns of a checkpoint, but for flags and ties: those are the leaves' own."""

    saved: Saved
    tensor_flags: list[int]
    tensor_alias: list[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.saved, name)


def _content(saved: Saved, row: int, shards: Shards) -> Content:
    stored = saved.stored
    rows = [row] if saved.spread is None else list(saved.spread.rows[row])
    pieces = [
        Piece(
            stored.offsets(at),
            stored.shape[at],
            row_major(stored.shape[at]),
            stored.begin[at],
            shards.storage(stored.shard[at]),
        )
        for at in rows
    ]
    return Content(getattr(torch, saved.table.dtype[row]), saved.table.shape[row], pieces)


def _needed(saved: Saved) -> frozenset[int]:
    """The rows whose values are made of real tensors."""
    nodes = zip(saved.node_paths, saved.node_tags, strict=True)
    holders = {path for path, tag in nodes if tag not in _STRUCTURE}
    rows = (
        [row for row, path in enumerate(saved.table.path) if _tree.selects(holders, path)] if holders else []
    )
    return frozenset(saved.base(row) for row in rows)


def _read(content: Content) -> torch.Tensor:
    data = torch.empty(content.nbytes, dtype=torch.uint8)
    content.read(0, data, Room(max(content.nbytes, 16)))
    return (
        data.view(content.dtype).view(content.shape)
        if content.nbytes
        else torch.empty(content.shape, dtype=content.dtype)
    )


class _Stretch(Ranged):
    """A leaf, as a save reads it."""

    def __init__(self, content: Content, room: Room) -> None:
        self.content = content
        self.room = room

    def read(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` with the content from byte `first` on."""
        self.content.read(first, out, self.room)


async def write(state: Any, path: str, options: Options, desk: Desk, step: int | None) -> Written:
    """Write a run with one step.

    Raises:
        UnsupportedStateError: listing what cannot be stored.
    """
    number = as_step((step or 0) if options.step is None else options.step)
    columns = await offload(columns_of, state)
    room = desk.room()
    sources: list[Any] = [
        _Stretch(leaf.content, room) if columns.table.alias[row] < 0 else None
        for row, leaf in enumerate(columns.leaves)
    ]
    budget = ByteBudget(max(options.budget // 2, 2 * desk.share))
    pool = BlockPool(budget, block_bytes=block_bytes(budget))
    store = open_store(path)
    try:
        await store.prepare()
        run_id = await open_run(store, StepNames(), None, RunFiles({}))
        async with CheckpointWriter(store, step=number, run_id=run_id, pool=pool) as writer:
            await writer.plan_captured(Captured(columns.table, sources, columns.flat))
            await writer.finish([await writer.write()])
    finally:
        pool.close()
        await store.aclose()
    return Written(state)
