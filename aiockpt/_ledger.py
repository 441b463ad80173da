"""A saver's books: which saves are under way, which failed, and who was told.

Saves are admitted and committed in the order in which they began. An error counts as
reported once an awaiter got it; one that nobody got is logged at once and raised at the
next opportunity, exactly once.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from ._entry import Entry, labels
from ._log import log
from .errors import (
    BusyError,
    CheckpointError,
    PreviousSaveError,
    SaveCancelledError,
    SaveErrors,
    StepError,
    UsageError,
)
from .pending import PendingSave

KEPT = 100
"""How many past failures are remembered."""


class Ledger:
    """The saves of one saver.

    Args:
        max_pending: how many may be under way at the same time.

    Raises:
        UsageError: it is not at least 1.
    """

    def __init__(self, max_pending: int) -> None:
        if max_pending < 1:
            raise UsageError(f"max_pending must be at least 1, not {max_pending}")
        self.max_pending = max_pending
        self.active: list[Entry] = []
        """Begun and not done, oldest first."""
        self.failures: deque[CheckpointError] = deque(maxlen=KEPT)
        self.never_awaited: list[PendingSave] = []
        """Of calls that can no longer be awaited."""
        self.other_errors: list[CheckpointError] = []
        """Of what went on beside the saves; raised when the saver drains."""
        self._unreported: list[PendingSave] = []
        self._waited_for = ""
        """The save that `free_within` waited for in vain."""

    def refuse_if_busy(self, what: str, **facts: Any) -> None:
        """Raise when one more save would exceed `max_pending`.

        Args:
            what: it would be, for the message.
            **facts: for the error.

        Raises:
            BusyError: naming what is pending.
        """
        if len(self.active) >= self.max_pending:
            shown = labels([entry.pending for entry in self.active])
            raise BusyError(f"{what}: {len(self.active)} save(s) are pending already ({shown})", **facts)

    def begin(self, entry: Entry) -> None:
        """Enter a save, in the order of the calls (tasks may begin them in another one)."""
        bisect.insort(self.active, entry, key=lambda r: r.number)

    async def admit(self, entry: Entry) -> None:
        """Wait until fewer than `max_pending` older saves are under way, none of the same step.

        Raises:
            StepError: one of those still under way is of a later step.
        """
        while (at := self.active.index(entry)) >= self.max_pending:
            await self.active[at - self.max_pending].pending._ended.wait()
        for older in self.active[:at]:
            if older.step > entry.step:
                message = f"step {entry.step} is not above step {older.step}, which is being saved"
                raise StepError(message, step=entry.step)
        for older in [r for r in self.active[:at] if r.step == entry.step]:
            await older.pending._ended.wait()  # whether it commits decides what becomes of this one

    async def free_within(self, seconds: float | None) -> bool:
        """Wait a little for room for one more save; returns whether there is.

        Once for each save under way: whoever asks at every step is not held up at every step.
        None waits as long as it takes.
        """
        oldest = self.active[0].pending.save_id if self.active else ""
        if seconds is not None:
            seconds = 0.0 if oldest == self._waited_for else seconds
            self._waited_for = oldest
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self.active) >= self.max_pending:
                    await self.active[0].pending._ended.wait()
        return len(self.active) < self.max_pending

    async def turn(self, entry: Entry) -> None:
        """Wait until every older save has committed or failed."""
        while (at := self.active.index(entry)) > 0:
            await self.active[at - 1].pending._ended.wait()

    def end(self, entry: Entry, error: CheckpointError | None) -> None:
        """A save is done; with an error, tell its waiters, or log it when there are none."""
        pending = entry.pending
        self.active.remove(entry)
        if error is not None:
            self._fail(pending, error)
        # Last, and with the entry gone: those who wait for it look into `active` again.
        pending._end()

    def _fail(self, pending: PendingSave, error: CheckpointError) -> None:
        if not (pending._reported and isinstance(error, SaveCancelledError)):  # else it was wanted
            self.failures.append(error)
        # Also when somebody waits: that waiter may be cancelled before it is told.
        self._unreported = [p for p in self._unreported if not p._reported] + [pending]
        if not pending._fail(error) and not pending._reported:
            log.error(
                "the save of %s failed: %s", pending._label, error, extra={"step": pending._facts.get("step")}
            )

    def take_unreported(self) -> list[CheckpointError]:
        """Errors nobody has got yet; they count as reported from now on."""
        return [p._error for p in self._take_unreported() if p._error is not None]

    def _take_unreported(self) -> list[PendingSave]:
        taken = [p for p in self._unreported if not p._reported]
        self._unreported.clear()
        for pending in taken:
            pending._reported = True
        return taken

    def still_pending(self, seconds: float | None) -> str:
        """What to say when a drain has lasted `seconds`."""
        shown = labels([entry.pending for entry in self.active])
        return f"the save of {shown} did not end within {seconds:g} s; it goes on"

    def raise_unreported(self, first: CheckpointError | None = None) -> None:
        """Raise what nobody was told of, now that the saver drains.

        Args:
            first: an error of the drain itself.

        Raises:
            CheckpointError: the one error there is, or `SaveErrors` of several.
        """
        errors = [first] if first is not None else []
        errors += self.take_unreported() + self.other_errors
        self.other_errors = []
        if self.never_awaited:
            calls, self.never_awaited = self.never_awaited, []
            message = f"save or stage of {labels(calls)} was called and never awaited: nothing was written"
            errors.append(UsageError(message, **calls[0]._facts))
        if errors:
            raise one_error(errors)

    def previous_error(self, pending: PendingSave) -> PreviousSaveError | None:
        """What the next accepted save has to raise, if an earlier one failed unseen."""
        failed = self._take_unreported()
        errors = [p._error for p in failed if p._error is not None]
        if not errors:
            return None
        message = (
            f"an earlier save failed and nobody had awaited it ({labels(failed)}: {errors[0]}). "
            f"The save of {pending._label} was accepted and goes on: see .pending"
        )
        error = PreviousSaveError(message, step=errors[0].step, pending=pending)
        error.__cause__ = one_error(errors)
        return error


def add_notes(to: BaseException, errors: Sequence[BaseException]) -> None:
    """Tell what happened to saves on an exception that goes first."""
    for error in errors:
        if isinstance(error, SaveErrors):
            add_notes(to, error.exceptions)
        else:
            to.add_note(f"While the saver was closed: {type(error).__name__}: {error}")


def one_error(errors: Sequence[CheckpointError]) -> CheckpointError:
    """The error itself, or a group of several."""
    return errors[0] if len(errors) == 1 else SaveErrors(f"{len(errors)} saves failed", errors)
