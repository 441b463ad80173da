"""What stays and when to save: the contracts of retention and triggers.

Both are pure. Retention is a function from the checkpoints of a run to the steps that
stay; whoever deletes (the saver after a commit, `Catalog.prune`) adds what no policy may
touch. A trigger is a function from what is known at a step to yes or no; the saver keeps
the books it is asked with. Policies are combined with `|`: what one of them wants, stays
(or is due).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..checkpoint import Checkpoint

__all__ = ["Keep", "KeepFunction", "Moment", "When", "as_keep"]

KeepFunction = Callable[[Sequence[Checkpoint]], Collection[int]]
"""Anything that takes a run's checkpoints, oldest step first, and gives the steps that stay."""


class Keep(ABC):
    """Decides which steps stay."""

    @abstractmethod
    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        """The steps that stay, of checkpoints in ascending order of step."""

    def __or__(self, other: Keep | KeepFunction) -> Keep:
        return _AnyKeep((self, other))

    def __ror__(self, other: KeepFunction) -> Keep:
        return _AnyKeep((other, self))


@dataclass(frozen=True)
class _AnyKeep(Keep):
    members: tuple[Keep | KeepFunction, ...]

    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        return frozenset(step for member in self.members for step in member(checkpoints))


@dataclass(frozen=True)
class _FunctionKeep(Keep):
    function: KeepFunction

    def __call__(self, checkpoints: Sequence[Checkpoint]) -> Collection[int]:
        return self.function(checkpoints)


def as_keep(policy: Keep | KeepFunction) -> Keep:
    """A policy as an object, whatever form it was given in."""
    return policy if isinstance(policy, Keep) else _FunctionKeep(policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a trigger may know when it is asked; a new fact is a new field."""

    step: int
    """The step that has just been completed."""
    now: float
    """Seconds on a monotonic clock."""
    last_step: int | None
    """The step of the last save that was begun or restored; None if there was none."""
    last_time: float
    """When that was, on the same clock; for a new run, when the saver was entered."""
    blocked_seconds: float = 0.0
    """How long one save keeps the training loop, as measured; 0 before the first."""
    write_seconds: float = 0.0
    """How long one save takes from the call to the commit, as measured."""
    preempted: bool = False
    """The process was told to end."""
    pending: int = 0
    """Saves under way."""


class When(ABC):
    """Decides whether a save is due."""

    @abstractmethod
    def __call__(self, moment: Moment) -> bool:
        """Whether to save now."""

    def __or__(self, other: When) -> When:
        return _AnyWhen((self, other))


@dataclass(frozen=True)
class _AnyWhen(When):
    members: tuple[When, ...]

    def __call__(self, moment: Moment) -> bool:
        return any(member(moment) for member in self.members)
