"""Copies of one run whose n-th operation fails: what the tests of faults sweep over."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiockpt import CheckpointError, StorageError, Store
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyFiles, FaultyStore, Kind
from tests.proof import save, state_of


@dataclass
class Bench:
    """Copies of one run, each on a store whose n-th operation from now on can be made to fail."""

    floor: str
    tmp_path: Path
    template: Any = None
    number: Iterator[int] = field(default_factory=itertools.count)

    async def make_template(self, *states: int) -> None:
        """The run every copy begins as: these states, each at its own step."""
        if self.floor == "store-memory":
            self.template = MemoryStore()
            for number in states:
                await save(self.template, state_of(number), number)
        else:
            self.template = self.tmp_path / "template"
            for number in states:
                await save(self.template, state_of(number), number)

    def copy(self, kind: Kind = "error", code: int = errno.EIO) -> tuple[Any, Any]:
        """(store, what counts its operations) of a fresh copy."""
        path = self.tmp_path / f"run-{next(self.number)}"
        if self.floor == "store-memory":
            inner = MemoryStore()
            if self.template is not None:
                inner._bucket.files.update(self.template._bucket.files)
                inner._bucket.exists = True
            store = FaultyStore(inner, None, kind, errno=code)
            return store, store
        if self.template is not None:
            shutil.copytree(self.template, path)
        if self.floor == "files":
            files = FaultyFiles(None, kind, errno=code)
            return LocalStore(path, files=files), files
        store = FaultyStore(LocalStore(path), None, kind, errno=code)
        return store, store

    def drop(self, store: Store) -> None:
        """Remove a copy that passed."""
        inner = getattr(store, "inner", store)
        if isinstance(inner, LocalStore):
            shutil.rmtree(inner.path, ignore_errors=True)


def arm(counter: Any, n: int) -> None:
    """The n-th operation from here on fails."""
    counter.faults.fail_at = len(counter.operations) + n


def failed_operation(counter: Any) -> str:
    """The operation that the fault hit."""
    return str(counter.operations[counter.faults.fail_at])


def check_error(error: BaseException | None, code: int) -> None:
    """It is one of ours; what the store said is kept."""
    if error is None:
        return
    assert isinstance(error, CheckpointError), f"a foreign error: {error!r}"
    if isinstance(error, StorageError):
        assert error.errno == code
        assert error.__cause__ is not None


async def attempt(act: Callable[[], Awaitable[object]]) -> BaseException | None:
    """The error of an act, or None."""
    try:
        await act()
    except Exception as error:
        return forgetful(error)
    return None


def forgetful(error: BaseException) -> BaseException:
    """The error without its frames: what they hold (an attempt's lock) must be free to go."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
