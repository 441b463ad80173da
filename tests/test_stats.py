"""Numbers: what a saver counts and measures is what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import aiockpt.sync
from aiockpt import Phase, Saver, SaverStats, StepExistsError
from aiockpt.policies.when import EverySteps
from aiockpt.stats import SMOOTH, Tally
from tests.proof import state_of
from tests.savers import large, small_blocks
from tests.stalling import Disk, a_write, before_commit, store_on


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small poisoned blocks."""
    with small_blocks():
        yield


async def test_counts(tmp_path: Path) -> None:
    """Begun, committed, failed, cancelled, skipped, and bytes."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path), when=EverySteps(1), save_last=False) as saver:
        assert saver.stats == SaverStats()
        first = await saver.save(large(1), step=1)
        with pytest.raises(StepExistsError):
            await saver.save(large(1), step=1)
        disk.arm()
        pending = await saver.stage(large(2), step=2)
        assert await saver.stage_if_due(large(3), step=3) is None
        stats = saver.stats
        assert (stats.saves, stats.committed, stats.failed, stats.skipped) == (3, 1, 1, 1)
        assert stats.nbytes == stats.last_nbytes == first.nbytes
        assert 0 < stats.pending_bytes <= first.nbytes
        pending.cancel()
        disk.release.set()
        await pending.cancel_and_wait()
        assert saver.stats.cancelled == 1
        assert saver.stats.pending_bytes == 0
        assert stats.cancelled == 0  # a snapshot


@pytest.mark.parametrize("verb", ["save", "stage", "staging", "save_nowait"])
async def test_durations_of_every_verb(verb: str, tmp_path: Path) -> None:
    """Blocked is what the caller was kept until the state could change; the body of `staging` is not."""
    body = 0.2
    async with Saver(tmp_path) as saver:
        pending: Any
        if verb == "staging":
            async with saver.staging(large(1), step=1) as pending:
                await pending
                await asyncio.sleep(body)
            blocked = saver.stats.last_blocked_seconds
            assert blocked < pending.seconds[Phase.COMMITTED]
        else:
            pending = getattr(saver, verb)(large(1), step=1)
            if verb != "save_nowait":
                await pending
        await saver.drain()
        stats = saver.stats
    assert 0 < stats.last_blocked_seconds <= stats.last_write_seconds
    assert stats.blocked_seconds == stats.last_blocked_seconds == stats.total_blocked_seconds
    assert stats.write_seconds == stats.last_write_seconds == stats.total_write_seconds
    assert stats.saved_seconds == stats.write_seconds - stats.blocked_seconds
    assert stats.bandwidth >= stats.nbytes / stats.write_seconds
    assert stats.expected_seconds() == pytest.approx(stats.nbytes / stats.bandwidth)


async def test_waiting_for_the_disk_is_training_time_saved(tmp_path: Path) -> None:
    """What passes after `staged` does not count as blocked."""
    disk, wait = Disk(before_commit), 0.3
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        pending = await saver.stage(state_of(1), step=1)
        await asyncio.sleep(wait)
        disk.release.set()
        await pending
        stats = saver.stats
    assert stats.saved_seconds >= wait
    assert stats.write_seconds - stats.blocked_seconds >= wait


async def test_waiting_for_admission_is_blocked_time(tmp_path: Path) -> None:
    """A save behind another one keeps its caller, and does not count as a slow disk."""
    disk, wait = Disk(before_commit), 0.3
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        await saver.stage(state_of(1), step=1)
        asyncio.get_running_loop().call_later(wait, disk.release.set)
        await saver.save(state_of(2), step=2)
        stats = saver.stats
        assert stats.last_blocked_seconds >= wait / 2
        assert stats.interval_seconds < stats.last_write_seconds


def test_smoothing_and_sums() -> None:
    """The newest measurement has its weight; sums are sums."""
    tally = Tally()
    tally.begun(10.0)
    tally.committed(100, blocked=1.0, write=2.0, admitted=1.0)
    tally.begun(15.0)
    tally.committed(300, blocked=3.0, write=4.0, admitted=1.0)
    stats = tally.snapshot()
    assert stats.blocked_seconds == pytest.approx(1.0 + SMOOTH * 2.0)
    assert stats.write_seconds == pytest.approx(2.0 + SMOOTH * 2.0)
    assert stats.bandwidth == 100.0
    assert (stats.last_blocked_seconds, stats.total_blocked_seconds) == (3.0, 4.0)
    assert (stats.last_write_seconds, stats.total_write_seconds) == (4.0, 6.0)
    assert (stats.nbytes, stats.last_nbytes, stats.interval_seconds) == (400, 300, 5.0)
    assert stats.saved_seconds == 2.0
    assert stats.expected_seconds() == 3.0
    assert stats.expected_seconds(50) == 0.5
    assert tally.snapshot(pending_bytes=100).expected_seconds(0) == 1.0
    assert SaverStats().expected_seconds(1) is None


def test_snapshot_cannot_be_changed() -> None:
    """It is a value."""
    with pytest.raises(FrozenInstanceError):
        setattr(SaverStats(), fields(SaverStats)[0].name, 1)


def test_stats_of_a_loop_that_is_not_async(tmp_path: Path) -> None:
    """The same numbers, before, during and after."""
    saver = aiockpt.sync.Saver(tmp_path)
    assert saver.stats == SaverStats()
    with saver:
        saver.save(state_of(1), step=1)
        assert saver.stats.committed == 1
        assert saver.stats.blocked_seconds > 0
    assert saver.stats.committed == 1
