"""When to look again: after a pause, or at once when the file system gives notice.

The pause is the truth, a notice only a hint (it comes from `integrations/wake.py`, where
watchfiles is installed and the run lies in a folder of this machine). Pauses vary by a
quarter, so that many readers do not ask a store all at the same moment.
"""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable
from typing import Any, Final, Protocol

from ._log import log
from ._threads import Lane, offload
from .errors import UsageError
from .storage import Store

__all__ = ["Patience", "Waker", "as_poll"]


JITTER: Final = 0.25
LONGEST: Final = 30.0
"""Seconds between two looks at a store that fails, at most (or the poll's, if that is more)."""
PLUG: Final = f"{__package__}.integrations.wake"


def as_poll(poll: float) -> float:
    """Check the seconds between two looks.

    Raises:
        UsageError: it is not a number above 0.
    """
    given: object = poll
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < 86400 * 7:
        raise UsageError(f"poll is a number of seconds above 0, not {given!r:.80}")
    return float(given)


class _Hint(Protocol):
    alive: bool

    def stop(self) -> None: ...


class Waker:
    """Waits between two looks at a run.

    Args:
        store: the run.
    """

    def __init__(self, store: Store) -> None:
        path = getattr(store, "path", None)
        self._path: str | None = path if isinstance(path, str) else None
        self._event = asyncio.Event()
        self._hint: _Hint | None = None

    def wake(self) -> None:
        """End the pause, or the next one if there is none now. On the loop's thread."""
        self._event.set()

    async def wait(self, seconds: float) -> None:
        """Pause for about so long."""
        await self._listen()
        try:
            async with asyncio.timeout(seconds * random.uniform(1 - JITTER, 1 + JITTER)):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()

    def close(self) -> None:
        """Listen no more."""
        hint, self._hint, self._path = self._hint, None, None
        if hint is not None:
            hint.stop()

    async def _listen(self) -> None:
        """Begin to listen, where that is possible; a folder that is not there yet is tried again."""
        if self._path is None or (self._hint is not None and self._hint.alive):
            return
        loop = asyncio.get_running_loop()
        try:
            make = await offload(_plug, lane=Lane.CONTROL)
            if make is None:
                self._path = None
                return
            self._hint = await offload(
                make, self._path, lambda: _tell(loop, self._event), lane=Lane.CONTROL, undo=_stop
            )
            self._event.set()  # what came before we listened
        except FileNotFoundError:
            return
        except Exception as error:
            log.info("%s: no notices of changes: %s", self._path, error)
            self._path = None


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:  # the loop is closed, and so is whoever listened
        return


def _stop(hint: _Hint) -> None:
    hint.stop()


def _plug() -> Callable[..., _Hint] | None:
    """Find the plug, if what it needs is installed; blocking."""
    try:
        module: Any = importlib.import_module(PLUG)
    except ImportError:
        return None
    found: Callable[..., _Hint] = module.Notices
    return found


class Patience:
    """How long to pause while a store fails, and what of that to log: each trouble once.

    Args:
        poll: seconds between two looks when all is well.
        who: for the log.
    """

    def __init__(self, poll: float, who: str) -> None:
        self._poll = poll
        self._who = who
        self._told = ""
        self._failures = 0

    def failed(self, error: BaseException) -> float:
        """Note a failure; returns how long to pause."""
        self._failures += 1
        text = f"{type(error).__name__}: {error}"
        if text != self._told:
            self._told = text
            log.warning("%s: looking for checkpoints failed, it goes on: %s", self._who, str(error))
        return min(self._poll * 2.0 ** min(self._failures - 1, 20), max(LONGEST, self._poll))

    def worked(self) -> float:
        """Note that all is well; returns how long to pause."""
        if self._told:
            log.info("%s: looking for checkpoints works again", self._who)
        self._told, self._failures = "", 0
        return self._poll
