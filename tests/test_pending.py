"""The handle: waits by anybody, any number of times; what it tells; what keeping it costs."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from aiockpt import (
    Checkpoint,
    Event,
    PendingSave,
    Phase,
    SaveCancelledError,
    Saver,
    StorageError,
    UsageError,
)
from aiockpt._request import Request
from tests.proof import steps
from tests.savers import assert_quiet, large, small_blocks, until
from tests.stalling import Disk, a_write, before_commit, store_on


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small poisoned blocks."""
    with small_blocks():
        yield


async def test_awaiting_is_committed_any_number_of_times(tmp_path: Path) -> None:
    """Before, during and after; the same checkpoint; also through `as_task`, `gather` and `wait`."""
    async with Saver(tmp_path) as saver:
        pending = saver.save_nowait(large(1), step=1)
        got = await asyncio.gather(pending, pending.committed(), pending.as_task(), pending)
        assert isinstance(got[0], Checkpoint)
        assert all(c is got[0] for c in got)
        assert await pending is got[0]
        assert await pending.as_task() is got[0]
        assert pending.as_task() is pending.as_task()
        done, waiting = await asyncio.wait([pending.as_task()])
        assert len(done) == 1
        assert not waiting
        assert pending.exception() is None
        assert "step 1" in repr(pending)
        assert "committed" in repr(pending)


async def test_cancelling_the_task_ends_a_wait(tmp_path: Path) -> None:
    """`as_task()` is a wait like any other: the save goes on."""
    async with Saver(tmp_path) as saver:
        pending = saver.save_nowait(large(1), step=1)
        task = pending.as_task()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pending).step == 1


async def test_a_phase_once_reached_never_turns_into_an_error(tmp_path: Path) -> None:
    """A save that failed after `staged`: `planned` and `staged` return, what comes later raises."""
    disk = Disk(before_commit, kind="error")
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        pending = await saver.stage(large(1), step=1)
        errors = await asyncio.gather(pending.committed(), pending.committed(), return_exceptions=True)
        assert isinstance(errors[0], StorageError)
        assert errors[0] is errors[1] is pending.exception()
        for _ in range(2):
            await pending.planned()
            await pending.staged()
            await pending.written()
            assert pending.phase == Phase.WRITTEN
            with pytest.raises(StorageError):
                await pending
        assert set(pending.seconds) == {Phase.PLANNED, Phase.STAGED, Phase.WRITTEN}
        assert "failed" in repr(pending)


async def test_a_phase_that_can_no_longer_come_raises_at_once(tmp_path: Path) -> None:
    """Waiters of every later phase get the save's own error, those of an earlier one do not."""
    disk = Disk(a_write, kind="stall")
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        pending = await saver.stage(large(1), step=1)
        await until(disk.stalled.is_set)
        waits = [asyncio.ensure_future(w) for w in (pending.staged(), pending.written(), pending.committed())]
        await asyncio.sleep(0)
        assert pending.cancel() is True
        assert pending.cancel() in (True, False)
        disk.heal()
        got = await asyncio.gather(*waits, return_exceptions=True)
        assert got[0] is None
        assert [type(e) for e in got[1:]] == [SaveCancelledError] * 2
        assert isinstance(got[1], RuntimeError)
        assert not isinstance(got[1], asyncio.CancelledError)
        await pending.cancel_and_wait()
        assert_quiet(saver)


async def test_it_is_too_late_once_the_commit_has_begun(tmp_path: Path) -> None:
    """`cancel()` says False; `cancel_and_wait` waits for the commit instead."""
    disk = Disk(before_commit)
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        pending = await saver.stage(large(1), step=1)
        await until(disk.stalled.is_set)
        assert pending.cancel() is False
        wait = asyncio.create_task(pending.cancel_and_wait())
        await asyncio.sleep(0.01)
        wait.cancel()
        await asyncio.sleep(0.01)
        assert not wait.done()
        disk.heal()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert pending.done()
        assert pending.cancel() is False
        assert_quiet(saver)
    assert await steps(tmp_path) == (1,)


