"""Cancelling at every wait: before `staged` a save ends with its caller, afterwards only the wait does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiockpt import CheckpointError, PendingSave, Phase, SaveCancelledError, Saver
from aiockpt._gate import _Gate
from tests.proof import leftovers, litter, number_in, state_of, steps
from tests.savers import (
    CANCELLATIONS,
    Striker,
    assert_quiet,
    busy_threads,
    large,
    numbers,
    small_blocks,
    strike,
    until,
)
from tests.stalling import Disk, a_write, before_staged, store_on

Act = Callable[[Saver], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small poisoned blocks."""
    with small_blocks():
        yield


async def save(saver: Saver) -> None:
    """Save, to the commit."""
    await saver.save(large(2), step=2)


async def stage(saver: Saver) -> None:
    """Save, until the state may change."""
    await saver.stage(large(2), step=2)


async def staging(saver: Saver) -> None:
    """Save beside a body."""
    async with saver.staging(large(2), step=2):
        await asyncio.sleep(0)


async def drain(saver: Saver) -> None:
    """Wait for a save that goes on by itself."""
    saver.save_nowait(large(2), step=2)
    await saver.drain()


async def cancel_and_wait(saver: Saver) -> None:
    """Cancel a save that is under way."""
    pending = saver.save_nowait(large(2), step=2)
    await pending.planned()
    await pending.cancel_and_wait()


async def restore(saver: Saver) -> None:
    """Load the newest."""
    await saver.restore()


ACTS: dict[str, Act] = {a.__name__: a for a in (save, stage, staging, drain, cancel_and_wait, restore)}


@pytest.mark.parametrize("how", CANCELLATIONS)
@pytest.mark.parametrize("act", ACTS)
async def test_cancelled_at_any_wait(act: str, how: str, tmp_path: Path) -> None:
    """For every n: cut short at the n-th suspension; nothing is left, old steps load, the next save works."""
    async with Saver(tmp_path, budget=3 << 20) as saver:
        await saver.save(state_of(1), step=1)
        for n in itertools.count():
            fired, outcome = await strike(n, lambda: ACTS[act](saver), how)
            cut = isinstance(outcome, BaseException)
            assert fired or not cut
            check_outcome(how, outcome)
            if act in ("save", "stage", "staging") and cut and saver.pending == ():
                assert_quiet(saver)  # at once, not after some more waiting
            for pending in saver.pending:
                assert pending.phase >= Phase.STAGED or act in ("drain", "cancel_and_wait"), n
            await saver.drain()
            assert_quiet(saver)
            found = await saver.restore()
            assert found is not None
            if found.step == 1:
                assert number_in(found.values) == 1
            else:
                assert numbers(found.values) == {2.0}
                await saver.restore(step=1, rewind=True)
            if not fired:
                break
            await saver.save(large(2), step=2)
            await saver.restore(step=1, rewind=True)
        assert n >= 4


def check_outcome(how: str, outcome: object) -> None:
    """Cut short in the caller's own words, never by an error of ours."""
    if isinstance(outcome, ExceptionGroup):
        assert how == "sibling"
        assert [type(e) for e in outcome.exceptions] == [ValueError]
    elif isinstance(outcome, BaseException):
        expected = TimeoutError if how == "timeout" else asyncio.CancelledError
        assert type(outcome) is expected, outcome


# ---------------------------------------------------------------- the saver leaves


async def leave(saver: Saver) -> None:
    """Close with a save under way."""
    saver.save_nowait(large(2), step=2)
    await saver.aclose()


async def leave_by_error(saver: Saver) -> None:
    """Leave as a body that raised does."""
    saver.save_nowait(large(2), step=2)
    await saver.__aexit__(ValueError, ValueError("the body"), None)


async def give_up(saver: Saver) -> None:
    """Abort with a save under way."""
    saver.save_nowait(large(2), step=2)
    await saver.abort()


LEAVING: dict[str, Act] = {a.__name__: a for a in (leave, leave_by_error, give_up)}


