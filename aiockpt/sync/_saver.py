"""Saver for training loops that are not async."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Literal, Unpack

from .. import _calls, saver
from .._place import as_step
from .._request import Request, SaveOptions
from ..errors import BusyError, UsageError
from ..pending import PendingSave as AsyncPendingSave
from ._door import blocking, like
from ._entered import AnyThread
from ._facts import Facts
from ._pending import PendingSave

__all__ = ["Saver", "Staging"]


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
        self._inner._owner = AnyThread()

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

    def mutating(self) -> AbstractContextManager[None]:
        """`with saver.mutating():` around whatever changes the state while other threads save.

        The thread waits until no save reads the state; a save waits for the thread.
        Saving inside the block, on the same thread, is a `UsageError`.
        """
        self._open()
        return self._inner.mutating()

    # Behind the verbs

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
