"""Errors of saves: each reaches somebody exactly once, and none hides another."""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aiockpt
from aiockpt import (
    BusyError,
    CheckpointError,
    DrainTimeoutError,
    PreviousSaveError,
    SaveCancelledError,
    SaveErrors,
    Saver,
    StepError,
    StepExistsError,
    StorageError,
    UsageError,
    _running,
)
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyStore
from tests.proof import assert_sound, litter, steps
from tests.savers import assert_quiet, busy_threads, in_thread, large, small_blocks, until
from tests.stalling import Disk, a_write, before_commit, before_staged, store_on


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small poisoned blocks."""
    with small_blocks():
        yield


async def fail(saver: Saver, disk: Disk, step: int) -> aiockpt.PendingSave:
    """A save that fails with nobody waiting."""
    disk.arm()
    pending = saver.save_nowait(large(step), step=step)
    await until(lambda: pending not in saver.pending)
    disk.heal()
    return pending


def breaking() -> Disk:
    """A disk whose writes fail once, when armed."""
    return Disk(a_write, kind="error")


# ---------------------------------------------------------------- exactly once


async def test_an_awaited_error_is_reported(tmp_path: Path) -> None:
    """Whoever awaits gets it, any number of times; nobody else does; it stays in `failures`."""
    disk = breaking()
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        with pytest.raises(StorageError) as error:
            await saver.save(large(1), step=1)
        assert error.value.step == 1
        assert error.value.errno == 5
        assert list(saver.failures) == [error.value]
        pending = await fail(saver, disk, 2)
        for _ in range(2):
            with pytest.raises(StorageError):
                await pending
        await saver.save(large(3), step=3)
        await saver.drain()
        assert len(saver.failures) == 2
    assert await steps(tmp_path) == (3,)


async def test_an_unseen_error_is_logged_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the step, before anybody asks; an awaited one is not logged."""
    disk = breaking()
    async with Saver(store_on(disk, tmp_path), on_failure="log") as saver:
        await fail(saver, disk, 1)
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert record.name == "aiockpt"
        assert record.step == 1  # type: ignore[attr-defined]
        assert "Input/output error" in record.getMessage()
        with pytest.raises(StorageError):
            await saver.drain()
        caplog.clear()
        disk.arm()
        with pytest.raises(StorageError):
            await saver.save(large(2), step=2)
        assert caplog.records == []


@pytest.mark.parametrize("verb", ["save", "stage", "staging"])
async def test_the_next_save_tells_of_an_unseen_error(verb: str, tmp_path: Path) -> None:
    """Once, with the accepted save in `.pending`, which goes on."""
    disk = breaking()
    async with Saver(store_on(disk, tmp_path)) as saver:
        await fail(saver, disk, 1)
        with pytest.raises(PreviousSaveError, match="step 1") as error:
            if verb == "save":
                await saver.save(large(2), step=2)
            elif verb == "stage":
                await saver.stage(large(2), step=2)
            else:
                async with saver.staging(large(2), step=2):
                    pass
        assert error.value.step == 1
        assert isinstance(error.value.__cause__, StorageError)
        pending = error.value.pending
        assert isinstance(pending, aiockpt.PendingSave)
        assert pending.phase >= aiockpt.Phase.STAGED
        assert pickle.loads(pickle.dumps(error.value)).pending is None
        assert (await pending).step == 2
        await saver.save(large(3), step=3)
        await saver.drain()
    assert await steps(tmp_path) == (2, 3)


async def test_on_failure_log_leaves_the_next_save_alone(tmp_path: Path) -> None:
    """It is raised by leaving all the same."""
    disk = breaking()
    with pytest.raises(StorageError):
        async with Saver(store_on(disk, tmp_path), on_failure="log") as saver:
            await fail(saver, disk, 1)
            await saver.save(large(2), step=2)
    assert await steps(tmp_path) == (2,)


@pytest.mark.parametrize("end", ["drain", "aclose", "leave"])
async def test_draining_raises_what_nobody_was_told_of(end: str, tmp_path: Path) -> None:
    """One error as it is, once."""
    disk = breaking()
    saver = await Saver(store_on(disk, tmp_path)).__aenter__()
    pending = await fail(saver, disk, 1)
    with pytest.raises(StorageError) as error:
        if end == "drain":
            await saver.drain()
        elif end == "aclose":
            await saver.aclose()
        else:
            await saver.__aexit__(None, None, None)
    assert pending.exception() is error.value
    await saver.aclose()


