"""The leak check: descriptors and threads are back where they were after a test."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "aiockpt"
PATIENCE = 3.0
"""Seconds that threads and descriptors get to go away; lanes end after half a second without work."""


def descriptors() -> dict[int, str]:
    """List this process' open descriptors with what each points at (Linux)."""
    found: dict[int, str] = {}
    if not os.path.isdir("/proc/self/fd"):
        return found
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            # The descriptor that listed the folder is in the list and closed by now.
            continue
    return found


def threads() -> set[threading.Thread]:
    """List the package's own threads that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith(PREFIX)}


def _left_over(fds: dict[int, str], workers: set[threading.Thread]) -> list[str]:
    """Name what is there now and was not there before."""
    left = [f"descriptor {fd} -> {what}" for fd, what in descriptors().items() if fds.get(fd) != what]
    return left + [f"thread {t.name}" for t in threads() - workers]


def _trim() -> None:
    """Ask idle lanes to end now instead of after their grace."""
    lanes = sys.modules.get("aiockpt._threads")
    if lanes is not None and threads():
        lanes.trim()


@contextmanager
def checked() -> Iterator[list[str]]:
    """Compare before and after the body; the yielded list then holds what leaked."""
    fds, workers = descriptors(), threads()
    leaked: list[str] = []
    yield leaked
    _trim()
    left = _left_over(fds, workers)
    deadline = time.monotonic() + PATIENCE
    while left and time.monotonic() < deadline:
        # Cycles (a traceback that holds a frame that holds a file) are not leaks: collect, then look again.
        gc.collect()
        time.sleep(0.02)
        left = _left_over(fds, workers)
    leaked += left
    if any(name.startswith("thread") for name in left):
        # A failed test may have left a thread in a call that never ends. The end of the loop waits for
        # such a thread, for good: better one red test than a suite that hangs.
        sys.modules["aiockpt._threads"].abandon_busy()
