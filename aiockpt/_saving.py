"""What a saver does behind its verbs: begin, own, run, cancel and drain saves.

Every save that has begun has one task, kept in the ledger and awaited before the saver
closes. Callers never await that task itself, only the handle: a cancelled caller ends
his wait, and the saver decides what becomes of the save.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from typing import Any

from . import _threads
from ._cgroup import memory_left
from ._door import translate
from ._ledger import Ledger
from ._memory import BlockPool, ByteBudget, budget_warning, default_budget
from ._place import Places
from ._request import Request
from .errors import CheckpointError, DrainTimeoutError, SaveCancelledError
from .pending import PendingSave, Phase
from .storage import Store

UNWIND_SECONDS = 5.0
"""How long saves that were written off may take to unwind."""


class Saving:
    """The saves of one saver.

    Args:
        store: of the run.
        places: decides the folders.
        max_pending: saves under way at the same time.
        budget: host memory for blocks; None for the default of the first state.
    """

    def __init__(self, store: Store, places: Places, max_pending: int, budget: ByteBudget | None) -> None:
        self.ledger = Ledger(max_pending)
        self._store = store
        self._places = places
        self._budget = budget
        self._pool = BlockPool(budget) if budget is not None else None
        self._memory_left = 0

    async def open(self) -> None:
        """Look at what the default budget depends on."""
        if self._pool is None:
            self._memory_left = await _threads.offload(memory_left, lane=_threads.Lane.CONTROL)

    def pool_for(self, nbytes: int) -> BlockPool:
        """The saver's blocks, made for the first state that comes: `nbytes` would hold all of it."""
        if self._pool is None:
            self._budget = ByteBudget(default_budget(nbytes, left=self._memory_left))
            self._pool = BlockPool(self._budget)
            warning = budget_warning(nbytes, self._budget.total)
            if warning:
                warnings.warn(warning, ResourceWarning, stacklevel=2)
        return self._pool

    def begin(self, request: Request) -> PendingSave:
        """Start the save's own task; from here on the saver owns it."""
        pending = request.pending
        pending._canceller = request.cancel
        self.ledger.active.append(request)
        request.context.run(_threads.OWNER.set, self)
        name = f"aiockpt save of step {request.step}"
        request.task = pending._loop.create_task(self._run(request), name=name, context=request.context)
        return pending

    async def own(self, request: Request) -> None:
        """The caller's wait for `staged`: its cancellation cancels the save.

        It then returns only when no thread touches the state or the disk any more.
        """
        try:
            await request.pending.staged()
        except asyncio.CancelledError:
            await self.withdraw(request)
            raise

    async def withdraw(self, request: Request) -> None:
        """Cancel a save that is not staged yet, and wait until it has ended."""
        if request.pending.phase < Phase.STAGED and request.cancel():
            request.pending._reported = True
            await _threads.settle(request.pending._ended.wait())

    async def _run(self, request: Request) -> None:
        """One save from admission to commit; its errors are the handle's."""
        pending = request.pending
        error: CheckpointError | None = None
        try:
            retire = await self._write(request)
            await self._commit(request)
        except asyncio.CancelledError:
            message = f"the save of step {request.step} was cancelled; nothing of it is left"
            error = SaveCancelledError(message, step=request.step, save_id=pending.save_id)
        except Exception as cause:
            error = translate(cause, "saving", step=request.step, save_id=pending.save_id)
        else:
            await self._retire(retire)
        if error is not None:
            await self._clean_up(request)
        self.ledger.end(request, error)

    async def _write(self, request: Request) -> list[str]:
        """Admission, plan, stage, write; returns older folders of the same step."""
        pending, writer = request.pending, request.writer
        await self.ledger.admit(request)
        writer.name, writer.generation, retire = await self._places.find(
            request.step, overwrite=request.overwrite
        )
        plan = await writer.plan_captured(request.captured)
        pool = self.pool_for(plan.block_bytes)
        writer.use(pool, pool.budget.next_order())
        writer.on_staged = lambda: pending._reach(Phase.STAGED)
        pending._reach(Phase.PLANNED)
        request.record = await writer.write()
        pending._reach(Phase.WRITTEN)
        return retire

    async def _commit(self, request: Request) -> None:
        await self.ledger.turn(request)
        request.committing = True
        assert request.record is not None
        checkpoint = await request.writer.finish([request.record])
        self._places.newest = max(self._places.newest, request.step)
        request.pending._commit(checkpoint)

    async def _clean_up(self, request: Request) -> None:
        # The save is over in any case, and its error says why.
        with contextlib.suppress(asyncio.CancelledError):
            await request.writer.abort()
        request.drop()

    async def _retire(self, names: list[str]) -> None:
        """The step was written anew: take older generations away. Failing that is no failure."""
        for name in names:
            try:
                await self._store.retire(name)
            except OSError as error:
                warnings.warn(f"cannot remove {name}: {error}", RuntimeWarning, stacklevel=1)

    async def idle(self) -> None:
        """Wait until no save is under way."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)

    def _tasks(self) -> set[asyncio.Task[Any]]:
        return {request.task for request in self.ledger.active if request.task is not None}

    async def drain(self, seconds: float | None) -> None:
        """Wait for all saves, at most so long; then let go of the blocks.

        Raises:
            DrainTimeoutError: some did not end; their threads were written off.
        """
        try:
            tasks = self._tasks()
            if tasks:
                _, stuck = await asyncio.wait(tasks, timeout=seconds)
                if stuck:
                    await self._write_off(stuck, seconds or 0.0)
        finally:
            if self._pool is not None:
                self._pool.close()
            _threads.trim()

    def _abandon(self) -> list[str]:
        if self._pool is not None:
            # First: what the stuck threads use must never be granted again.
            self._pool.write_off()
        return _threads.abandon_busy(owner=self)

    async def _write_off(self, stuck: set[asyncio.Task[Any]], seconds: float) -> None:
        late = [request for request in self.ledger.active if request.task in stuck]
        files = ", ".join(file for request in late for file in request.writer.open_files()) or "none open"
        threads = ", ".join(self._abandon()) or "none"
        for request in late:
            request.pending._reported = True
            assert request.task is not None
            request.task.cancel()
        await asyncio.wait(stuck, timeout=UNWIND_SECONDS)
        step, phase = late[0].step, late[0].pending.phase.name.lower()
        message = (
            f"the save of step {', '.join(str(r.step) for r in late)} did not end within {seconds:g} s. "
            f"It got as far as {phase}; files: {files}; threads stuck in a call: {threads}. "
            "It is a checkpoint only if its manifest is there."
        )
        raise DrainTimeoutError(message, step=step, file=files, save_id=late[0].pending.save_id)
