"""The end of a saver: drain, close, abort, and what happens when its body raised."""

from __future__ import annotations

import asyncio
import warnings
from types import TracebackType

from . import _threads
from ._facts import Facts
from ._ledger import add_notes
from ._on_error import OnError, run_on_error
from ._place import Places
from ._rhythm import Rhythm
from .errors import CheckpointError, DrainTimeoutError
from .storage import Store


class Leaving(Rhythm, Facts):
    """The half of a saver that ends it."""

    store: Store
    _owned: bool
    """Whether the store was opened here, and so is closed here."""
    _places: Places
    _drain_timeout: float | None
    _keep_last: bool
    _save_on_error: OnError | None

    async def __aexit__(
        self, kind: type[BaseException] | None, body: BaseException | None, _: TracebackType | None
    ) -> None:
        if body is None:
            try:
                if self._keep_last:
                    await self._save_last()
            finally:
                await self.aclose()
            return
        # The body's exception goes through unchanged; what the saves have to say becomes notes.
        for request in list(self._saving.ledger.active):
            if request.needs_state:
                request.cancel()
        try:
            if self._save_on_error is not None and self._owner.open:
                await _threads.settle(run_on_error(self._save_on_error, body, self._drain_timeout))
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
                await self._beside.idle()
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
            await self._places.lock.release()
        if self._owned:
            await self.store.aclose()

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
            steps = ", ".join(str(r.step) for r in self._saving.ledger.active) or "none"
            warnings.warn(
                f"a saver of {self.store.url} was never closed (pending steps: {steps}); "
                "use `async with`, or await saver.aclose()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
