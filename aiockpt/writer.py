"""The lifecycle of one save, one coroutine a phase: plan, stage, write, finish.

`Saver` drives this; so can anybody who schedules the phases himself, such as an adapter
to another library's planner. `finish` needs only the records of the parts, and may run
in another process than the one that wrote them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from . import _tree
from ._capture import Captured, Source, capture
from ._commit import build_manifest, commit
from ._door import translate
from ._dtypes import NAME
from ._manifest import FileRecord, PartRecord, ShardRecord, encode_part
from ._memory import BLOCK_BYTES, BlockPool, ByteBudget, default_budget
from ._names import StepNames, new_save_id, part_name
from ._pages import build_part
from ._pipeline import Job, Pipeline, Progress
from ._plan import ShardPlan, plan_blocks, plan_shards
from ._records import (
    TensorItem,
    UserFile,
    check_files,
    content_of,
    count_items,
    describe,
    encode_extra,
    item_problems,
    put_file,
)
from ._stage import fill_block
from ._table import TensorTable
from ._threads import Lane, offload, settle
from .checkpoint import Checkpoint
from .errors import BusyError, SaveError, UnsupportedStateError, UsageError
from .layouts import Layout
from .layouts.per_item import PerItem
from .storage import Attempt, Store, open_store

__all__ = ["CheckpointWriter", "SavePlan", "TensorItem", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A ready-made `TensorItem`."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a save will write; nothing has been written when it exists."""

    tensors: int
    nbytes: int
    """Bytes of tensor data; tied tensors count once."""
    files: tuple[tuple[str, int], ...]
    """(name, bytes) of the data files."""
    block_bytes: int
    """Bytes of host memory that would hold all of it at once, in whole blocks."""


T = TypeVar("T")


