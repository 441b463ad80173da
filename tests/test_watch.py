"""A watch tells of committed checkpoints, leases each while it is used, and lets go whatever happens."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt import (
    Catalog,
    Checkpoint,
    CorruptCheckpointError,
    Saver,
    StepNotFoundError,
    StorageError,
    UsageError,
    Watch,
    Watched,
    _waking,
)
from aiockpt.policies.keep import KeepLast
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyStore
from tests.crash_child import ROOT
from tests.proof import number_in, save, state_of, steps
from tests.savers import until

POLL = 0.01
"""Seconds between two looks, for tests."""


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Only polls, except where hints are what a test is about."""
    if "hints" not in request.fixturenames:
        monkeypatch.setattr(_waking, "_plug", lambda: None)


@pytest.fixture
def hints() -> None:
    """File notices are on."""


def leases(run: Path) -> list[str]:
    """The leases that are there; what retention looks at them with is none."""
    names = os.listdir(run / "leases") if (run / "leases").exists() else []
    return sorted(name for name in names if name.startswith("step-"))


def leased_steps(run: Path) -> list[int]:
    """The steps that somebody has leased."""
    return sorted(int(name.split(".")[0].removeprefix("step-")) for name in leases(run))


async def one(watch: AsyncIterator[Watched], seconds: float = 20) -> Watched:
    """The next checkpoint."""
    async with asyncio.timeout(seconds):
        return await anext(watch)


async def nothing(watch: AsyncIterator[Watched], looks: int = 12) -> None:
    """There is no next one for now; finding out ends the watch."""
    with pytest.raises(TimeoutError):
        await one(watch, looks * POLL)


# ---------------------------------------------------------------- what is told, and in what order


