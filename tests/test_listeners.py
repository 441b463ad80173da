"""Listeners: told everything in order, never in the way."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiockpt.sync
from aiockpt import (
    Checkpoint,
    Failure,
    Listener,
    PendingSave,
    SaveCancelledError,
    Saver,
    StorageError,
    UsageError,
)
from aiockpt.listeners import EVENTS
from tests.proof import state_of, steps
from tests.savers import large, small_blocks
from tests.stalling import Disk, a_write, before_commit, store_on


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small poisoned blocks."""
    with small_blocks():
        yield


def number(value: Any) -> int | None:
    """The step an event is about, if any."""
    return getattr(value, "step", None)


def record(told: list[tuple[str, int | None]], *, slow: bool = False) -> Any:
    """A listener that writes down all events, at once or a while later."""

    def method(event: str) -> Callable[[Any, Any], Any]:
        async def later(self: Any, value: Any) -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            told.append((event, number(value)))

        def now(self: Any, value: Any) -> None:
            told.append((event, number(value)))

        return later if slow else now

    return type("Recorder", (), {event: method(event) for event in EVENTS})()


@pytest.mark.parametrize("slow", [False, True])
async def test_everything_is_told_in_order(slow: bool, tmp_path: Path) -> None:
    """Begin, each save's events, a failure, the end: to every listener, sync or async."""
    told: list[tuple[str, int | None]] = []
    other: list[tuple[str, int | None]] = []
    async with Saver(tmp_path, listeners=[record(told, slow=slow), record(other)]) as saver:
        await saver.save(state_of(1), step=1)
        with pytest.raises(FileExistsError):
            await saver.save(state_of(1), step=1)
        await saver.save(state_of(2), step=2)
    expected = [
        ("begin", None),
        *[("before_save", 1), ("after_stage", 1), ("after_commit", 1)],
        *[("before_save", 1), ("after_failure", 1)],
        *[("before_save", 2), ("after_stage", 2), ("after_commit", 2)],
        ("end", None),
    ]
    assert told == other == expected


async def test_values_of_events(tmp_path: Path) -> None:
    """The saver, the handle, the checkpoint, the failure: what a listener can work with."""
    got: dict[str, Any] = {}

    class Mine(Listener):
        def begin(self, saver: Saver) -> None:
            got["begin"] = saver

        async def after_stage(self, pending: PendingSave) -> None:
            got["after_stage"] = pending

        def after_commit(self, checkpoint: Checkpoint) -> None:
            got["after_commit"] = checkpoint

        def after_failure(self, failure: Failure) -> None:
            got["after_failure"] = failure

    disk = Disk(before_commit, "error")
    async with Saver(store_on(disk, tmp_path), listeners=[Mine()]) as saver:
        pending = await saver.stage(state_of(1), step=1)
        assert await pending == got["after_commit"]
        disk.arm()
        with pytest.raises(StorageError) as caught:
            await saver.save(state_of(2), step=2)
    assert got["begin"] is saver
    assert got["after_stage"].step == 2
    failure = got["after_failure"]
    assert failure == Failure(step=2, save_id=failure.save_id, error=caught.value)


async def test_sync_listeners_have_run_when_the_awaiter_goes_on(tmp_path: Path) -> None:
    """So what one of them decides at a commit is there after `await save`."""

    class Stopper:
        def begin(self, saver: Saver) -> None:
            self.saver = saver

        def after_commit(self, checkpoint: Checkpoint) -> None:
            self.saver.request_stop(f"enough at {checkpoint.step}")

    async with Saver(tmp_path, listeners=[Stopper()]) as saver:
        assert [saver.stop_requested] == [None]
        await saver.save(state_of(1), step=1)
        assert saver.stop_requested == "enough at 1"
        await saver.save(state_of(2), step=2)
        assert saver.stop_requested == "enough at 1"


class Failing:
    """Fails at everything, in one of several ways."""

    def __init__(self, how: str) -> None:
        for event in EVENTS:
            setattr(self, event, self._later if how.endswith("later") else self._now)
        self.error: BaseException = asyncio.CancelledError() if "cancel" in how else KeyError("mine")

    def _now(self, value: object) -> None:
        raise self.error

    async def _later(self, value: object) -> None:
        await asyncio.sleep(0)
        raise self.error


