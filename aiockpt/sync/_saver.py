"""Saver for training loops that are not async."""

from __future__ import annotations

import atexit
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from .. import _calls, _threads, saver
from .._log import log
from .._owner import Owner
from .._place import as_step
from .._request import Request, SaveOptions
from .._saving import Saving
from ..errors import BusyError, CheckpointError, DrainTimeoutError, PreviousSaveError, UsageError
from ..pending import PendingSave as AsyncPendingSave
from ._bridge import Bridge, Make
from ._door import blocking, like
from ._facts import Facts
from ._pending import PendingSave

__all__ = ["Saver", "Staging"]


class _AnyThread(Owner):
    """The owner of a saver behind a bridge: who may call is the bridge's business."""

    def check(self, *, closed_too: bool = False) -> Any:
        if self.closed and not closed_too:
            raise UsageError("the saver is closed")
        return self.loop


class Saver(Facts):
    """Writes the checkpoints of one run, from code that is not async.

    A context manager; it must be entered. It has the options, the verbs and the promises
    of `aiockpt.Saver`; each verb blocks the calling thread, and none is async. A loop in a
    daemon thread of its own does the work. Several threads may use it at once.

    Interrupted (Ctrl-C) before `staged`, a save is cancelled, and the interrupt goes on when
    no thread touches the state any more, or after `drain_timeout`; from `staged` on only the
    wait ends. Called where an event loop is running (Jupyter, `async def`) it works, stalls
    that loop, and warns once.

    Args:
        run: the run's folder or URL, or a store.
        **options: see `aiockpt.Saver`.

    Raises:
        UsageError: an option is wrong. Nothing was written.
    """

    what = "saver"

    @like(saver.Saver.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(saver.Saver(*args, **options))
        self._inner._owner = _AnyThread()

    # Entering and leaving

    def __enter__(self) -> Self:
        if self._bridge is not None or self._closed:
            raise UsageError("a saver is entered once; make another one for another `with`")
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
        saving = self._inner._saving
        message = _never_closed(self._inner)
        bridge.wind_down(partial(saving.drain, self._inner._drain_timeout))
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    # Saving

    def save(self, state: Any, *, step: int, **options: Unpack[SaveOptions]) -> PendingSave:
        """Save; returns when a crash cannot lose it. Options and errors as `aiockpt.Saver.save`.

        Returns:
            The handle of the save, which is done; `.result()` is its checkpoint.
        """
        return self._carry(self._request(state, step, options), self._inner._save)

    def stage(self, state: Any, *, step: int, **options: Unpack[SaveOptions]) -> PendingSave:
        """Save; returns when the state may change. The rest goes on by itself.

        Options and errors as `aiockpt.Saver.stage`; errors after `staged` are the handle's.

        Returns:
            The handle: ask it what became of the save.
        """
        return self._carry(self._request(state, step, options), self._inner._stage)

    def save_nowait(self, state: Any, *, step: int, **options: Unpack[SaveOptions]) -> PendingSave:
        """Copy the whole state now, and return the handle. The state may change then.

        Unlike `stage` it waits neither for earlier saves nor for the disk.

        Raises:
            BusyError: too many saves are pending, or the budget does not hold the state.
        """
        ledger, number = self._inner._saving.ledger, as_step(step)
        # Before the capture, which may be long.
        self._open().ask(lambda: ledger.refuse_if_busy(f"step {number}", step=number))
        return self._carry(self._request(state, step, options), self._copy_now)

    def staging(self, state: Any, *, step: int, **options: Unpack[SaveOptions]) -> Staging:
        """Save while the body runs: `with saver.staging(state, step=n) as pending: ...`.

        The body may read the state (forward and backward) and must not change it: an
        optimizer of the state that steps there waits until `staged`. Leaving waits for
        `staged`. If the body raises before that, the save is cancelled.
        """
        request = self._request(state, step, options)
        return Staging(self, request, self._open().ask(lambda: self._inner._staging(request)))

    def due(self, step: int) -> bool:
        """Whether the trigger (`when=`) wants a save after `step` completed steps."""
        return self._open().ask(lambda: self._inner.due(step))

    def stage_if_due(
        self,
        state: Any,
        *,
        step: int,
        if_busy: Literal["skip", "wait"] = "skip",
        **options: Unpack[SaveOptions],
    ) -> PendingSave | None:
        """As `stage` if a save is due, else None. Call it at every step.

        Options and errors as `aiockpt.Saver.stage_if_due`.
        """
        if not self._open().ask(lambda: self._inner._wants(state, step, if_busy, options)):
            return None
        taken: list[AsyncPendingSave | None] = []

        async def verb(request: Request) -> None:
            taken.append(await self._inner._stage_or_skip(request, if_busy))

        handle = self._carry(self._request(state, step, options), verb)
        return None if taken == [None] else handle

    restore = blocking(saver.Saver.restore)

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

    def mutating(self) -> AbstractContextManager[None]:
        """`with saver.mutating():` around whatever changes the state while other threads save.

        The thread waits until no save reads the state; a save waits for the thread.
        Saving inside the block, on the same thread, is a `UsageError`.
        """
        self._open()
        return self._inner.mutating()

    # Behind the verbs

    def _make_bridge(self) -> Bridge:
        raise UsageError("enter the saver first: `with aiockpt.sync.Saver(...) as saver:`")

    def _request(self, state: Any, step: int, options: SaveOptions) -> Request:
        """Capture the state here and now, on the thread that calls."""
        bridge = self._open()
        if threading.get_ident() in self._inner._exclusion._mutators:
            raise UsageError("a save inside `with saver.mutating():` waits for that block to end", step=step)
        request = self._inner._request(state, step, options)
        if request.held is not None and request.held.hold is not None:
            # Only the loop's thread would deadlock if it waited at the gate; this one may wait.
            request.held.hold.thread = bridge.thread
        return request

    def _carry(self, request: Request, verb: Callable[[Request], Coroutine[Any, Any, object]]) -> PendingSave:
        assert self._bridge is not None
        try:
            self._bridge.run(lambda: verb(request))
        except PreviousSaveError as error:
            if error.pending is request.pending:
                error.pending = self._handle(request.pending)
            raise
        except BaseException:
            if request.task is None:  # interrupted before it had begun: nobody else lets go of the state
                request.drop()
            raise
        return self._handle(request.pending)

    async def _copy_now(self, request: Request) -> None:
        try:
            # Another thread may have been quicker.
            self._inner._saving.ledger.refuse_if_busy(request.pending._label, step=request.step)
        except BusyError:
            request.drop()
            raise
        self._inner._copy_now(request)


class Staging:
    """`with saver.staging(...)`: the copy runs while the body does."""

    def __init__(self, saver: Saver, request: Request, staging: _calls.Staging) -> None:
        self._saver = saver
        self._request = request
        self._staging = staging

    def __enter__(self) -> PendingSave:
        bridge = self._saver._open()
        try:
            bridge.run(self._staging.__aenter__)
        except BaseException:
            # Interrupted just when the save had begun: the body will not run, nobody waits for `staged`.
            bridge.run(lambda: self._saver._inner._leave(self._request, failed=True))
            raise
        return self._saver._handle(self._request.pending)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        inner = self._saver._inner
        self._saver._carry(self._request, lambda request: inner._leave(request, failed=kind is not None))


# At the end of the interpreter

_entered: weakref.WeakSet[Saver] = weakref.WeakSet()


def _watch_exit(entered: Saver) -> None:
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


def _never_closed(inner: saver.Saver) -> str:
    saving: Saving = inner._saving
    steps = ", ".join(str(request.step) for request in list(saving.ledger.active)) or "none"
    return (
        f"a saver of {inner.store.url} was never closed (pending steps: {steps}); "
        "use `with aiockpt.sync.Saver(...)`, or saver.close()"
    )