async def test_the_newest_wins(tmp_path: Path) -> None:
    """What a newer one has replaced while the body ran is left out; nothing comes twice."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)
    async with Catalog(run) as catalog, catalog.watch(poll=POLL) as watch:
        assert (await one(watch)).step == 1
        for step in (2, 3, 4):
            await save(run, state_of(step), step)
        assert (await one(watch)).step == 4
        await nothing(watch)


async def test_every_one_in_order(tmp_path: Path) -> None:
    """With `every` a slow body misses none, and one that was written anew comes again."""
    run = tmp_path / "run"
    async with Saver(run) as saver, Catalog(run) as catalog, catalog.watch(poll=POLL, every=True) as watch:
        for step in (1, 2, 3):
            await saver.save(state_of(step), step=step)
        assert [(await one(watch)).step for _ in range(3)] == [1, 2, 3]
        await saver.save(state_of(4), step=4)
        assert (await one(watch)).step == 4
        again = await saver.save(state_of(5), step=2, overwrite=True)
        found = await one(watch)
        assert (found.step, found.save_id) == (2, again.save_id)
        await nothing(watch)


@pytest.mark.parametrize("every", [False, True])
async def test_a_step_written_anew_is_news(tmp_path: Path, every: bool) -> None:
    """Identity is (step, save id): another generation counts, and so does the same folder name again."""
    run = tmp_path / "run"
    first = await save(run, state_of(1), 7)
    async with Catalog(run) as catalog, catalog.watch(poll=POLL, every=every) as watch:
        assert (await one(watch)) == first
        second = await save(run, state_of(2), 7, overwrite=True)
        assert second.name != first.name
        assert (await one(watch)) == second
        for name in (first.name, second.name):
            await catalog.store.retire(name)
        third = await save(run, state_of(3), 7)
        assert third.step == 7
        found = await one(watch)
        assert found == third
        assert number_in(await found.load()) == 3


@pytest.mark.parametrize("every", [False, True])
async def test_the_same_files_again_are_no_news(tmp_path: Path, every: bool) -> None:
    """Touched times, and a copy put in the place of the original, change nothing."""
    run = tmp_path / "run"
    found = await save(run, state_of(1), 1)
    async with Catalog(run) as catalog, catalog.watch(poll=POLL, every=every) as watch:
        assert (await one(watch)) == found
        shutil.copytree(run / found.name, tmp_path / "copy")
        shutil.rmtree(run / found.name)
        (tmp_path / "copy").rename(run / found.name)
        for file in (run / found.name).iterdir():
            os.utime(file)
        await nothing(watch)


async def test_after_a_step(tmp_path: Path) -> None:
    """Only what lies above it; what is written below it later is not told either."""
    run = tmp_path / "run"
    for step in (1, 5):
        await save(run, state_of(step), step)
    for every in (False, True):
        async with Catalog(run) as catalog:
            await nothing(catalog.watch(after=5, poll=POLL, every=every))
            assert (await one(catalog.watch(after=4, poll=POLL, every=every))).step == 5
            assert (await one(catalog.watch(after=0, poll=POLL, every=every))).step == (1 if every else 5)


async def test_after_a_checkpoint(tmp_path: Path) -> None:
    """By identity: another save of the same step comes later."""
    run = tmp_path / "run"
    first = await save(run, state_of(1), 1)
    for every in (False, True):
        async with Catalog(run) as catalog:
            await nothing(catalog.watch(after=first, poll=POLL, every=every))
    second = await save(run, state_of(2), 1, overwrite=True)
    for every in (False, True):
        async with Catalog(run) as catalog:
            assert (await one(catalog.watch(after=first, poll=POLL, every=every))) == second


async def test_the_newest_is_deleted(tmp_path: Path) -> None:
    """That is no news: nobody is sent back to an older one."""
    run = tmp_path / "run"
    for step in (1, 2):
        await save(run, state_of(step), step)
    async with Catalog(run) as catalog, catalog.watch(poll=POLL) as watch:
        assert (await one(watch)).step == 2
        waiting = asyncio.create_task(one(watch))
        await asyncio.sleep(5 * POLL)
        shutil.rmtree(run / "step-00000002")
        await asyncio.sleep(10 * POLL)
        assert not waiting.done()
        await save(run, state_of(3), 3)
        assert (await waiting).step == 3


async def test_a_run_that_was_rewound(tmp_path: Path) -> None:
    """Lower steps that are born after the later ones were retired are followed."""
    run = tmp_path / "run"
    for step in (100, 200, 300):
        await save(run, state_of(step), step)
    async with Catalog(run) as catalog, catalog.watch(poll=POLL) as watch:
        assert (await one(watch)).step == 300
        waiting = asyncio.create_task(one(watch))
        async with Saver(run) as saver:
            target = state_of(0)
            await saver.restore(target, step=100, rewind=True)
            await asyncio.sleep(10 * POLL)
            assert not waiting.done()
            await saver.save(state_of(150), step=150)
        assert (await waiting).step == 150


async def test_an_alias_is_followed_back_and_forth(tmp_path: Path) -> None:
    """Before it is promoted there is nothing; a rollback is followed; promoting it again is no news."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        await save(run, state_of(step), step)
    async with Catalog(run) as catalog, catalog.watch(follow="alias:production", poll=POLL) as watch:
        waiting = asyncio.create_task(one(watch))
        await asyncio.sleep(5 * POLL)
        assert not waiting.done()
        for step in (2, 3, 1):
            await catalog.promote(step)
            assert (await waiting).step == step
            waiting = asyncio.create_task(one(watch))
        await catalog.promote(1)
        await asyncio.sleep(5 * POLL)
        assert not waiting.done()
        await catalog.demote()
        await asyncio.sleep(5 * POLL)
        await catalog.promote(2)
        assert (await waiting).step == 2


