"""The guard: a blocking call on the event loop's thread fails the test.

blockbuster finds the calls; this module says which of them count. A call counts
when a loop is running in this thread and the innermost project frame on the stack
belongs to the package. So the package is held to its word wherever it is called
from, while a test, a test's callback or pytest itself may touch the disk freely.

What blockbuster raises can be swallowed by an `except Exception` on the way up,
hence each call is also written down, and the fixture fails the test by that list.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import blockbuster.blockbuster as engine
from blockbuster import BlockBuster, BlockBusterFunction, BlockingError

import aiockpt

PACKAGE = str(Path(next(iter(aiockpt.__path__))).resolve()) + "/"
TESTS = str(Path(__file__).resolve().parent) + "/"
TEST_KIT = PACKAGE + "testing"

WATCHED = (
    "builtins.open",
    "fcntl.flock",
    "fcntl.lockf",
    "io.open",
    "os.chmod",
    "os.copy_file_range",
    "os.fdatasync",
    "os.fsync",
    "os.ftruncate",
    "os.lstat",
    "os.open",
    "os.posix_fallocate",
    "os.pread",
    "os.preadv",
    "os.pwrite",
    "os.pwritev",
    "os.readv",
    "os.scandir",
    "os.truncate",
    "os.utime",
    "os.writev",
)
"""What blockbuster does not watch by itself and a checkpoint library lives on."""

HARMLESS = ("os.getcwd", "os.path.abspath", "os.path.samestat")
"""Watched by blockbuster, but answered from memory: they cannot wait for a disk."""

EXEMPT = {
    "_find_and_load": "<frozen importlib._bootstrap>",  # a module imported on its first use
    "_iter_file_finder_modules": "pkgutil.py",  # and the search for plug-ins that precedes it
    "getsourcefile": "inspect.py",  # a web framework that looks where a handler is from
    "checkcache": "linecache.py",  # a traceback or warning that quotes its source
    "updatecache": "linecache.py",
    "emit": "logging/__init__.py",  # where log records go is the application's choice
}
"""Functions, and the files they are in, whose callees may block."""

seen: list[str] = []
"""The blocking calls of the running test, as 'os.fsync at _files.py:12 in finish'."""


def _frames() -> Iterator[FrameType]:
    """Walk the stack outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owner() -> FrameType | None:
    """Find the innermost project frame if it is the package's, and nothing excuses it."""
    owner: FrameType | None = None
    decided = False
    for frame in _frames():
        file = frame.f_code.co_filename
        exempt_file = EXEMPT.get(frame.f_code.co_name)
        if exempt_file is not None and file.endswith(exempt_file):
            return None
        if not decided and file != __file__ and file.startswith((PACKAGE, TESTS)):
            decided = True
            owner = frame if file.startswith(PACKAGE) and not file.startswith(TEST_KIT) else None
    return owner


class GuardError(BlockingError):
    """A blocking call on the loop's thread, raised at the call and written down."""

    def __init__(self, func: str) -> None:
        super().__init__(func)
        frame = _owner()
        where = frame and f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        seen.append(f"{func}{where or ''}")


def _excused(theirs: Callable[..., bool], *args: object, **kwargs: object) -> bool:
    """Decide whether a call on the loop's thread may pass."""
    return _owner() is None or theirs(*args, **kwargs)


def _build() -> BlockBuster:
    """Put together everything that is watched."""
    buster = BlockBuster()
    for name in HARMLESS:
        del buster.functions[name]
    for name in WATCHED:
        # "os.scandir" is blockbuster's own name for the iterator's steps.
        buster.functions[f"{name}()"] = BlockBusterFunction(None, name)
    for function in buster.functions.values():
        function.can_block_predicate = functools.partial(_excused, function.can_block_predicate)
    return buster


@contextmanager
def watching() -> Iterator[None]:
    """Watch blocking calls while the body runs."""
    buster = _build()
    original = engine.BlockingError
    engine.BlockingError = GuardError  # type: ignore[misc]
    buster.activate()
    try:
        yield
    finally:
        buster.deactivate()
        engine.BlockingError = original  # type: ignore[misc]
