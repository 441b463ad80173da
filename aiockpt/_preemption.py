"""Notice of preemption: a signal becomes an event that any task can await.

A flag that the training loop looks at between two steps is looked at too late: the grace
of a scheduler is often shorter than a step. Here the event is set when the signal comes,
and whoever waits for it may save at once.

The handler is a plain one (`signal.signal`), not the loop's: what was there before can
then be put back, on any loop; and a forked data loader worker, which inherits it, would
through the loop's wake-up descriptor tell its parent of signals meant for the worker.
One handler serves all notices of a process, so that they may overlap in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self

from .errors import UsageError
from .stats import SaverStats

__all__ = ["Preemption", "preemption"]

SPARE = 1.1
"""What something takes is multiplied by this before it is compared with the grace."""


def preemption(
    *signals: signal.Signals, grace: float = math.inf, clock: Callable[[], float] = time.monotonic
) -> Preemption:
    """Take notice of preemption: `async with aiockpt.preemption(SIGTERM, grace=30) as notice:`.

    While the body runs, the signals set `notice.event` instead of ending the process, any
    number of times; the handlers from before come back at the end. Notices may be nested:
    all of them are told. Off the main thread no signal can be caught: a warning says so,
    and `notice.trigger()` does the same by hand. Handlers set by `loop.add_signal_handler`
    go on being called as well.

    Args:
        *signals: by default SIGTERM.
        grace: seconds the scheduler leaves between the signal and the kill.
        clock: monotonic seconds, for tests.

    Raises:
        UsageError: `grace` is not above 0.
    """
    return Preemption(signals or (signal.SIGTERM,), grace, clock)


class Preemption:
    """The notice; see `preemption`.

    Attributes:
        event: set once the process was told to end; await it anywhere on this loop.
        signal: the signal that did it, or None.
    """

    def __init__(self, signals: tuple[signal.Signals, ...], grace: float, clock: Callable[[], float]) -> None:
        if not grace > 0:
            raise UsageError(f"grace must be above 0 seconds, not {grace}")
        self.event = asyncio.Event()
        self.signal: signal.Signals | None = None
        self._signals = tuple(signal.Signals(s) for s in dict.fromkeys(signals))
        self._grace = grace
        self._clock = clock
        self._since: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def requested(self) -> bool:
        """Whether the process was told to end."""
        return self._since is not None

    @property
    def remaining(self) -> float:
        """Seconds of grace that are left: all of it before the notice, 0 when it is over."""
        if self._since is None:
            return self._grace
        return max(0.0, self._grace - (self._clock() - self._since))

    def fits(self, save: SaverStats | float, *, nbytes: int | None = None) -> bool:
        """Whether a save begun now can be committed in time, with a tenth to spare.

        Args:
            save: `saver.stats`, or how many seconds it will take. By the measured bandwidth,
                saves under way included. Where nothing was measured yet the answer is yes:
                trying costs nothing.
            nbytes: of the state; None: as many as the last save had.
        """
        seconds = save.expected_seconds(nbytes) if isinstance(save, SaverStats) else save
        return seconds is None or seconds * SPARE <= self.remaining

    def trigger(self, signum: signal.Signals | None = None) -> None:
        """Give notice by hand; from any thread or signal handler, any number of times.

        Raises:
            UsageError: it was not entered.
        """
        if self._loop is None:
            raise UsageError("enter it first: `async with aiockpt.preemption(...) as notice:`")
        if self._since is None:
            self.signal = signum
            self._since = self._clock()
        # Also on the loop's own thread: a signal handler may interrupt the loop at any line.
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self.event.set)

    async def wait(self) -> None:
        """Return once the process was told to end."""
        await self.event.wait()

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise UsageError("a notice is entered once; make another one")
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "preemption() off the main thread cannot catch signals: call notice.trigger() "
                "from the handler your main thread installs",
                RuntimeWarning,
                stacklevel=2,
            )
            return self
        try:
            for signum in self._signals:
                _exchange.listen(signum, self)
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        for signum in self._signals:
            _exchange.unlisten(signum, self)


@dataclass(eq=False)
class _Layer:
    """One installation of our handler, and who came while it was in place."""

    before: Any
    """The handler it took the place of."""
    notices: list[Preemption] = field(default_factory=list)


class _Exchange:
    """Hands the signals of this process to the notices; main thread only."""

    def __init__(self) -> None:
        self._layers: dict[signal.Signals, list[_Layer]] = {}
        """Oldest first. More than one where somebody put a handler of his own over ours meanwhile."""
        self._pid = 0

    def listen(self, signum: signal.Signals, notice: Preemption) -> None:
        if self._pid != os.getpid():  # a forked child: its parent's notices are not there
            for inherited in self._layers.values():
                for layer in inherited:
                    layer.notices.clear()
            self._pid = os.getpid()
        layers = self._layers.setdefault(signum, [])
        if not layers or signal.getsignal(signum) != self.deliver:
            layers.append(_Layer(signal.signal(signum, self.deliver)))
        layers[-1].notices.append(notice)

    def unlisten(self, signum: signal.Signals, notice: Preemption) -> None:
        layers = self._layers.get(signum, [])
        for layer in layers:
            if notice in layer.notices:
                layer.notices.remove(notice)
        while layers and not layers[-1].notices:
            # Whoever put another handler in place of ours meanwhile, keeps it.
            if signal.getsignal(signum) == self.deliver:
                self.restore(signum)
            else:
                layers.pop()

    def restore(self, signum: signal.Signals) -> None:
        layers = self._layers.get(signum)
        before = layers.pop().before if layers else None
        # None: it was not installed from Python, and cannot be put back from here.
        signal.signal(signum, signal.SIG_DFL if before is None else before)

    def deliver(self, number: int, frame: FrameType | None) -> None:
        signum = signal.Signals(number)
        if os.getpid() != self._pid:
            # A forked child, such as a data loader's worker: there it does what it did before.
            self.restore(signum)
            os.kill(os.getpid(), signum)
            return
        for layer in list(self._layers.get(signum, ())):
            for notice in list(layer.notices):
                notice.trigger(signum)


_exchange = _Exchange()
