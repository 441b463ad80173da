"""One save as its saver sees it, from the call to the end."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from ._capture import Captured
from ._driven import DrivenWriter
from ._manifest import PartRecord
from ._records import UserFile
from .pending import PendingSave, Phase


class SaveOptions(TypedDict, total=False):
    """Keywords that every way to save takes."""

    metrics: Mapping[str, float] | None
    """Numbers by name, kept in the manifest."""
    meta: Any
    """Plain values, kept in the manifest."""
    files: Mapping[str, UserFile] | None
    """Files of your own to commit with the step, by name: content, or a path to copy."""
    overwrite: bool
    """Write a committed step anew; the older one is removed after the commit."""


@dataclass(eq=False, slots=True)
class Request:
    """What was captured at the call, and how far it got."""

    pending: PendingSave
    writer: DrivenWriter
    overwrite: bool
    take: Callable[[], Captured]
    """Captures the state; called once."""
    held: Captured | None = None
    """The captured state; at the call already, unless another thread was changing it."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    task: asyncio.Task[None] | None = None
    record: PartRecord | None = None
    """What was written, for the commit."""
    committing: bool = False
    """The commit has begun: it can no longer be cancelled."""
    copied: bool = False
    """An independent copy of everything existed before the task ran."""
    number: int = field(default_factory=itertools.count().__next__)
    """The order of the calls."""

    @property
    def step(self) -> int:
        """The step it saves."""
        return self.pending.step

    @property
    def needs_state(self) -> bool:
        """Whether it still reads the caller's state."""
        return not self.copied and self.pending.phase < Phase.STAGED

    def cancel(self) -> bool:
        """End it unless it is too late; returns whether it was not."""
        if self.committing or self.task is None or self.task.done():
            return False
        self.task.cancel()
        return True

    @property
    def captured(self) -> Captured:
        """The captured state; there is one from the beginning of the save on."""
        assert self.held is not None
        return self.held

    def capture(self) -> None:
        """Take the state as it is now."""
        start = time.perf_counter()
        self.held = self.take()
        self.pending.capture_seconds = time.perf_counter() - start
        self.take = _taken

    def drop(self) -> None:
        """It will never begin, or has ended: let go of the state."""
        self.take = _taken
        self.writer.on_staged = None
        if self.held is not None:
            self.held.release()


def _taken() -> Captured:
    raise AssertionError("a state is captured once")
