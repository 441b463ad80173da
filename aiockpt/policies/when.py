"""Triggers: when to save. Names as in Orbax, where there is one."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from . import Moment, When

__all__ = ["AtSteps", "EveryOverhead", "EverySeconds", "EverySteps", "First", "OnPreemption"]


@dataclass(frozen=True)
class EverySteps(When):
    """Due once `n` steps have gone by since the last save.

    Distances count, not multiples: a loop whose steps jump (several a call) still saves.
    A new run counts from step 0, a resumed one from the step it was restored to.
    """

    n: int

    def __post_init__(self) -> None:
        n: object = self.n
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise UsageError(f"EverySteps: n must be an int of at least 1, not {self.n!r}")

    def __call__(self, moment: Moment) -> bool:
        return moment.step - (moment.last_step or 0) >= self.n


@dataclass(frozen=True)
class EverySeconds(When):
    """Due once so many seconds have gone by since the last save began."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"EverySeconds: seconds must be above 0, not {self.seconds}")

    def __call__(self, moment: Moment) -> bool:
        return moment.now - moment.last_time >= self.seconds


@dataclass(frozen=True, init=False)
class AtSteps(When):
    """Due at these steps, or at the first step asked after one of them."""

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise UsageError("AtSteps: name at least one step")
        object.__setattr__(self, "steps", tuple(sorted(steps)))

    def __call__(self, moment: Moment) -> bool:
        last = -1 if moment.last_step is None else moment.last_step
        return any(last < step <= moment.step for step in self.steps)


@dataclass(frozen=True)
class First(When):
    """Due at the first step of a run that has no save yet: finds a broken setup early."""

    def __call__(self, moment: Moment) -> bool:
        return moment.last_step is None


@dataclass(frozen=True)
class OnPreemption(When):
    """Due when the process was told to end, unless this very step was saved."""

    def __call__(self, moment: Moment) -> bool:
        return moment.preempted and moment.last_step != moment.step


@dataclass(frozen=True)
class EveryOverhead(When):
    """As often as saving costs no more than this share of the time.

    The interval is what one save keeps the loop, divided by `share`, and at least what one
    takes to be written: the next is due when the last is expected to be committed, and not
    before it is. Before anything was measured, one save is due at once. Idea: CheckFreq (FAST '21), which
    tunes the frequency to a bound on the overhead in the same way.

    Args:
        share: of the training time, such as 0.03.
    """

    share: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(f"EveryOverhead: share must lie between 0 and 1, not {self.share}")

    def __call__(self, moment: Moment) -> bool:
        if moment.last_step is None:
            return True
        if moment.pending:  # what it costs is not known yet, or it costs more than was expected
            return False
        interval = max(moment.blocked_seconds / self.share, moment.write_seconds)
        return moment.step > moment.last_step and moment.now - moment.last_time >= interval
