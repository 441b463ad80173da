"""Saver: writes one run. Admission, order, overlap, errors, drain."""

from __future__ import annotations

import asyncio
import os
import warnings
import weakref
from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from . import _threads
from ._calls import SaveCall, Staging
from ._capture import Captured, capture
from ._door import translate
from ._exclusion import Exclusion
from ._memory import ByteBudget
from ._names import STEP_FORMAT, StepNames, new_save_id
from ._owner import Owner
from ._place import Places, as_step, open_run
from ._request import Request, SaveOptions
from ._saving import Saving
from .catalog import Catalog, LoadOptions
from .checkpoint import Checkpoint
from .errors import BusyError, CheckpointError, UsageError
from .layouts import Layout
from .pending import PendingSave, Phase
from .storage import Store, open_store
from .writer import CheckpointWriter

__all__ = ["Saver"]


class Saver:
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
    ) -> None:
        if on_overlap not in ("wait", "error"):
            raise UsageError(f"on_overlap is 'wait' or 'error', not {on_overlap!r}")
        if on_failure not in ("raise", "log"):
            raise UsageError(f"on_failure is 'raise' or 'log', not {on_failure!r}")
        if max_pending < 1:
            raise UsageError(f"max_pending must be at least 1, not {max_pending}")
        self.store = open_store(run)
        self.run_id = ""
        """The run's id, once the saver is entered."""
        self._on_overlap = on_overlap
        self._on_failure = on_failure
        self._layout = layout
        self._drain_timeout = drain_timeout
        self._allow_pickle = allow_pickle
        self._meta = dict(meta or {})
        self._names = StepNames(step_format)
        self._catalog = Catalog(self.store, allow_pickle=allow_pickle, step_format=step_format)
        self._places = Places(self.store, self._names, self._catalog)
        shared = ByteBudget(budget) if isinstance(budget, int) else budget
        self._saving = Saving(self.store, self._places, max_pending, shared)
        self._exclusion = Exclusion()
        self._calls: weakref.WeakSet[SaveCall[Any]] = weakref.WeakSet()
        self._owner = Owner()

    # Entering and leaving

    async def __aenter__(self) -> Self:
        self._owner.enter()
        try:
            await self.store.prepare()
            self.run_id = await open_run(self.store, self._names, self._meta)
            await self.store.sweep()
            await self._places.refresh()
            await self._saving.open()
        except BaseException as error:
            self._owner.closed = True
            if not isinstance(error, OSError) or isinstance(error, CheckpointError):
                raise
            raise translate(error, "cannot open the run in", step=None) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, body: BaseException | None, _: TracebackType | None
    ) -> None:
        if body is None:
            await self.aclose()
            return
        # The body's exception goes through unchanged; what the saves have to say becomes notes.
        for request in list(self._saving.ledger.active):
            if request.pending.phase < Phase.STAGED:
                request.cancel()
        try:
            await self.aclose()
        except CheckpointError as error:
            body.add_note(f"While the saver was closed: {type(error).__name__}: {error}")

    async def drain(self, *, timeout: float | None = None) -> None:
        """Wait until nothing is pending, then raise what nobody was told of.

        Cancelled, or timed out, only the wait ends.

        Args:
            timeout: seconds, or None for ever.

        Raises:
            CheckpointError: a save failed and nobody had awaited it; several: `SaveErrors`.
            TimeoutError: the time is over; the saves go on.
        """
        self._owner.check(closed_too=True)
        async with asyncio.timeout(timeout):
            await self._saving.idle()
        self._saving.ledger.raise_unreported()

    async def aclose(self) -> None:
        """Drain and close; any number of times.

        Under cancellation it still drains, for at most `drain_timeout` seconds.

        Raises:
            CheckpointError: as `drain`.
            DrainTimeoutError: a save did not end in time. A thread of it may still run;
                its memory and descriptor are leaked on purpose.
            UsageError: a `save` or `stage` was never awaited.
        """
        if self._owner.loop is None or (self._owner.closed and not self._saving.ledger.active):
            self._owner.closed = True
            return
        self._owner.check(closed_too=True)
        self._owner.closed = True
        for call in list(self._calls):
            call.abandon()
        await _threads.settle(self._saving.drain(self._drain_timeout))
        self._saving.ledger.raise_unreported()

    async def abort(self) -> None:
        """Cancel whatever is not committing yet, and close; cancelled saves raise no error here."""
        for request in list(self._saving.ledger.active):
            if request.cancel():
                request.pending._reported = True
        await self.aclose()

    def __del__(self) -> None:
        owner = getattr(self, "_owner", None)
        if owner is not None and owner.open:
            steps = ", ".join(str(r.step) for r in self._saving.ledger.active) or "none"
            warnings.warn(
                f"a saver of {self.store.url} was never closed (pending steps: {steps}); "
                "use `async with`, or await saver.aclose()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

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
        return self._call("save", request, lambda: self._save(request))

    def stage(
        self, state: Any, *, step: int, **options: Unpack[SaveOptions]
    ) -> Coroutine[Any, Any, PendingSave]:
        """Save; the await returns when the state may change. The rest goes on by itself.

        Arguments and errors as `save`; errors after `staged` are the handle's.

        Returns:
            The handle: await it, or one of its phases, to know what became of the save.
        """
        request = self._request(state, step, options)
        return self._call("stage", request, lambda: self._stage(request))

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
        self._saving.ledger.refuse_if_busy(as_step(step))
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
            rewind: retire later steps, so that the run can go on from here.
            **options: as for `Catalog.load`.

        Returns:
            The checkpoint with `.values`, `.report` and `.skipped`, or None for an empty run.

        Raises:
            CorruptCheckpointError: there are steps and none is valid, or `step` is damaged.
            StateMismatchError: it does not fit `into`; nothing was touched.
        """
        self._owner.check()
        await self._saving.idle()
        checkpoint = await self._catalog.restore(into, step=step, **options)
        if checkpoint is not None and rewind:
            await self._places.rewind(checkpoint)
        return checkpoint

    def mutating(self) -> AbstractContextManager[None]:
        """`with saver.mutating():` around whatever changes the state in another thread.

        The thread waits until no save reads the state; a save waits for the thread. On
        the loop's own thread there is nothing to wait for: it raises `UsageError` while
        a save still reads.
        """
        return self._exclusion.mutating(self._owner.thread)

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """The saves under way, oldest first."""
        return tuple(request.pending for request in self._saving.ledger.active)

    @property
    def failures(self) -> tuple[CheckpointError, ...]:
        """The errors of past saves, the last hundred."""
        return tuple(self._saving.ledger.failures)

    # Behind the verbs

    def _request(self, state: Any, step: int, options: SaveOptions) -> Request:
        loop = self._owner.check()
        number = as_step(step)
        pending = PendingSave(number, new_save_id(), loop)
        writer = CheckpointWriter(
            self.store,
            step=number,
            save_id=pending.save_id,
            run_id=self.run_id,
            name=self._names.folder(number),
            metrics=options.get("metrics"),
            meta=options.get("meta"),
            files=options.get("files"),
            layout=self._layout,
            progress=pending.progress,
        )
        request = Request(
            pending, writer, options.get("overwrite", False), partial(self._capture, state, number)
        )
        if self._exclusion.try_read():
            request.capture()
        return request

    def _capture(self, state: Any, step: int) -> Captured:
        """Capture with the right to read, which ends when the state is let go."""
        try:
            captured = capture(state, step=step, allow_pickle=self._allow_pickle)
        except BaseException:
            self._exclusion.end_read()
            raise
        captured.on_release = self._exclusion.end_read
        return captured

    def _call(self, name: str, request: Request, begin: Any) -> SaveCall[Any]:
        def drop(closed: bool) -> None:
            request.drop()
            if not closed:
                self._saving.ledger.never_awaited.append(request.step)

        call: SaveCall[Any] = SaveCall(request.step, name, begin, drop)
        self._calls.add(call)
        return call

    def _begin(self, request: Request) -> PendingSave:
        try:
            self._owner.check()
            if self._on_overlap == "error":
                self._saving.ledger.refuse_if_busy(request.step)
        except BaseException:
            request.drop()
            raise
        return self._saving.begin(request)

    async def _stage(self, request: Request) -> PendingSave:
        await self._start(request)
        return await self._staged(request)

    async def _start(self, request: Request) -> PendingSave:
        if request.held is None:  # a thread was inside `mutating()` at the call
            await self._exclusion.read()
            request.capture()
        return self._begin(request)

    def _staging(self, request: Request) -> Staging:
        call = self._call("staging", request, lambda: self._stage(request))
        return Staging(call, partial(self._start, request), partial(self._leave, request))

    def _copy_now(self, request: Request) -> PendingSave:
        try:
            if request.held is None:
                raise BusyError(
                    f"step {request.step}: a thread is inside saver.mutating()", step=request.step
                )
            request.writer.fill_now(request.captured, self._saving.pool_for)
        except BaseException:
            request.drop()
            raise
        return self._begin(request)

    async def _staged(self, request: Request) -> PendingSave:
        await self._saving.own(request)
        if self._on_failure == "raise":
            previous = self._saving.ledger.previous_error(request.pending)
            if previous is not None:
                raise previous
        return request.pending

    async def _save(self, request: Request) -> Checkpoint:
        pending = await self._stage(request)
        return await pending.committed()

    async def _leave(self, request: Request, *, failed: bool) -> None:
        """The end of a `staging` body."""
        if failed:
            await self._saving.withdraw(request)
        else:
            await self._staged(request)
