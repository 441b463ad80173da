"""Retention: which steps stay. Names as in Orbax, where there is one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ..checkpoint import Checkpoint
from ..errors import UsageError
from . import Keep

__all__ = ["KeepAll", "KeepBest", "KeepEvery", "KeepEverySeconds", "KeepFirst", "KeepLast"]


@dataclass(frozen=True)
class KeepAll(Keep):
    """Every step stays."""

    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        return [c.step for c in checkpoints]


@dataclass(frozen=True)
class KeepLast(Keep):
    """The `n` highest steps stay."""

    n: int = 1

    def __post_init__(self) -> None:
        _at_least("KeepLast: n", self.n, 1)

    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        return [c.step for c in checkpoints[-self.n :]]


@dataclass(frozen=True)
class KeepFirst(Keep):
    """The `n` lowest steps stay."""

    n: int = 1

    def __post_init__(self) -> None:
        _at_least("KeepFirst: n", self.n, 1)

    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        return [c.step for c in checkpoints[: self.n]]


@dataclass(frozen=True)
class KeepEvery(Keep):
    """Steps that are multiples of `steps` stay."""

    steps: int

    def __post_init__(self) -> None:
        _at_least("KeepEvery: steps", self.steps, 1)

    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        return [c.step for c in checkpoints if c.step % self.steps == 0]


@dataclass(frozen=True)
class KeepEverySeconds(Keep):
    """One step in so many seconds of the writers' clocks stays, counted from the first.

    A clock that was set back makes more steps stay, never fewer.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"KeepEverySeconds: seconds must be above 0, not {self.seconds}")

    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        kept: list[Checkpoint] = []
        for checkpoint in checkpoints:
            if not kept or not 0 <= checkpoint.time - kept[-1].time < self.seconds:
                kept.append(checkpoint)
        return [c.step for c in kept]


@dataclass(frozen=True)
class KeepBest(Keep):
    """The `n` steps with the best value of a metric stay.

    Metrics stand in the manifests, so that the best survives a restart. A step without
    the metric, or with NaN, is never among the best. Of equals the later one is better.

    Args:
        metric: its name, as given to the save.
        n: how many.
        mode: whether low or high is good.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _at_least("KeepBest: n", self.n, 1)
        if self.mode not in ("min", "max"):
            raise UsageError(f"KeepBest: mode is 'min' or 'max', not {self.mode!r}")

    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        return [c.step for c in self.ranked(checkpoints)[: self.n]]

    def ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Those that have the metric, best first."""
        sign = -1.0 if self.mode == "max" else 1.0
        rated = [(sign * value, -c.step, c) for c in checkpoints if (value := self._value(c)) is not None]
        return [c for _, _, c in sorted(rated, key=lambda entry: entry[:2])]

    def _value(self, checkpoint: Checkpoint) -> float | None:
        value = checkpoint.metrics.get(self.metric)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        try:
            number = float(value)
        except OverflowError:  # an int may be larger than any float
            number = math.inf if value > 0 else -math.inf
        return None if math.isnan(number) else number


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be an int of at least {least}, not {value!r}")
