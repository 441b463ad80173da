"""FileSaver with a process: what it may run, how it dies, what it leaves behind. Chainer's by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import aiockpt
from aiockpt import FileSaver, Phase, SaveCancelledError, SaveError, StorageError, UsageError
from tests.filesavers import (
    children,
    fail,
    fill,
    keeper,
    names,
    number_in,
    read,
    slow,
    target,
    worker_pid,
    write_json,
)
from tests.savers import until


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process and no shared memory is left by any test here."""
    shared = set(os.listdir("/dev/shm"))
    yield
    assert children() == []
    assert set(os.listdir("/dev/shm")) <= shared


# ---------------------------------------------------------------- Chainer's writers


async def test_process_writer(tmp_path: Path) -> None:
    """ProcessWriter is `process`: the savefun runs in another process, one save at a time."""
    async with FileSaver(write_json, worker="process", extra="x") as saver:
        first = await saver.stage([1], tmp_path / "1.json")
        second = asyncio.create_task(saver.stage([2], tmp_path / "2.json", extra="y"))
        await asyncio.sleep(0.02)
        assert not second.done()
        await first
        await (await second)
        pid = worker_pid(saver)
        assert [p.pid for p in children()] == [pid]
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    assert one == {"pid": pid, "main": True, "target": [1], "extra": "x"}
    assert two == {"pid": pid, "main": True, "target": [2], "extra": "y"}
    assert pid != os.getpid()
    assert names(tmp_path) == ["1.json", "2.json"]


async def test_process_queue_writer(tmp_path: Path) -> None:
    """ProcessQueueWriter is `process` with `max_pending`; hooks run here; the memory is used again."""
    state = target(0)
    told: list[tuple[str, int]] = []
    async with FileSaver(worker="process", max_pending=3, keep=4) as saver:
        saver.add_after_save(lambda path: told.append((path.name, os.getpid())))
        for round_ in range(2):
            handles = []
            for n in range(3):
                fill(state, 10 * round_ + n)
                handles.append(await saver.stage(state, tmp_path / f"{round_}{n}.pt"))
            assert handles[-1].phase == Phase.STAGED
            for handle in handles:
                await handle
        assert len(saver._saving._arenas._idle) == 3
        # A larger target gets larger memory, in place of one of these.
        state["w"] = torch.randn(1 << 20)
        await saver.save(state, tmp_path / "large.pt")
        assert torch.equal(read(tmp_path / "large.pt")["w"], state["w"])
        assert len(saver._saving._arenas._idle) == 3
    assert told[:-1] == [(f"{r}{n}.pt", os.getpid()) for r in range(2) for n in range(3)]
    assert {name: number_in(read(tmp_path / name)) for name in names(tmp_path)} == {
        "10.pt": 10,
        "11.pt": 11,
        "12.pt": 12,
        "large.pt": 12,
    }


# ---------------------------------------------------------------- what may be run


def test_what_cannot_be_imported_is_refused_at_once() -> None:
    """A lambda, a function inside another, keywords that do not pickle."""

    def inner(path: str, given: object) -> None:
        raise AssertionError

    for savefun in (lambda path, given: None, inner):
        with pytest.raises(UsageError, match=r"worker='process' cannot pass .*<locals>.*imported"):
            FileSaver(savefun, worker="process")
    with pytest.raises(UsageError, match="keywords must be picklable"):
        FileSaver(write_json, worker="process", extra=lambda: 1)


@pytest.mark.slow
async def test_keywords_of_one_save_are_looked_at_at_the_call(tmp_path: Path) -> None:
    """Before anything is written."""
    async with FileSaver(write_json, worker="process") as saver:
        with pytest.raises(UsageError, match="must be picklable"):
            await saver.save([1], tmp_path / "a", extra=lambda: 1)
    assert names(tmp_path) == []


