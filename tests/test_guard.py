"""The guard and the leak check: they fire when they must, and only then."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockingError

from tests import guard, leaks

SOURCE = """
import builtins, fcntl, io, os, pathlib, threading, time, warnings

CALLS = {
    "os.open": lambda fd, folder: os.close(os.open(folder / "file", os.O_RDONLY)),
    "os.stat": lambda fd, folder: os.stat(folder / "file"),
    "os.lstat": lambda fd, folder: os.lstat(folder / "file"),
    "os.fsync": lambda fd, folder: os.fsync(fd),
    "os.fdatasync": lambda fd, folder: os.fdatasync(fd),
    "os.pread": lambda fd, folder: os.pread(fd, 4, 0),
    "os.preadv": lambda fd, folder: os.preadv(fd, [bytearray(4)], 0),
    "os.pwrite": lambda fd, folder: os.pwrite(fd, b"x", 0),
    "os.pwritev": lambda fd, folder: os.pwritev(fd, [b"x"], 0),
    "os.read": lambda fd, folder: os.read(fd, 1),
    "os.write": lambda fd, folder: os.write(fd, b"x"),
    "os.readv": lambda fd, folder: os.readv(fd, [bytearray(4)]),
    "os.writev": lambda fd, folder: os.writev(fd, [b"x"]),
    "os.ftruncate": lambda fd, folder: os.ftruncate(fd, 64),
    "os.truncate": lambda fd, folder: os.truncate(folder / "file", 64),
    "os.posix_fallocate": lambda fd, folder: os.posix_fallocate(fd, 0, 64),
    "os.copy_file_range": lambda fd, folder: os.copy_file_range(fd, fd, 1, 0, 32),
    "os.chmod": lambda fd, folder: os.chmod(folder / "file", 0o644),
    "os.utime": lambda fd, folder: os.utime(folder / "file"),
    "os.statvfs": lambda fd, folder: os.statvfs(folder),
    "os.link": lambda fd, folder: os.link(folder / "file", folder / "a"),
    "os.rename": lambda fd, folder: os.rename(folder / "a", folder / "b"),
    "os.replace": lambda fd, folder: os.replace(folder / "b", folder / "c"),
    "os.unlink": lambda fd, folder: os.unlink(folder / "c"),
    "os.symlink": lambda fd, folder: os.symlink("file", folder / "d"),
    "os.readlink": lambda fd, folder: os.readlink(folder / "d"),
    "os.remove": lambda fd, folder: os.remove(folder / "d"),
    "os.mkdir": lambda fd, folder: os.mkdir(folder / "sub"),
    "os.rmdir": lambda fd, folder: os.rmdir(folder / "sub"),
    "os.scandir": lambda fd, folder: os.scandir(folder).close(),
    "os.listdir": lambda fd, folder: os.listdir(folder),
    "fcntl.flock": lambda fd, folder: fcntl.flock(fd, fcntl.LOCK_SH),
    "fcntl.lockf": lambda fd, folder: fcntl.lockf(fd, fcntl.LOCK_SH),
    "io.open": lambda fd, folder: io.open(folder / "file").close(),
    "builtins.open": lambda fd, folder: open(folder / "file").close(),
    "pathlib": lambda fd, folder: (folder / "file").read_bytes(),
    "time.sleep": lambda fd, folder: time.sleep(0.001),
}

async def awaited(name, fd, folder):
    CALLS[name](fd, folder)

def swallow(name, fd, folder):
    try:
        CALLS[name](fd, folder)
    except Exception:
        return True
    return False

def call(function):
    return function()

def import_for_the_first_time(name):
    return __import__(name)

def warn_and_log(logger):
    warnings.formatwarning(UserWarning("odd"), UserWarning, "odd.py", 1)
    try:
        1 / 0
    except ZeroDivisionError:
        logger.exception("odd")

def wait_for(event):
    event.wait(0.001)