async def test_several_errors_come_as_a_group(tmp_path: Path) -> None:
    """`SaveErrors` is caught by `except CheckpointError` and by `except*`."""
    disk = breaking()
    with pytest.raises(SaveErrors) as error:
        async with Saver(store_on(disk, tmp_path)) as saver:
            for step in (1, 2, 3):
                await fail(saver, disk, step)
    assert [e.step for e in error.value.exceptions if isinstance(e, StorageError)] == [1, 2, 3]
    assert isinstance(error.value, CheckpointError)
    assert isinstance(error.value, ExceptionGroup)


async def test_a_waiter_that_goes_leaves_the_error_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that is cancelled just when the save fails was not told."""
    disk = breaking()
    with pytest.raises(StorageError):
        async with Saver(store_on(disk, tmp_path)) as saver:
            disk.arm()
            pending = saver.save_nowait(large(1), step=1)
            waiter = asyncio.create_task(pending.committed())
            wake = pending._wake

            def wake_and_cancel() -> None:
                wake()
                if pending.done():
                    waiter.cancel()  # it was woken to be told, and has not run yet

            monkeypatch.setattr(pending, "_wake", wake_and_cancel)
            await asyncio.wait([waiter])
            assert waiter.cancelled()


async def test_one_failure_leaves_the_others_alone(tmp_path: Path) -> None:
    """A queued save behind a failed one commits."""
    disk = breaking()
    async with Saver(store_on(disk, tmp_path), max_pending=3, on_failure="log") as saver:
        disk.arm()
        pendings = [saver.save_nowait(large(step), step=step) for step in (1, 2, 3)]
        got = await asyncio.gather(*pendings, return_exceptions=True)
        assert sum(isinstance(g, StorageError) for g in got) == 1
        assert_quiet(saver)
    assert len(await steps(tmp_path)) == 2


async def test_failures_are_the_last_hundred(tmp_path: Path) -> None:
    """They do not grow for ever; cancelled saves are no failures."""
    store = FaultyStore(MemoryStore())
    async with Saver(store, on_failure="log") as saver:
        for step in range(105):
            store.faults.fail_at = len(store.operations) + 2
            with pytest.raises(StorageError):
                await saver.save({"n": step}, step=step)
        assert [error.step for error in saver.failures] == list(range(5, 105))
        pending = saver.save_nowait({}, step=500)
        await pending.cancel_and_wait()
        assert len(saver.failures) == 100
        assert saver.failures[-1].step == 104


# ---------------------------------------------------------------- the body's own error


async def test_the_bodys_error_goes_through_unchanged(tmp_path: Path) -> None:
    """Errors of saves stand in its notes, each of them."""
    disk = breaking()
    raised = ValueError("the body")
    with pytest.raises(ValueError, match="the body") as error:
        async with Saver(store_on(disk, tmp_path)) as saver:
            await fail(saver, disk, 1)
            await fail(saver, disk, 2)
            raise raised
    assert error.value is raised
    notes = "\n".join(error.value.__notes__)
    assert notes.count("StorageError") == 2
    assert notes.count("While the saver was closed") == 2


async def test_a_body_that_raised_keeps_what_was_staged(tmp_path: Path) -> None:
    """Staged saves are drained, also those copied in line; unstaged ones are cancelled."""
    disk = Disk(before_staged)
    with pytest.raises(KeyError) as error:
        async with Saver(store_on(disk, tmp_path), max_pending=3) as saver:
            await saver.stage(large(1), step=1)
            copied = saver.save_nowait(large(2), step=2)
            disk.arm()
            unstaged = asyncio.create_task(saver.stage(large(3), step=3))
            await until(disk.stalled.is_set)
            asyncio.get_running_loop().call_later(0.05, disk.heal)
            raise KeyError
    assert copied.done()
    with pytest.raises(SaveCancelledError):
        await unstaged
    assert "SaveCancelledError" not in "".join(getattr(error.value, "__notes__", []))
    assert 3 not in await steps(tmp_path)
    assert {1, 2} & set(await steps(tmp_path))
    assert litter(tmp_path) == []


async def test_a_cancelled_body_drains_first(tmp_path: Path) -> None:
    """The cancellation goes on when the staged save is committed; its failures are in the notes."""
    disk = Disk(a_write)

    async def body() -> None:
        async with Saver(store_on(disk, tmp_path)) as saver:
            disk.arm()
            await saver.stage(large(1), step=1)
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await until(disk.stalled.is_set)
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    disk.heal()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await steps(tmp_path) == (1,)


async def test_closing_under_cancellation_notes_what_failed(tmp_path: Path) -> None:
    """The CancelledError that comes out tells of the failed save."""
    disk = Disk(a_write, kind="error")

    async def body() -> None:
        async with Saver(store_on(disk, tmp_path)) as saver:
            await fail(saver, disk, 1)
            me = asyncio.current_task()
            assert me is not None
            asyncio.get_running_loop().call_soon(me.cancel)

    task = asyncio.create_task(body())
    with pytest.raises(asyncio.CancelledError) as error:
        await task
    assert "StorageError" in "".join(error.value.__notes__)


# ---------------------------------------------------------------- refusals


async def test_refused_saves_are_no_failures_of_others(tmp_path: Path) -> None:
    """Order and overlap: typed, with the step; told to the one who asked and to nobody else."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path), on_overlap="error") as saver:
        await saver.save(large(5), step=5)
        with pytest.raises(StepExistsError) as exists:
            await saver.save(large(5), step=5)
        assert exists.value.step == 5
        with pytest.raises(StepError) as order:
            await saver.save(large(3), step=3)
        assert order.value.step == 3
        disk.arm()
        pending = await saver.stage(large(6), step=6)
        await until(disk.stalled.is_set)
        for verb in (saver.save, saver.stage):
            with pytest.raises(BusyError, match="step 6") as busy:
                await verb(large(7), step=7)
            assert busy.value.step == 7
        with pytest.raises(BusyError):
            saver.save_nowait(large(7), step=7)
        disk.heal()
        await pending
        assert_quiet(saver)
    assert await steps(tmp_path) == (5, 6)


