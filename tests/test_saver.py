"""The saver's verbs: what each leaves on disk, in which order, within which memory, in which setting."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import safetensors.torch
import torch

import aiockpt
from aiockpt import (
    ByteBudget,
    Catalog,
    Checkpoint,
    CorruptCheckpointError,
    PendingSave,
    Phase,
    Saver,
    StepError,
    StepExistsError,
    UnsupportedStateError,
    UsageError,
)
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyFiles
from tests.proof import assert_exact, assert_sound, litter, number_in, state_of, steps
from tests.savers import assert_quiet, fill, large, numbers, small_blocks, until
from tests.stalling import Disk, a_write, before_commit, store_on

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small poisoned blocks."""
    with small_blocks():
        yield


# ---------------------------------------------------------------- verbs


async def test_every_verb_commits_the_same_thing(tmp_path: Path) -> None:
    """save, stage, staging and save_nowait differ in when they return, not in what they write."""
    async with Saver(tmp_path) as saver:
        saved = await saver.save(state_of(3), step=1)
        staged = await saver.stage(state_of(3), step=2)
        async with saver.staging(state_of(3), step=3) as beside:
            pass
        await beside
        at_once = saver.save_nowait(state_of(3), step=4)
        checkpoints = [saved, await staged, await beside, await at_once]
        assert [c.step for c in checkpoints] == [1, 2, 3, 4]
        assert {c.run_id for c in checkpoints} == {saver.run_id}
        assert len({c.save_id for c in checkpoints}) == 4
        assert len({c.nbytes for c in checkpoints}) == 1
        for checkpoint in checkpoints:
            assert number_in((await saver.restore(step=checkpoint.step) or checkpoint).values) == 3
            assert checkpoint.items == ("model", "optim")
        assert_quiet(saver)
    assert await assert_sound(tmp_path) == (1, 2, 3, 4)


@pytest.mark.parametrize("where", ["local", "memory"])
async def test_what_is_kept_with_a_step(where: str, tmp_path: Path) -> None:
    """metrics, meta and files come back; the files are hashed and committed with the step."""
    (tmp_path / "on disk.txt").write_bytes(b"from a path")
    files: dict[str, Any] = {"config.json": '{"a": 1}', "raw.bin": b"\0\1"}
    files["copied.txt"] = tmp_path / "on disk.txt"
    metrics: dict[str, Any] = {"loss": 0.5, "count": 3, "nan": float("nan")}
    metrics |= {"tensor": torch.tensor(2.5), "np": np.float32(1.5)}
    meta = {"note": "x", "shape": (1, 2), 3: None}
    store = LocalStore(tmp_path / "run") if where == "local" else MemoryStore()
    async with Saver(store) as saver:
        checkpoint = await saver.save({"n": 1}, step=1, metrics=metrics, meta=meta, files=files)
        for found in (checkpoint, await aiockpt.latest(store)):
            assert found is not None
            assert found.files == ("config.json", "raw.bin", "copied.txt")
            assert found.meta == meta
            assert {k: v for k, v in found.metrics.items() if k != "nan"} == {
                "loss": 0.5,
                "count": 3,
                "tensor": 2.5,
                "np": 1.5,
            }
            assert np.isnan(found.metrics["nan"])
    async with Catalog(store) as catalog:
        assert await catalog.read_file(1, "config.json") == b'{"a": 1}'
        assert await catalog.read_file(1, "copied.txt") == b"from a path"
        await catalog.verify(1)


