"""What every saver over a bridge has in common: entering, handles, the end, and the interpreter's end."""

from __future__ import annotations

import atexit
import functools
import warnings
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from .. import _threads
from .._ending import Ending
from .._entry import Entry, labels
from .._log import log
from .._owner import Owner
from ..errors import CheckpointError, DrainTimeoutError, PreviousSaveError, UsageError
from ..pending import PendingSave as AsyncPendingSave
from ._bridge import Bridge, Make
from ._door import Door
from ._pending import PendingSave

__all__ = ["AnyThread", "Entered"]

A = TypeVar("A", bound=Ending[Any])
E = TypeVar("E", bound=Entry)


class AnyThread(Owner):
    """The owner of a saver behind a bridge: who may call is the bridge's business."""

    def check(self, *, closed_too: bool = False) -> Any:
        if self.closed and not closed_too:
            raise UsageError("the saver is closed")
        return self.loop


class Entered(Door[A]):
    """A saver over a bridge, from entering to its end."""

    def __enter__(self) -> Self:
        if self._bridge is not None or self._closed:
            raise UsageError(f"a {self.what} is entered once; make another one for another `with`")
        self._warn()
        bridge = self._bridge = Bridge(self.what, limit=self._inner._drain_timeout)
        try:
            bridge.run(self._inner.__aenter__)
        except BaseException:
            self._closed = self._inner._owner.closed = True
            bridge.close()
            raise
        _watch_exit(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, body: BaseException | None, trace: TracebackType | None
    ) -> None:
        if body is not None and self._bridge is not None and self._bridge.foreign:
            return  # a forked child on its way out of the parent's block
        try:
            if body is not None and not self._closed:
                self._run_on_error(body)
        finally:
            self._shut(lambda: self._inner.__aexit__(kind, body, trace))

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """The saves under way, oldest first."""
        bridge = self._bridge
        return () if bridge is None else tuple(map(self._handle, bridge.ask(lambda: self._inner.pending)))

    @property
    def failures(self) -> tuple[CheckpointError, ...]:
        """The errors of past saves, and of publishers, the last hundred."""
        bridge = self._bridge
        return () if bridge is None else bridge.ask(lambda: self._inner.failures)

    def close(self) -> None:
        """Drain and close; any number of times. Leaving the `with` block does it.

        Interrupted (Ctrl-C), it still drains, for at most `drain_timeout` seconds, unless
        interrupted again: then what is under way is cancelled.

        Raises:
            CheckpointError: a save failed and nobody was told; several: `SaveErrors`.
            DrainTimeoutError: a save did not end in time. A thread of it may still run;
                its memory and descriptor are leaked on purpose.
        """
        self._shut(self._inner.aclose)

    def abort(self) -> None:
        """Cancel whatever is not committing yet, and close; cancelled saves raise no error here."""
        self._shut(self._inner.abort)

    def _shut(self, end: Make[None]) -> None:
        bridge = self._bridge
        if bridge is None or self._closed:
            self._closed = True
            return
        bridge.check()
        self._warn()
        _entered.discard(self)
        if bridge.overdue:  # the time that stuck threads are given has been used up
            self._inner._drain_timeout = 0.0
        try:
            bridge.run(end, patient=True, gone=lambda: None)
        finally:
            self._closed = True
            bridge.close()

    def __del__(self) -> None:
        bridge: Bridge | None = getattr(self, "_bridge", None)
        if bridge is None or self._closed:
            return
        # Whoever records the warning keeps its source, that is us: do not warn again at exit.
        self._closed = True
        self._inner._owner.closed = True  # or it would warn, too
        if bridge.foreign:
            return
        message = _never_closed(self._inner)
        bridge.wind_down(partial(self._inner._saving.drain, self._inner._drain_timeout))
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def drain(self, *, timeout: float | None = None) -> None:
        """Wait until nothing is pending, then raise what nobody was told of.

        Interrupted, or timed out, only the wait ends.

        Args:
            timeout: seconds, or None for ever.

        Raises:
            CheckpointError: a save failed and nobody was told; several: `SaveErrors`.
            TimeoutError: the time is over; the saves go on.
        """
        if not self._closed:
            self._run(partial(self._inner.drain, timeout=timeout))

    # Behind the verbs

    def _run_on_error(self, body: BaseException) -> None:
        """The body raised: what is to be done on this thread before the drain."""

    def _make_bridge(self) -> Bridge:
        raise UsageError(f"enter the saver first: `with aiockpt.sync.{type(self).__name__}(...) as saver:`")

    def _handle(self, pending: AsyncPendingSave) -> PendingSave:
        assert self._bridge is not None
        return PendingSave(pending, self._bridge)

    def _carry(self, entry: E, verb: Callable[[E], Coroutine[Any, Any, object]]) -> PendingSave:
        assert self._bridge is not None
        try:
            self._bridge.run(lambda: verb(entry))
        except PreviousSaveError as error:
            if error.pending is entry.pending:
                error.pending = self._handle(entry.pending)
            raise
        except BaseException:
            if entry.task is None:  # interrupted before it had begun: nobody else lets go of the state
                entry.drop()
            raise
        return self._handle(entry.pending)


# At the end of the interpreter

_entered: weakref.WeakSet[Entered[Any]] = weakref.WeakSet()


def _watch_exit(entered: Entered[Any]) -> None:
    _entered.add(entered)
    _hook()


@functools.cache
def _hook() -> None:
    # Exit handlers run last to first: the lanes' own, which ends them, has to be there already.
    _threads.executor(_threads.Lane.CONTROL)
    atexit.register(_leave)


def _leave() -> None:
    """Whoever forgot to close loses no staged save, and no exit takes longer than a drain."""
    for forgotten in list(_entered):
        bridge = forgotten._bridge
        if bridge is None or bridge.foreign or forgotten._closed:
            continue
        message = _never_closed(forgotten._inner)
        try:
            forgotten.close()
        except DrainTimeoutError as error:
            log.error("at exit: %s", error)
        except CheckpointError:
            pass  # was logged when it happened
        warnings.warn(message, ResourceWarning, stacklevel=1, source=forgotten)


def _never_closed(inner: Ending[Any]) -> str:
    saves = [entry.pending for entry in list(inner._saving.ledger.active)]
    return (
        f"a saver of {inner._name()} was never closed (pending steps: "
        f"{labels(saves).removeprefix('step ') or 'none'}); "
        "use `with aiockpt.sync.Saver(...)`, or saver.close()"
    )
