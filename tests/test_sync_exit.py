"""aiockpt.sync in processes of their own: running loops, forks, forgotten savers, the interpreter's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import aiockpt.sync

HEAD = """
import asyncio, os, sys, threading, time, warnings
import torch
import aiockpt.sync
from tests.stalling import Disk, a_write, before_commit, before_staged, store_on
run = sys.argv[1]
big = {"w": torch.zeros(100_000)}
"""
LIMIT = 60.0
"""Seconds a child may take, on a machine that is busy with other things."""


def child(code: str, run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, to its end."""
    command = [sys.executable, *options, "-c", HEAD + textwrap.dedent(code), str(run)]
    root = str(Path(__file__).parent.parent)
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=root, check=False)


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What a child wrote to stderr, without what development mode says about slow machines and itself."""
    lines = done.stderr.splitlines()
    return [line for line in lines if not line.startswith("Executing ") and "tracemalloc" not in line]


def newest(run: Path) -> int | None:
    """The newest step of a run."""
    found = aiockpt.sync.latest(run)
    return None if found is None else found.step


def test_on_a_running_loop(tmp_path: Path) -> None:
    """Inside `async def` it works, on one loop after another, and each object warns once."""
    done = child(
        """
        warnings.simplefilter("always")
        saver = aiockpt.sync.Saver(run)
        runs = aiockpt.sync.Catalog(run)

        async def first():
            saver.__enter__()
            for step in (1, 2):
                saver.save(big, step=step)

        async def second():
            with saver.staging(big, step=3) as pending:
                pass
            with saver.mutating():
                pass
            pending.result()
            saver.close()
            assert runs.steps() == (1, 2, 3)
            assert runs.latest().step == 3
            assert aiockpt.sync.latest(run).step == 3

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asyncio.run(first())
            asyncio.run(second())
        for warning in caught:
            print(warning.category.__name__, warning.filename, str(warning.message))
        runs.close()
        assert "aiockpt-sync" not in {t.name for t in threading.enumerate()}
        """,
        tmp_path,
        "-X",
        "dev",
    )
    assert (done.returncode, complaints(done)) == (0, [])
    lines = done.stdout.splitlines()
    assert [line.partition(" <string> ")[0] for line in lines] == ["RuntimeWarning"] * 3
    assert "aiockpt.Saver" in lines[0]
    assert "aiockpt.Catalog" in lines[1]
    assert "aiockpt.latest" in lines[2]


def test_forked_child(tmp_path: Path) -> None:
    """A child is refused, by saver, handle and catalog; leaving the parent's block does no harm."""
    done = child(
        """
        from aiockpt.errors import UsageError
        disk = Disk(before_commit)
        runs = aiockpt.sync.Catalog(run)
        with aiockpt.sync.Saver(store_on(disk, run)) as saver:
            old = saver.save(big, step=1)
            runs.steps()
            disk.arm()
            handle = saver.stage(big, step=2)
            disk.stalled.wait()
            pid = os.fork()
            if not pid:
                refused = 0
                calls = [lambda: saver.stage(big, step=3), lambda: saver.pending, saver.close, saver.drain,
                         saver.mutating, saver.restore, handle.result, handle.cancel, runs.steps]
                for call in calls:
                    try:
                        call()
                    except UsageError as error:
                        assert "parent" in str(error), error
                        refused += 1
                assert old.result().step == 1
                with aiockpt.sync.Saver(run + "-child") as mine:
                    mine.save(big, step=1)
                sys.exit(refused)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            disk.heal()
        runs.close()
        print(status, handle.result().step)
        """,
        tmp_path / "run",
    )
    assert (done.returncode, done.stdout) == (0, "9 2\n"), done.stderr
    assert newest(tmp_path / "run-child") == 1