async def test_what_may_not_be_kept_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Names that leave the folder or are ours, metrics that are no numbers: told before."""
    async with Saver(tmp_path) as saver:
        for name in ("../x", "a/b", "", ".hidden", "manifest.json", "/etc/passwd", ".."):
            with pytest.raises(UsageError):
                saver.save({}, step=1, files={name: b""})  # type: ignore[unused-coroutine]
        for name in ("part-00000.json", "model-00000-00000.safetensors"):
            with pytest.raises(UsageError, match=re.escape(name)):
                await saver.save({"model": {"w": torch.zeros(2)}}, step=1, files={name: b""})
        with pytest.raises(UsageError, match="loss"):
            saver.save({}, step=1, metrics={"loss": "low"})  # type: ignore[dict-item, unused-coroutine]
        with pytest.raises(UsageError, match="metric 'loss'"):
            saver.save({}, step=1, metrics={"loss": Fraction(10**400)})  # type: ignore[dict-item, unused-coroutine]
        with pytest.raises(UsageError, match="maps names to numbers"):
            saver.save({}, step=1, metrics=[("loss", 1)])  # type: ignore[arg-type, unused-coroutine]
        with pytest.raises(UnsupportedStateError):
            saver.save({}, step=1, meta={"t": torch.zeros(2)})  # type: ignore[unused-coroutine]
        with pytest.raises(aiockpt.StorageError):
            await saver.save({}, step=1, files={"gone": tmp_path / "gone"})
        assert_quiet(saver)
        await saver.save({}, step=1)
    assert await steps(tmp_path) == (1,)


async def test_pickle_is_said_on_both_sides(tmp_path: Path) -> None:
    """What has no codec is stored only with `allow_pickle`."""
    async with Saver(tmp_path, allow_pickle=True) as saver:
        await saver.save({"odd": re.compile("a+")}, step=1)
        restored = await saver.restore()
        assert restored is not None
        assert restored.values["odd"].pattern == "a+"
    with pytest.raises(aiockpt.PickleRefusedError):
        await aiockpt.load(tmp_path)


async def test_stock_readers_open_the_shards(tmp_path: Path) -> None:
    """Each item lies in plain safetensors files under the names of its own state dict."""
    model = torch.nn.Linear(3, 2)
    async with Saver(tmp_path) as saver:
        await saver.save({"model": model, "n": 1}, step=1)
    found = safetensors.torch.load_file(tmp_path / "step-00000001" / "model-00000-00000.safetensors")
    assert_exact(found, {k: v.detach() for k, v in model.state_dict().items()})


# ---------------------------------------------------------------- the run


async def test_the_run_keeps_its_id_and_names(tmp_path: Path) -> None:
    """`run.json` is written once; a saver with other names is refused; users' files are not touched."""
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (tmp_path / ".hidden").mkdir()
    async with Saver(tmp_path, step_format="ckpt_{}", meta={"seed": 7}) as saver:
        run_id = saver.run_id
        await saver.save({"n": 1}, step=5)
    before = (tmp_path / "run.json").read_bytes()
    record = json.loads(before)
    assert record["run_id"] == run_id
    assert record["step_format"] == "ckpt_{}"
    assert record["meta"] == {"seed": 7}
    async with Saver(tmp_path, step_format="ckpt_{}", meta={"seed": 8}) as again:
        assert again.run_id == run_id
        assert (await again.save({"n": 2}, step=6)).name == "ckpt_6"
    with pytest.raises(UsageError, match="ckpt_"):
        await Saver(tmp_path).__aenter__()
    assert (tmp_path / "run.json").read_bytes() == before
    assert mine.read_text() == "mine"
    assert (tmp_path / ".hidden").is_dir()


async def test_a_damaged_run_record_is_told(tmp_path: Path) -> None:
    """A run.json that is none: CorruptCheckpointError, and it stays as it is."""
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CorruptCheckpointError):
        await Saver(tmp_path).__aenter__()
    assert (tmp_path / "run.json").read_text() == "{"


async def test_files_outside_the_run_are_left_alone(tmp_path: Path) -> None:
    """Everything a saver makes lies in its run."""
    (tmp_path / "beside").write_text("x")
    async with Saver(tmp_path / "a" / "run") as saver:
        await saver.save(state_of(1), step=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "beside"]


# ---------------------------------------------------------------- steps and generations


async def test_steps_only_go_up(tmp_path: Path) -> None:
    """Not the same, not a lower one; whoever goes back retires the later ones."""
    async with Saver(tmp_path) as saver:
        for step in (0, 3, 5):
            await saver.save(state_of(step), step=step)
        with pytest.raises(StepExistsError):
            await saver.save(state_of(3), step=3)
        with pytest.raises(StepError, match="newest"):
            await saver.save(state_of(4), step=4)
    async with Saver(tmp_path) as saver:
        with pytest.raises(StepError):
            await saver.save(state_of(4), step=4)
        back = await saver.restore(step=3, rewind=True)
        assert back is not None
        assert await steps(tmp_path) == (0, 3)
        await saver.save(state_of(4), step=4)
        await saver.save(state_of(12345678901), step=12345678901)
    assert await steps(tmp_path) == (0, 3, 4, 12345678901)
    assert litter(tmp_path) == []


