"""Wake-ups for `watch` and `Reloader` from the kernel's file notices, by watchfiles.

Only a hint: notices do not cross network file systems, and some are lost. What polls
goes on polling. Loaded only where watchfiles is installed, and only for runs in a folder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Final

import watchfiles

from aiockpt._log import log

__all__ = ["Notices"]


FOLDERS: Final = ("", "aliases")
"""What is watched, in the run. Not what lies deeper: data that is being written is no news."""
STEP_MS: Final = 50
"""How often the thread looks whether it is to end."""


class Notices:
    """Calls a function when something appears in a run's folder, or goes.

    Args:
        path: the run's folder; it must be there.
        wake: called in a thread of its own.

    Raises:
        OSError: it cannot be watched.
    """

    def __init__(self, path: str, wake: Callable[[], object]) -> None:
        self._path = path
        self._wake = wake
        self._end = threading.Event()
        self._folders = self._present()
        if not self._folders:
            raise FileNotFoundError(path)
        self._thread = threading.Thread(target=self._run, name="aiockpt-wake", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still watches; it ends when the folder goes."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread, a moment later; any number of times."""
        self._end.set()

    def _present(self) -> list[str]:
        paths = [os.path.join(self._path, folder) if folder else self._path for folder in FOLDERS]
        return [path for path in paths if os.path.isdir(path)]

    def _run(self) -> None:
        try:
            while self._folders and not self._end.is_set():
                self._watch()
                self._folders = self._present()
        except Exception as error:  # a hint that fails is none; the poll is the truth
            log.info("%s: no notices of changes: %s", self._path, error)

    def _watch(self) -> None:
        """Watch until it is to end, or other folders are to be watched."""
        changes = watchfiles.watch(
            *self._folders,
            watch_filter=None,
            debounce=STEP_MS,
            step=STEP_MS,
            stop_event=self._end,
            rust_timeout=1000,
            yield_on_timeout=True,
            recursive=False,
            raise_interrupt=False,
        )
        for found in changes:
            if _is_news(path for _, path in found):
                self._wake()
            if self._present() != self._folders:
                return


def _is_news(paths: Iterable[str]) -> bool:
    """Whether any of them is more than a save under way or a writer's sign of life."""
    names = (os.path.basename(path) for path in paths)
    return any(not name.startswith(".") and name != "lock" for name in names)
