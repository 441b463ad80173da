"""What a saver tells about itself, and how it is asked to tell training to stop."""

from __future__ import annotations

from ._beside import Beside
from ._due import Due
from ._housekeeping import Housekeeping
from ._ranks import Decision, Decisions, Kind
from .stats import SaverStats


class Facts:
    """The half of a saver that only looks."""

    _beside: Beside
    _housekeeping: Housekeeping
    _due: Due
    _decisions: Decisions

    @property
    def stats(self) -> SaverStats:
        """What was saved so far and what it cost, as of now."""
        return self._beside.stats(self._due.skipped, self._housekeeping.retention.retained)

    @property
    def stop_requested(self) -> str | None:
        """Why training is to stop, or None: look at it once a step."""
        return self._beside.stop_requested

    def request_stop(self, reason: str) -> None:
        """Ask training to stop; for listeners, from any thread. The first reason stays.

        Nothing is stopped by it: the training loop is to look at `stop_requested`.
        """
        if self._beside.stop is None:
            self._beside.stop = self._decisions.note(Decision(Kind.STOP, None, reason)).value
