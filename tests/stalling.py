"""Stores whose disk stands still, or fails, at a call of the test's choice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

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
    return operation.startswith("write")


def store_on(disk: Disk, run: Path) -> LocalStore:
    """A local store on that disk."""
    return LocalStore(run, files=disk)
