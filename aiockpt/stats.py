"""What saving costs, as measured: counts, bytes and seconds of one saver.

All durations are differences of one monotonic clock of this process. Smoothed numbers
follow the last few saves, so that one slow save does not change a decision for long.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SaverStats"]

SMOOTH = 0.3
"""Weight of the newest measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverStats:
    """One look at a saver's books; it does not change afterwards.

    Seconds and bytes are 0 until there was something to measure.
    """

    saves: int = 0
    """Saves that have begun."""
    committed: int = 0
    """Saves that a crash cannot lose."""
    failed: int = 0
    """Saves that ended with an error, those cancelled aside."""
    cancelled: int = 0
    """Saves that were cancelled before their commit."""
    skipped: int = 0
    """Saves that were due and left out because others were under way."""
    retained: int | None = None
    """Checkpoints that the last pass of retention left; None before the first one and with `KeepAll`."""
    nbytes: int = 0
    """Bytes of all committed files."""
    pending_bytes: int = 0
    """Bytes of tensors that saves under way have yet to write."""
    last_nbytes: int = 0
    """Bytes of the last committed save's files."""
    blocked_seconds: float = 0.0
    """How long a save keeps its caller until the state may change, smoothed: the capture
    at the call, admission and the wait for `staged`."""
    last_blocked_seconds: float = 0.0
    """The same of the last committed save."""
    total_blocked_seconds: float = 0.0
    """The same of all committed saves together."""
    write_seconds: float = 0.0
    """From the call to the commit, smoothed."""
    last_write_seconds: float = 0.0
    """The same of the last committed save."""
    total_write_seconds: float = 0.0
    """The same of all committed saves together."""
    saved_seconds: float = 0.0
    """Training time saved: what was spent on writing while the caller was not kept."""
    interval_seconds: float = 0.0
    """Between the calls of the last two saves."""
    bandwidth: float = 0.0
    """Bytes a second from admission to commit, smoothed."""

    def expected_seconds(self, nbytes: int | None = None) -> float | None:
        """How long a save begun now would take to its commit, those under way included.

        Args:
            nbytes: of its state; None: as many as the last one had.

        Returns:
            Seconds, or None when no save has been measured yet.
        """
        if self.bandwidth <= 0:
            return None
        return (self.pending_bytes + (self.last_nbytes if nbytes is None else nbytes)) / self.bandwidth


class Tally:
    """The books themselves; used on the loop's thread only."""

    def __init__(self) -> None:
        self._saves = self._committed = self._failed = self._cancelled = 0
        self._nbytes = self._last_nbytes = 0
        self._blocked = self._last_blocked = self._total_blocked = 0.0
        self._write = self._last_write = self._total_write = 0.0
        self._saved = self._interval = self._bandwidth = 0.0
        self._called: float | None = None

    def begun(self, called: float) -> None:
        """A save has begun, whose call was at `called`."""
        self._saves += 1
        if self._called is not None:
            self._interval = max(0.0, called - self._called)
        self._called = called

    def committed(self, nbytes: int, *, blocked: float, write: float, admitted: float) -> None:
        """A save is committed.

        Args:
            nbytes: of all its files.
            blocked: seconds that its caller was kept.
            write: seconds from the call to the commit.
            admitted: seconds from the call to its admission.
        """
        first = self._committed == 0
        self._committed += 1
        self._nbytes += nbytes
        self._last_nbytes, self._last_blocked, self._last_write = nbytes, blocked, write
        self._total_blocked += blocked
        self._total_write += write
        self._saved += max(0.0, write - blocked)
        speed = nbytes / max(write - admitted, 1e-9)
        self._blocked = blocked if first else smooth(self._blocked, blocked)
        self._write = write if first else smooth(self._write, write)
        self._bandwidth = speed if first else smooth(self._bandwidth, speed)

    def failed(self, *, cancelled: bool) -> None:
        """A save ended without a commit."""
        if cancelled:
            self._cancelled += 1
        else:
            self._failed += 1

    def snapshot(
        self, *, pending_bytes: int = 0, skipped: int = 0, retained: int | None = None
    ) -> SaverStats:
        """The numbers as they are now."""
        return SaverStats(
            saves=self._saves,
            committed=self._committed,
            failed=self._failed,
            cancelled=self._cancelled,
            skipped=skipped,
            retained=retained,
            nbytes=self._nbytes,
            pending_bytes=pending_bytes,
            last_nbytes=self._last_nbytes,
            blocked_seconds=self._blocked,
            last_blocked_seconds=self._last_blocked,
            total_blocked_seconds=self._total_blocked,
            write_seconds=self._write,
            last_write_seconds=self._last_write,
            total_write_seconds=self._total_write,
            saved_seconds=self._saved,
            interval_seconds=self._interval,
            bandwidth=self._bandwidth,
        )


def smooth(old: float, new: float) -> float:
    """Let the newest measurement count by SMOOTH."""
    return (1 - SMOOTH) * old + SMOOTH * new