async def test_overwrite_writes_a_new_generation(tmp_path: Path) -> None:
    """The newer one wins; the older one goes after the commit, never before."""
    disk = Disk(before_commit)
    async with Saver(store_on(disk, tmp_path)) as saver:
        first = await saver.save(state_of(1), step=1)
        disk.arm()
        pending = await saver.stage(state_of(2), step=1, overwrite=True)
        await until(disk.stalled.is_set)
        found = await aiockpt.latest(tmp_path)
        assert found is not None
        assert found.save_id == first.save_id
        disk.heal()
        second = await pending
        await saver.drain()
        assert (second.name, second.generation) == ("step-00000001.1", 1)
        assert [p.name for p in tmp_path.glob("step*")] == ["step-00000001.1"]
        third = await saver.save(state_of(3), step=1, overwrite=True)
        assert third.generation == 2
        assert number_in(await aiockpt.load(tmp_path)) == 3
        await saver.save(state_of(4), step=2, overwrite=True)  # nothing there: as usual
    assert await assert_sound(tmp_path) == (1, 2)


async def test_a_queue_behind_an_overwrite(tmp_path: Path) -> None:
    """While the older generation is being removed the next save waits without spinning."""
    disk = Disk(lambda op: op.startswith("rename") and op.endswith("step-00000001"))
    async with Saver(store_on(disk, tmp_path)) as saver:
        await saver.save(state_of(1), step=1)
        disk.arm()
        pending = saver.save_nowait(state_of(2), step=1, overwrite=True)
        queued = asyncio.create_task(saver.save(state_of(3), step=2))
        await until(disk.stalled.is_set)
        assert (await pending).generation == 1  # committed already
        await asyncio.sleep(0.01)
        assert not queued.done()
        disk.heal()
        await queued
    assert await steps(tmp_path) == (1, 2)


async def test_a_damaged_step_is_written_anew_beside_the_evidence(tmp_path: Path) -> None:
    """Without `overwrite` nothing is removed: not the damage, not a user's folder of that name."""
    async with Saver(tmp_path) as saver:
        await saver.save(state_of(1), step=1)
        await saver.save(state_of(2), step=2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "notes").write_text("mine")
    (tmp_path / "step-00000004").write_text("a file")
    async with Saver(tmp_path) as saver:
        names = [(await saver.save(state_of(step), step=step)).name for step in (2, 3, 4)]
    assert names == ["step-00000002.1", "step-00000003.1", "step-00000004.1"]
    assert manifest.exists()
    assert (tmp_path / "step-00000003" / "notes").read_text() == "mine"
    assert await steps(tmp_path) == (1, 2, 3, 4)


async def test_the_same_step_while_it_is_being_saved(tmp_path: Path) -> None:
    """Whether the first one commits decides: then it exists; else the second one is the step."""
    for end in ("commit", "fail"):
        run = tmp_path / end
        disk = Disk(a_write, kind="stall")
        async with Saver(store_on(disk, run), max_pending=2, on_failure="log") as saver:
            disk.arm()
            first = await saver.stage(large(1), step=7)
            await until(disk.stalled.is_set)
            second = asyncio.create_task(saver.save(large(2), step=7))
            anew = asyncio.create_task(saver.save(large(3), step=7, overwrite=True))
            await asyncio.sleep(0)
            if end == "fail":
                first.cancel()
            disk.heal()
            if end == "commit":
                with pytest.raises(StepExistsError):
                    await second
            else:
                await second
            assert (await anew).generation == 1
            with pytest.raises(StepError):
                await saver.save(large(3), step=6)
        assert await steps(run) == (7,)
        assert numbers(await aiockpt.load(run)) == {3.0}


# ---------------------------------------------------------------- order and overlap


