"""The handle of a save, for threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .._log import log
from .._pipeline import Progress
from ..checkpoint import Checkpoint
from ..errors import CheckpointError, DrainTimeoutError, UsageError
from ..pending import PendingSave as AsyncPendingSave
from ..pending import Phase
from ._bridge import Bridge, Make

__all__ = ["PendingSave"]


class PendingSave:
    """One save, as `aiockpt.PendingSave`, with waits that block. Any thread may wait.

    A wait that ends early (`timeout`, Ctrl-C) leaves the save alone. Made by a saver.
    """

    def __init__(self, pending: AsyncPendingSave, bridge: Bridge) -> None:
        self._pending = pending
        self._bridge = bridge

    def __repr__(self) -> str:
        return repr(self._pending)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PendingSave) and other._pending is self._pending

    def __hash__(self) -> int:
        return hash(self._pending.save_id)

    @property
    def step(self) -> int:
        """The step it saves."""
        return self._pending.step

    @property
    def save_id(self) -> str:
        """Names this save for ever."""
        return self._pending.save_id

    @property
    def phase(self) -> Phase:
        """The last phase it reached."""
        return self._pending.phase

    @property
    def progress(self) -> Progress:
        """Bytes staged, written and in total."""
        return self._pending.progress

    @property
    def seconds(self) -> Mapping[Phase, float]:
        """Seconds from the call to each phase reached so far."""
        return self._pending.seconds

    def done(self) -> bool:
        """Whether it has committed or failed."""
        return self._pending.done()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until a crash cannot lose it.

        Args:
            timeout: seconds.

        Raises:
            CheckpointError: the save failed; nothing of it is visible.
            TimeoutError: it takes longer, and goes on.
        """
        return self.committed(timeout)

    def exception(self, timeout: float | None = None) -> CheckpointError | None:
        """Wait until it is done: the error of a failed save, None if it committed.

        Raises:
            TimeoutError: it takes longer, and goes on.
        """
        if not self.done():
            self._wait(self._ended, lambda: self._look(None), timeout)
        return self._bridge.ask(self._pending.exception)

    def planned(self, timeout: float | None = None) -> None:
        """Wait until sizes are known and nothing stands against the save. Raises as `result`."""
        self._reached(Phase.PLANNED, timeout)

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state may change. Raises as `result`."""
        self._reached(Phase.STAGED, timeout)

    def written(self, timeout: float | None = None) -> None:
        """Wait until all bytes are flushed to stable storage (not yet visible). Raises as `result`."""
        self._reached(Phase.WRITTEN, timeout)

    def committed(self, timeout: float | None = None) -> Checkpoint:
        """As `result`."""
        self._reached(Phase.COMMITTED, timeout)
        checkpoint = self._pending._checkpoint
        assert checkpoint is not None
        return checkpoint

    def cancel(self) -> bool:
        """Stop it: the I/O ends, its files go, whoever waits gets `SaveCancelledError`.

        Returns at once; `exception()` returns when nothing touches the state or the disk
        any more.

        Returns:
            False when it is too late: the commit has begun, or the save is done.
        """
        return not self.done() and self._bridge.ask(self._pending.cancel)

    def add_done_callback(self, call: Callable[[PendingSave], object]) -> None:
        """Have `call(handle)` called once it is done; at once if it is.

        It runs on the saver's own thread: short work only, such as setting an event. The
        saver refuses to be used there. What it raises is logged.
        """

        async def when_ended() -> None:
            await self._ended()
            self._tell(call)

        if not self.done() and self._bridge.background(when_ended):
            return
        if not self.done():
            self._look(None)
        self._tell(call)

    # -------------------------------------------------------------- behind the verbs

    async def _ended(self) -> None:
        await self._pending._ended.wait()

    def _tell(self, call: Callable[[PendingSave], object]) -> None:
        try:
            call(self)
        except Exception:
            log.exception("a callback of the save of step %d failed", self.step)

    def _reached(self, phase: Phase, timeout: float | None) -> None:
        if self.phase < phase:
            self._wait(lambda: self._pending._reached(phase), lambda: self._look(phase), timeout)

    def _wait(self, make: Make[None], look: Callable[[], None], timeout: float | None) -> None:
        """Wait on the loop; on its own thread, or without it, look how things are."""
        if self._bridge.here:
            look()
        else:
            self._bridge.run(make, timeout=timeout, gone=look)

    def _look(self, phase: Phase | None) -> None:
        """What waiting for `phase` (None: for the end) comes to when nothing will happen any more."""
        pending = self._pending
        if self.done() if phase is None else self.phase >= phase:
            return
        if pending._error is not None:
            pending._reported = True
            raise pending._error
        if self._bridge.here:
            raise UsageError("a wait on the saver's own thread would wait for itself", step=self.step)
        message = f"the save of step {self.step} had not ended when its saver was closed"
        raise DrainTimeoutError(message, step=self.step)