async def test_damage_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, however often it is looked at; repaired, it is told of."""
    run = tmp_path / "run"
    for step in (1, 2):
        await save(run, state_of(step), step)
    hidden = tmp_path / "hidden"
    shard = next((run / "step-00000002").glob("model*"))
    shard.rename(hidden)
    with caplog.at_level(logging.WARNING, "aiockpt"):
        async with Catalog(run) as catalog, catalog.watch(poll=POLL) as watch:
            assert (await one(watch)).step == 1
            waiting = asyncio.create_task(one(watch))
            await asyncio.sleep(10 * POLL)
            assert not waiting.done()
            hidden.rename(shard)
            assert (await waiting).step == 2
    assert len(caplog.records) == 1
    assert "step-00000002 is passed over" in caplog.text


# ---------------------------------------------------------------- leases


async def test_it_is_leased_while_the_body_runs(tmp_path: Path) -> None:
    """And no longer: a saver that keeps one step only deletes around it."""
    run = tmp_path / "run"
    async with Saver(run, keep=KeepLast(1), keep_grace=0) as saver, Catalog(run) as catalog:
        await saver.save(state_of(1), step=1)
        async with catalog.watch(poll=POLL, ttl=30) as watch:
            checkpoint = await one(watch)
            assert leased_steps(run) == [1]
            assert [info.purpose for info in await catalog.leases()] == ["watch"]
            for step in (2, 3):
                await saver.save(state_of(step), step=step)
                await saver._housekeeping.drain()
            assert await steps(run) == (1, 3)
            assert number_in(await checkpoint.load()) == 1
            target = state_of(0)
            await checkpoint.load(into=target)
            assert number_in(target | {"n": 1}) == 1
            assert (await one(watch)).step == 3
            assert leased_steps(run) == [3]
        assert leases(run) == []


@pytest.mark.parametrize("how", ["break", "error", "cancel", "aclose", "exit"])
async def test_the_lease_goes_however_the_loop_ends(tmp_path: Path, how: str) -> None:
    """With the loop: nobody has to close anything by hand."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)

    async def body() -> None:
        async for _ in aiockpt.watch(run, poll=POLL):
            assert leased_steps(run) == [1]
            if how == "break":
                break
            if how == "error":
                raise ValueError("the body")
            if how == "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(1)

    if how in ("break", "error", "cancel"):
        await asyncio.gather(asyncio.create_task(body()), return_exceptions=True)
    else:
        watch = aiockpt.watch(run, poll=POLL)
        await one(watch)
        assert leased_steps(run) == [1]
        if how == "aclose":
            await watch.aclose()
            await watch.aclose()
        else:
            async with watch:
                pass
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
    async with asyncio.timeout(10):
        await until(lambda: not leases(run))
        await until(lambda: "aiockpt lease" not in {task.get_name() for task in asyncio.all_tasks()})


async def test_a_cancelled_wait_ends_the_watch(tmp_path: Path) -> None:
    """A watch that nobody waits for listens no more, and a new one begins where it is told to."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)
    watch = aiockpt.watch(run, poll=POLL, after=1)
    await nothing(watch)
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


BREAK_AND_LEAVE = """
import asyncio, sys, aiockpt
async def main(how):
    async for checkpoint in aiockpt.watch(sys.argv[1]):
        if how == "break":
            break
        if how == "return":
            return
        raise ValueError
for how in ("break", "return", "raise"):
    try:
        asyncio.run(main(how))
    except ValueError:
        pass
"""


def test_the_end_of_the_loop_lets_go(tmp_path: Path) -> None:
    """A program that breaks out and ends at once leaves no lease, and no thread that keeps it."""
    run = tmp_path / "run"
    asyncio.run(save(run, state_of(1), 1))
    command = [sys.executable, "-W", "error", "-c", BREAK_AND_LEAVE, str(run)]
    subprocess.run(command, check=True, timeout=50, cwd=ROOT)
    assert leases(run) == []


async def test_a_step_that_goes_before_it_is_leased(tmp_path: Path) -> None:
    """It is not told, and the next one is."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)

    class Deleting(FaultyStore):
        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key.startswith("leases/step-00000001."):
                await self.inner.retire("step-00000001")
            await super().put(key, data, if_absent=if_absent)

    async with Catalog(Deleting(LocalStore(run))) as catalog, catalog.watch(poll=POLL) as watch:
        waiting = asyncio.create_task(one(watch))
        await asyncio.sleep(10 * POLL)
        await save(run, state_of(2), 2)
        assert (await waiting).step == 2
    assert leases(run) == []


# ---------------------------------------------------------------- cursors


