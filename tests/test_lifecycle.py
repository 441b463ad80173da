"""Saves that are due, steps that may go: a saver over the life of a run."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import Catalog, PendingSave, Saver, StateMismatchError, UsageError
from aiockpt._ranks import Decision, Kind
from aiockpt._retention import Retention
from aiockpt.policies import When
from aiockpt.policies.keep import KeepBest, KeepEvery, KeepLast
from aiockpt.policies.when import AtSteps, EveryOverhead, EverySeconds, EverySteps, First
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyStore


def state(value: float) -> dict[str, Any]:
    """A small state that tells which step it is of."""
    return {"model": {"w": torch.full((4,), value)}, "step": value}


async def steps(run: Path) -> list[int]:
    """The committed steps."""
    async with Catalog(run) as catalog:
        return list(await catalog.steps())


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# -------------------------------------------------------------- triggers


async def test_saves_when_due_and_once_more_at_the_end(tmp_path: Path) -> None:
    """Every tenth step is saved, and the last one seen on leaving."""
    async with Saver(tmp_path, when=EverySteps(10)) as saver:
        for step in range(1, 26):
            pending = await saver.stage_if_due(state(step), step=step, if_busy="wait")
            assert (pending is not None) == (step in (10, 20))
    assert await steps(tmp_path) == [10, 20, 25]


async def test_last_save_is_not_doubled_and_can_be_declined(tmp_path: Path) -> None:
    """A run that ends on a saved step writes nothing more; `save_last=False` never does."""
    async with Saver(tmp_path / "a", when=EverySteps(5)) as saver:
        for step in range(1, 6):
            await saver.stage_if_due(state(step), step=step)
    assert await steps(tmp_path / "a") == [5]
    async with Saver(tmp_path / "b", when=EverySteps(5), save_last=False) as saver:
        for step in range(1, 8):
            await saver.stage_if_due(state(step), step=step)
    assert await steps(tmp_path / "b") == [5]


async def test_no_last_save_when_the_body_raised(tmp_path: Path) -> None:
    """After an error the state is not to be trusted: only what was staged is committed."""
    with pytest.raises(ValueError, match="the body's"):
        async with Saver(tmp_path, when=EverySteps(5)) as saver:
            for step in range(1, 8):
                await saver.stage_if_due(state(step), step=step)
            raise ValueError("the body's")
    assert await steps(tmp_path) == [5]


async def test_counts_from_the_restored_step(tmp_path: Path) -> None:
    """A resumed run saves a full interval after the step it resumed from."""
    async with Saver(tmp_path) as saver:
        await saver.save(state(7), step=7)
    async with Saver(tmp_path, when=EverySteps(10), save_last=False) as saver:
        restored = await saver.restore()
        assert restored is not None
        due = [step for step in range(8, 30) if saver.due(step)]
    assert due[0] == 17


async def test_skips_after_a_short_grace_when_busy(tmp_path: Path) -> None:
    """With a save stuck in the store, a due one is skipped and releases the state; `wait` waits."""
    store = FaultyStore(LocalStore(tmp_path))
    async with Saver(store, when=EverySteps(1), save_last=False) as saver:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(100_000))], lr=0.1)
        first = await stalled(saver, store, 1)
        assert await saver.stage_if_due({"o": optimizer}, step=2) is None
        optimizer.step()  # not gated: the skipped save let go of the state
        waiting = asyncio.create_task(saver.stage_if_due(state(3), step=3, if_busy="wait"))
        await asyncio.sleep(0)
        assert not waiting.done()
        store.release.set()
        await first
        third = await waiting
        assert third is not None
        await third
    assert await steps(tmp_path) == [1, 3]


async def stalled(saver: Saver, store: FaultyStore, step: int) -> PendingSave:
    """A staged save whose next write to the store stalls until `store.release` is set."""
    store.faults.kind = "stall"
    store.faults.fail_at = len(store.operations) + 4
    pending = await saver.stage(state(step), step=step)
    await asyncio.wait_for(store.stalled.wait(), 10)
    return pending


async def test_costs_are_measured(tmp_path: Path) -> None:
    """EveryOverhead spaces saves by what they cost on the injected clock."""
    clock = Clock()
    async with Saver(tmp_path, when=EveryOverhead(0.5), clock=clock, save_last=False) as saver:
        await (await _due(saver, 1))
        assert not saver.due(2)
        clock.now += 3600
        assert saver.due(2)


async def _due(saver: Saver, step: int) -> PendingSave:
    pending = await saver.stage_if_due(state(step), step=step)
    assert pending is not None
    return pending


@pytest.mark.parametrize(
    ("when", "want"),
    [
        (AtSteps(3, 6), [3, 6]),
        (First(), [1]),
        (First() | EverySteps(4), [1, 5]),
        (EverySeconds(2.5), [3, 6]),
    ],
)
async def test_each_trigger_drives_saves(tmp_path: Path, when: When, want: list[int]) -> None:
    """One second a step on the injected clock: each trigger saves at its steps."""
    clock = Clock()
    async with Saver(tmp_path, when=when, clock=clock, save_last=False) as saver:
        for step in range(1, 8):
            clock.now += 1
            await saver.stage_if_due(state(step), step=step, if_busy="wait")
    assert await steps(tmp_path) == want


async def test_needs_a_trigger(tmp_path: Path) -> None:
    """Without `when=` nothing could ever be due: that is a mistake."""
    async with Saver(tmp_path) as saver:
        assert not saver.due(5)
        with pytest.raises(UsageError, match="when="):
            await saver.stage_if_due(state(1), step=1)
        with pytest.raises(UsageError, match="if_busy"):
            await saver.stage_if_due(state(1), step=1, if_busy="never")  # type: ignore[arg-type]


# -------------------------------------------------------------- retention


async def test_keeps_last_and_best_at_every_point(tmp_path: Path) -> None:
    """The union of the last k and the best b is what is there after each commit."""
    accuracy = [0.5, 0.9, 0.4, 0.3, 0.2, 0.1]
    keep = KeepLast(1) | KeepBest("acc", mode="max")
    async with Saver(tmp_path, keep=keep, keep_grace=0) as saver:
        for step, value in enumerate(accuracy):
            await saver.save(state(step), step=step, metrics={"acc": value})
            await saver._housekeeping.drain()
            assert await steps(tmp_path) == sorted({step, accuracy.index(max(accuracy[: step + 1]))})


async def test_best_survives_a_restart(tmp_path: Path) -> None:
    """Ranking comes from the manifests; a step removed by hand is no obstacle (Lightning#4911)."""
    keep = KeepLast(1) | KeepBest("acc", mode="max")
    for first, values in ((0, [0.9, 0.5]), (2, [0.6, 0.7])):
        async with Saver(tmp_path, keep=keep, keep_grace=0) as saver:
            for step, value in enumerate(values, first):
                await saver.save(state(step), step=step, metrics={"acc": value})
                await saver._housekeeping.drain()
    assert await steps(tmp_path) == [0, 3]


async def test_order_is_numeric_past_the_padding(tmp_path: Path) -> None:
    """The highest numbers stay, however wide (huggingface/transformers#27138)."""
    numbers = [9, 10, 99, 100, 999, 1000, 99999999, 100000000, 10**12]
    async with Saver(tmp_path, keep=KeepLast(3), keep_grace=0) as saver:
        for step in numbers:
            await saver.save(state(step), step=step)
    assert await steps(tmp_path) == [99999999, 100000000, 10**12]


async def test_grace_protects_the_one_before(tmp_path: Path) -> None:
    """Of the newest two the older goes only when the newer has stood its time."""
    clock = Clock()
    async with Saver(tmp_path, keep=KeepLast(1), keep_grace=60, clock=clock) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
            await saver._housekeeping.drain()
        assert await steps(tmp_path) == [2, 3]
        clock.now += 61
        saver._housekeeping._kick()
        await saver._housekeeping.drain()
        assert await steps(tmp_path) == [3]


async def test_grace_ends_by_itself(tmp_path: Path) -> None:
    """No further commit is needed for the protected one to go."""
    async with Saver(tmp_path, keep=KeepLast(1), keep_grace=0.2) as saver:
        for step in (1, 2):
            await saver.save(state(step), step=step)
        gone = asyncio.Event()
        retire = saver.store.retire

        async def watched(name: str, *, unless: Any = None) -> bool:
            went = await retire(name, unless=unless)
            gone.set()
            return went

        saver.store.retire = watched  # type: ignore[method-assign]
        await asyncio.wait_for(gone.wait(), 20)
        assert await steps(tmp_path) == [2]


async def test_resumed_step_stays(tmp_path: Path) -> None:
    """The step the run was resumed from is kept whatever the policy says."""
    async with Saver(tmp_path) as saver:
        await saver.save(state(1), step=1)
    async with Saver(tmp_path, keep=KeepLast(1), keep_grace=0) as saver:
        await saver.restore()
        for step in (2, 3):
            await saver.save(state(step), step=step)
    assert await steps(tmp_path) == [1, 3]


async def test_other_runs_damage_and_newer_formats_stay(tmp_path: Path) -> None:
    """Only readable checkpoints of this very run are candidates."""
    async with Saver(tmp_path) as saver:
        for step in (1, 2):
            await saver.save(state(step), step=step)
    (tmp_path / "run.json").unlink()  # a new run begins in the old one's folder
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    async with Saver(tmp_path, keep=KeepLast(1), keep_grace=0) as saver:
        for step in (3, 4):
            await saver.save(state(step), step=step)
    assert await steps(tmp_path) == [1, 4]
    assert (tmp_path / "step-00000002").exists()


async def test_failed_deletion_warns_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deletion that fails fails no save; the next commit cleans up."""
    store = FaultyStore(LocalStore(tmp_path), kind="error", errno=errno.EBUSY)
    async with Saver(store, keep=KeepLast(1), keep_grace=0) as saver:
        await saver.save(state(1), step=1)
        pending = await saver.stage(state(2), step=2)
        await pending.written()
        real = store.inner.retire
        store.inner.retire = _busy  # type: ignore[method-assign]
        await pending
        with caplog.at_level(logging.WARNING, "aiockpt"):
            await saver._housekeeping.drain()
        assert "cannot delete step-00000001" in caplog.text
        assert await steps(tmp_path) == [1, 2]
        store.inner.retire = real  # type: ignore[method-assign]
        await saver.save(state(3), step=3)
    assert await steps(tmp_path) == [3]


async def _busy(name: str, *, unless: Any = None) -> bool:
    raise OSError(errno.EBUSY, "busy", name)


async def test_wanted_steps_stay_also_when_the_wish_comes_late(tmp_path: Path) -> None:
    """A reader's pin is looked at before, and again while the step is set aside."""
    async with Saver(tmp_path) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
    store = LocalStore(tmp_path)
    async with Catalog(store) as catalog:
        found = {c.step: c for c in await catalog.checkpoints()}
        asked = 0

        async def pinned() -> Collection[tuple[str, str]]:
            nonlocal asked
            asked += 1
            early = {(found[1].name, found[1].save_id)}
            late = {(found[2].name, found[2].save_id)} if asked > 1 else set()
            return early | late

        retention = Retention(store, catalog.checkpoints, pinned)
        assert await retention.apply(KeepLast(1), found[1].run_id) == []
        assert await catalog.steps() == (1, 2, 3)
        await catalog.load(2)
    await store.aclose()


async def test_a_run_is_never_emptied(tmp_path: Path) -> None:
    """A policy that keeps nothing still leaves the newest."""
    async with Saver(tmp_path, keep=KeepEvery(1000), keep_grace=0) as saver:
        for step in (1, 2, 3):
            await saver.save(state(step), step=step)
    assert await steps(tmp_path) == [3]
    assert (await _load(tmp_path))["step"] == 3


async def _load(run: Path) -> Any:
    async with Catalog(run) as catalog:
        with pytest.raises(StateMismatchError):
            await catalog.load(into={"model": {"w": torch.zeros(5)}})
        return await catalog.load()


async def test_prune_says_first_and_deletes_then(tmp_path: Path) -> None:
    """A dry run names what would go; the real one deletes it, but nothing leased, promoted or newest."""
    async with Saver(tmp_path) as saver:
        for step in range(1, 7):
            await saver.save(state(step), step=step)
    async with Catalog(tmp_path) as catalog:
        await catalog.promote(2)
        async with catalog.lease(3):
            assert await catalog.prune(KeepEvery(4)) == (1, 5)
            assert await catalog.steps() == (1, 2, 3, 4, 5, 6)
            assert await catalog.prune(KeepEvery(4), dry_run=False) == (1, 5)
            assert await catalog.steps() == (2, 3, 4, 6)
        assert await catalog.prune(lambda checkpoints: []) == (3, 4)
        assert await catalog.prune(KeepLast(9), dry_run=False) == ()
    async with Catalog(tmp_path / "empty") as catalog:
        assert await catalog.prune(KeepLast(1), dry_run=False) == ()


async def test_written_anew_while_leased(tmp_path: Path) -> None:
    """The older generation of a step stays as long as somebody reads it."""
    async with Saver(tmp_path) as saver:
        first = await saver.save(state(1), step=1)
        async with Catalog(tmp_path) as catalog, catalog.lease(first) as lease:
            await saver.save(state(2), step=1, overwrite=True)
            assert (await lease.load())["step"] == 1
            assert (await catalog.load(1))["step"] == 2
        await saver.save(state(3), step=1, overwrite=True)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001.2"]


async def test_a_state_that_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Missing space is found out at `planned`, with the numbers."""
    store = LocalStore(tmp_path)
    async with Saver(store) as saver:
        store.room = _no_room  # type: ignore[method-assign]
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(OSError, match="7 are free") as error:
            await saver.save(state(1), step=1)
        assert error.value.errno == errno.ENOSPC
        assert sorted(tmp_path.rglob("*")) == before
    await store.aclose()


async def _no_room() -> int:
    return 7


async def test_goes_on_below_a_damaged_step_and_reaches_it_again(tmp_path: Path) -> None:
    """A restore that passed over damaged data lets the run save on, up to that step and beyond it."""
    async with Saver(tmp_path) as saver:
        for step in (1, 5):
            await saver.save(state(step), step=step)
    shard = tmp_path / "step-00000005" / "model-00000-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    async with Saver(tmp_path, keep=KeepLast(1), keep_grace=0) as saver:
        restored = await saver.restore()
        assert restored is not None
        assert (restored.step, [step for step, _ in restored.skipped]) == (1, [5])
        await saver.save(state(3), step=3)
        await saver._housekeeping.drain()
        assert await steps(tmp_path) == [1, 3, 5]  # resumed from, newest, evidence
        await saver.save(state(5.5), step=5)
        await saver._housekeeping.drain()
    async with Catalog(tmp_path) as catalog:
        assert (await catalog.load(5))["step"] == 5.5
        assert await catalog.steps() == (1, 5)
    assert shard.read_bytes() == data


async def test_every_decision_goes_through_one_place(tmp_path: Path) -> None:
    """What many ranks will have to share: admit, skip, due, stop, restore."""
    async with Saver(tmp_path, when=EverySteps(2), save_last=False) as saver:
        last = saver._decisions.last
        assert await saver.restore() is None
        assert last[Kind.RESTORE] == Decision(Kind.RESTORE, None, None)
        await saver.stage_if_due(state(1), step=1)
        assert last[Kind.DUE] == Decision(Kind.DUE, 1, False)
        pending = await saver.stage_if_due(state(2), step=2)
        assert pending is not None
        await pending
        assert last[Kind.ADMIT] == Decision(Kind.ADMIT, 2)
        saver.request_stop("enough")
        assert saver.stop_requested == last[Kind.STOP].value == "enough"
        assert await saver.restore() is not None
        assert last[Kind.RESTORE].value == 2
        assert Kind.SKIP not in last


@pytest.mark.parametrize("kind", ["error", "after"])
async def test_retention_may_fail_at_any_operation(tmp_path: Path, kind: Any) -> None:
    """A failing deletion: the save stands, the newest loads; the next commit tidies up."""
    for n in range(200):
        run = tmp_path / f"{kind}-{n}"
        store = FaultyStore(LocalStore(run), kind=kind)
        async with Saver(store, keep=KeepLast(1), keep_grace=0) as saver:
            for step in (1, 2):
                pending = await saver.stage(state(step), step=step)
                await pending.written()
            await pending
            store.faults.fail_at = len(store.operations) + n
            saver._housekeeping._kick()
            await saver._housekeeping.drain()
            fired = store.faults.fired
            store.faults.fail_at = None
            assert (await saver.restore(step=2)) is not None
            saver._housekeeping.retention.resumed_from = None
            await saver.save(state(3), step=3)
        assert await steps(run) == [3]
        assert saver.failures == ()
        if not fired:
            assert n > 3
            return
    raise AssertionError("it never came to an end")