@pytest.mark.parametrize("how", CANCELLATIONS)
@pytest.mark.parametrize("act", LEAVING)
async def test_leaving_is_cancelled_at_any_wait(act: str, how: str, tmp_path: Path) -> None:
    """For every n: it drains all the same, and only then the cancellation goes on."""
    for n in itertools.count():
        run = tmp_path / str(n)
        saver = await Saver(run, budget=3 << 20).__aenter__()
        await saver.save(state_of(1), step=1)
        fired, outcome = await strike(n, lambda saver=saver: LEAVING[act](saver), how)  # type: ignore[misc]
        # (A group may end just before its failing sibling has run.)
        assert isinstance(outcome, BaseException) == fired or how == "sibling"
        check_outcome(how, outcome)
        assert_quiet(saver)
        assert await steps(run) == ((1,) if act == "give_up" else (1, 2))
        with pytest.raises(CheckpointError, match="closed"):
            saver.save_nowait({}, step=9)
        if not fired:
            break
    assert n >= (1 if act == "give_up" else 20)


# ---------------------------------------------------------------- the handle is cancelled


async def test_a_save_is_cancelled_at_any_suspension(tmp_path: Path) -> None:
    """`pending.cancel()` at every point: True means gone, False means committed; both for good."""
    answers = set()
    async with Saver(tmp_path, budget=3 << 20) as saver:
        await saver.save(state_of(1), step=1)
        n = missed = 0
        while missed < 3:  # how often it waits differs by a few, as threads are quicker or slower
            pending, said, outcome = await cancelled_at(n, saver)
            await pending.cancel_and_wait()
            assert_quiet(saver)
            n += 1
            if not said:
                missed += 1
                await saver.restore(step=1, rewind=True)
                continue
            answers.add(said[0])
            assert isinstance(outcome, SaveCancelledError) == said[0]
            assert not isinstance(outcome, asyncio.CancelledError)
            assert pending.cancel() is False
            assert await steps(tmp_path) == ((1,) if said[0] else (1, 2))
            await saver.restore(step=1, rewind=True)
        assert saver.failures == ()
    assert True in answers
    assert n > 20


async def cancelled_at(n: int, saver: Saver) -> tuple[PendingSave, list[bool], object]:
    """A save whose handle is cancelled at suspension n: the handle, what `cancel` said, the outcome."""
    said: list[bool] = []
    loop = asyncio.get_running_loop()
    pending = saver.save_nowait(large(2), step=2)

    def act() -> None:
        said.append(pending.cancel())

    loop.set_task_factory(Striker(n, act))
    (outcome,) = await asyncio.gather(pending.as_task(), return_exceptions=True)
    loop.set_task_factory(None)
    return pending, said, outcome


@pytest.mark.parametrize("at", ["called", "planned", "staged", "written"])
async def test_cancelled_at_each_phase(at: str, tmp_path: Path) -> None:
    """Nothing of it is left at once after `cancel_and_wait`; whoever waits is told by our own error."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path), max_pending=2) as saver:
        disk.arm()
        older = saver.save_nowait(large(1), step=1)
        await until(disk.stalled.is_set)
        pending = saver.save_nowait(large(2), step=2)  # as far as `written`: the older goes first
        waits = [asyncio.ensure_future(wait) for wait in (pending.committed(), pending.as_task())]
        if at == "called":
            assert pending.cancel()
        else:
            await getattr(pending, at)()
        await pending.cancel_and_wait()
        assert saver.pending == (older,)
        assert len(leftovers(saver.store)) == 2  # the older one's folder and lock
        got = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(error) for error in got] == [SaveCancelledError] * 2
        with pytest.raises(SaveCancelledError) as told:
            await pending
        assert (told.value.step, told.value.save_id) == (2, pending.save_id)
        again = await saver.stage(large(2), step=2)  # the step is free
        disk.heal()
        assert (await again).step == 2
        assert_quiet(saver)
    assert await steps(tmp_path) == (1, 2)


async def test_a_cancelled_save_does_not_end_a_task_group_quietly(tmp_path: Path) -> None:
    """A group whose task awaits a save that somebody cancels fails; it does not just end."""
    async with Saver(tmp_path) as saver:
        pending = saver.save_nowait(large(1), step=1)
        with pytest.raises(ExceptionGroup) as group:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pending.committed())
                await asyncio.sleep(0)
                pending.cancel()
        assert group.group_contains(SaveCancelledError)


# ---------------------------------------------------------------- who waits, who owns


async def test_after_staged_only_the_wait_ends(tmp_path: Path) -> None:
    """A cancelled `save` that was staged commits all the same; its saver owns it."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        task = asyncio.create_task(saver.save(large(1), step=1))
        await until(disk.stalled.is_set)
        (pending,) = saver.pending
        await pending.staged()
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert saver.pending == (pending,)
        disk.heal()
        assert (await pending).step == 1
    assert await steps(tmp_path) == (1,)


