"""FileSaver for code that is not async."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .. import filesaver
from .._filing import FileEntry, SavedFile
from ._door import like
from ._entered import AnyThread, Entered
from ._pending import PendingSave

__all__ = ["FileSaver"]

H = TypeVar("H", bound=Callable[[Path], object])


class FileSaver(Entered[filesaver.FileSaver]):
    """Saves with a function of your own, from code that is not async.

    A context manager; it must be entered. It has the options, the verbs and the promises
    of `aiockpt.FileSaver`; each verb blocks the calling thread, and none is async. An async
    savefun, and async hooks, run on the saver's own loop.

    Args:
        savefun: called as `savefun(path, target, **kwds)`.
        **options: see `aiockpt.FileSaver`.

    Raises:
        UsageError: an option is wrong, or the worker cannot run the savefun.
    """

    what = "saver"

    @like(filesaver.FileSaver.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(filesaver.FileSaver(*args, **options))
        self._inner._owner = AnyThread()

    def save(self, target: Any, path: str | os.PathLike[str], /, **more: Any) -> SavedFile:
        """Save; returns when it is durable under its name and the hooks have run.

        Arguments and errors as `aiockpt.FileSaver.save`.
        """
        saved: list[SavedFile] = []

        async def verb(entry: FileEntry) -> None:
            saved.append(await self._inner._save(entry))

        self._carry(self._entry(target, path, more), verb)
        return saved[0]

    def stage(self, target: Any, path: str | os.PathLike[str], /, **more: Any) -> PendingSave:
        """Save; returns when the target may change. The rest goes on by itself.

        Arguments and errors as `aiockpt.FileSaver.stage`.

        Returns:
            The handle: ask it what became of the save; `.result()` is the `SavedFile`.
        """
        return self._carry(self._entry(target, path, more), self._inner._stage)

    def add_after_save(self, hook: H) -> H:
        """Have `hook(path)` called after each save from now on; as `aiockpt.FileSaver.add_after_save`."""
        return self._inner.add_after_save(hook)

    def finalize(self) -> None:
        """As `close`: drain and close; any number of times."""
        self.close()

    def _entry(self, target: Any, path: str | os.PathLike[str], more: dict[str, Any]) -> FileEntry:
        """Capture the target here and now, on the thread that calls."""
        bridge = self._open()
        entry = self._inner._entry(target, path, more)
        hold = entry.job.parcel.captured.hold
        if hold is not None:
            # Only the loop's thread would deadlock if it waited at the gate; this one may wait.
            hold.thread = bridge.thread
        return entry
