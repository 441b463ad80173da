"""How anything that saves ends: drain, close, abort."""

from __future__ import annotations

import asyncio
import warnings
from types import TracebackType
from typing import Self

from . import _threads
from ._admission import Admission, E
from ._entry import labels
from ._ledger import add_notes
from .errors import CheckpointError, DrainTimeoutError
from .pending import PendingSave

__all__ = ["Ending"]


class Ending(Admission[E]):
    """The half of a saver that ends it."""

    _drain_timeout: float | None

    # What the kind of saver decides

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    def _name(self) -> str:
        """What it is, for a message."""
        raise NotImplementedError

    async def _let_go(self) -> None:
        """Its saves have ended, or were written off: release what it holds."""

    async def _dispose(self) -> None:
        """The last thing, unless something failed."""

    async def _body_ended(self) -> None:
        """The body of `async with` came to its end."""

    async def _body_raised(self, body: BaseException) -> None:
        """It did not; what is not staged was cancelled, nothing is drained yet."""

    async def _idle_beside(self) -> None:
        """Wait until what goes on beside the saves is done."""

    # Leaving

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """The saves under way, oldest first."""
        return tuple(entry.pending for entry in self._saving.ledger.active)

    @property
    def failures(self) -> tuple[CheckpointError, ...]:
        """The errors of past saves, and of those who were to be told of them, the last hundred."""
        return tuple(self._saving.ledger.failures)

    async def __aexit__(
        self, kind: type[BaseException] | None, body: BaseException | None, _: TracebackType | None
    ) -> None:
        if body is None:
            try:
                await self._body_ended()
            finally:
                await self.aclose()
            return
        # The body's exception goes through unchanged; what the saves have to say becomes notes.
        for entry in list(self._saving.ledger.active):
            if entry.needs_state:
                entry.cancel()
        try:
            await self._body_raised(body)
        finally:  # also when we were cancelled meanwhile
            try:
                await self.aclose()
            except CheckpointError as error:
                add_notes(body, [error])

    async def drain(self, *, timeout: float | None = None) -> None:
        """Wait until nothing is pending and all is published, then raise what nobody was told of.

        Cancelled, or timed out, only the wait ends.

        Args:
            timeout: seconds, or None for ever.

        Raises:
            CheckpointError: a save failed and nobody had awaited it; several: `SaveErrors`.
            DrainTimeoutError: the time is over; the saves go on.
        """
        self._owner.check(closed_too=True)
        try:
            async with asyncio.timeout(timeout) as limit:
                await self._saving.idle()
                await self._idle_beside()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DrainTimeoutError(self._saving.ledger.still_pending(timeout)) from error
        self._saving.ledger.raise_unreported()

    async def aclose(self) -> None:
        """Drain and close; any number of times.

        Under cancellation it still drains, for at most `drain_timeout` seconds. What nobody
        was told of then stands in the notes of the CancelledError.

        Raises:
            CheckpointError: as `drain`.
            DrainTimeoutError: a save did not end in time. A thread of it may still run;
                its memory and descriptor are leaked on purpose.
            UsageError: a `save` or `stage` was never awaited.
        """
        ledger = self._saving.ledger
        if self._owner.loop is None or (self._owner.closed and not ledger.active):
            self._owner.closed = True
            return
        self._owner.check(closed_too=True)
        try:
            await _threads.settle(self._close())
        except asyncio.CancelledError as cancelled:
            add_notes(cancelled, ledger.take_unreported())
            raise
        except DrainTimeoutError as error:
            ledger.raise_unreported(error)
        ledger.raise_unreported()

    async def _close(self) -> None:
        if not self._owner.closed:
            await asyncio.sleep(0)  # tasks that were given a call have not begun it yet
            self._owner.closed = True
            for call in list(self._calls):
                call.abandon()
        try:
            await self._saving.drain(self._drain_timeout)
        finally:
            await self._let_go()
        await self._dispose()

    async def abort(self) -> None:
        """Cancel whatever is not committing yet, and close; cancelled saves raise no error here."""
        if self._owner.loop is not None:
            self._owner.check(closed_too=True)
        for pending in self.pending:
            pending.cancel()
        await self.aclose()

    def __del__(self) -> None:
        owner = getattr(self, "_owner", None)
        if owner is not None and owner.open:
            steps = labels(list(self.pending)).removeprefix("step ") or "none"
            warnings.warn(
                f"a saver of {self._name()} was never closed (pending steps: {steps}); "
                "use `async with`, or await saver.aclose()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