async def test_saves_commit_in_the_order_of_their_calls(tmp_path: Path) -> None:
    """Also when a later one has written everything first, and when tasks begin in another order."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path), max_pending=4) as saver:
        disk.arm()
        first = await saver.stage(large(1), step=1)
        await until(disk.stalled.is_set)
        later = [await saver.stage(large(step), step=step) for step in (2, 3)]
        await asyncio.gather(*(p.written() for p in later))
        assert [p.phase for p in later] == [Phase.WRITTEN] * 2
        assert await steps(tmp_path) == ()
        disk.heal()
        await asyncio.gather(first, *later)
        four, five = saver.save({"n": 4}, step=4), saver.save({"n": 5}, step=5)
        await asyncio.gather(five, four)
    renamed = [op.rpartition(".step-")[2][:8] for op in disk.operations if op.startswith("rename ")]
    assert renamed == [f"{step:08d}" for step in (1, 2, 3, 4, 5)]


async def test_max_pending_bounds_what_is_under_way(tmp_path: Path) -> None:
    """Twenty concurrent saves: all commit, never more than two attempts at once."""
    most = 0

    class Counting(FaultyFiles):
        def mkdir(self, path: str) -> None:
            nonlocal most
            super().mkdir(path)
            here = [n for n in os.listdir(tmp_path) if n.startswith(".step") and not n.endswith("lock")]
            most = max(most, len(here))

    async with Saver(LocalStore(tmp_path, files=Counting()), max_pending=2) as saver:
        await asyncio.gather(*(saver.save(large(step), step=step) for step in range(20)))
    assert 1 <= most <= 2
    assert await steps(tmp_path) == tuple(range(20))


async def test_phases_come_in_order_and_say_what_is_true(tmp_path: Path) -> None:
    """planned: sizes; staged: the gate is open; written: not visible; committed: visible."""
    disk = Disk(before_commit)
    state = large(1)
    total = sum(t.nbytes for item in state.values() if isinstance(item, dict) for t in item.values())
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        async with saver.staging(state, step=1) as pending:
            assert pending.phase.name == "CALLED"
            await pending.planned()
            assert pending.progress.total == total
        assert pending.phase >= Phase.STAGED
        assert pending.progress.staged == total
        await pending.written()
        assert pending.progress.written == total
        await until(disk.stalled.is_set)
        assert await steps(tmp_path) == ()
        assert not pending.done()
        disk.heal()
        checkpoint = await pending.committed()
        assert pending.phase.name == "COMMITTED"
        assert await steps(tmp_path) == (1,)
        seconds = [pending.seconds[phase] for phase in Phase if phase is not Phase.CALLED]
        assert seconds == sorted(seconds)
        assert checkpoint == await aiockpt.latest(tmp_path)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("verb", ["save", "stage", "staging"])
async def test_a_state_of_three_times_the_budget(verb: str, tmp_path: Path) -> None:
    """Two blocks do for a leaf larger than the budget, many leaves, strided ones: never more are out."""
    state = {
        "huge": torch.arange(3 * MIB // 2, dtype=torch.float32),
        "strided": torch.arange(MIB, dtype=torch.float32).reshape(1024, 1024).t(),
        "many": [torch.full((1000,), float(i)) for i in range(500)],
    }
    budget = ByteBudget(2 * MIB)
    async with Saver(tmp_path, budget=budget) as saver:
        if verb == "staging":
            async with saver.staging(state, step=1) as pending:
                pass
            await pending
        elif verb == "stage":
            await (await saver.stage(state, step=1))
        else:
            await saver.save(state, step=1)
        assert budget.used <= 2 * MIB
        with pytest.raises(aiockpt.BusyError, match="budget"):
            saver.save_nowait(state, step=2)
        assert_quiet(saver)
    assert budget.used == 0
    assert_exact(await aiockpt.load(tmp_path), state)


async def test_several_saves_and_savers_under_one_small_budget(tmp_path: Path) -> None:
    """Two savers, four saves each, two blocks in all: every save commits, whoever waits is served."""
    budget = ByteBudget(2 * MIB)
    state = large(1, leaves=8)
    async with AsyncExitStack() as stack:
        runs = [tmp_path / name for name in "ab"]
        savers = [await stack.enter_async_context(Saver(run, budget=budget, max_pending=4)) for run in runs]
        await asyncio.gather(*(saver.save(state, step=step) for step in range(4) for saver in savers))
        assert budget.used <= 2 * MIB
    assert budget.used == 0
    for run in runs:
        assert await steps(run) == (0, 1, 2, 3)


async def test_a_cancelled_save_hands_its_blocks_on(tmp_path: Path) -> None:
    """A save that waits for blocks gets those of one that is cancelled."""
    disk = Disk(a_write)
    async with Saver(store_on(disk, tmp_path), budget=2 * MIB, max_pending=2) as saver:
        disk.arm()
        hog = asyncio.create_task(saver.save(large(1, leaves=12), step=1))
        await until(disk.stalled.is_set)
        other = asyncio.create_task(saver.save(large(2, leaves=12), step=2))
        pool = saver._saving.reserve._pool
        assert pool is not None
        await until(lambda: pool.budget.waiting > 0)
        hog.cancel()
        disk.heal()
        with pytest.raises(asyncio.CancelledError):
            await hog
        await other
    assert await steps(tmp_path) == (2,)


async def test_the_default_budget_grows_with_the_state(tmp_path: Path) -> None:
    """A small first state does not starve a large second one."""
    async with Saver(tmp_path) as saver:
        await saver.save({"w": torch.zeros(10)}, step=1)
        pool = saver._saving.reserve._pool
        assert pool is not None
        first = pool.budget.total
        assert first < large(1)["item0"]["w0"].nbytes * 200
        many = large(1, items=40)
        await saver.save(many, step=2)
        grown = pool.budget.total
        assert grown > first
        saver.save_nowait(many, step=3)
        await saver.drain()
        await saver.save({}, step=4)
        assert pool.budget.total == grown


async def test_one_warning_when_the_budget_is_small(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says what it costs, once a saver."""
    async with Saver(tmp_path, budget=2 * MIB) as saver:
        for step in range(3):
            await saver.save({"w": torch.zeros(MIB)}, step=step)
    assert len([r for r in caplog.records if "budget" in r.getMessage()]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("end", ["commit", "fail"])
async def test_two_hundred_saves_do_not_grow(end: str, tmp_path: Path) -> None:
    """Memory, descriptors, threads and tasks level off, whether saves succeed or fail."""
    disk = Disk(a_write, kind="error")
    state = large(1, leaves=6)
    process = psutil.Process()
    seen: list[tuple[int, int, int]] = []
    async with Saver(store_on(disk, tmp_path), budget=4 * MIB, on_failure="log") as saver:
        handles: list[PendingSave] = []
        for n in range(200):
            if end == "fail":
                disk.arm()
            pending = saver.save_nowait(state, step=n, overwrite=True)
            handles.append(pending)
            (outcome,) = await asyncio.gather(pending, return_exceptions=True)
            assert isinstance(outcome, BaseException) == (end == "fail")
            if n % 20 == 19:
                gc.collect()
                disk.faults.operations.clear()
                disk.events.log.clear()
                seen.append((process.memory_info().rss, process.num_fds(), len(asyncio.all_tasks())))
        rss, fds, tasks = zip(*seen, strict=True)
        assert rss[-1] - rss[3] < 20 * MIB, rss
        assert max(fds[2:]) <= fds[1] + 2
        assert max(tasks) <= min(tasks) + 1


# ---------------------------------------------------------------- settings


@pytest.fixture
async def fixture_saver(tmp_path: Path) -> AsyncIterator[Saver]:
    """Entered and left by pytest, in whatever tasks it uses."""
    async with Saver(tmp_path) as saver:
        yield saver


async def test_in_a_fixture(fixture_saver: Saver) -> None:
    """Entered in one task, used in another, left in a third, with a save under way."""
    await asyncio.create_task(_save_once(fixture_saver, 1))
    await fixture_saver.stage(large(2), step=2)


async def _save_once(saver: Saver, step: int) -> Checkpoint:
    return await saver.save(large(step), step=step)


async def test_in_task_groups(tmp_path: Path) -> None:
    """asyncio's and anyio's take the calls as they are; a failing save fails the group."""
    async with Saver(tmp_path, max_pending=2) as saver:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(saver.save(large(step), step=step)) for step in (1, 2)]
        assert [task.result().step for task in tasks] == [1, 2]
        async with anyio.create_task_group() as others:
            others.start_soon(_save_once, saver, 3)
            others.start_soon(_save_once, saver, 4)
        with pytest.raises(ExceptionGroup) as error:
            async with asyncio.TaskGroup() as group:
                group.create_task(saver.save(large(1), step=1))
        assert error.group_contains(StepExistsError)
        assert (await asyncio.wait_for(saver.save({}, step=9), 60)).step == 9
        done, _ = await asyncio.wait([saver.save_nowait({}, step=10).as_task()])
        assert {task.result().step for task in done} == {10}
    assert await steps(tmp_path) == (1, 2, 3, 4, 9, 10)