async def test_asking_too_early_is_refused(tmp_path: Path) -> None:
    """`exception()` of a save under way."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        pending = await saver.stage(large(1), step=1)
        with pytest.raises(UsageError, match="not done"):
            pending.exception()
        assert not pending.done()
        disk.heal()


# ---------------------------------------------------------------- events


async def collect(pending: PendingSave) -> list[Event]:
    """All events."""
    return [event async for event in pending.events()]


async def test_events_tell_every_phase_once(tmp_path: Path) -> None:
    """Phases in order, numbers that only grow, the end; the same for a latecomer."""
    async with Saver(tmp_path, budget=2 << 20) as saver:
        async with saver.staging(large(1, leaves=8), step=1) as pending:
            told = asyncio.create_task(collect(pending))
        events = await told
        late = await collect(pending)
    for seen in (events, late):
        phases = [event.phase for event in seen]
        assert phases == sorted(phases)
        assert set(Phase) - {Phase.CALLED} <= set(phases)
        assert phases.count(Phase.COMMITTED) == 1
        assert seen[-1].phase == Phase.COMMITTED
        assert all(event.error is None and event.step == 1 for event in seen)
        for one, other in itertools.pairwise(seen):
            assert (one.staged, one.written) <= (other.staged, other.written)
        assert seen[-1].staged == seen[-1].written == seen[-1].total > 0


async def test_events_end_with_the_error(tmp_path: Path) -> None:
    """Whoever listens to the end was told."""
    disk = Disk(a_write, kind="error")
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        pending = saver.save_nowait(large(1), step=1)
        events = await collect(pending)
        assert isinstance(events[-1].error, StorageError)
        assert all(event.error is None for event in events[:-1])
        await saver.drain()


async def test_a_slow_listener_costs_nothing(tmp_path: Path) -> None:
    """One that stops listening after the first event misses numbers; nothing is kept for it."""
    async with Saver(tmp_path, budget=2 << 20) as saver:
        pending = saver.save_nowait(large(1, leaves=3), step=1)
        async with aclosing(pending.events()) as events:  # type: ignore[type-var]
            first = await anext(events)
            await pending
            assert len(pending._waiters) == 0
            rest = [event async for event in events]
        assert first.total > 0
        assert len(rest) <= len(Phase)


# ---------------------------------------------------------------- what it keeps


@pytest.mark.parametrize("end", ["commit", "fail", "cancel"])
async def test_a_kept_handle_keeps_nothing_else(end: str, tmp_path: Path) -> None:
    """Not the writer, not the request, not the saver: only numbers and the outcome."""
    disk = Disk(a_write, kind="error")
    saver = await Saver(store_on(disk, tmp_path)).__aenter__()
    if end == "fail":
        disk.arm()
    pending = saver.save_nowait(large(1), step=1)
    request = saver._saving.ledger.active[0]
    assert isinstance(request, Request)
    writer = weakref.ref(request.writer)
    keeper = weakref.ref(saver)
    if end == "cancel":
        pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await saver.aclose()
    saver._saving.ledger.failures.clear()
    del request, saver
    gc.collect()
    assert (pending.exception() is None) == (end == "commit")
    assert writer() is None
    assert keeper() is None


async def test_many_waiters_of_many_phases(tmp_path: Path) -> None:
    """A hundred tasks at random phases, some cancelled: each gets its own end, none is left."""
    async with Saver(tmp_path) as saver:
        pending = saver.save_nowait(large(1), step=1)
        names = ["planned", "staged", "written", "committed"] * 25
        waits = [asyncio.create_task(getattr(pending, name)()) for name in names]
        await asyncio.sleep(0)
        for wait in waits[::3]:
            wait.cancel()
        got = await asyncio.gather(*waits, return_exceptions=True)
        for n, (name, outcome) in enumerate(zip(names, got, strict=True)):
            if n % 3 == 0:
                assert isinstance(outcome, asyncio.CancelledError)
            else:
                assert isinstance(outcome, Checkpoint) == (name == "committed")
        assert pending._waiters == set()
