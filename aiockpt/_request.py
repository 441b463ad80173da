"""One save as its saver sees it, from the call to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from ._capture import Captured
from ._driven import DrivenWriter
from ._entry import Entry
from ._manifest import PartRecord
from ._records import UserFile


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
class Request(Entry):
    """What was captured at the call, and how far it got."""

    writer: DrivenWriter
    overwrite: bool
    take: Callable[[], Captured]
    """Captures the state; called once."""
    held: Captured | None = None
    """The captured state; at the call already, unless another thread was changing it."""
    record: PartRecord | None = None
    """What was written, for the commit."""
    retire: list[str] = field(default_factory=list)
    """Older folders of the same step, which it replaces."""

    @property
    def committed(self) -> bool:
        """Whether the manifest is there."""
        return self.writer.checkpoint is not None

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

    def forget(self) -> None:
        """Give back blocks and let go of the state."""
        self.writer.forget()

    async def abort(self) -> None:
        """End it, and remove what it wrote."""
        await self.writer.abort()

    def open_files(self) -> list[str]:
        """Names of data files that are being written."""
        return self.writer.open_files()


def _taken() -> Captured:
    raise AssertionError("a state is captured once")
