"""The lifecycle of one save, one coroutine a phase: plan, stage, write, finish.

`Saver` drives this; so can anybody who schedules the phases himself. `finish` needs only
the records of the parts, and may run in another process than the one that wrote them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch

from ._capture import Captured, capture
from ._commit import commit
from ._content import Content, SavePlan
from ._door import is_stuck, translate
from ._items import ChunkSpec, TensorItem, TensorSpec, captured_items
from ._manifest import PartRecord, ShardRecord
from ._memory import BlockPool
from ._names import StepNames, new_save_id
from ._pipeline import Job, Pipeline, Progress, release_all
from ._records import UserFile, describe
from ._reserve import Reserve
from ._threads import Lane, offload, settle
from .checkpoint import Checkpoint
from .errors import SaveError, UsageError
from .layouts import Layout
from .layouts.per_item import PerItem
from .storage import Attempt, Store, open_store

__all__ = ["CheckpointWriter", "ChunkSpec", "SavePlan", "TensorItem", "TensorSpec"]


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
        markers: names of empty files that a publisher may put beside them after the commit.
        layout: which tensor goes into which file.
        pool: host memory shared with other saves.
        rank: this process's number; rank 0 must have staged before others do, unless they
            are given an `attempt`.
        world: how many ranks write a part.
        allow_pickle: store what has no codec as a pickle.
        generation: how often the step had been written before.
        progress: counts bytes for somebody else too.
        attempt: begun or attached already, of the same name and save id; ours from now on.

    Raises:
        UsageError: an argument is wrong. Nothing was written.
    """

    _record: PartRecord | None = None
    """What `write` gave."""

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
        markers: Sequence[str] = (),
        layout: Layout | None = None,
        pool: BlockPool | None = None,
        rank: int = 0,
        world: int = 1,
        allow_pickle: bool = False,
        generation: int = 0,
        progress: Progress | None = None,
        attempt: Attempt | None = None,
    ) -> None:
        self.store = open_store(run)
        self.step = step
        self.save_id = save_id or new_save_id()
        self.run_id = run_id
        self.name = name or StepNames().folder(step, generation)
        self.generation = generation
        self.progress = progress or Progress()
        self.on_staged: Callable[[], None] | None = None
        self.checkpoint: Checkpoint | None = None
        """What `finish` returned: it is committed."""
        extra = {"metrics": metrics, "meta": meta, "files": files, "markers": markers}
        self._content = Content(step, self.save_id, rank, world, layout or PerItem(), **extra)
        self._pool, self._order = pool, 0
        self._reserve = Reserve(None)  # for those who bring no pool
        self._allow_pickle = allow_pickle
        self._filled: list[Job] | None = None
        self._pipeline: Pipeline | None = None
        self._attempt = attempt
        self._task: asyncio.Task[list[ShardRecord]] | None = None
        self._reached_staged = asyncio.Event()
        self._beginning = False
        self._ended = False
        self._ending, self._writing = asyncio.Lock(), asyncio.Lock()
        self._removed = asyncio.Event()
        self._stuck = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.abort()

    async def plan_state(self, state: Any) -> SavePlan:
        """Plan the save of a state; captures it at once.

        Raises:
            UnsupportedStateError: listing every path that cannot be stored.
        """
        self._refuse_second_plan()
        return await self.plan_captured(capture(state, step=self.step, allow_pickle=self._allow_pickle))

    async def plan(
        self, items: Sequence[TensorItem], resolve: Callable[[Any], torch.Tensor], *, values: Any = None
    ) -> SavePlan:
        """Plan the save of tensors that need not exist yet.

        Args:
            items: path, dtype and shape of each tensor.
            resolve: gives an item's tensor; called in a thread when its turn to be
                copied has come, and again when it lies in several blocks.
            values: a dict of plain values to store beside them; it may share entries
                with the paths of `items`.

        Raises:
            UnsupportedStateError: a dtype cannot be stored, or two things have one path.
            UsageError: `values` is no dict.
        """
        self._refuse_second_plan()
        captured = captured_items(items, resolve, values, step=self.step, allow_pickle=self._allow_pickle)
        return await self.plan_captured(captured)

    async def plan_captured(self, captured: Captured) -> SavePlan:
        """Plan the save of a captured state (what `plan_state` does after its capture)."""
        if self._content.captured is not captured:
            self._refuse_second_plan()
            self._content.captured = captured
            await self._guard(offload(self._content.lay_out, captured, lane=Lane.CONTROL), "cannot plan")
        return self._planned()

    def _refuse_second_plan(self) -> None:
        if self._ended or self._content.captured is not None:
            raise UsageError("this writer has a plan already; make a writer for each save", step=self.step)

    def _planned(self) -> SavePlan:
        plan = self._content.plan()
        self.progress.total = plan.nbytes
        return plan

    async def stage(self) -> None:
        """Begin to write, and return once an independent copy of every leaf exists.

        Cancelled before that, the save is over: it returns when no thread touches the
        state or the disk any more, and nothing of the save is left.

        Raises:
            CheckpointError: the save failed; nothing of it is left.
        """
        captured = self._captured()
        if self._task is None:
            if self._beginning:
                raise UsageError("another task is beginning to stage this save", step=self.step)
            self._beginning = True
            await self._guard(self._begin(captured), "cannot begin")
        assert self._task is not None
        try:
            await self._reached_staged.wait()
        except asyncio.CancelledError:
            await self.abort()
            raise
        if self._task.done() and (self._task.cancelled() or self._task.exception() is not None):
            await self._joined()

    async def _begin(self, captured: Captured) -> None:
        if self._pool is None:
            self._pool = await self._reserve.pool(self._content.plan())
        if self._attempt is None:
            join = self.store.attach if self._content.rank else self.store.begin
            self._attempt = await join(self.name, self.save_id)
        filled, self._filled = self._filled, None
        self._pipeline = Pipeline(
            self._attempt,
            captured.table,
            self._content.shards,
            captured.sources,
            self._pool,
            order=self._order,
            progress=self.progress,
            staged=self._note_staged,
            filled=filled,
            witness=self._content.witness,
        )
        self._task = asyncio.get_running_loop().create_task(self._pipeline.run())
        # Its end, good or bad, must wake whoever waits for `staged`.
        self._task.add_done_callback(lambda _: self._reached_staged.set())

    def _note_staged(self) -> None:
        captured = self._content.captured
        assert captured is not None
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
        self._reserve.close()
        assert self._attempt is not None
        async with self._writing:  # however many ask, the part is put once
            if self._record is None:
                put = self._content.put(self._attempt, shards)
                self._record = await self._guard(put, "cannot write")
        return self._record

    async def _joined(self) -> list[ShardRecord]:
        assert self._task is not None
        try:
            await asyncio.wait([self._task])  # which, cancelled, leaves the task alone
        except asyncio.CancelledError:
            await self.abort()
            raise
        if self._task.cancelled():
            await self.abort()
            raise SaveError(f"step {self.step}: the save was aborted", step=self.step)
        return await self._guard(self._task, "writing")

    async def finish(self, parts: Sequence[PartRecord]) -> Checkpoint:
        """Commit: from its return on a crash cannot lose the checkpoint.

        Cancelled, it returns only when the commit has succeeded or failed; in the first
        case `checkpoint` is set.

        Args:
            parts: the record of every rank's `write`, in any order. May be called by a
                writer of another process, made with the same run, step, name and
                save id; that one needs no plan.

        Raises:
            StepExistsError: another save has taken the name.
            CommitUnknownError: the store failed, and the step may be visible all the same.
            CheckpointError: the save failed; nothing of it is visible, what it wrote is removed.
        """
        if self.checkpoint is not None:
            return self.checkpoint
        self._refuse_if_ended()
        if self._attempt is None:
            self._attempt = await self._guard(self.store.attach(self.name, self.save_id), "cannot attach")
        # Not to be torn by a cancellation: half a commit is the one thing nobody could explain.
        return await settle(self._guard(self._commit(self._attempt, parts), "cannot commit"))

    async def _commit(self, attempt: Attempt, parts: Sequence[PartRecord]) -> Checkpoint:
        manifest = self._content.manifest(parts, self.run_id)
        checkpoint = describe(manifest, self.store.url, self.name, self.generation)
        async with self._ending:
            await commit(self.store, attempt, manifest)
            self.checkpoint = checkpoint
            self._ended = True
            self._removed.set()
        return checkpoint

    async def abort(self) -> None:
        """End the save and remove what it wrote; returns when no thread touches it any more.

        After the commit it does nothing. Any number of times.
        """
        if self._ended:
            await settle(self._removed.wait())
            return
        self._ended = True
        await settle(self._abort())

    async def _abort(self) -> None:
        try:
            async with self._ending:  # a commit that another task has begun ends first
                if self.checkpoint is None:
                    await self._undo()
        finally:
            self._removed.set()

    async def _undo(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():  # reported by whoever waited for it
                self._stuck = self._stuck or is_stuck(self._task.exception())
        self.forget()
        # A stuck thread may still be in there: it is for a sweep, once this process has ended.
        if self._attempt is not None and not self._stuck:
            # The reason of the failure matters more; a sweep takes the rest away.
            with contextlib.suppress(OSError):
                await self._attempt.abort()

    def forget(self) -> None:
        """Give back blocks and let go of the state; no thread may be at work any more."""
        if self._pool is not None:
            if self._filled is not None:
                release_all(self._filled, self._pool)
            if self._pipeline is not None:
                self._pipeline.drop_queue()
        if self._content.captured is not None:
            self._content.captured.release()
        self._reserve.close()

    async def _guard(self, call: Awaitable[T], doing: str) -> T:
        try:
            return await call
        except asyncio.CancelledError:
            await self.abort()
            raise
        except Exception as error:
            self._stuck = self._stuck or is_stuck(error)
            await self.abort()
            ours = translate(error, doing, step=self.step, save_id=self.save_id)
            if ours is error:
                raise
            raise ours from error

    def _captured(self) -> Captured:
        self._refuse_if_ended()
        if self._content.captured is None:
            raise UsageError("plan first: await writer.plan_state(state)", step=self.step)
        return self._content.captured

    def _refuse_if_ended(self) -> None:
        if self._ended:
            how = "was aborted" if self.checkpoint is None else "is committed"
            message = f"step {self.step} {how}; make a writer for each save"
            raise UsageError(message, step=self.step)