async def test_misuse_is_told_with_the_remedy(tmp_path: Path) -> None:
    """Not entered, entered twice, closed, another thread, another loop: UsageError at the call."""
    saver = Saver(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: saver.save({}, step=1),
        lambda: saver.save_nowait({}, step=1),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="enter the saver"):
            call()
    with pytest.raises(UsageError, match="enter the saver"):
        await saver.drain()
    await saver.aclose()  # nothing to close
    async with Saver(tmp_path) as saver:
        with pytest.raises(UsageError, match="entered once"):
            await saver.__aenter__()
        pending = saver.save_nowait({}, step=1)
        calls = [
            lambda: saver.save({}, step=2),
            lambda: asyncio.run(saver.drain()),
            lambda: asyncio.run(saver.aclose()),
            lambda: asyncio.run(saver.restore()),
            lambda: asyncio.run(pending.committed()),
            lambda: asyncio.run(pending.cancel_and_wait()),
            pending.as_task,
        ]
        for call in calls:
            got = in_thread(call)
            assert isinstance(got, UsageError), got
            assert "aiockpt.sync" in str(got)
        await pending
    calls = [lambda: saver.save({}, step=3), lambda: saver.staging({}, step=3)]
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()
    await saver.drain()
    await saver.aclose()
    await saver.abort()