"""


def _module(file: str) -> types.ModuleType:
    """Make a module whose code lies, to all appearances, in that file."""
    module = types.ModuleType("pretender")
    exec(compile(SOURCE, file, "exec"), vars(module))
    return module


INSIDE = _module(guard.PACKAGE + "_pretender.py")
OUTSIDE = _module("/elsewhere/pretender.py")
NAMES = sorted(INSIDE.CALLS)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A descriptor of tmp_path / "file", for reading and writing."""
    (tmp_path / "file").write_bytes(b"0123456789abcdef" * 4)
    opened = os.open(tmp_path / "file", os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("name", NAMES)
async def test_fires(name: str, fd: int, tmp_path: Path, blocking_calls: list[str]) -> None:
    """A blocking call of the package's code on the loop's thread raises and is written down."""
    with pytest.raises(BlockingError):
        INSIDE.CALLS[name](fd, tmp_path)
    with pytest.raises(BlockingError):
        await INSIDE.awaited(name, fd, tmp_path)
    expected = "io.open" if name == "pathlib" else name
    assert [call.partition(" ")[0].removesuffix("()") for call in blocking_calls] == [expected] * 2
    assert "_pretender.py" in blocking_calls[0]
    blocking_calls.clear()


async def test_fires_in_tasks_and_callbacks(fd: int, tmp_path: Path, blocking_calls: list[str]) -> None:
    """It does not matter who called the package: a task of its own, or the loop itself."""
    loop = asyncio.get_running_loop()
    with pytest.raises(BlockingError):
        await loop.create_task(INSIDE.awaited("os.fsync", fd, tmp_path))
    ran = loop.create_future()
    loop.call_soon(lambda: ran.set_result(INSIDE.swallow("os.fsync", fd, tmp_path)))
    assert await ran
    assert len(blocking_calls) == 2
    blocking_calls.clear()


async def test_waiting_for_a_thread_is_blocking(blocking_calls: list[str]) -> None:
    """A wait on an event or lock of threads holds up the loop like a disk does."""
    with pytest.raises(BlockingError):
        INSIDE.wait_for(threading.Event())
    assert blocking_calls
    blocking_calls.clear()


async def test_threads_may_block(fd: int, tmp_path: Path, blocking_calls: list[str]) -> None:
    """In a thread every one of the calls passes: that is where they belong."""
    for name, call in INSIDE.CALLS.items():
        await asyncio.get_running_loop().run_in_executor(None, call, fd, tmp_path)
        assert not blocking_calls, name


def test_no_loop_no_objection(fd: int, tmp_path: Path, blocking_calls: list[str]) -> None:
    """Where no loop runs there is nothing to hold up."""
    for name, call in INSIDE.CALLS.items():
        call(fd, tmp_path)
        assert not blocking_calls, name


async def test_others_may_block(fd: int, tmp_path: Path, blocking_calls: list[str]) -> None:
    """Calls that neither the package nor its callees make are none of the guard's business."""
    for name, call in OUTSIDE.CALLS.items():
        call(fd, tmp_path)
        assert not blocking_calls, name


async def test_callbacks_of_a_test_may_block(tmp_path: Path, blocking_calls: list[str]) -> None:
    """A test's own function may touch the disk even when the package calls it."""
    assert INSIDE.call(lambda: (tmp_path / "mine").write_bytes(b"x")) == 1
    assert not blocking_calls


async def test_helpers_of_the_package_may_not_block(
    fd: int, tmp_path: Path, blocking_calls: list[str]
) -> None:
    """Whoever is called by the package blocks in its name, library code too."""
    with pytest.raises(BlockingError):
        INSIDE.call(lambda: INSIDE.call(lambda: INSIDE.CALLS["os.stat"](fd, tmp_path)))
    with pytest.raises(BlockingError):
        INSIDE.CALLS["pathlib"](fd, tmp_path)
    assert len(blocking_calls) == 2
    blocking_calls.clear()


async def test_imports_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking_calls: list[str]
) -> None:
    """A module imported on first use reads files, and that is accepted, also if it does so itself."""
    (tmp_path / "imported_late.py").write_text("import os\nhere = os.listdir(os.path.dirname(__file__))\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "imported_late.py" in INSIDE.import_for_the_first_time("imported_late").here
    assert not blocking_calls


async def test_warnings_and_logs_pass(blocking_calls: list[str]) -> None:
    """A warning or a traceback in the log looks up its source line; nobody can ask for less."""
    INSIDE.warn_and_log(logging.getLogger("aiockpt.test"))
    assert not blocking_calls


SWALLOWED = """
from tests.test_guard import INSIDE

async def test_swallows():
    assert INSIDE.swallow("os.stat", 0, __import__("pathlib").Path("/"))

async def test_is_clean():
    pass
"""


def test_swallowed_calls_fail_the_test(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """`except Exception` in the package cannot hide a blocking call, and the next test starts clean."""
    monkeypatch.setenv("AIOCKPT_TEST_LOOP", "asyncio")
    root = Path(__file__).parent.parent
    pytester.makeconftest("from tests.conftest import *\nfrom tests.conftest import _watch_blocking_calls\n")
    pytester.makepyfile(SWALLOWED)
    done = pytester.runpytest_subprocess(
        "-c", str(root / "pyproject.toml"), "--rootdir", str(pytester.path), "."
    )
    done.assert_outcomes(passed=2, errors=1)
    done.stdout.fnmatch_lines(
        ["*event loop's thread was blocked by*", "*os.stat at *_pretender.py*in <lambda>*"]
    )


def test_leaked_descriptor_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor left open is named with the file it points at."""
    monkeypatch.setattr(leaks, "PATIENCE", 0.0)
    with leaks.checked() as leaked:
        fd = os.open(tmp_path / "left", os.O_CREAT | os.O_WRONLY)
    os.close(fd)
    assert leaked == [f"descriptor {fd} -> {tmp_path / 'left'}"]


def test_leaked_thread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of ours that goes on is named; other people's threads are theirs."""
    monkeypatch.setattr(leaks, "PATIENCE", 0.0)
    done = threading.Event()
    ours = threading.Thread(target=done.wait, name="aiockpt-bulk-9")
    theirs = threading.Thread(target=done.wait, name="pool-1")
    with leaks.checked() as leaked:
        ours.start()
        theirs.start()
    done.set()
    ours.join()
    theirs.join()
    assert leaked == ["thread aiockpt-bulk-9"]


def test_threads_get_time_to_end() -> None:
    """A lane that ends a moment after its last work is no leak."""
    end: Callable[[], None] = lambda: time.sleep(0.1)  # noqa: E731 -- a thread's body in one line
    with leaks.checked() as leaked:
        threading.Thread(target=end, name="aiockpt-bulk-9").start()
    assert leaked == []
