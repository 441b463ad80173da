"""Disks and copies that stand still, or fail, at a moment of the test's choice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiockpt.sync
from aiockpt import _pipeline, _stage
from aiockpt.storage.local import LocalStore
from aiockpt.testing import Faults, FaultyFiles, Kind


class _When(Faults):
    """Fires at the first operation that `match` takes, once it is armed."""

    def __init__(self, match: Callable[[str], bool], kind: Kind) -> None:
        super().__init__(kind=kind)
        self.armed = False
        self._match = match
        self._guard = threading.Lock()

    def next(self, operation: str, *, writes: bool) -> Kind | None:
        with self._guard:
            if self.armed and self._match(operation):
                self.armed, self.fail_at = False, len(self.operations)
            return super().next(operation, writes=writes)


class Disk(FaultyFiles):
    """The real disk, until `arm()`; then the next matching call stalls or fails, once."""

    def __init__(self, match: Callable[[str], bool], kind: Kind = "stall") -> None:
        super().__init__()
        self.when = _When(match, kind)
        self.faults = self.when

    def arm(self) -> None:
        """From now on."""
        self.when.armed = True


def before_staged(operation: str) -> bool:
    """The attempt's folder is made: nothing has been copied yet."""
    return operation.startswith("mkdir") and ".step-" in operation


def before_commit(operation: str) -> bool:
    """Everything is written; the next thing would be the commit."""
    return operation.startswith("rename")


def a_write(operation: str) -> bool:
    """Tensor data on their way to the disk, in a bulk thread."""
    return operation.startswith("write ")  # and not `write_lock`, which a long test meets too


def store_on(disk: Disk, run: Path) -> LocalStore:
    """A local store on that disk."""
    return LocalStore(run, files=disk)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Start a thread of the test's own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class SlowCopy:
    """Holds the thread that reads the state until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        self.left = False
        original = _stage.fill_block

        def fill_block(*args: Any) -> int:
            self.inside.set()
            self.go.wait(60)
            nbytes = original(*args)
            self.left = True
            return nbytes

        monkeypatch.setattr(_pipeline, "fill_block", fill_block)


def draining(saver: aiockpt.sync.Saver) -> threading.Event:
    """Set once closing has begun to wait for the saves."""
    saving, begun = saver._inner._saving, threading.Event()
    original = saving.drain

    async def drain(seconds: float | None) -> None:
        begun.set()
        await original(seconds)

    saving.drain = drain  # type: ignore[method-assign]
    return begun


def interrupt_when(event: threading.Event, then: Callable[[], object], number: int = signal.SIGINT) -> None:
    """Send the main thread a signal once `event` is set, then go on with `then`."""

    def work() -> None:
        event.wait(60)
        interrupt(number)
        then()

    in_thread(work)


def interrupt(number: int = signal.SIGINT) -> None:
    """Send the main thread a signal."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)
