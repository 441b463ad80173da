"""Saves that run behind a saver's verbs: begin, own, run, cancel and drain them.

Every save that has begun has one task, kept in the ledger and awaited before the saver
closes. Callers never await that task itself, only the handle: a cancelled caller ends
his wait, and the saver decides what becomes of the save.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import Any, Generic, TypeVar

from . import _threads
from ._door import forget_frames, translate
from ._entry import Entry, labels
from ._ledger import Ledger
from ._log import ABOUT
from .errors import CheckpointError, DrainTimeoutError, SaveCancelledError
from .pending import PendingSave, Phase

__all__ = ["Running"]

UNWIND_TRIES = 5
"""How often, once a second, threads are written off until the saves have unwound."""

E = TypeVar("E", bound=Entry)


class Running(Generic[E]):
    """The saves of one saver, whatever they write.

    Args:
        ledger: the saver's books.
    """

    fate = "It is a checkpoint only if its manifest is there."
    """What is to be said of a save that did not end in time."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    # What the kind of save decides

    async def _carry_out(self, entry: E) -> None:
        """From admission to commit."""
        raise NotImplementedError

    async def _wind_up(self, entry: E) -> None:
        """It has committed."""

    def _about(self, entry: E) -> tuple[str | None, int | None]:
        """Run and step, for log records."""
        raise NotImplementedError

    def _begun(self, entry: E) -> None:
        """It has its task now."""

    def _failed(self, entry: E, error: CheckpointError) -> None:
        """It has ended otherwise."""

    def _translate(self, cause: Exception, entry: E) -> CheckpointError:
        return translate(cause, "saving", step=entry.step, save_id=entry.pending.save_id)

    def _write_off_memory(self) -> None:
        """What stuck threads use must never be granted again."""

    async def _close(self, deadline: float | None, seconds: float | None) -> CheckpointError | None:
        """All saves have ended: finish what goes on beside them, let go of the memory.

        Args:
            deadline: on the monotonic clock.
            seconds: that leaving was given, for messages.

        Returns:
            What to raise if nothing else is.
        """
        return None

    # One save

    def begin(self, entry: E) -> PendingSave:
        """Start the save's own task; from here on the saver owns it."""
        pending = entry.pending
        pending._canceller = entry.cancel
        self.ledger.begin(entry)
        entry.context.run(_threads.OWNER.set, self)
        entry.context.run(ABOUT.set, self._about(entry))
        name = f"aiockpt save of {pending._label}"
        entry.task = pending._loop.create_task(self._run(entry), name=name, context=entry.context)
        entry.task.add_done_callback(partial(self._see_off, entry))
        self._begun(entry)
        return pending

    async def own(self, entry: E) -> None:
        """The caller's wait for `staged`: its cancellation cancels the save.

        It then returns only when no thread touches the state or the disk any more.
        """
        try:
            await entry.pending.staged()
        except asyncio.CancelledError:
            await self.withdraw(entry)
            raise
        except GeneratorExit:  # the caller's coroutine was closed: it cannot wait any more
            entry.pending.cancel()
            raise

    async def withdraw(self, entry: E) -> None:
        """Cancel a save that is not staged yet, and wait until it has ended."""
        if entry.pending.phase < Phase.STAGED and entry.pending.cancel():
            await _threads.settle(entry.pending._ended.wait())

    async def _run(self, entry: E) -> None:
        """One save from admission to its end; its errors are the handle's."""
        error = await self._try(entry)
        # The save is over in any case, and its error says why: a cancellation now tells nothing new.
        with contextlib.suppress(asyncio.CancelledError):
            await _threads.settle(self._wind_up(entry) if error is None else entry.abort())
        entry.drop()
        if error is not None:
            forget_frames(error)  # while they are all ours: nobody has been told yet
        self._end(entry, error)

    def _end(self, entry: E, error: CheckpointError | None) -> None:
        self.ledger.end(entry, error)
        if error is not None:
            self._failed(entry, error)

    async def _try(self, entry: E) -> CheckpointError | None:
        try:
            await self._carry_out(entry)
        except asyncio.CancelledError:
            return None if entry.committed else _cancelled(entry)
        except Exception as cause:
            return self._translate(cause, entry)
        return None

    def _see_off(self, entry: E, task: asyncio.Task[None]) -> None:
        """No save is left without an end: cancelled before its task ran, or Ctrl-C hit the task's code."""
        if entry in self.ledger.active:
            if not task.cancelled():
                task.exception()
            entry.forget()
            entry.drop()
            self._end(entry, _cancelled(entry))

    # All of them

    async def idle(self) -> None:
        """Wait until no save is under way."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)

    def _tasks(self) -> set[asyncio.Task[Any]]:
        return {entry.task for entry in self.ledger.active if entry.task is not None}

    async def drain(self, seconds: float | None) -> None:
        """Wait for all saves, at most so long; then let go of the memory.

        Raises:
            DrainTimeoutError: some did not end, or what goes on beside them did not; their threads
                were written off.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            tasks = self._tasks()
            if tasks:
                _, stuck = await asyncio.wait(tasks, timeout=seconds)
                if stuck:
                    await self._write_off(stuck, seconds or 0.0)
        finally:
            late = await self._close(deadline, seconds)
            _threads.trim()
        if late is not None:
            raise late

    def _abandon(self) -> list[str]:
        self._write_off_memory()  # first
        return _threads.abandon_busy(owner=self)

    async def _write_off(self, stuck: set[asyncio.Task[Any]], seconds: float) -> None:
        late = [entry for entry in self.ledger.active if entry.task in stuck]
        error = self._late(late, seconds, self._abandon())
        for entry in late:
            entry.pending._reported = True
            assert entry.task is not None
            entry.task.cancel()
        for _ in range(UNWIND_TRIES):
            _, stuck = await asyncio.wait(stuck, timeout=1.0)
            if not stuck:
                break
            self._abandon()  # what they do to unwind can get stuck just as well
        raise error

    def _late(self, late: list[Entry], seconds: float, threads: list[str]) -> DrainTimeoutError:
        files = ", ".join(file for entry in late for file in entry.open_files())
        pending = late[0].pending
        message = (
            f"the save of {labels([entry.pending for entry in late])} did not end within {seconds:g} s. "
            f"It got as far as {pending.phase.name.lower()}; files: {files or 'none open'}; threads stuck "
            f"in a call: {', '.join(threads) or 'none'}. {self.fate}"
        )
        facts = {"file": files or None} | pending._facts
        return DrainTimeoutError(message, save_id=pending.save_id, **facts)


def _cancelled(entry: Entry) -> SaveCancelledError:
    pending = entry.pending
    message = f"the save of {pending._label} was cancelled; nothing of it is visible"
    return SaveCancelledError(message, save_id=pending.save_id, **pending._facts)
