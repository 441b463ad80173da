"""What a committed checkpoint is to its users: a small frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Checkpoint", "LoadReport"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a checkpoint and a target fitted."""

    matched: int = 0
    """Tensors that were filled."""
    missing: tuple[str, ...] = ()
    """Paths of the target that the checkpoint lacks (kept as they were)."""
    unexpected: tuple[str, ...] = ()
    """Paths of the checkpoint that the target lacks (not loaded)."""
    mismatched: tuple[tuple[str, str], ...] = ()
    """(path, what differs) of entries that were left alone with `strict=False`."""
    cast: tuple[str, ...] = ()
    """Paths whose dtype was converted on request."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint. Identity is (step, save id), never the step alone.

    `values` and `report` are filled by loads with `into=`, `skipped` by `restore`.
    """

    run: str
    """The run's URL or path."""
    name: str
    """Its folder in the run."""
    step: int
    """Completed steps."""
    save_id: str
    """Names this save for ever."""
    run_id: str
    """The run it belongs to; kept over restarts."""
    time: float
    """Seconds since 1970 on the writer's clock; information only, never used for order."""
    nbytes: int
    """Bytes of all its files."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    meta: Any = None
    items: tuple[str, ...] = ()
    """The top-level entries of the state that hold tensors."""
    files: tuple[str, ...] = ()
    """Names of the user's own files committed with it."""
    generation: int = 0
    """How often this step had been written before."""
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Restored plain values, by top-level entry of the target."""
    report: LoadReport | None = field(default=None, compare=False)
    skipped: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    """(step, why) of newer steps that were passed over as damaged."""

    @property
    def url(self) -> str:
        """Where it lies."""
        return f"{self.run}/{self.name}"
