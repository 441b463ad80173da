"""One save as whoever runs it sees it, whatever it writes: a step of a run, or a file."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from dataclasses import dataclass, field

from .pending import PendingSave, Phase

__all__ = ["Entry", "labels"]


@dataclass(eq=False, slots=True)
class Entry:
    """How far a save got, and how it is ended."""

    pending: PendingSave
    context: contextvars.Context = field(default_factory=contextvars.copy_context, kw_only=True)
    task: asyncio.Task[None] | None = field(default=None, kw_only=True)
    committing: bool = field(default=False, kw_only=True)
    """The commit has begun: it can no longer be cancelled."""
    copied: bool = field(default=False, kw_only=True)
    """An independent copy of everything existed before the task ran."""
    number: int = field(default_factory=itertools.count().__next__, kw_only=True)
    """The order of the calls."""

    @property
    def step(self) -> int:
        """The step it saves."""
        return self.pending.step

    @property
    def needs_state(self) -> bool:
        """Whether it still reads the caller's state."""
        return not self.copied and self.pending.phase < Phase.STAGED

    @property
    def committed(self) -> bool:
        """Whether a crash can no longer lose it, told to its waiters or not."""
        raise NotImplementedError

    def cancel(self) -> bool:
        """End it unless it is too late; returns whether it was not."""
        if self.committing or self.task is None or self.task.done():
            return False
        self.task.cancel()
        return True

    def drop(self) -> None:
        """It will never begin, or has ended: let go of the state."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of memory and state; it has not begun, and no thread is at work."""
        raise NotImplementedError

    async def abort(self) -> None:
        """End it, and remove what it wrote; returns when no thread touches it any more."""
        raise NotImplementedError

    def open_files(self) -> list[str]:
        """Names of files that are being written."""
        raise NotImplementedError


def labels(saves: list[PendingSave]) -> str:
    """What they save, for a message: `step 1, 2`, or the files."""
    names = [pending._label for pending in saves]
    return ", ".join(names[:1] + [name.removeprefix("step ") for name in names[1:]])
