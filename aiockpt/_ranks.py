"""How the ranks of one save agree: gather the parts, share one decision and one outcome.

A coordinator moves small picklable records; data goes to the store directly. Everything
that decides what happens next (admit, skip, due, stop, restore a step) and everything
that was decided (committed, failed) goes through it as a record, so that a saver of many
ranks differs from one of a single process only by its coordinator.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

__all__ = ["Coordinator", "Decision", "Decisions", "Kind", "SoloCoordinator"]

T = TypeVar("T")


class Kind(enum.Enum):
    """What a decision is about."""

    ADMIT = "admit"
    """A save is taken in; the value is None."""
    SKIP = "skip"
    """A save that was due is left out; the value says why."""
    DUE = "due"
    """Whether a save is due at this step; the value is a bool."""
    STOP = "stop"
    """Training is to stop; the value is the reason."""
    RESTORE = "restore"
    """Which step is restored; the value is the step, or None for a fresh start."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, made by rank 0 and the same on every rank."""

    kind: Kind
    step: int | None
    value: Any = None


class Coordinator(Protocol):
    """Connects the ranks of one run. All methods are called by all ranks, in the same order."""

    @property
    def rank(self) -> int:
        """This process's number; 0 decides and commits."""

    @property
    def world(self) -> int:
        """How many ranks there are."""

    async def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on rank 0; elsewhere only the own one.

        Args:
            value: a small picklable record.
        """

    async def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank.

        Args:
            value: what rank 0 says; what others give is ignored.
        """


class SoloCoordinator:
    """The coordinator of a single process: it agrees with itself."""

    rank = 0
    world = 1

    async def gather(self, value: T) -> list[T]:
        """The one value there is."""
        return [value]

    async def broadcast(self, value: T) -> T:
        """The value itself."""
        return value


class Decisions:
    """The one place where a saver decides what happens next.

    Args:
        coordinator: shares what is decided.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.last: dict[Kind, Decision] = {}
        """The newest decision of each kind."""

    def note(self, decision: Decision) -> Decision:
        """Take a decision that rank 0 can make without asking anybody, and that others learn later."""
        self.last[decision.kind] = decision
        return decision

    async def agree(self, decision: Decision) -> Decision:
        """Take a decision that every rank has to know before it goes on."""
        return self.note(await self.coordinator.broadcast(decision))
