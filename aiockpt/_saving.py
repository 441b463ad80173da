"""What a saver does behind its verbs: begin, own, run, cancel and drain saves.

Every save that has begun has one task, kept in the ledger and awaited before the saver
closes. Callers never await that task itself, only the handle: a cancelled caller ends
his wait, and the saver decides what becomes of the save.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from . import _threads
from ._beside import Beside
from ._door import forget_frames, translate
from ._housekeeping import Housekeeping
from ._log import ABOUT, log
from ._place import Places
from ._ranks import Coordinator
from ._request import Request
from ._reserve import Reserve
from .checkpoint import Checkpoint
from .errors import CheckpointError, DrainTimeoutError, SaveCancelledError
from .pending import PendingSave, Phase
from .storage import Store

UNWIND_TRIES = 5
"""How often, once a second, threads are written off until the saves have unwound."""


class Saving:
    """The saves of one saver.

    Args:
        store: of the run.
        places: decides the folders.
        reserve: gives the blocks.
        housekeeping: deletes what retention lets go.
        beside: told of everything.
        coordinator: connects the ranks.
    """

    def __init__(
        self,
        store: Store,
        places: Places,
        reserve: Reserve,
        housekeeping: Housekeeping,
        beside: Beside,
        coordinator: Coordinator,
    ) -> None:
        self.ledger = beside.ledger
        self.reserve = reserve
        self.housekeeping = housekeeping
        self.beside = beside
        self._coordinator = coordinator
        self.after_commit: list[Callable[[PendingSave, Checkpoint], None]] = []
        """Told at once of each commit, on the loop; must neither block nor raise."""
        self._store = store
        self._places = places

    @property
    def newest(self) -> int:
        """The highest committed step, -1 for none."""
        return self._places.newest

    def begin(self, request: Request) -> PendingSave:
        """Start the save's own task; from here on the saver owns it."""
        pending = request.pending
        pending._canceller = request.cancel
        self.ledger.begin(request)
        request.context.run(_threads.OWNER.set, self)
        request.context.run(ABOUT.set, (self._store.url, request.step))
        name = f"aiockpt save of step {request.step}"
        request.task = pending._loop.create_task(self._run(request), name=name, context=request.context)
        request.task.add_done_callback(partial(self._see_off, request))
        self.beside.begun(pending)
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
        except GeneratorExit:  # the caller's coroutine was closed: it cannot wait any more
            request.pending.cancel()
            raise

    async def withdraw(self, request: Request) -> None:
        """Cancel a save that is not staged yet, and wait until it has ended."""
        if request.pending.phase < Phase.STAGED and request.pending.cancel():
            await _threads.settle(request.pending._ended.wait())

    async def _run(self, request: Request) -> None:
        """One save from admission to its end; its errors are the handle's."""
        retire: list[str] = []
        error = await self._try(request, retire)
        # The save is over in any case, and its error says why: a cancellation now tells nothing new.
        with contextlib.suppress(asyncio.CancelledError):
            await _threads.settle(self._retire(retire) if error is None else request.writer.abort())
        request.drop()
        if error is not None:
            forget_frames(error)  # while they are all ours: nobody has been told yet
        self._end(request, error)

    def _end(self, request: Request, error: CheckpointError | None) -> None:
        self.ledger.end(request, error)
        if error is not None:
            self.beside.failed(request.pending, error)

    async def _try(self, request: Request, retire: list[str]) -> CheckpointError | None:
        """From admission to commit; fills `retire` with older folders of the same step."""
        try:
            retire += await self._write(request)
            await self._commit(request)
        except asyncio.CancelledError:
            return _cancelled(request) if request.writer.checkpoint is None else None
        except Exception as cause:
            return translate(cause, "saving", step=request.step, save_id=request.pending.save_id)
        return None

    def _see_off(self, request: Request, task: asyncio.Task[None]) -> None:
        """No save is left without an end: cancelled before its task ran, or Ctrl-C hit the task's code."""
        if request in self.ledger.active:
            if not task.cancelled():
                task.exception()
            request.writer.forget()
            request.drop()
            self._end(request, _cancelled(request))

    async def _write(self, request: Request) -> list[str]:
        """Admission, plan, stage, write; returns older folders of the same step."""
        pending, writer = request.pending, request.writer
        await self.ledger.admit(request)
        writer.name, writer.generation, retire = await self._places.find(
            request.step, overwrite=request.overwrite
        )
        plan = await writer.plan_captured(request.captured)
        await self._check_room(sum(size for _, size in plan.files))
        pool = await self.reserve.pool(plan)
        writer.use(pool, pool.budget.next_order())
        writer.on_staged = partial(self._staged, pending)
        pending._reach(Phase.PLANNED)
        request.record = await writer.write()
        pending._reach(Phase.WRITTEN)
        return retire

    def _staged(self, pending: PendingSave) -> None:
        pending._reach(Phase.STAGED)
        self.beside.staged(pending)

    async def _check_room(self, nbytes: int) -> None:
        """Refuse what cannot fit before anything is written; the reservation of each file has the last word.

        Raises:
            OSError: ENOSPC.
        """
        room = await self._store.room()
        if room is not None and room < nbytes:
            reason = f"{nbytes} bytes are needed and {room} are free"
            raise OSError(errno.ENOSPC, reason, self._store.url)

    async def _commit(self, request: Request) -> None:
        await self.ledger.turn(request)
        await self._places.lock.check()
        request.committing = True
        assert request.record is not None
        writer = request.writer
        try:
            # Of many ranks the first one commits, once it has every other's record.
            await writer.finish(await self._coordinator.gather(request.record))
        finally:
            # Also when it was cancelled: the commit goes on to its end then.
            if writer.checkpoint is not None:
                self._places.newest = max(self._places.newest, request.step)
                request.pending._commit(writer.checkpoint)
                for tell in self.after_commit:
                    tell(request.pending, writer.checkpoint)
                self.beside.committed(request.pending, writer.checkpoint)

    async def _retire(self, names: list[str]) -> None:
        """The step was written anew: take older generations away. Failing that is no failure."""
        for name in names:
            try:
                await self.housekeeping.retention.retire(name)
            except OSError as error:
                log.warning("%s: cannot remove %s, which was written anew: %s", self._store.url, name, error)

    async def idle(self) -> None:
        """Wait until no save is under way."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)

    def _tasks(self) -> set[asyncio.Task[Any]]:
        return {request.task for request in self.ledger.active if request.task is not None}

    async def drain(self, seconds: float | None) -> None:
        """Wait for all saves, at most so long; then let go of the blocks.

        Raises:
            DrainTimeoutError: some did not end, or deleting did not; their threads were written off.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            tasks = self._tasks()
            if tasks:
                _, stuck = await asyncio.wait(tasks, timeout=seconds)
                if stuck:
                    await self._write_off(stuck, seconds or 0.0)
        finally:
            await self.beside.close(deadline)
            late = await self.housekeeping.close(deadline, self._abandon)
            self.reserve.close()
            _threads.trim()
        if late:
            raise DrainTimeoutError(
                f"deleting checkpoints that retention lets go did not end within {seconds or 0.0:g} s; "
                "nothing else is lost, and what is left of them is removed later"
            )

    def _abandon(self) -> list[str]:
        # First: what the stuck threads use must never be granted again.
        self.reserve.write_off()
        return _threads.abandon_busy(owner=self)

    async def _write_off(self, stuck: set[asyncio.Task[Any]], seconds: float) -> None:
        late = [request for request in self.ledger.active if request.task in stuck]
        error = self._late(late, seconds, self._abandon())
        for request in late:
            request.pending._reported = True
            assert request.task is not None
            request.task.cancel()
        for _ in range(UNWIND_TRIES):
            _, stuck = await asyncio.wait(stuck, timeout=1.0)
            if not stuck:
                break
            self._abandon()  # what they do to unwind can get stuck just as well
        raise error

    def _late(self, late: list[Request], seconds: float, threads: list[str]) -> DrainTimeoutError:
        files = ", ".join(file for request in late for file in request.writer.open_files())
        pending = late[0].pending
        message = (
            f"the save of step {', '.join(str(r.step) for r in late)} did not end within {seconds:g} s. "
            f"It got as far as {pending.phase.name.lower()}; files: {files or 'none open'}; threads stuck "
            f"in a call: {', '.join(threads) or 'none'}. It is a checkpoint only if its manifest is there."
        )
        return DrainTimeoutError(message, step=pending.step, file=files or None, save_id=pending.save_id)


def _cancelled(request: Request) -> SaveCancelledError:
    message = f"the save of step {request.step} was cancelled; nothing of it is visible"
    return SaveCancelledError(message, step=request.step, save_id=request.pending.save_id)