@pytest.mark.parametrize("every", [False, True])
async def test_a_cursor_remembers(tmp_path: Path, every: bool) -> None:
    """What was acknowledged does not come again after a restart, what was not does."""
    run = tmp_path / "run"
    for step in (1, 2):
        await save(run, state_of(step), step)

    async def next_one() -> Watched:
        return await one(aiockpt.watch(run, cursor="eval", every=every, poll=POLL))

    first = await next_one()
    assert first.step == (1 if every else 2)
    assert await next_one() == first
    await first.ack()
    record = json.loads((run / "cursors" / "eval.json").read_text())
    assert (record["step"], record["save_id"]) == (first.step, first.save_id)
    await save(run, state_of(3), 3)
    assert (await next_one()).step == (2 if every else 3)
    assert await steps(run) == (1, 2, 3)  # a cursor is no step, and no litter
    other = await one(aiockpt.watch(run, cursor="other", every=every, poll=POLL))
    assert other.step == (1 if every else 3)


async def test_a_damaged_cursor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody guesses where it was: it is told once, and waited for."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)
    (run / "cursors").mkdir()
    for junk in (
        "",
        "[]",
        '{"step": 1}',
        "[" * 100_000,
        '{"name": 1, "step": 1, "generation": 0, "save_id": ""}',
    ):
        (run / "cursors" / "eval.json").write_text(junk)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "aiockpt"):
            await nothing(aiockpt.watch(run, cursor="eval", poll=POLL))
        assert len([r for r in caplog.records if "cursor" in r.getMessage()]) == 1
    (run / "cursors" / "eval.json").unlink()
    assert (await one(aiockpt.watch(run, cursor="eval", poll=POLL))).step == 1


async def test_ack_that_cannot_be_written(tmp_path: Path) -> None:
    """A StorageError; without a cursor it is the call that is wrong."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)

    class ReadOnly(FaultyStore):
        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key.startswith("cursors/"):
                raise OSError(30, "read-only", key)
            await super().put(key, data, if_absent=if_absent)

    async with Catalog(ReadOnly(LocalStore(run))) as catalog:
        async with catalog.watch(cursor="eval", poll=POLL) as watch:
            with pytest.raises(StorageError, match=r"cursors/eval\.json"):
                await (await one(watch)).ack()
        async with catalog.watch(poll=POLL) as watch:
            with pytest.raises(UsageError, match="cursor="):
                await (await one(watch)).ack()


# ---------------------------------------------------------------- trouble


async def test_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    """It is waited for, and nothing is made meanwhile; when it vanishes and comes back it goes on."""
    run = tmp_path / "deep" / "run"
    async with Catalog(run) as catalog, catalog.watch(poll=POLL) as watch:
        waiting = asyncio.create_task(one(watch))
        await asyncio.sleep(5 * POLL)
        assert not run.parent.exists()
        await save(run, state_of(1), 1)
        assert (await waiting).step == 1
        waiting = asyncio.create_task(one(watch))
        await asyncio.sleep(2 * POLL)
        shutil.rmtree(run)
        await asyncio.sleep(5 * POLL)
        await save(run, state_of(2), 2)
        assert (await waiting).step == 2


async def test_a_store_that_fails_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each trouble is told once, then that it is over; the watch goes on."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)
    broken = True

    class Failing(FaultyStore):
        async def list(self, folder: str = "") -> list[Any]:
            if broken:
                raise OSError(5, "the disk is away", folder)
            return await super().list(folder)

    with caplog.at_level(logging.INFO, "aiockpt"):
        async with Catalog(Failing(LocalStore(run))) as catalog, catalog.watch(poll=POLL) as watch:
            waiting = asyncio.create_task(one(watch))
            await asyncio.sleep(10 * POLL)
            broken = False
            assert (await waiting).step == 1
    told = [record.getMessage() for record in caplog.records]
    assert len([text for text in told if "the disk is away" in text]) == 1
    assert len([text for text in told if "works again" in text]) == 1


def test_patience_grows_and_ends() -> None:
    """The pause doubles up to half a minute, and is back to the poll's after a look that worked."""
    patience = _waking.Patience(1.0, "run")
    pauses = [patience.failed(OSError("x")) for _ in range(40)]
    assert pauses[:6] == [1, 2, 4, 8, 16, 30]
    assert pauses[-1] == 30
    assert patience.worked() == 1
    assert patience.failed(OSError("x")) == 1
    assert _waking.Patience(100.0, "run").failed(OSError("x")) == 100


