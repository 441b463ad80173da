"""Work of a training loop that goes on behind its back: one thread, in the order of the calls.

For frameworks whose loops are not async. What is handed over is already independent of the
state; here it only has to be written. The calls of one `Background` run one after the other,
so that a removal never overtakes the save of what it removes.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait

from aiockpt._threads import LaneExecutor
from aiockpt.errors import CheckpointError, PreviousSaveError, SaveError, SaveErrors, StorageError

__all__ = ["Background", "earlier", "one_of"]

log = logging.getLogger("aiockpt")

EXIT_SECONDS = 600.0
"""How long the interpreter's exit waits for what nobody drained."""


class Background:
    """A queue of saves and of other work, and the errors nobody was told of.

    Its thread starts with the first call and ends when idle. Nothing has to be closed.

    Args:
        name: of the thread.
        max_pending: saves that may be under way at the same time.
    """

    def __init__(self, name: str, *, max_pending: int) -> None:
        self._lane = LaneExecutor(f"aiockpt-{name}", 1)
        self._max_pending = max_pending
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._saves: list[Future[None]] = []
        self._last: Future[None] | None = None
        self._unseen: list[Exception] = []
        _watch(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child: the thread, and what it was doing, stayed with the parent."""
        return os.getpid() != self._pid

    @property
    def pending(self) -> int:
        """Saves under way."""
        with self._lock:
            return sum(not save.done() for save in self._saves)

    def admit(self) -> None:
        """Wait until one more save may begin: call it before the state is copied."""
        while True:
            with self._lock:
                self._saves = [save for save in self._saves if not save.done()]
                if len(self._saves) < self._max_pending:
                    return
                oldest = self._saves[0]
            wait([oldest])

    def save(self, target: str, call: Callable[[], None]) -> None:
        """Queue a save of `target`; its error becomes one of ours, is logged at once, and kept."""
        job = self._submit(functools.partial(self._guarded, "saving", target, call))
        with self._lock:
            self._saves.append(job)

    def then(self, target: str, call: Callable[[], None]) -> None:
        """Queue other work on `target`, after everything queued so far."""
        self._submit(functools.partial(self._guarded, "removing", target, call))

    def _submit(self, call: Callable[[], None]) -> Future[None]:
        with self._lock:
            self._last = self._lane.submit(call)
            return self._last

    def settle(self, timeout: float | None = None) -> None:
        """Wait until everything queued so far has ended, well or not."""
        if self._last is not None and not self.foreign:
            wait([self._last], timeout)

    def unseen(self) -> list[Exception]:
        """The errors nobody was told of; from now on somebody was."""
        with self._lock:
            errors, self._unseen = self._unseen, []
        return errors

    def finish(self) -> list[Exception]:
        """Wait for everything, and let the thread go; returns the errors nobody was told of."""
        self.settle()
        self._lane.trim()
        return self.unseen()

    # On the thread

    def _guarded(self, doing: str, target: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            # The frames hold the copy of a whole state, the error may be kept for long.
            traceback.clear_frames(error.__traceback__)
            ours = _ours(error, doing, target)
            log.error("%s", ours)
            with self._lock:
                self._unseen.append(ours)


def _ours(error: BaseException, doing: str, target: str) -> Exception:
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        elsewhere = error.filename is not None and str(error.filename) != target
        where = f"{doing} {target}: cannot write" if elsewhere else doing
        ours: Exception = StorageError.wrap(error, where, file=str(error.filename) if elsewhere else target)
    else:
        ours = SaveError(f"{doing} {target} failed: {type(error).__name__}: {error}", file=target)
    ours.__cause__ = error
    return ours


def earlier(errors: list[Exception], accepted: str) -> PreviousSaveError:
    """What a save raises, once, of those before it, when it has been accepted itself."""
    error = PreviousSaveError(
        f"an earlier save failed: {errors[0]}. The save of {accepted} was accepted and goes on; "
        "this is said once."
    )
    error.__cause__ = one_of(errors)
    return error


def one_of(errors: list[Exception]) -> Exception:
    """The error to raise for all of these."""
    return errors[0] if len(errors) == 1 else SaveErrors(f"{len(errors)} saves failed", errors)


# At the end of the interpreter

_all: weakref.WeakSet[Background] = weakref.WeakSet()


def _watch(background: Background) -> None:
    _all.add(background)
    _hook()


@functools.cache
def _hook() -> None:
    # After the lanes' own hook in time, hence before it at the exit, where that ends their threads.
    atexit.register(_leave)


def _leave() -> None:
    for background in list(_all):
        if background.foreign or background._last is None or background._last.done():
            continue
        log.warning("waiting for checkpoints that are still being written")
        background.settle(EXIT_SECONDS)