@pytest.mark.slow
async def test_what_the_savefun_keeps_stays_as_it_was(tmp_path: Path) -> None:
    """Memory that something in the process refers to is not used again."""
    async with FileSaver(keeper, worker="process") as saver:
        for n in range(3):
            await saver.save(target(n), tmp_path / "a.pt")
            assert torch.load(tmp_path / "a.pt") == list(range(n + 1))
        assert saver._saving._arenas._idle == []


@pytest.mark.slow
def test_functions_and_classes_of_a_script(tmp_path: Path) -> None:
    """The main module is imported in the process if something of it is needed, and only then."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, dataclasses
        import aiockpt

        with open("imported", "a") as file:
            file.write(__name__ + "\\n")

        @dataclasses.dataclass
        class Config:
            n: int

        async def main():
            async with aiockpt.FileSaver(worker="process") as saver:
                await saver.save([1], "plain.pt")
                assert open("imported").read().split() == ["__main__"]
                await saver.save([Config(1)], "a.pt")
                await saver.save([Config(2)], "b.pt")

        if __name__ == "__main__":
            asyncio.run(main())
            import torch
            assert torch.load("b.pt", weights_only=False) == [Config(2)]
        """)
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imported").read_text().split() == ["__main__", "__mp_main__"]


def test_a_function_that_was_typed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module has no file to import."""
    typed = types.ModuleType("__main__")
    exec("def savefun(path, target): pass", typed.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", typed)
    with pytest.raises(UsageError, match="cannot import savefun: it was typed in"):
        FileSaver(typed.savefun, worker="process")


# ---------------------------------------------------------------- errors and deaths


async def test_errors_come_with_type_text_and_traceback(tmp_path: Path) -> None:
    """Those that do not survive pickling too, and `SystemExit`; the process goes on."""
    async with FileSaver(fail, worker="process") as saver:
        pids = set()
        for how, cause, text in (
            ("value", ValueError, "the savefun says no"),
            ("odd", RuntimeError, "tests.filesavers.OddError: odd 1 2"),
            ("exit", RuntimeError, "SystemExit: 3"),
            ("os", PermissionError, "not here"),
        ):
            with pytest.raises((SaveError, StorageError), match=text) as caught:
                await saver.save(target(1), tmp_path / "a", how=how)
            assert type(caught.value.__cause__) is cause
            assert caught.value.file == str(tmp_path / "a")
            (note,) = caught.value.__cause__.__notes__
            assert note.startswith("In the worker process:\nTraceback")
            assert "in fail" in note
            pids.add(worker_pid(saver))
        await saver.save(target(1), tmp_path / "b", how="not at all")
        assert pids == {worker_pid(saver)}
    assert names(tmp_path) == ["b"]


@pytest.mark.slow
async def test_the_death_of_the_process_fails_one_save(tmp_path: Path) -> None:
    """The save under way says how it died; the next one has a new process; what was staged is written."""
    async with FileSaver(fail, worker="process", max_pending=2) as saver:
        first = await saver.stage(target(1), tmp_path / "a", how="die")
        second = await saver.stage(target(2), tmp_path / "b", how="not at all")
        with pytest.raises(SaveError, match=r"process \d+ was killed by SIGKILL while it wrote a;") as caught:
            await first
        assert isinstance(caught.value.__cause__, ChildProcessError)
        assert caught.value.file == str(tmp_path / "a")
        await second
        pid = worker_pid(saver)
        psutil.Process(pid).kill()  # it is idle: no save suffers from that
        await saver.save(target(3), tmp_path / "c", how="not at all")
        assert worker_pid(saver) != pid
    assert names(tmp_path) == ["b", "c"]


@pytest.mark.slow
async def test_a_process_that_cannot_start_is_told(tmp_path: Path) -> None:
    """It ends before it is ready: the save says so, and the next one tries again."""
    async with FileSaver(worker="process") as saver:
        psutil.Process(worker_pid(saver)).kill()
        with pytest.raises(SaveError, match="was killed by SIGKILL before it was ready"):
            await saver.save(target(1), tmp_path / "a")
        await saver.save(target(2), tmp_path / "a")
    assert number_in(read(tmp_path / "a")) == 2


async def test_a_worker_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering says so; the saver is closed."""
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: str(tmp_path / "no python"))
    saver = FileSaver(worker="process")
    with pytest.raises(SaveError, match=r"cannot start the worker: .*no python"):
        await saver.__aenter__()
    await saver.aclose()


