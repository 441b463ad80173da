"""Preemption: the notice comes at once, a save still fits, and handlers come back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiockpt
import aiockpt.sync
from aiockpt import Catalog, Saver, SaverStats, UsageError, preemption
from aiockpt.policies.when import OnPreemption
from tests.crash_child import ROOT, start
from tests.proof import litter, number_in, save, state_of, steps
from tests.savers import in_thread

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


def tell(signum: signal.Signals = TERM) -> None:
    """Send this process a signal."""
    os.kill(os.getpid(), signum)


def mine(number: int, frame: object) -> None:
    """A handler of the test's own."""
    del frame
    seen.append(number)


seen: list[int] = []


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers are in the end what they were before."""
    seen.clear()
    before = {s: signal.signal(s, mine) for s in (TERM, USR1)}
    yield
    now = {s: signal.signal(s, handler) for s, handler in before.items()}
    assert now == {TERM: mine, USR1: mine}


async def test_signal_sets_the_event(caplog: pytest.LogCaptureFixture) -> None:
    """Any of the signals wakes whoever waits, once; more of them change nothing."""
    async with preemption(TERM, USR1) as notice:
        waiting = asyncio.create_task(notice.wait())
        await asyncio.sleep(0)
        assert [notice.requested] == [False]
        tell(USR1)
        tell(TERM)
        await waiting
        assert notice.requested
        assert notice.event.is_set()
        assert notice.signal is USR1
        await notice.wait()
    tell()
    assert seen == [TERM]
    assert not caplog.records


async def test_grace_runs_from_the_notice_on() -> None:
    """What is left of the grace is known, and whether a save fits into it."""
    now = [100.0]
    async with preemption(grace=30, clock=lambda: now[0]) as notice:
        now[0] = 200.0
        assert notice.remaining == 30
        notice.trigger()
        assert notice.signal is None
        now[0] = 210.0
        notice.trigger()
        assert notice.remaining == 20
        assert notice.fits(18)
        assert not notice.fits(19)
        now[0] = 300.0
        assert notice.remaining == 0
        assert not notice.fits(0.001)
    with pytest.raises(UsageError, match="grace"):
        preemption(grace=0)


async def test_fits_by_measured_bandwidth() -> None:
    """Bytes under way count, and so do the bytes of the state; unknown speed says try."""
    async with preemption(grace=10, clock=lambda: 0.0) as notice:
        stats = SaverStats(bandwidth=100.0, last_nbytes=900)
        assert notice.fits(stats)
        assert not notice.fits(stats, nbytes=1000)
        assert not notice.fits(SaverStats(bandwidth=100.0, last_nbytes=900, pending_bytes=100))
        assert notice.fits(SaverStats(), nbytes=1 << 60)


async def test_nested_and_overlapping_notices_are_all_told() -> None:
    """Whichever leaves first, the others go on, and the handler from before comes back last."""
    outer, inner, third = preemption(), preemption(), preemption(TERM)
    await outer.__aenter__()
    async with inner:
        await third.__aenter__()
        tell()
        await asyncio.gather(outer.wait(), inner.wait(), third.wait())
    await outer.__aexit__(None, None, None)
    assert signal.getsignal(TERM) is not mine
    await third.__aexit__(None, None, None)
    assert signal.getsignal(TERM) is mine
    assert seen == []


async def test_handlers_come_back_when_the_body_raises() -> None:
    """Also when it is cancelled."""
    with pytest.raises(ValueError, match="mine"):
        async with preemption(TERM, USR1):
            raise ValueError("mine")
    assert signal.getsignal(TERM) is mine

    async def body() -> None:
        async with preemption():
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    assert signal.getsignal(TERM) is not mine
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_signals_that_cannot_be_caught_leave_nothing_behind() -> None:
    """SIGKILL is refused by the system; what was installed before it is gone again."""
    with pytest.raises(OSError, match="Invalid"):
        async with preemption(TERM, signal.SIGKILL):
            pass


async def test_handler_set_inside_the_body_stays() -> None:
    """Whoever takes the signal over meanwhile keeps it."""
    other: Any = lambda number, frame: None  # noqa: E731
    async with preemption():
        signal.signal(TERM, other)
    assert signal.getsignal(TERM) is other
    signal.signal(TERM, mine)
    async with preemption() as notice:
        tell()
        await notice.wait()


def test_off_the_main_thread_it_says_so_and_can_be_triggered() -> None:
    """A warning, no handler, and `trigger` from the main thread instead."""

    async def body() -> str:
        notice = preemption()
        with pytest.warns(RuntimeWarning, match=r"notice\.trigger"):
            await notice.__aenter__()
        assert signal.getsignal(TERM) is mine
        asyncio.get_running_loop().call_soon(in_thread, notice.trigger)
        await notice.wait()
        await notice.__aexit__(None, None, None)
        return str(notice.signal)

    assert in_thread(lambda: asyncio.run(body())) == "None"


async def test_misuse() -> None:
    """A notice that was not entered cannot be given, and one is entered once."""
    notice = preemption()
    with pytest.raises(UsageError, match="enter"):
        notice.trigger()
    async with notice:
        with pytest.raises(UsageError, match="once"):
            await notice.__aenter__()


async def test_saver_with_a_notice(tmp_path: Path) -> None:
    """It asks to stop, says why, and `OnPreemption` finds a save due, once."""
    async with preemption() as notice, Saver(tmp_path, preemption=notice, when=OnPreemption()) as saver:
        assert [saver.stop_requested] == [None]
        assert not saver.due(3)
        tell()
        await notice.wait()
        assert saver.stop_requested == "preemption (SIGTERM)"
        assert await saver.stage_if_due(state_of(3), step=3) is not None
        assert not saver.due(3)
    assert await steps(tmp_path) == (3,)


# -------------------------------------------------------------- save_on_error


async def test_save_on_error_saves_and_the_body_wins(tmp_path: Path) -> None:
    """The hook gets the exception itself, saves, and the exception goes on without notes."""
    got: list[BaseException] = []

    async def last_word(error: BaseException) -> None:
        got.append(error)
        await saver.save(state_of(2), step=2)

    boom = ValueError("boom")
    with pytest.raises(ValueError, match="boom") as caught:
        async with Saver(tmp_path, save_on_error=last_word) as saver:
            await saver.stage(state_of(1), step=1)
            raise boom
    assert got == [boom]
    assert caught.value is boom
    assert not hasattr(boom, "__notes__")
    assert await steps(tmp_path) == (1, 2)


@pytest.mark.parametrize("how", ["sync", "async", "cancelled", "late"])
async def test_failing_hook_is_a_note(how: str, tmp_path: Path) -> None:
    """Whatever the hook does, the body's exception comes out, and staged saves are committed."""

    def hook(error: BaseException) -> Any:
        if how == "sync":
            raise KeyError("hook")

        async def later() -> None:
            if how == "late":
                await asyncio.Event().wait()
            raise KeyError("hook") if how == "async" else asyncio.CancelledError

        return later()

    with pytest.raises(ValueError, match="boom") as caught:
        async with Saver(
            tmp_path, save_on_error=hook, drain_timeout=0.1 if how == "late" else 600.0
        ) as saver:
            await saver.save(state_of(1), step=1)
            raise ValueError("boom")
    (note,) = caught.value.__notes__
    assert note.startswith("save_on_error failed: ")
    assert await steps(tmp_path) == (1,)