@pytest.mark.parametrize("how", ["now", "later", "cancel", "cancel later"])
async def test_failing_listener_harms_nothing(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every event's error is logged with the listener's name; saves, run and others go on."""
    told: list[tuple[str, int | None]] = []
    async with Saver(tmp_path, listeners=[Failing(how), record(told)]) as saver:
        await saver.save(state_of(1), step=1)
        (await saver.stage(state_of(2), step=2)).cancel()
        assert saver.failures == ()
    assert len(told) == 8
    lines = [r.message for r in caplog.records if "listener Failing failed in" in r.message]
    assert [line.split(" failed in ")[1].split()[0] for line in lines] == [event for event, _ in told]
    assert 1 in await steps(tmp_path)


async def test_slow_listener_delays_nothing(tmp_path: Path) -> None:
    """While one hangs in its first event, a save is staged and committed, and others are told."""
    go = asyncio.Event()
    told: list[tuple[str, int | None]] = []
    mine: list[int] = []

    class Slow:
        async def before_save(self, pending: PendingSave) -> None:
            await go.wait()

        def after_commit(self, checkpoint: Checkpoint) -> None:
            mine.append(checkpoint.step)

    async with Saver(tmp_path, listeners=[Slow(), record(told)]) as saver:
        await saver.save(large(1), step=1)
        await saver.drain()
        assert told[-1] == ("after_commit", 1)
        assert mine == []
        go.set()
    assert mine == [1]


async def test_hanging_listener_is_left_behind_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaving takes no longer than `drain_timeout`; the listener is cancelled and named."""
    ended: list[str] = []

    class Hanging:
        async def after_commit(self, checkpoint: Checkpoint) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

    async with Saver(tmp_path, listeners=[Hanging()], drain_timeout=0.2) as saver:
        await saver.save(state_of(1), step=1)
    assert ended == ["cancelled"]
    assert "listener Hanging did not end in time" in caplog.text
    assert await steps(tmp_path) == (1,)


async def test_events_run_in_the_context_of_the_call(tmp_path: Path) -> None:
    """Context variables of whoever saved are there, so logs and traces carry the right step."""
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    heard: list[tuple[int, str]] = []

    class Context:
        async def before_save(self, pending: PendingSave) -> None:
            await asyncio.sleep(0)
            heard.append((pending.step, name.get()))

        async def after_commit(self, checkpoint: Checkpoint) -> None:
            await asyncio.sleep(0)
            heard.append((checkpoint.step, name.get()))

    async with Saver(tmp_path, listeners=[Context()]) as saver:
        for step in (1, 2):
            name.set(f"step {step}")
            await saver.stage(state_of(step), step=step)
        name.set("later")
    assert sorted(heard) == [(1, "step 1"), (1, "step 1"), (2, "step 2"), (2, "step 2")]


async def test_cancelled_and_unseen_failures_are_told(tmp_path: Path) -> None:
    """A wanted cancellation, and an error that nobody awaited."""
    failures: list[Failure] = []

    class Failures:
        def after_failure(self, failure: Failure) -> None:
            failures.append(failure)

    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path), listeners=[Failures()]) as saver:
        disk.arm()
        pending = await saver.stage(state_of(1), step=1)
        pending.cancel()
        disk.release.set()
        await pending.cancel_and_wait()
        assert isinstance(failures[0].error, SaveCancelledError)
    disk = Disk(before_commit, "error")
    async with Saver(store_on(disk, tmp_path), listeners=[Failures()]) as saver:
        disk.arm()
        pending = await saver.stage(state_of(2), step=2)
        with pytest.raises(StorageError) as caught:
            await saver.drain()
    assert [failure.error for failure in failures[1:]] == [caught.value]
    assert failures[1].publisher is None


def test_what_is_no_listener_is_refused(tmp_path: Path) -> None:
    """An object without any of the methods, and a class instead of an object."""
    for wrong in (object(), Listener):
        with pytest.raises(UsageError, match="no listener"):
            Saver(tmp_path, listeners=[wrong])


def test_stop_can_be_asked_for_under_sync(tmp_path: Path) -> None:
    """The same listeners, and the same word for the loop that is not async."""

    class Stopper:
        def begin(self, saver: Saver) -> None:
            self.saver = saver

        def after_commit(self, checkpoint: Checkpoint) -> None:
            self.saver.request_stop("enough")

    with aiockpt.sync.Saver(tmp_path, listeners=[Stopper()]) as saver:
        assert [saver.stop_requested] == [None]
        saver.save(state_of(1), step=1)
        assert saver.stop_requested == "enough"
        saver.request_stop("more")
        assert saver.stop_requested == "enough"


async def test_every_event_may_be_left_out_of_a_derived_listener(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The base class does nothing, in all of its methods."""
    with caplog.at_level(logging.DEBUG, "aiockpt"):
        async with Saver(tmp_path, listeners=[Listener()]) as saver:
            await saver.save(state_of(1), step=1)
            with pytest.raises(FileExistsError):
                await saver.save(state_of(1), step=1)
    assert "listener" not in caplog.text