@pytest.mark.slow
async def test_a_cancelled_save_ends_its_process(tmp_path: Path) -> None:
    """At once, however long the savefun would take; the next save works."""
    mark = tmp_path / "inside"
    (tmp_path / "run").mkdir()
    async with FileSaver(slow, worker="process") as saver:
        pending = await saver.stage(target(1), tmp_path / "run" / "a", mark=str(mark))
        pid = worker_pid(saver)
        await until(mark.exists)
        await pending.cancel_and_wait()
        assert not psutil.pid_exists(pid)
        with pytest.raises(SaveCancelledError):
            await pending
        assert names(tmp_path / "run") == []
        mark.unlink()
        pending = await saver.stage(target(2), tmp_path / "run" / "b", mark=str(mark), seconds=0.2)
        await until(mark.exists)
        ticks = 0
        while not pending.done():  # and the loop turns meanwhile
            await asyncio.sleep(0.001)
            ticks += 1
        assert ticks > 20
    assert number_in(read(tmp_path / "run" / "b")) == 2


@pytest.mark.slow
async def test_a_stuck_process_is_killed_at_the_end(tmp_path: Path) -> None:
    """`drain_timeout` holds for it too, and nothing is leaked."""
    mark = tmp_path / "inside"
    (tmp_path / "run").mkdir()
    saver = await FileSaver(slow, worker="process", drain_timeout=0.1).__aenter__()
    await saver.stage(target(1), tmp_path / "run" / "a", mark=str(mark))
    await until(mark.exists)
    with pytest.raises(aiockpt.DrainTimeoutError, match="did not end within"):
        await saver.aclose()
    assert names(tmp_path / "run") == []


# ---------------------------------------------------------------- what is left behind

PARENT = """
import asyncio, os, sys
import torch
import aiockpt
from tests.filesavers import slow

async def main(run, mark):
    saver = await aiockpt.FileSaver(slow, worker="process").__aenter__()
    await saver.stage({"w": torch.ones(100_000)}, run + "/a", mark=mark)
    print(saver._saving.worker.pid, flush=True)
    if os.fork() == 0:  # a data loader's worker, which has the line open as well
        import time
        time.sleep(60)
        os._exit(0)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_parent_takes_its_process_along(tmp_path: Path) -> None:
    """In the middle of a savefun, though a forked child holds the line. What remains is the hidden folder."""
    (tmp_path / "run").mkdir()
    mark = tmp_path / "inside"
    command = [sys.executable, "-c", PARENT, str(tmp_path / "run"), str(mark)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        while not mark.exists():
            time.sleep(0.01)
        family = psutil.Process(parent.pid).children(recursive=True)
        while len(family) < 2:
            time.sleep(0.01)
            family = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
        parent.wait(20)
        child.wait(20)
        for other in family:  # the forked one, which the kernel does not end
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
    (left,) = names(tmp_path / "run")
    assert left.startswith(".a.")
    assert left.endswith(".tmp")


@pytest.mark.slow
def test_a_saver_that_nobody_closed_leaves_no_process(tmp_path: Path) -> None:
    """The interpreter ends, and the process with it."""
    code = """
        import asyncio, sys, warnings
        import aiockpt
        warnings.simplefilter("ignore")
        async def main():
            saver = await aiockpt.FileSaver(worker="process").__aenter__()
            await saver.save([1], sys.argv[1])
            print(saver._saving.worker.pid)
        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "a.pt"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(20)
    assert names(tmp_path) == ["a.pt"]