@pytest.mark.parametrize(
    "options",
    [
        {"max_pending": 0},
        {"on_overlap": "skip"},
        {"on_failure": "ignore"},
        {"budget": 1},
        {"budget": -1},
        {"step_format": "no field"},
        {"meta": {"a": object()}},
        {"meta": {"a": float("nan")}},
    ],
)
def test_wrong_options_are_refused_where_they_are_given(options: dict[str, object], tmp_path: Path) -> None:
    """At construction, before anything exists."""
    with pytest.raises(UsageError):
        Saver(tmp_path / "run", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


async def test_a_run_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    """A file where the run should be: StorageError, and nothing is left of the saver."""
    (tmp_path / "run").write_text("a file")
    saver = Saver(tmp_path / "run")
    with pytest.raises(StorageError) as error:
        await saver.__aenter__()
    assert error.value.errno
    with pytest.raises(UsageError, match="closed"):
        await saver.save({}, step=1)


# ---------------------------------------------------------------- stuck


async def test_drain_with_a_time_limit_ends_only_the_wait(tmp_path: Path) -> None:
    """`drain(timeout=)`: a typed error that names the step; the save goes on."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        pending = await saver.stage(large(1), step=1)
        with pytest.raises(DrainTimeoutError, match="step 1") as error:
            await saver.drain(timeout=0.05)
        assert isinstance(error.value, TimeoutError)
        disk.heal()
        await saver.drain(timeout=60)
        assert pending.done()
    assert await steps(tmp_path) == (1,)


@pytest.mark.leaks("a thread of the disk stands still until the end of the test")
@pytest.mark.parametrize("where", ["write", "commit"])
async def test_a_stuck_thread_is_written_off(where: str, tmp_path: Path) -> None:
    """`drain_timeout`: an error that names step, file and thread; its blocks are never used again."""
    disk = Disk(a_write if where == "write" else before_commit)
    saver = await Saver(store_on(disk, tmp_path), drain_timeout=0.1).__aenter__()
    disk.arm()
    pending = await saver.stage(large(1), step=1)
    await until(disk.stalled.is_set)
    stuck = [t for t in threading.enumerate() if t.name.startswith("aiockpt-")]
    with pytest.raises(DrainTimeoutError, match=r"aiockpt-(bulk|control)") as error:
        await saver.aclose()
    assert error.value.step == 1
    assert error.value.save_id == pending.save_id
    if where == "write":
        assert error.value.file is not None
        assert error.value.file.endswith(".safetensors")
    assert pending.done()
    assert saver.pending == ()
    pool = saver._saving.reserve._pool
    assert pool is not None
    out = set(pool._out)
    # Another saver is not disturbed, and does not sweep what the thread may still be writing.
    async with Saver(tmp_path) as other:
        await other.save(large(2), step=2)
        assert busy_threads() == []
    assert len(litter(tmp_path)) == 2
    disk.heal()
    for thread in stuck:
        thread.join()
    assert pool._out == out
    lose(saver)
    # A commit that was stuck may still happen, wholly.
    assert await assert_sound(tmp_path) in ([(2,)] if where == "write" else [(2,), (1, 2)])


@pytest.mark.leaks("a thread of the disk stands still until the end of the test")
async def test_a_body_error_outlives_a_stuck_thread(tmp_path: Path) -> None:
    """The drain's own error becomes a note."""
    disk = Disk(a_write)
    with pytest.raises(ValueError) as error:
        async with Saver(store_on(disk, tmp_path), drain_timeout=0.1) as saver:
            disk.arm()
            await saver.stage(large(1), step=1)
            await until(disk.stalled.is_set)
            raise ValueError
    assert "DrainTimeoutError" in "".join(error.value.__notes__)
    disk.heal()
    lose(saver)


async def test_unwinding_that_gets_stuck_is_written_off_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that swallows cancellation for ever cannot keep `aclose`."""
    monkeypatch.setattr(_running, "UNWIND_TRIES", 1)
    store = FaultyStore(MemoryStore(), None, "stall")
    saver = await Saver(store, drain_timeout=0.05).__aenter__()
    pending = await saver.stage({"n": 1}, step=1)
    store.faults.fail_at = None
    await pending
    store.faults.fail_at = len(store.operations) + 1
    late = saver.save_nowait(large(2), step=2)
    await store.stalled.wait()
    with pytest.raises(DrainTimeoutError):
        await saver.aclose()
    assert late.done()
    lose(saver)


def lose(saver: Saver) -> None:
    """Forget blocks that were leaked on purpose: the fixture counts what is out."""
    pool = saver._saving.reserve._pool
    assert pool is not None
    assert pool._out == pool._lost
    pool._out.clear()


# ---------------------------------------------------------------- processes


def child(body: str, run: Path, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own; `RUN` is the folder."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PRELUDE + textwrap.dedent(body)],
        env={"RUN": str(run), "PATH": "/usr/bin:/bin"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


PRELUDE = """
import asyncio, gc, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
from aiockpt import *
from tests.stalling import *
from tests.savers import large, until
warnings.simplefilter("default")
RUN = os.environ["RUN"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["closed", "never closed", "dropped", "interrupted"])
async def test_a_process_with_a_stuck_thread_ends(variant: str, tmp_path: Path) -> None:
    """Whatever the caller does, the process is gone within ten seconds and says which step hung."""
    body = f"""
    variant = {variant!r}
    async def main():
        disk = Disk(a_write)
        saver = await Saver(store_on(disk, RUN), drain_timeout=0.5).__aenter__()
        disk.arm()
        pending = await saver.stage(large(1), step=1)
        await until(disk.stalled.is_set)
        if variant == "closed":
            try:
                await saver.aclose()
            except DrainTimeoutError as error:
                print("told:", error, flush=True)
        elif variant == "interrupted":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(30)
            finally:
                try:
                    await saver.aclose()
                except DrainTimeoutError as error:
                    print("told:", error, flush=True)
        elif variant == "dropped":
            del saver, pending
            gc.collect()
    loop = asyncio.new_event_loop()
    try:
        if variant in ("closed", "interrupted"):
            asyncio.run(main())
        else:
            loop.run_until_complete(main())  # and nobody cancels what is left
    finally:
        print("left", flush=True)
    """
    began = time.monotonic()
    done = await asyncio.get_running_loop().run_in_executor(None, child, body, tmp_path)
    assert time.monotonic() - began < 60
    assert "left" in done.stdout, done.stderr
    if variant in ("closed", "interrupted"):
        assert "step 1 did not end within 0.5 s" in done.stdout
    if variant == "interrupted":
        assert "KeyboardInterrupt" in done.stderr
    assert await steps(tmp_path) == ()


@pytest.mark.slow
async def test_ctrl_c_drains_and_goes_on(tmp_path: Path) -> None:
    """One SIGINT in the body: what was staged is committed, then KeyboardInterrupt."""
    body = """
    async def main():
        async with Saver(RUN) as saver:
            await saver.stage(large(1), step=1)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
    asyncio.run(main())
    """
    done = await asyncio.get_running_loop().run_in_executor(None, child, body, tmp_path)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert "never retrieved" not in done.stderr
    assert "never closed" not in done.stderr
    assert await steps(tmp_path) == (1,)


@pytest.mark.slow
async def test_an_idle_forgotten_saver_delays_no_exit(tmp_path: Path) -> None:
    """No thread is left, one warning names the steps; a failed save that nobody saw is on stderr."""
    body = """
    async def main():
        saver = await Saver(RUN).__aenter__()
        await saver.save(large(1), step=1)
        disk = Disk(a_write, kind="error")
        other = await Saver(store_on(disk, RUN + "-other")).__aenter__()
        disk.arm()
        pending = await other.stage(large(7), step=7)
        await until(pending.done)
    asyncio.run(main())
    gc.collect()
    began = time.monotonic()
    import atexit
    atexit.register(lambda: print("exit took", time.monotonic() - began))
    """
    done = await asyncio.get_running_loop().run_in_executor(None, child, body, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was never closed (pending steps: none)") == 2
    assert "the save of step 7 failed" in done.stderr
    assert "Input/output error" in done.stderr
    assert float(done.stdout.split()[-1]) < 5
    assert await steps(tmp_path) == (1,)


@pytest.mark.slow
async def test_a_forked_child_is_told(tmp_path: Path) -> None:
    """In the child every verb raises; the parent's save is not disturbed; no false warning."""
    body = """
    async def main():
        disk = Disk(a_write)
        async with Saver(store_on(disk, RUN)) as saver:
            disk.arm()
            pending = await saver.stage(large(1), step=1)
            await until(disk.stalled.is_set)
            pid = os.fork()
            if pid == 0:
                said = []
                for call in (lambda: saver.save({}, step=2), lambda: saver.save_nowait({}, step=2)):
                    try:
                        call()
                    except UsageError as error:
                        said.append("child" in str(error))
                del saver
                os._exit(0 if said == [True, True] else 1)
            _, status = os.waitpid(pid, 0)
            disk.heal()
            await pending
            print("child", status)
    warnings.simplefilter("ignore", DeprecationWarning)
    asyncio.run(main())
    """
    done = await asyncio.get_running_loop().run_in_executor(None, child, body, tmp_path)
    assert done.stdout.strip() == "child 0", done.stderr
    assert await steps(tmp_path) == (1,)