async def test_save_on_error_runs_when_the_body_is_cancelled(tmp_path: Path) -> None:
    """Ctrl-C and time limits are errors, too; the hook may await under the cancellation."""

    async def body(limit: asyncio.Timeout) -> None:
        async with Saver(tmp_path, save_on_error=lambda error: saver.save(state_of(5), step=5)) as saver:
            limit.reschedule(asyncio.get_running_loop().time())  # not before it is entered
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await body(limit)
    assert await steps(tmp_path) == (5,)


async def test_save_on_error_is_not_for_a_good_end_or_a_closed_saver(tmp_path: Path) -> None:
    """No error, or nothing to save with: it is not called."""
    called: list[BaseException] = []
    async with Saver(tmp_path, save_on_error=called.append):
        pass
    with pytest.raises(ValueError, match="late"):
        async with Saver(tmp_path, save_on_error=called.append) as saver:
            await saver.aclose()
            raise ValueError("late")
    assert called == []


def test_save_on_error_of_a_loop_that_is_not_async(tmp_path: Path) -> None:
    """It runs on the caller's thread, where the blocking verbs can be used; its error is a note."""

    def hook(error: BaseException) -> None:
        saver.save(state_of(4), step=4)
        raise KeyError("hook")

    with pytest.raises(ValueError, match="boom") as caught:
        with aiockpt.sync.Saver(tmp_path, save_on_error=hook) as saver:
            raise ValueError("boom")
    assert caught.value.__notes__ == ["save_on_error failed: KeyError: 'hook'"]
    assert asyncio.run(steps(tmp_path)) == (4,)


# -------------------------------------------------------------- processes


def child(program: str, run: Path, loop: str) -> subprocess.Popen[str]:
    """Start a program that will be told to end."""
    words = [sys.executable, "-m", "tests.preempt_child", program, str(run), loop]
    return subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE)


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=pytest.mark.slow)])
def test_sigterm_twice_while_a_save_runs(loop: str, tmp_path: Path) -> None:
    """The save goes on; the same step asked for again waits for it and is refused; exit code 0."""
    with child("twice", tmp_path / "run", loop) as process:
        said = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 0
    assert said["error"] == "StepExistsError"
    assert not said["early"]
    assert said["latency"] < 5  # of a loop that is not held up; not a measurement

    async def look() -> None:
        async with Catalog(tmp_path / "run") as catalog:
            assert await catalog.steps() == (1, 7)
            await catalog.verify(7)
            assert number_in(await catalog.load(7)) == 7

    asyncio.run(look())
    assert litter(tmp_path / "run") == []


@pytest.mark.slow
def test_signal_from_outside_is_noticed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Any task may wait for it: no need to reach the end of a step."""
    with child("at_once", tmp_path / "run", "asyncio") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"ready": True, "fits": True}
        process.send_signal(signal.SIGUSR1)
        said = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 0
    assert int(said["signal"]) == USR1
    assert 0 < said["remaining"] < 60
    assert asyncio.run(steps(tmp_path / "run")) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_forked_child_does_not_inherit_the_notice(loop: str, tmp_path: Path) -> None:
    """A data loader's worker ends by SIGTERM as ever, and the trainer is not told."""
    with child("worker", tmp_path, loop) as process:
        said = json.loads(process.communicate(timeout=60)[0])
    assert said == {"status": -TERM, "told": False}


def test_default_action_leaves_older_steps_and_what_is_swept(tmp_path: Path) -> None:
    """Without a handler the process ends at once; the half-done step is none."""
    asyncio.run(save(tmp_path, state_of(1), 1))
    with start("hold", tmp_path, 2) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        process.terminate()
        process.wait(timeout=60)
    assert process.returncode == -TERM
    assert litter(tmp_path) != []
    assert asyncio.run(steps(tmp_path)) == (1,)
    asyncio.run(save(tmp_path, state_of(2), 2))
    assert litter(tmp_path) == []
    assert asyncio.run(steps(tmp_path)) == (1, 2)
