"""Saver: writes one run. Admission, order, overlap, errors, drain."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Self, Unpack

from . import _threads
from ._beside import Beside
from ._calls import Staging
from ._driven import DrivenWriter
from ._due import Due
from ._housekeeping import Housekeeping
from ._leaving import Leaving
from ._ledger import Ledger
from ._memory import ByteBudget
from ._names import STEP_FORMAT, StepNames
from ._on_error import OnError
from ._pinned import pinned, pinned_if_any
from ._place import Places, as_json, as_step, open_run
from ._preemption import Preemption
from ._ranks import Decision, Decisions, Kind, SoloCoordinator
from ._records import UserFile
from ._request import SaveOptions
from ._reserve import Reserve
from ._retention import Retention
from ._saving import Saving
from .catalog import Catalog, LoadOptions
from .checkpoint import Checkpoint
from .errors import CheckpointError, RunLockedError, StorageError
from .layouts import Layout
from .pending import PendingSave
from .policies import Keep, KeepFunction, When, as_keep
from .policies.keep import KeepAll
from .progress import SaveBars
from .publish import Publisher, PublishFunction
from .storage import Store, open_store

__all__ = ["Saver"]


class Saver(Leaving):
    """Writes the checkpoints of one run.

    An async context manager; it must be entered. Leaving it drains what is pending and
    raises errors nobody was told of. It belongs to the loop and thread that entered it.

    Args:
        run: the run's folder or URL, or a store.
        on_overlap: what a save does when `max_pending` are under way: `wait` for
            admission, or raise `BusyError`. A save is never skipped.
        max_pending: saves under way at the same time.
        budget: bytes of host memory for staging, or a `ByteBudget` shared with others.
            By default the state's size, at most 40 % of what the machine leaves.
        layout: which tensor goes into which file; by default one set of files an item.
        on_failure: whether a failure nobody awaited is raised by the next save (`raise`)
            or only logged (`log`). Leaving the saver raises it in both cases.
        drain_timeout: seconds that leaving may take; None waits for ever.
        step_format: names of the steps' folders; fixed for a run when it begins.
        allow_pickle: store what has no codec as a pickle (and load it).
        meta: JSON values kept in `run.json` when this saver begins the run.
        keep: which steps stay after a commit (`aiockpt.policies.keep`); by default all.
        keep_grace: seconds after a commit during which the step before it stays as well.
        when: when a save is due (`aiockpt.policies.when`), for `due` and `stage_if_due`.
        save_last: save at the end what `stage_if_due` last saw, if it is not committed.
        clock: monotonic seconds, for tests.
        listeners: told what happens to saves; see `aiockpt.listeners`.
        progress: draw a bar for each save on a terminal, with rich or tqdm; on rank 0 only.
        publish: told of each commit after it happened (`aiockpt.publish`): publishers, or
            functions of a checkpoint.
        run_files: files of the whole run, by name: written to `RUN/files` in the background
            once, named with their digests in `run.json`; content or paths to copy.
        save_on_error: called with the exception when the body of `async with` raised (or was
            cancelled), before the drain; sync or async. It may save. Its own error becomes a note.
        preemption: a notice (`aiockpt.preemption`) that sets `stop_requested`.

    Raises:
        UsageError: an option is wrong. Nothing was written.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Store,
        *,
        on_overlap: Literal["wait", "error"] = "wait",
        max_pending: int = 1,
        budget: int | ByteBudget | None = None,
        layout: Layout | None = None,
        on_failure: Literal["raise", "log"] = "raise",
        drain_timeout: float | None = 600.0,
        step_format: str = STEP_FORMAT,
        allow_pickle: bool = False,
        meta: Mapping[str, Any] | None = None,
        keep: Keep | KeepFunction | None = None,
        keep_grace: float = 30.0,
        when: When | None = None,
        save_last: bool = True,
        clock: Callable[[], float] = time.monotonic,
        listeners: Sequence[object] = (),
        progress: bool = False,
        publish: Sequence[Publisher | PublishFunction] = (),
        run_files: Mapping[str, UserFile] | None = None,
        save_on_error: OnError | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.store = open_store(run)
        self.run_id = ""
        """The run's id, once the saver is entered."""
        self._owned = self.store is not run
        self._layout = layout
        self._drain_timeout = drain_timeout
        self._meta = as_json(meta or {}, "meta")
        self._save_on_error = save_on_error
        self._names = StepNames(step_format)
        self._catalog = Catalog(self.store, allow_pickle=allow_pickle, step_format=step_format)
        self._places = Places(self.store, self._names, self._catalog)
        reserve = Reserve(ByteBudget(budget) if isinstance(budget, int) else budget)
        retention = Retention(
            self.store,
            self._catalog.checkpoints,
            partial(pinned, self.store),
            pinned_if_any=partial(pinned_if_any, self.store),
            grace=keep_grace,
            clock=clock,
            fence=_fence(self._places.lock.check),
        )
        self._housekeeping = Housekeeping(retention, as_keep(keep or KeepAll()))
        self._beside = Beside(
            self.store,
            Ledger(max_pending),
            self._places,
            listeners=(*listeners, SaveBars()) if progress else listeners,
            publish=publish,
            run_files=run_files,
            preemption=preemption,
        )
        self._decisions = Decisions(SoloCoordinator())
        coordinator = self._decisions.coordinator
        saving = Saving(self.store, self._places, reserve, self._housekeeping, self._beside, coordinator)
        # Weakly: saves under way must not keep a saver that was dropped without being closed.
        saving.after_commit.append(_weakly(self._note_commit))
        self._due = Due(when, clock)
        self._keep_last = save_last and when is not None
        super().__init__(saving, on_overlap=on_overlap, on_failure=on_failure, allow_pickle=allow_pickle)

    # Entering; leaving is in `Leaving`

    async def __aenter__(self) -> Self:
        self._owner.enter()
        try:
            await self.store.prepare()
            await self._places.lock.acquire()
            await self._beside.run_files.read()
            self.run_id = await open_run(self.store, self._names, self._meta, self._beside.run_files)
            await self._places.refresh()
            await self.store.sweep(unless=self._places.is_wanted)
            await self._saving.reserve.open()
        except BaseException as error:
            self._owner.closed = True
            await _threads.settle(self._places.lock.release())
            if not isinstance(error, OSError) or isinstance(error, CheckpointError):
                raise
            where = str(error.filename or self.store.url)
            raise StorageError.wrap(error, "cannot open the run in", file=where) from error
        self._beside.enter(self, self._catalog.latest)
        return self

    # Saving

    def save(
        self, state: Any, *, step: int, **options: Unpack[SaveOptions]
    ) -> Coroutine[Any, Any, Checkpoint]:
        """Save; the await returns when a crash cannot lose it.

        Captured at the call: state dicts, containers, plain values, module buffers,
        small tensors. Large tensors are read until `staged`; the caller is waiting until
        then, and optimizers are stopped.

        Args:
            state: nested containers of tensors, plain values and objects with `state_dict()`.
            step: completed steps; above every step of the run.
            **options: see `SaveOptions`: metrics, meta, files, overwrite.

        Raises:
            UnsupportedStateError: at the call; lists every path that cannot be stored.
            StepError: at the call for what is no step; awaited for one out of order.
            StepExistsError: the step is committed already.
            BusyError: `on_overlap="error"` and too many saves are pending.
            PreviousSaveError: an earlier save failed unseen; this one goes on in `.pending`.
            StorageError: the store failed. Nothing of the save is visible or left.
        """
        request = self._request(state, step, options)
        return self._call("save", request, partial(self._save, request))

    def stage(
        self, state: Any, *, step: int, **options: Unpack[SaveOptions]
    ) -> Coroutine[Any, Any, PendingSave]:
        """Save; the await returns when the state may change. The rest goes on by itself.

        Arguments and errors as `save`; errors after `staged` are the handle's.

        Returns:
            The handle: await it, or one of its phases, to know what became of the save.
        """
        request = self._request(state, step, options)
        return self._call("stage", request, partial(self._stage, request))

    def staging(self, state: Any, *, step: int, **options: Unpack[SaveOptions]) -> Staging:
        """Save while the body runs: `async with saver.staging(state, step=n) as pending: ...`.

        The body may read the state (forward and backward) and must not change it;
        optimizers that would are stopped. Leaving waits for `staged`. If the body raises
        before that, the save is cancelled.
        """
        return self._staging(self._request(state, step, options))

    def save_nowait(self, state: Any, *, step: int, **options: Unpack[SaveOptions]) -> PendingSave:
        """Copy the whole state now, on this thread, and return the handle.

        Blocks the loop as long as the copy takes; for callers that cannot await. The
        state may change once it returns.

        Raises:
            BusyError: too many saves are pending, or the budget does not hold the state.
        """
        self._owner.check()
        number = as_step(step)
        self._saving.ledger.refuse_if_busy(f"step {number}", step=number)
        return self._copy_now(self._request(state, step, options))

    async def restore(
        self,
        into: Any = None,
        *,
        step: int | None = None,
        rewind: bool = False,
        **options: Unpack[LoadOptions],
    ) -> Checkpoint | None:
        """Load the newest valid checkpoint, or the one of `step`.

        Args:
            into: what to fill, as for `Catalog.load`; without it `.values` is the state.
            step: this one and no other.
            rewind: retire later steps, leased and promoted ones too, so that the run can go on from here.
            **options: as for `Catalog.load`.

        Returns:
            The checkpoint with `.values`, `.report` and `.skipped`, or None for an empty run.

        Raises:
            CorruptCheckpointError: there are steps and none is valid, or `step` is damaged.
            StateMismatchError: it does not fit `into`; nothing was touched.
        """
        self._owner.check()
        await self._saving.idle()
        async with self._housekeeping.paused():  # what it goes back to must stay until that is known
            return await self._restore(into, step, rewind, options)

    async def _restore(
        self, into: Any, step: int | None, rewind: bool, options: LoadOptions
    ) -> Checkpoint | None:
        checkpoint = await self._catalog.restore(into, step=step, **options)
        found = None if checkpoint is None else checkpoint.step
        await self._decisions.agree(Decision(Kind.RESTORE, step, found))
        if checkpoint is None:
            return None
        if rewind:
            await self._beside.idle()  # no publisher is at work on what goes
            await self._places.rewind(checkpoint)
            self._beside.rewound(checkpoint)
        await self._places.pass_over(checkpoint)
        self._housekeeping.retention.passed_over = self._places.passed_over
        self._housekeeping.retention.resumed_from = checkpoint.name
        self._restored(checkpoint.step)
        return checkpoint

    def _note_commit(self, pending: PendingSave, checkpoint: Checkpoint) -> None:
        self._measure(pending)
        self._housekeeping.run_id = self.run_id
        self._housekeeping.committed(checkpoint.name)

    def mutating(self) -> AbstractContextManager[None]:
        """`with saver.mutating():` around whatever changes the state in another thread.

        The thread waits until no save reads the state; a save waits for the thread. On
        the loop's own thread there is nothing to wait for: it raises `UsageError` while
        a save still reads.
        """
        return self._exclusion.mutating(self._owner.thread)

    def _writer(self, pending: PendingSave, options: SaveOptions) -> DrivenWriter:
        return DrivenWriter(
            self.store,
            step=pending.step,
            save_id=pending.save_id,
            run_id=self.run_id,
            name=self._names.folder(pending.step),
            metrics=options.get("metrics"),
            meta=options.get("meta"),
            files=options.get("files"),
            markers=self._beside.publishing.markers,
            layout=self._layout,
            progress=pending.progress,
        )


def _fence(check: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], Coroutine[Any, Any, None]]:
    """The same, without keeping the lock of a saver that was dropped."""
    found = weakref.WeakMethod(check)

    async def fence() -> None:
        bound = found()
        if bound is None:
            raise RunLockedError("the saver was dropped, and the run with it")
        await bound()

    return fence


def _weakly(method: Callable[[PendingSave, Checkpoint], None]) -> Callable[[PendingSave, Checkpoint], None]:
    found = weakref.WeakMethod(method)

    def call(pending: PendingSave, checkpoint: Checkpoint) -> None:
        if (bound := found()) is not None:
            bound(pending, checkpoint)

    return call
