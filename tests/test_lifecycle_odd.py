"""A run's life where it goes wrong: policies that fail, disks that stand still, two things at once."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import Catalog, DrainTimeoutError, RunLockedError, Saver
from aiockpt.policies import Moment
from aiockpt.policies.keep import KeepBest, KeepLast
from aiockpt.policies.when import EveryOverhead, EverySteps
from aiockpt.storage import Wanted
from aiockpt.storage.local import LocalStore
from tests.savers import until


def state(value: float) -> dict[str, Any]:
    """A small state that tells which step it is of."""
    return {"model": {"w": torch.full((4,), value)}, "step": value}


async def steps(run: Path) -> list[int]:
    """The committed steps."""
    async with Catalog(run) as catalog:
        return list(await catalog.steps())


class Halting(LocalStore):
    """A folder in which deleting waits to be let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.halts = True

    async def retire(self, name: str, *, unless: Wanted | None = None) -> bool:
        if self.halts:
            self.begun.set()
            await self.go.wait()
        return await super().retire(name, unless=unless)


def _fails(_: Any) -> list[int]:
    raise KeyError("a metric that is not there")


@pytest.mark.parametrize(
    "policy",
    [_fails, lambda found: found[-1:], lambda _: None, lambda _: ["3"], lambda _: [torch.ones(2)]],
    ids=["raises", "checkpoints", "none", "strings", "tensors"],
)
async def test_policy_that_fails_deletes_nothing_and_is_told(
    policy: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake in a function that says what stays costs no checkpoint, and no save."""
    async with Saver(tmp_path, keep=policy, keep_grace=0) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
            await saver._housekeeping.drain()
    gc.collect()
    assert await steps(tmp_path) == [1, 2, 3]
    assert any("retention" in r.getMessage() and r.levelno >= logging.WARNING for r in caplog.records)
    assert not any("never retrieved" in r.getMessage() for r in caplog.records)
    async with Catalog(tmp_path) as catalog:
        with pytest.raises((KeyError, aiockpt.UsageError)):
            await catalog.prune(policy)


async def test_steps_in_other_types_count(tmp_path: Path) -> None:
    """What a policy returns may be any whole number, also of a step that does not exist."""
    stay: list[Any] = [torch.tensor(1), 77]
    async with Saver(tmp_path, keep=lambda _: stay, keep_grace=0) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
    assert await steps(tmp_path) == [1, 3]


async def test_deleting_that_stands_still_does_not_hold_the_end_up(tmp_path: Path) -> None:
    """`drain_timeout` holds for a deletion as well; the run is free then, nothing was lost."""
    store = Halting(tmp_path)
    saver = Saver(store, keep=KeepLast(1), keep_grace=0, drain_timeout=0.3)
    async with asyncio.timeout(20):
        with pytest.raises(DrainTimeoutError, match="delet"):
            async with saver:
                await saver.save(state(1), step=1)
                await saver.save(state(2), step=2)
                await store.begun.wait()
    assert await steps(tmp_path) == [1, 2]
    async with Saver(tmp_path) as after:
        await after.save(state(3), step=3)


async def test_cancelled_while_the_hook_of_the_end_runs(tmp_path: Path) -> None:
    """A body raised, `save_on_error` runs, and the task is cancelled: the saver is closed all the same."""
    inside = asyncio.Event()

    async def hook(_: BaseException) -> None:
        inside.set()
        await asyncio.sleep(0.05)

    async def work() -> None:
        async with Saver(tmp_path, save_on_error=hook) as saver:
            await saver.stage(state(1), step=1)
            raise ValueError("the body's")

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises((ValueError, asyncio.CancelledError)):
        await task
    assert await steps(tmp_path) == [1]
    async with Saver(tmp_path):  # the lock is free
        pass


async def test_what_was_seen_before_a_restore_is_not_saved_at_the_end(tmp_path: Path) -> None:
    """The last save is of what came after the restore: else old weights got a new number."""
    async with Saver(tmp_path, when=EverySteps(5)) as saver:
        living = state(0)
        for step in range(1, 9):
            living["model"]["w"].fill_(float(step))
            await saver.stage_if_due(living, step=step, if_busy="wait")
        await saver.restore(into=living, step=5, rewind=True)
    assert await steps(tmp_path) == [5]


async def test_rewind_while_retention_deletes(tmp_path: Path) -> None:
    """A pass that began before the rewind does not take away what the run was rewound to."""
    store = Halting(tmp_path)
    store.halts = False
    async with Saver(store, keep=KeepLast(1), keep_grace=3600) as saver:
        await saver.save(state(1), step=1)
        await saver.save(state(2), step=2)
        await saver._housekeeping.drain()
        saver._housekeeping.retention._grace = 0
        store.halts = True
        await saver.save(state(3), step=3)
        await store.begun.wait()
        rewinding = asyncio.create_task(saver.restore(step=2, rewind=True))
        await asyncio.sleep(0.1)
        store.halts = False
        store.go.set()
        try:
            await rewinding
        except aiockpt.StepNotFoundError:
            assert await steps(tmp_path) == [3]  # it was gone before
        await saver._housekeeping.drain()
        assert await steps(tmp_path) in ([2], [3])


async def test_prune_of_another_process_while_the_run_is_rewound(tmp_path: Path) -> None:
    """What had a newer step when `prune` looked may be the newest now: it stays."""
    async with Saver(tmp_path) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
    store = Halting(tmp_path)
    async with Catalog(store) as catalog:
        pruning = asyncio.create_task(catalog.prune(KeepLast(1), dry_run=False))
        await store.begun.wait()
        async with Saver(tmp_path) as saver:
            await saver.restore(step=2, rewind=True)
        store.go.set()
        await pruning
    assert 2 in await steps(tmp_path)


async def test_rewind_to_what_is_deleted_just_then(tmp_path: Path) -> None:
    """The step went between the load and the rewind: an error, and the later steps are still there."""
    async with Saver(tmp_path) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
        rewind = saver._places.rewind

        async def late(checkpoint: aiockpt.Checkpoint) -> None:
            async with Catalog(tmp_path) as catalog:
                assert await catalog.prune(KeepLast(1), dry_run=False) == (1, 2)
            await rewind(checkpoint)

        saver._places.rewind = late  # type: ignore[method-assign]
        with pytest.raises(aiockpt.StepNotFoundError):
            await saver.restore(step=2, rewind=True)
    assert await steps(tmp_path) == [3]


async def test_alias_moves_only_to_what_stays(tmp_path: Path) -> None:
    """A step that goes while it is promoted never costs what the alias pointed at before its protection."""
    async with Saver(tmp_path) as saver:
        for step in (1, 2, 3, 4):
            await saver.save(state(step), step=step)

    class Pruned(LocalStore):
        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            async with Catalog(tmp_path) as other:
                await other.prune(KeepLast(1), dry_run=False)
            await super().put(key, data, if_absent=if_absent)

    async with Catalog(tmp_path) as catalog, Catalog(Pruned(tmp_path)) as racing:
        await catalog.promote(1)
        with pytest.raises(aiockpt.StepNotFoundError):
            await racing.promote(2)
        assert (await catalog.alias()).step == 1
        assert (await racing.promote(4)).step == 4
    assert await steps(tmp_path) == [1, 4]


async def test_promoted_step_that_is_written_anew_is_never_out_of_sight(tmp_path: Path) -> None:
    """The older generation stays for its alias; it is not even moved aside for a moment."""
    moved: list[str] = []

    class Watched(LocalStore):
        async def retire(self, name: str, *, unless: Wanted | None = None) -> bool:
            moved.append(name)
            return await super().retire(name, unless=unless)

    async with Saver(Watched(tmp_path)) as saver, Catalog(tmp_path) as catalog:
        await saver.save(state(1), step=1)
        first = await catalog.promote(1)
        for _ in range(2):
            await saver.save(state(10), step=1, overwrite=True)
            assert (await catalog.alias()).save_id == first.save_id
        await saver._saving.idle()
    assert moved == ["step-00000001.1"]


async def test_alias_waits_for_a_step_that_is_aside(tmp_path: Path) -> None:
    """Retention looks twice, and the step is out of sight in between: a reader of the alias looks again."""
    async with Saver(tmp_path) as saver, Catalog(tmp_path) as catalog:
        await saver.save(state(1), step=1)
        await catalog.promote(1)
        there, aside = tmp_path / "step-00000001", tmp_path / f".step-00000001.{'a' * 32}.retired"
        there.rename(aside)
        asyncio.get_running_loop().call_later(0.03, aside.rename, there)
        assert (await catalog.alias()).step == 1


async def test_huge_metric_does_not_end_retention(tmp_path: Path) -> None:
    """An int beyond every float is a number all the same, here the worst and there the best."""
    for mode, want in (("min", [2, 3]), ("max", [1, 3])):
        async with Saver(tmp_path / mode, keep=KeepBest("loss", 1, mode), keep_grace=0) as saver:  # type: ignore[arg-type]
            for step, loss in ((1, 10**400), (2, 5), (3, 7)):
                await saver.save(state(step), step=step, metrics={"loss": loss})
        assert await steps(tmp_path / mode) == want


async def test_due_save_waits_where_others_are_refused(tmp_path: Path) -> None:
    """`if_busy="wait"` says so itself, whatever `on_overlap` says of plain saves."""
    async with Saver(tmp_path, when=EverySteps(1), on_overlap="error") as saver:
        saver.save_nowait(state(1), step=1)
        for step in range(2, 6):
            assert await saver.stage_if_due(state(step), step=step, if_busy="wait") is not None
    assert await steps(tmp_path) == [1, 2, 3, 4, 5]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_overhead_is_not_due_while_nothing_was_measured(tmp_path: Path) -> None:
    """One save is due at once; until it has told what it costs, none is."""
    gate = asyncio.Event()

    class Held(LocalStore):
        async def room(self) -> int | None:
            await gate.wait()
            return await super().room()

    clock = Clock()
    async with Saver(Held(tmp_path), when=EveryOverhead(0.1), max_pending=2, clock=clock) as saver:
        first = asyncio.create_task(saver.save(state(1), step=1))
        await until(lambda: len(saver.pending) == 1)
        clock.now += 1
        assert not saver.due(2)
        gate.set()
        await first


async def test_busy_saver_costs_its_grace_once(tmp_path: Path) -> None:
    """The short wait for an older save is not repeated at every step as long as that one runs."""
    gate = asyncio.Event()

    class Held(LocalStore):
        async def begin(self, name: str, save_id: str) -> Any:
            await gate.wait()
            return await super().begin(name, save_id)

    async with Saver(Held(tmp_path), when=EverySteps(1), save_last=False) as saver:
        pending = saver.save_nowait(state(1), step=1)
        start = time.monotonic()
        for step in range(2, 12):
            assert await saver.stage_if_due(state(step), step=step) is None
        waited = time.monotonic() - start
        assert saver.stats.skipped == 10
        gate.set()
        await pending
        assert await saver.stage_if_due(state(12), step=12) is not None
    assert waited < 5 * 0.1


async def test_notice_inside_a_foreign_handler_is_told() -> None:
    """Somebody put his own handler over an outer notice: an inner one hears the signal all the same."""
    heard: list[int] = []

    def foreign(number: int, _: object) -> None:
        heard.append(number)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        async with aiockpt.preemption(signal.SIGUSR1) as outer:
            signal.signal(signal.SIGUSR1, foreign)
            async with aiockpt.preemption(signal.SIGUSR1) as inner:
                signal.raise_signal(signal.SIGUSR1)
                assert inner.requested
                assert outer.requested
            assert signal.getsignal(signal.SIGUSR1) is foreign
        assert signal.getsignal(signal.SIGUSR1) is foreign
        assert heard == []
    finally:
        signal.signal(signal.SIGUSR1, before)


async def test_notices_around_a_foreign_handler_may_end_in_any_order() -> None:
    """The outer one ends first: the inner one goes on hearing, and gives back what it found."""

    def foreign(number: int, _: object) -> None: ...

    before = signal.getsignal(signal.SIGUSR1)
    try:
        outer = aiockpt.preemption(signal.SIGUSR1)
        await outer.__aenter__()
        signal.signal(signal.SIGUSR1, foreign)
        inner = aiockpt.preemption(signal.SIGUSR1)
        await inner.__aenter__()
        await outer.__aexit__(None, None, None)
        signal.raise_signal(signal.SIGUSR1)
        assert inner.requested
        await inner.__aexit__(None, None, None)
        assert signal.getsignal(signal.SIGUSR1) is foreign
    finally:
        signal.signal(signal.SIGUSR1, before)


async def test_dry_run_leaves_no_trace(tmp_path: Path) -> None:
    """Only saying what would go writes nothing, so that it can be said of a run of somebody else's."""
    async with Saver(tmp_path) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
    there = sorted(p.name for p in tmp_path.iterdir())
    async with Catalog(tmp_path) as catalog:
        assert await catalog.prune(KeepLast(1)) == (1, 2)
        assert sorted(p.name for p in tmp_path.iterdir()) == there
        await catalog.promote(1)
        async with catalog.lease(2):
            assert await catalog.prune(KeepLast(1)) == ()


async def test_saver_that_lost_its_run_deletes_nothing(tmp_path: Path) -> None:
    """Taken for dead and overtaken, it must not delete what the new writer needs."""
    async with Saver(tmp_path, keep=KeepLast(1), keep_grace=0) as saver:
        saver._housekeeping.retention._grace = 3600
        await saver.save(state(1), step=1)
        await saver.save(state(2), step=2)
        await saver._housekeeping.drain()
        assert await steps(tmp_path) == [1, 2]
        saver._places.lock._lost_to = b"{}"  # as `check` finds out
        with pytest.raises(RunLockedError):
            await saver._places.lock.check()
        saver._housekeeping.retention._grace = 0
        saver._housekeeping._kick()  # as the timer does when the grace time is over
        await saver._housekeeping.drain()
        assert await steps(tmp_path) == [1, 2]
        saver._places.lock._lost_to = None


async def test_crash_between_aside_and_the_second_look(tmp_path: Path) -> None:
    """A step that was promoted while it was moved aside comes back, also when its remover died then."""
    async with Saver(tmp_path) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
    async with Catalog(tmp_path) as catalog:
        await catalog.promote(1)
        (tmp_path / "step-00000001").rename(tmp_path / f".step-00000001.{'a' * 32}.retired")
        (tmp_path / "step-00000002").rename(tmp_path / f".step-00000002.{'b' * 32}.retired")
        async with Saver(tmp_path):
            pass
        assert (await catalog.alias()).step == 1
        assert await steps(tmp_path) == [1, 3]
        assert not list(tmp_path.glob(".*"))


def test_overhead_asks_for_one_measurement() -> None:
    """The trigger by itself."""
    fresh = Moment(step=2, now=10.0, last_step=1, last_time=0.0, pending=1)
    assert not EveryOverhead()(fresh)