async def test_in_a_lifespan(tmp_path: Path) -> None:
    """As a web framework does: started and stopped by a task of its own, used by others."""

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[Saver]:
        async with Saver(tmp_path) as saver:
            yield saver

    started: asyncio.Future[Saver] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def serve() -> None:
        async with lifespan() as saver:
            started.set_result(saver)
            await stop.wait()

    server = asyncio.create_task(serve())
    saver = await started
    await asyncio.gather(*(_save_once(saver, step) for step in (1, 2)))
    saver.save_nowait(large(3), step=3)
    stop.set()
    await server
    assert await steps(tmp_path) == (1, 2, 3)


def test_on_a_loop_that_runs_now_and_then(tmp_path: Path) -> None:
    """As in a notebook: one loop, several runs, a saver that lives across them."""
    with asyncio.Runner() as runner:
        saver = runner.run(Saver(tmp_path).__aenter__())
        pending = runner.run(_staged(saver, 1))
        runner.run(_save_once(saver, 2))
        assert pending.done()
        assert runner.run(pending.committed()).step == 1
        runner.run(saver.aclose())
    with asyncio.Runner() as runner:
        assert runner.run(steps(tmp_path)) == (1, 2)


async def _staged(saver: Saver, step: int) -> PendingSave:
    return await saver.stage(large(step), step=step)