async def test_polls_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a quarter at most, and they are not all the same."""
    waited: list[float] = []

    def timeout(seconds: float) -> Any:
        waited.append(seconds)
        return asyncio.timeouts.Timeout(asyncio.get_running_loop().time())

    monkeypatch.setattr("aiockpt._waking.asyncio.timeout", timeout)
    waker = _waking.Waker(MemoryStore())
    for _ in range(20):
        await waker.wait(8.0)
    assert all(6 <= seconds <= 10 for seconds in waited)
    assert len(set(waited)) > 10


async def test_a_damaged_alias_is_waited_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Told once; what is promoted in its place is followed."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)
    (run / "aliases").mkdir()
    (run / "aliases" / "production.json").write_text("junk")
    with caplog.at_level(logging.WARNING, "aiockpt"):
        async with Catalog(run) as catalog, catalog.watch(follow="alias:production", poll=POLL) as watch:
            waiting = asyncio.create_task(one(watch))
            await asyncio.sleep(8 * POLL)
            await catalog.promote(1)
            assert (await waiting).step == 1
    assert len([r for r in caplog.records if "not an alias" in r.getMessage()]) == 1


# ---------------------------------------------------------------- hints


async def test_a_commit_is_seen_at_once(tmp_path: Path, hints: None) -> None:
    """With watchfiles a commit or a promotion ends a pause that would have lasted an hour."""
    run = tmp_path / "run"
    await save(run, state_of(1), 1)
    async with Catalog(run) as catalog, catalog.watch(poll=3600, every=True) as watch:
        assert (await one(watch)).step == 1
        for step in (2, 3):
            waiting = asyncio.create_task(one(watch, 30))
            await asyncio.sleep(0.2)
            await save(run, state_of(step), step)
            assert (await waiting).step == step
    async with Catalog(run) as catalog, catalog.watch(poll=3600, follow="alias:production") as watch:
        for step in (1, 2):
            waiting = asyncio.create_task(one(watch, 30))
            await asyncio.sleep(0.3)
            await catalog.promote(step)
            assert (await waiting).step == step


async def test_a_hint_that_fails_is_none(
    tmp_path: Path, hints: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where notices cannot be had, or their thread dies, the poll goes on."""
    from aiockpt.integrations import wake

    run = tmp_path / "run"
    await save(run, state_of(1), 1)

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("no more watches")

    monkeypatch.setattr("aiockpt.integrations.wake.watchfiles.watch", broken)
    async with Catalog(run) as catalog, catalog.watch(poll=POLL, every=True) as watch:
        for step in (1, 2):
            assert (await one(watch)).step == step
            await save(run, state_of(step + 1), step + 1)
    monkeypatch.setattr(wake.Notices, "__init__", broken)
    async with Catalog(run) as catalog, catalog.watch(poll=POLL) as watch:
        assert (await one(watch)).step == 3


# ---------------------------------------------------------------- options and records


async def test_options_are_checked_at_the_call(tmp_path: Path) -> None:
    """Before anything is looked at."""
    wrong: list[dict[str, Any]] = [
        {"poll": 0},
        {"poll": -1},
        {"poll": float("nan")},
        {"poll": "1"},
        {"ttl": 0},
        {"follow": "newest"},
        {"follow": "alias:"},
        {"follow": "alias:a/b"},
        {"follow": None},
        {"follow": "alias:a", "every": True},
        {"after": "3"},
        {"after": True},
        {"cursor": "a/b"},
        {"cursor": ""},
        {"cursor": "a", "after": 3},
    ]
    async with Catalog(tmp_path / "run") as catalog:
        for options in wrong:
            with pytest.raises(UsageError):
                catalog.watch(**options)
            with pytest.raises(UsageError):
                aiockpt.watch(tmp_path / "run", **options)
    gc.collect()


async def test_the_record(tmp_path: Path) -> None:
    """A watched checkpoint is equal to any other record of it, travels as one, and opens as one."""
    run = tmp_path / "run"
    made = await save(run, state_of(1), 1, metrics={"loss": 0.5})
    async with Catalog(run) as catalog, catalog.watch(poll=POLL) as watch:
        found = await one(watch)
        assert isinstance(watch, Watch)
        assert isinstance(found, Checkpoint)
        assert found == made == await catalog.get(1)
        assert made == found
        assert found != replace(made, save_id="0" * 32)
        assert found != 1
        assert found.metrics == {"loss": 0.5}
        travelled = pickle.loads(pickle.dumps(found))
        assert type(travelled) is Checkpoint
        assert travelled == made
        assert number_in(await catalog.load(found)) == 1
        with pytest.raises(UsageError, match="lease"):
            await replace(found, lease=None).load()
        assert "lease" not in repr(found)