def test_forgotten_in_a_running_program(tmp_path: Path) -> None:
    """A collected saver warns once, naming the steps; what was staged is committed, the thread ends."""
    done = child(
        """
        disk = Disk(before_commit)
        saver = aiockpt.sync.Saver(store_on(disk, run)).__enter__()
        disk.arm()
        handle = saver.stage(big, step=1)
        disk.stalled.wait()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del saver
        (thread,) = [t for t in threading.enumerate() if t.name == "aiockpt-sync"]
        disk.heal()
        assert handle.result().step == 1
        thread.join(30)
        assert not thread.is_alive()
        assert handle.result().step == 1
        (warning,) = caught
        assert warning.category is ResourceWarning
        print(warning.message)
        """,
        tmp_path,
        "-X",
        "dev",
    )
    assert (done.returncode, complaints(done)) == (0, [])
    assert "pending steps: 1" in done.stdout


@pytest.mark.parametrize("idle", [True, False])
def test_forgotten_at_exit(idle: bool, tmp_path: Path) -> None:
    """One warning; no staged save is lost; the program ends as it would have."""
    done = child(
        f"""
        saver = aiockpt.sync.Saver(run).__enter__()
        handle = saver.stage(big, step=1)
        if {idle}:
            handle.result()
        runs = aiockpt.sync.Catalog(run)
        runs.steps()
        sys.exit(3)
        """,
        tmp_path,
        "-W",
        "default",
    )
    assert done.returncode == 3
    assert newest(tmp_path) == 1
    (warning,) = [line for line in complaints(done) if "Warning: " in line]
    assert f"ResourceWarning: a saver of {tmp_path} was never closed" in warning


def test_an_idle_saver_does_not_delay_the_exit(tmp_path: Path) -> None:
    """The process ends at once although the saver's thread is alive."""
    done = child(
        """
        import atexit
        saver = aiockpt.sync.Saver(run).__enter__()
        saver.save(big, step=1)
        began = time.monotonic()
        # Registered last, runs first: time is taken from here to the end of the interpreter, below.
        atexit.register(lambda: print(time.time(), flush=True))
        """,
        tmp_path,
    )
    ended = time.time()
    assert done.returncode == 0
    assert done.stderr == ""
    assert ended - float(done.stdout) < 5


@pytest.mark.slow
@pytest.mark.parametrize("close", ["with", "never", "interrupted"])
@pytest.mark.parametrize("when", ["a_write", "before_staged"])
def test_a_stuck_disk_does_not_keep_the_process(close: str, when: str, tmp_path: Path) -> None:
    """A thread that never comes back costs the drain timeout, and the error says which step."""
    if close == "interrupted":
        act = "threading.Timer(0.2, lambda: os.kill(os.getpid(), 2)).start(); saver.save(big, step=1)"
    elif when == "before_staged":
        act = "saver.save_nowait(big, step=1)"
    else:
        act = "saver.stage(big, step=1)"
    enter = "with aiockpt.sync.Saver(store_on(disk, run), drain_timeout=1) as saver:\n    work(saver)"
    if close == "never":
        enter = "saver = aiockpt.sync.Saver(store_on(disk, run), drain_timeout=1).__enter__()\nwork(saver)"
    code = f"""
disk = Disk({when})
def work(saver):
    disk.arm()
    {act}
    assert disk.stalled.wait(30)
    print("stuck", time.time(), flush=True)
try:
    {enter.replace(chr(10), chr(10) + "    ")}
finally:
    print("left", time.time(), flush=True)
"""
    done = child(code, tmp_path)
    ended = time.time()
    began = float(done.stdout.split()[1])
    assert ended - began < 1 + 10
    if close == "interrupted":
        assert done.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in done.stderr
    else:
        assert done.returncode == (1 if close == "with" else 0)
        assert "step 1 did not end within 1 s" in done.stderr
    assert newest(tmp_path) is None


def test_one_ctrl_c_ends_a_training_loop(tmp_path: Path) -> None:
    """What was staged is committed, the exit status is that of an interrupt, no trace of ours is left."""
    done = child(
        """
        with aiockpt.sync.Saver(run) as saver:
            for step in range(1, 10_000):
                saver.stage(big, step=step)
                if step == 3:
                    os.kill(os.getpid(), 2)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGINT
    assert newest(tmp_path) == 3
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "never" not in done.stderr
    assert os.listdir(tmp_path / "step-00000003")