def test_one_loop_after_another(tmp_path: Path) -> None:
    """Each `asyncio.run` has its own saver; both write one run; lanes and pools are no hindrance."""

    async def once(first: int) -> str:
        async with Saver(tmp_path, max_pending=2) as saver:
            await asyncio.gather(_save_once(saver, first), _save_once(saver, first + 1))
            return saver.run_id

    assert len({asyncio.run(once(1), debug=True), asyncio.run(once(3))}) == 1
    assert asyncio.run(steps(tmp_path)) == (1, 2, 3, 4)


async def test_a_saver_that_is_never_closed_is_told_once(tmp_path: Path) -> None:
    """Collected with a save under way: one ResourceWarning names the step, and the save commits."""
    disk = Disk(a_write)
    saver = await Saver(store_on(disk, tmp_path)).__aenter__()
    disk.arm()
    pending = await saver.stage(large(5), step=5)
    await until(disk.stalled.is_set)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del saver
        gc.collect()
    assert [w.category for w in caught] == [ResourceWarning]
    assert "pending steps: 5" in str(caught[0].message)
    disk.heal()
    assert (await pending).step == 5
    assert await steps(tmp_path) == (5,)


async def test_a_full_default_executor_is_no_hindrance(tmp_path: Path) -> None:
    """The loop's own executor is neither used nor starved."""
    loop = asyncio.get_running_loop()
    used: list[Any] = []
    original = loop.run_in_executor

    def note(*args: Any) -> Any:
        used.append(args)
        return original(*args)

    loop.run_in_executor = note  # type: ignore[method-assign, assignment]
    try:
        async with Saver(tmp_path, max_pending=4) as saver:
            await asyncio.gather(*(_save_once(saver, step) for step in range(4)))
            await saver.restore()
    finally:
        loop.run_in_executor = original  # type: ignore[method-assign]
    assert [args for args in used if args[0] is None] == []


async def test_mutation_after_every_stage(tmp_path: Path) -> None:
    """A training loop that stages often and steps at once: each file holds its own number."""
    state = large(0)
    async with Saver(tmp_path, max_pending=3, budget=3 * MIB) as saver:
        for step in range(20):
            fill(state, step)
            await saver.stage(state, step=step)
    async with Catalog(tmp_path) as catalog:
        for step in range(20):
            assert numbers(await catalog.load(step)) == {float(step)}