# ---------------------------------------------------------------- wait_for, leases()


async def test_wait_for_a_step(tmp_path: Path) -> None:
    """Until it is committed, or one above it; bounded by asyncio's own means."""
    run = tmp_path / "run"
    async with Catalog(run) as catalog:
        waiting = asyncio.create_task(catalog.wait_for(3, poll=POLL))
        for step in (1, 2):
            await save(run, state_of(step), step)
        await asyncio.sleep(5 * POLL)
        assert not waiting.done()
        made = await save(run, state_of(3), 3)
        assert await waiting == made
        assert (await catalog.wait_for(2, poll=POLL)).step == 2
        await save(run, state_of(9), 9)
        assert (await catalog.wait_for(5, poll=POLL)).step == 9
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5 * POLL):
                await catalog.wait_for(10, poll=POLL)
        for wrong in ("3", True, None):
            with pytest.raises(UsageError):
                await catalog.wait_for(wrong)  # type: ignore[arg-type]
        assert leases(run) == []


async def test_wait_for_survives_trouble(tmp_path: Path) -> None:
    """Damage of the run's own record, for one."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("junk")
    async with Catalog(run) as catalog:
        with pytest.raises(CorruptCheckpointError):
            await catalog.latest()
        waiting = asyncio.create_task(catalog.wait_for(1, poll=POLL))
        await asyncio.sleep(5 * POLL)
        (run / "run.json").unlink()
        await save(run, state_of(1), 1)
        assert (await waiting).step == 1


async def test_who_reads_what(tmp_path: Path) -> None:
    """The leases of a run, readable or not, without a trace; one of a dead reader is told as expired."""
    run = tmp_path / "run"
    for step in (1, 2):
        await save(run, state_of(step), step)
    async with Catalog(run) as catalog:
        assert await catalog.leases() == ()
        async with catalog.lease(1, ttl=50, purpose="report"), catalog.lease(2):
            junk = run / "leases" / f"step-00000009.{'a' * 32}.{'b' * 32}.json"
            junk.write_text("junk")
            os.utime(junk, (0, 0))
            (run / "leases" / "notes").write_text("mine")
            before = leases(run)
            one, two, dead = await catalog.leases()
            assert leases(run) == before
    assert (one.step, one.purpose, one.ttl, one.pid, one.expired) == (1, "report", 50.0, os.getpid(), False)
    assert one.name == "step-00000001"
    assert one.host
    assert one.since
    assert one.renewed
    assert (two.step, two.purpose) == (2, "")
    assert (dead.step, dead.pid, dead.expired) == (None, None, True)


# ---------------------------------------------------------------- not async


def test_sync_lease_and_wait_for(tmp_path: Path) -> None:
    """The same for loops that are not async; a lease that is left open goes with the catalog."""
    run = tmp_path / "run"
    for step in (1, 2):
        asyncio.run(save(run, state_of(step), step, files={"a.txt": b"a"}))
    with aiockpt.sync.Catalog(run) as catalog:
        assert catalog.wait_for(1).step == 1
        with catalog.lease(1, ttl=30, purpose="eval") as lease:
            assert lease.checkpoint.step == 1
            assert not lease.lost
            assert not lease.pinned
            assert leased_steps(run) == [1]
            assert [info.purpose for info in catalog.leases()] == ["eval"]
            assert number_in(lease.load()) == 1
            target = state_of(0)
            assert lease.load(into=target).step == 1
            assert lease.read_file("a.txt") == b"a"
        assert leases(run) == []
        with pytest.raises(StepNotFoundError), catalog.lease(7):
            pass
        with pytest.raises(UsageError):
            catalog.lease(1, ttl=0)
        open_lease = catalog.lease()
        open_lease.__enter__()
        assert leased_steps(run) == [2]
    assert leases(run) == []
    open_lease.__exit__(None, None, None)