async def test_before_staged_the_call_returns_when_the_thread_has_left(tmp_path: Path) -> None:
    """While a thread is inside the write, the cancelled call does not return."""
    disk = Disk(before_staged)
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        task = asyncio.create_task(saver.save(large(1), step=1))
        await until(disk.stalled.is_set)
        task.cancel()
        task.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
            task.cancel()
        assert not task.done()
        assert busy_threads() != []
        disk.heal()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_quiet(saver)
        assert (await saver.save(large(1), step=1)).step == 1


async def test_waiting_for_admission_can_be_cancelled(tmp_path: Path) -> None:
    """A queued save goes; the one it waited for does not notice."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        first = saver.save_nowait(large(1), step=1)
        await until(disk.stalled.is_set)
        queued = asyncio.create_task(saver.save(large(2), step=2))
        await until(lambda: len(saver.pending) == 2)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert saver.pending == (first,)
        disk.heal()
        await first
    assert await steps(tmp_path) == (1,)


async def test_a_call_cancelled_before_it_ran_owes_nothing(tmp_path: Path) -> None:
    """A task that is cancelled before its first step never began: no save, no complaint, no gate."""
    async with Saver(tmp_path) as saver:
        tasks = [
            asyncio.create_task(saver.save(large(1), step=1)),
            asyncio.create_task(saver.stage(large(2), step=2)),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert_quiet(saver)
    assert await steps(tmp_path) == ()


async def test_many_tasks_wait_for_one_save(tmp_path: Path) -> None:
    """Each waiter gets the result; one that is cancelled takes nobody with it."""
    async with Saver(tmp_path) as saver:
        pending = saver.save_nowait(large(1), step=1)
        waits = [asyncio.create_task(pending.committed()) for _ in range(20)]
        await asyncio.sleep(0)
        waits[7].cancel()
        got = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(got.pop(7), asyncio.CancelledError)
        assert {checkpoint.save_id for checkpoint in got if not isinstance(checkpoint, BaseException)} == {
            pending.save_id
        }
        assert len(got) == 19


async def test_a_loop_that_ends_in_the_middle_of_saves(tmp_path: Path) -> None:
    """`asyncio.run` cancels every task: saves end without a trace, also one whose task never ran."""

    async def forgets() -> list[PendingSave]:
        saver = await Saver(tmp_path, max_pending=4).__aenter__()
        await saver.save(state_of(1), step=1)
        begun = saver.save_nowait(large(2), step=2)
        await begun.planned()
        unbegun = saver.save_nowait(large(3), step=3)
        saver._owner.closed = True  # (its warning is another test's business)
        return [begun, unbegun]

    pendings = await asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(forgets()))
    assert all(isinstance(p.exception(), SaveCancelledError) for p in pendings)
    assert litter(tmp_path) == []
    assert _Gate.holds() == []
    assert await steps(tmp_path) == (1,)