class CheckpointWriter:
    """Writes one checkpoint, phase by phase.

    Use as an async context manager: left before `finish`, it removes what it wrote.

    Args:
        run: the run's folder or URL, or a store.
        step: completed steps.
        save_id: this save's name for ever; made when absent. All parts of one save,
            and the `finish` in another process, must say the same.
        run_id: the run it belongs to.
        name: the folder's name; by default `step-{:08d}` of the step.
        metrics: numbers by name, kept in the manifest.
        meta: plain values, kept in the manifest.
        files: the user's own files to commit with the step, by name.
        layout: which tensor goes into which file.
        pool: host memory shared with other saves.
        rank: this process's number.
        world: how many ranks write a part.
        allow_pickle: store what has no codec as a pickle.
        generation: how often the step had been written before.
        progress: counts bytes for somebody else too.

    Raises:
        UsageError: an argument is wrong. Nothing was written.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Store,
        *,
        step: int,
        save_id: str | None = None,
        run_id: str = "",
        name: str | None = None,
        metrics: Mapping[str, float] | None = None,
        meta: Any = None,
        files: Mapping[str, UserFile] | None = None,
        layout: Layout | None = None,
        pool: BlockPool | None = None,
        rank: int = 0,
        world: int = 1,
        allow_pickle: bool = False,
        generation: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.store = open_store(run)
        self.step = step
        self.save_id = save_id or new_save_id()
        self.run_id = run_id
        self.name = name or StepNames().folder(step, generation)
        self.generation = generation
        self.progress = progress or Progress()
        self.on_staged: Callable[[], None] | None = None
        self._extra = encode_extra(metrics, meta, step)
        self._files = check_files(files or {})
        self._layout = layout or PerItem()
        self._pool = pool
        self._rank, self._world = rank, world
        self._allow_pickle = allow_pickle
        self._order = 0
        self._captured: Captured | None = None
        self._shards: list[ShardPlan] = []
        self._filled: list[Job] = []
        self._pipeline: Pipeline | None = None
        self._attempt: Attempt | None = None
        self._task: asyncio.Task[list[ShardRecord]] | None = None
        self._reached_staged = asyncio.Event()
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.abort()

    async def plan_state(self, state: Any) -> SavePlan:
        """Plan the save of a state; captures it at once.

        Raises:
            UnsupportedStateError: listing every path that cannot be stored.
        """
        captured = capture(state, step=self.step, allow_pickle=self._allow_pickle)
        return await self.plan_captured(captured)

    async def plan(
        self, items: Sequence[TensorItem], resolve: Callable[[Any], torch.Tensor], *, values: Any = None
    ) -> SavePlan:
        """Plan the save of tensors that need not exist yet.

        Args:
            items: path, dtype and shape of each tensor, in the order of the state.
            resolve: gives an item's tensor; called in a thread when its turn to be
                copied has come, and again when it lies in several blocks.
            values: a state of plain values to store beside them.

        Raises:
            UnsupportedStateError: a dtype cannot be stored, or two items have one path.
        """
        flat = _tree.flatten({} if values is None else values, allow_pickle=self._allow_pickle)
        if flat.tensors:
            raise UsageError("`values` holds tensors: put them among `items`", step=self.step)
        table = TensorTable()
        sources: list[Source | None] = []
        problems = item_problems(items)
        if problems:
            raise UnsupportedStateError(problems, step=self.step)
        for number, item in enumerate(items):
            table.add(number + len(flat.value_seq), item.path, NAME[item.dtype], tuple(item.shape))
            sources.append(lambda item=item: resolve(item))
        return await self.plan_captured(Captured(table, sources, flat))

    async def plan_captured(self, captured: Captured) -> SavePlan:
        """Plan the save of a captured state (what `plan_state` does after its capture)."""
        if self._ended or self._captured not in (None, captured):
            raise UsageError("this writer has a plan already; make a writer for each save", step=self.step)
        if self._captured is None:
            self._captured = captured
            self._shards = await offload(self._lay_out, captured.table, lane=Lane.CONTROL)
        return self._describe_plan(captured.table)

    def _describe_plan(self, table: TensorTable) -> SavePlan:
        nbytes = sum(shard.nbytes for shard in self._shards)
        self.progress.total = nbytes
        files = tuple((shard.name, shard.size) for shard in self._shards)
        # A block never holds parts of two files.
        blocks = sum(-(-shard.nbytes // BLOCK_BYTES) for shard in self._shards)
        return SavePlan(len(table), nbytes, files, blocks * BLOCK_BYTES)

    def use(self, pool: BlockPool, order: int) -> None:
        """Take blocks from `pool`; saves with smaller `order` get theirs first."""
        self._pool, self._order = pool, order

    def fill_now(self, captured: Captured, pool_for: Callable[[int], BlockPool]) -> None:
        """Plan and copy everything on this thread, now; the state may change afterwards.

        Args:
            captured: the state.
            pool_for: gives the pool, told how many bytes of whole blocks are needed.

        Raises:
            BusyError: the pool has not enough free blocks; nothing was kept.
        """
        self._captured = captured
        self._shards = self._lay_out(captured.table)
        pool = self._pool = pool_for(self._describe_plan(captured.table).block_bytes)
        for plan in plan_blocks(captured.table, self._shards, pool.block_bytes):
            block = pool.acquire_nowait(pool.budget.next_order())
            if block is None:
                self._release_filled()
                message = f"step {self.step}: the budget has no room to copy the whole state at once"
                raise BusyError(message, step=self.step)
            self._filled.append((plan, block, 0))
            padded = fill_block(block.tensor, plan, captured.table, captured.sources)
            self._filled[-1] = (plan, block, padded)
        captured.release()

    def _release_filled(self) -> None:
        """Give back blocks that no pipeline has taken over."""
        while self._filled:
            assert self._pool is not None
            self._pool.release(self._filled.pop()[1])

    def _lay_out(self, table: TensorTable) -> list[ShardPlan]:
        shards = plan_shards(table, self._layout, rank=self._rank)
        taken = {shard.name for shard in shards} | {part_name(rank) for rank in range(self._world)}
        clash = sorted(taken & self._files.keys())
        if clash:
            raise UsageError(
                f"files= may not use the name {clash[0]!r}: the checkpoint needs it", step=self.step
            )
        return shards

    async def stage(self) -> None:
        """Begin to write, and return once an independent copy of every leaf exists.

        Cancelled before that, the save is over: it returns when no thread touches the
        state or the disk any more, and nothing of the save is left.

        Raises:
            CheckpointError: the save failed; nothing of it is left.
        """
        captured = self._planned()
        if self._task is None:
            if self._pool is None:
                needed = self._describe_plan(captured.table).block_bytes
                self._pool = BlockPool(ByteBudget(await offload(default_budget, needed, lane=Lane.CONTROL)))
            self._attempt = await self._guard(self.store.begin(self.name, self.save_id), "cannot begin")
            filled, self._filled = self._filled, []
            self._pipeline = Pipeline(
                self._attempt,
                captured.table,
                self._shards,
                captured.sources,
                self._pool,
                order=self._order,
                progress=self.progress,
                staged=self._note_staged,
                filled=filled,
            )
            self._task = asyncio.get_running_loop().create_task(self._pipeline.run())
            # Its end, good or bad, must wake whoever waits for `staged`.
            self._task.add_done_callback(lambda _: self._reached_staged.set())
        try:
            await self._reached_staged.wait()
        except asyncio.CancelledError:
            await self.abort()
            raise
        if self._task.done() and (self._task.cancelled() or self._task.exception() is not None):
            await self._joined()

    def _note_staged(self) -> None:
        captured = self._planned()
        captured.check_unchanged(self.step)
        captured.release()
        if self.on_staged is not None:
            self.on_staged()
        self._reached_staged.set()

    async def write(self) -> PartRecord:
        """Return once all bytes are in the store and flushed to stable storage.

        Returns:
            What whoever commits needs to know of this rank.

        Raises:
            CheckpointError: the save failed; nothing of it is left.
        """
        await self.stage()
        shards = await self._joined()
        record = await self._guard(self._put_part(shards), "cannot write")
        return record

    async def _joined(self) -> list[ShardRecord]:
        assert self._task is not None
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            cancelled = self._task.cancelled()
            await self.abort()
            if cancelled:
                raise SaveError(f"step {self.step}: the save was aborted", step=self.step) from None
            raise
        except Exception as error:
            await self.abort()
            raise translate(error, "writing", step=self.step, save_id=self.save_id) from error

    async def _put_part(self, shards: list[ShardRecord]) -> PartRecord:
        captured, attempt = self._planned(), self._begun()
        part = await offload(self._encode_part, captured, shards, lane=Lane.CONTROL)
        records = [FileRecord(s.name, "shard", s.size, s.digest()) for s in shards]
        for name, content in self._files.items():
            data = await offload(content_of, content, lane=Lane.BULK)
            records.append(await put_file(attempt, name, data, "user"))
        return PartRecord(
            rank=self._rank,
            world=self._world,
            save_id=self.save_id,
            part=await put_file(attempt, part_name(self._rank), part, "part"),
            files=records,
            items=count_items(captured.table),
        )

    def _encode_part(self, captured: Captured, shards: list[ShardRecord]) -> bytes:
        rank, world = self._rank, self._world
        part = build_part(captured.table, captured.flat, shards, rank=rank, world=world, save_id=self.save_id)
        return encode_part(part)

    async def finish(self, parts: Sequence[PartRecord]) -> Checkpoint:
        """Commit: from its return on a crash cannot lose the checkpoint.

        Args:
            parts: the record of every rank's `write`, in any order. May be called by a
                writer of another process, made with the same run, step, name and
                save id; that one needs no plan.

        Raises:
            StepExistsError: another save has taken the name.
            CheckpointError: the save failed.
            In both cases nothing of this save is visible, and what it wrote is removed.
        """
        if self._attempt is None:
            self._attempt = await self._guard(self.store.attach(self.name, self.save_id), "cannot attach")
        manifest = build_manifest(
            parts,
            step=self.step,
            save_id=self.save_id,
            run_id=self.run_id,
            metrics=self._extra["metrics"],
            meta=self._extra["meta"],
        )
        # Not to be torn by a cancellation: half a commit is the one thing nobody could explain.
        await settle(self._guard(commit(self._attempt, manifest), "cannot commit"))
        self._ended = True
        return describe(manifest, self.store.url, self.name, self.generation)

    async def abort(self) -> None:
        """End the save and remove what it wrote; returns when no thread touches it any more.

        After the commit it does nothing. Any number of times.
        """
        if self._ended:
            return
        self._ended = True
        await settle(self._abort())

    async def _abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # reported by whoever waited for it
        self._release_filled()
        if self._captured is not None:
            self._captured.release()
        if self._attempt is not None:
            # The reason of the failure matters more; a sweep takes the rest away.
            with contextlib.suppress(OSError):
                await self._attempt.abort()

    def open_files(self) -> list[str]:
        """Names of data files that are being written."""
        return self._pipeline.open_files() if self._pipeline is not None else []

    async def _guard(self, call: Awaitable[T], doing: str) -> T:
        try:
            return await call
        except asyncio.CancelledError:
            await self.abort()
            raise
        except Exception as error:
            await self.abort()
            ours = translate(error, doing, step=self.step, save_id=self.save_id)
            if ours is error:
                raise
            raise ours from error

    def _planned(self) -> Captured:
        if self._captured is None:
            raise UsageError("plan first: await writer.plan_state(state)", step=self.step)
        return self._captured

    def _begun(self) -> Attempt:
        if self._attempt is None:
            raise UsageError("stage first: await writer.stage()", step=self.step)
        return self._attempt
