"""Whatever is wrong with a checkpoint, what serves serves on, whole, and the reason is told."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aiockpt import Catalog, Checkpoint, Reloader, Saver, _waking
from aiockpt._quarantine import LONGEST, MOST, Quarantine
from aiockpt.policies.keep import KeepLast
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyStore
from tests.crash_child import ROOT
from tests.proof import save
from tests.serving import POLL, Net, answer, commit, leases, served, shard, waited, weights


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only polls."""
    monkeypatch.setattr(_waking, "_plug", lambda: None)


def reloader_of(run: Any, **options: Any) -> Reloader[Net]:
    """A quick one."""
    return Reloader(run, Net, **{"poll": POLL, "retry": 3600, **options})


def flipped(run: Path, step: int) -> None:
    """A bit of the data changes on its way to the disk."""
    folder = commit(run.parent / "made", step)
    data = bytearray(shard(folder).read_bytes())
    data[-7] ^= 4
    shard(folder).write_bytes(data)
    folder.rename(run / folder.name)


def nan(run: Path, step: int) -> None:
    """One number is none."""
    bad = weights(step)
    bad["two.weight"][1, 2] = math.nan
    commit(run, step, bad)


def infinite(run: Path, step: int) -> None:
    """A buffer is infinite."""
    commit(run, step, {**weights(step), "scale": torch.full((5,), -math.inf)})


def missing(run: Path, step: int) -> None:
    """A parameter was not saved."""
    bad = weights(step)
    del bad["one.bias"]
    commit(run, step, bad)


def extra(run: Path, step: int) -> None:
    """There is one that the model does not have."""
    commit(run, step, {**weights(step), "three": torch.ones(1)})


def shape(run: Path, step: int) -> None:
    """A layer is wider."""
    commit(run, step, weights(step, width=5))


def dtype(run: Path, step: int) -> None:
    """Half the precision."""
    commit(run, step, {**weights(step), "one.bias": torch.full((3,), step, dtype=torch.float16)})


def no_tensors(run: Path, step: int) -> None:
    """The entry is something else."""
    commit(run, step, {"a": 1})


BAD: dict[Callable[[Path, int], None], tuple[str, str]] = {
    flipped: ("load", "checksum"),
    nan: ("finite", "two.weight"),
    infinite: ("finite", "scale"),
    missing: ("cover", "missing in the checkpoint: one.bias"),
    extra: ("cover", "not in the target: three"),
    shape: ("cover", "saved shape"),
    dtype: ("cover", "saved dtype"),
    no_tensors: ("cover", "missing in the checkpoint"),
}


@pytest.mark.parametrize("strategy", ["swap", "inplace"])
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
async def test_a_bad_checkpoint_is_passed_over(
    tmp_path: Path, bad: Callable[[Path, int], None], strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once, told once, and quarantined; the next good one is taken."""
    run = tmp_path / "run"
    commit(run, 1)
    with caplog.at_level(logging.WARNING, "aiockpt"):
        async with reloader_of(run, strategy=strategy) as reloader:
            await reloader.ready()
            bad(run, 2)
            await waited(lambda: reloader.status()["failures"])
            await asyncio.sleep(6 * POLL)
            assert await answer(reloader) == (1, {1.0})
            (quarantined,) = reloader.status()["quarantined"]
            stage, text = BAD[bad]
            assert (quarantined["step"], quarantined["stage"], quarantined["tries"]) == (2, stage, 1)
            assert text in quarantined["reason"]
            commit(run, 3)
            await reloader.wait_for(3)
            assert await answer(reloader) == (3, {3.0})
            assert reloader.status()["failures"] == 1
    assert len([r for r in caplog.records if "not put to service" in r.getMessage()]) == 1
    assert leases(run) == {}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
async def test_the_start_takes_the_newest_good_one(tmp_path: Path, bad: Callable[[Path, int], None]) -> None:
    """Whatever is wrong with those above it."""
    run = tmp_path / "run"
    for step in (1, 2):
        commit(run, step)
    bad(run, 3)
    nan(run, 4)
    async with reloader_of(run) as reloader:
        assert await answer(reloader) == (2, {2.0})
        assert [q["step"] for q in reloader.status()["quarantined"]] == [4, 3]


async def test_between_what_serves_and_a_bad_one(tmp_path: Path) -> None:
    """A good step that a bad newer one had overtaken is taken; none below what serves ever is."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        commit(run, step)
    async with reloader_of(run) as reloader:
        await reloader.wait_for(3)
        async with reloader.use():  # the next look waits for this one
            commit(run, 4)
            await reloader.wait_for(4)
            commit(run, 5)
            nan(run, 6)
        await reloader.wait_for(5)
        assert [h["step"] for h in reloader.status()["history"]] == [3, 4, 6, 5]


@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("validate", lambda model: model.versions() == {1.0}),
        ("validate", lambda model: 1 / (2 - max(model.versions()))),
        ("warm_up", lambda model: 1 / (2 - max(model.versions()))),
    ],
)
async def test_the_users_own_check(tmp_path: Path, what: str, function: Any) -> None:
    """False or an error, in a thread or on the loop: the version does not serve."""
    run = tmp_path / "run"
    commit(run, 1)

    async def on_loop(model: Net) -> Any:
        await asyncio.sleep(0)
        return function(model)

    for given in (function, on_loop):
        shutil.rmtree(run / "step-00000002", ignore_errors=True)
        options: dict[str, Any] = {what: given}
        async with reloader_of(run, **options) as reloader:
            await reloader.ready()
            commit(run, 2)
            await waited(lambda: reloader.status()["failures"])
            assert reloader.status()["quarantined"][0]["stage"] == what
            assert await answer(reloader) == (1, {1.0})


async def test_what_is_damaged_by_its_files_is_not_even_tried(tmp_path: Path) -> None:
    """Missing, cut or torn files are seen by the manifest; once repaired the step is served."""
    run = tmp_path / "run"
    commit(run, 1)
    for step in (2, 3, 4):
        commit(tmp_path / "made", step)
    cut = shard(tmp_path / "made" / "step-00000002")
    cut.write_bytes(cut.read_bytes()[:-1])
    (tmp_path / "made" / "step-00000003" / "manifest.json").write_text("{")
    hidden = shard(tmp_path / "made" / "step-00000004").rename(tmp_path / "hidden")
    async with reloader_of(run) as reloader:
        await reloader.ready()
        for step in (2, 3, 4):
            (tmp_path / "made" / f"step-{step:08d}").rename(run / f"step-{step:08d}")
        await asyncio.sleep(8 * POLL)
        assert (served(reloader), reloader.status()["failures"]) == (1, 0)
        name = next(r["name"] for r in _files(run / "step-00000004") if r["name"].startswith("model"))
        hidden.rename(run / "step-00000004" / name)
        await reloader.wait_for(4)


def _files(folder: Path) -> list[dict[str, Any]]:
    import json

    found: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())["files"]
    return found


async def test_deleted_while_it_is_loaded(tmp_path: Path) -> None:
    """By somebody who asks nobody: what serves serves on, the next one is taken."""
    run = tmp_path / "run"
    commit(run, 1)

    class Deleting(FaultyStore):
        async def open(self, key: str) -> Any:
            if key.startswith("step-00000002/"):
                shutil.rmtree(run / "step-00000002", ignore_errors=True)
            return await super().open(key)

    async with reloader_of(Deleting(LocalStore(run))) as reloader:
        await reloader.ready()
        commit(run, 2)
        await waited(lambda: reloader.status()["failures"])
        assert reloader.status()["history"][-1]["error"] in ("StepNotFoundError", "VanishedError")
        assert await answer(reloader) == (1, {1.0})
        commit(run, 3)
        await reloader.wait_for(3)


async def test_a_disk_that_fails_for_a_while(tmp_path: Path) -> None:
    """It is tried again soon: the checkpoint is not to blame."""
    run = tmp_path / "run"
    commit(run, 1)
    failing = [False]

    class Failing(FaultyStore):
        async def open(self, key: str) -> Any:
            if failing[0]:
                raise OSError(5, "the disk is away", key)
            return await super().open(key)

    async with reloader_of(Failing(LocalStore(run)), retry=0.05) as reloader:
        await reloader.ready()
        failing[0] = True
        commit(run, 2)
        await waited(lambda: reloader.status()["failures"] > 1)
        assert await answer(reloader) == (1, {1.0})
        failing[0] = False
        await reloader.wait_for(2)
        assert reloader.status()["quarantined"] == []


async def test_repaired_in_place(tmp_path: Path) -> None:
    """A bit that flips back is found at the next try."""
    run = tmp_path / "run"
    run.mkdir()
    flipped(run, 2)
    commit(run, 1)
    async with reloader_of(run, retry=0.05) as reloader:
        assert (await reloader.ready()).step == 1
        file = shard(run / "step-00000002")
        data = bytearray(file.read_bytes())
        data[-7] ^= 4
        file.write_bytes(data)
        await reloader.wait_for(2)


async def test_a_model_that_cannot_be_built(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No checkpoint is to blame: none is quarantined, it is tried again, and told once."""
    run = tmp_path / "run"
    commit(run, 1)
    broken = [True]

    def build() -> Net:
        if broken[0]:
            raise ImportError("no kernels")
        return Net()

    async with Reloader(run, build, poll=POLL) as reloader:
        await waited(lambda: reloader.status()["failures"] > 2)
        assert reloader.status()["quarantined"] == []
        assert {h["stage"] for h in reloader.status()["history"]} == {"build"}
        broken[0] = False
        await reloader.ready()


async def test_cancelled_while_it_loads(tmp_path: Path) -> None:
    """A pin that is cancelled, and a close in the middle, leave no lease and no thread."""
    run = tmp_path / "run"
    for step in (1, 2):
        commit(run, step)
    held, inside = asyncio.Event(), asyncio.Event()

    async def hold(_: Net) -> None:
        if held.is_set():
            inside.set()
            await asyncio.sleep(3600)

    async with reloader_of(run, warm_up=hold) as reloader:
        await reloader.wait_for(2)
        held.set()
        pin = asyncio.create_task(reloader.pin(1))
        await inside.wait()
        assert reloader.status()["reloading"]["stage"] == "warm_up"
        pin.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pin
        assert reloader.status()["history"][-1]["outcome"] == "cancelled"
        assert reloader.status()["pinned"] is None
        assert await answer(reloader) == (2, {2.0})
        assert leases(run) == {2: 1}
        inside.clear()
        commit(run, 3)
        await inside.wait()
    assert leases(run) == {}


# ---------------------------------------------------------------- quarantine


def checkpoint_of(step: int) -> Checkpoint:
    """A record."""
    return Checkpoint(
        run="r", name=f"step-{step}", step=step, save_id=f"{step:032x}", run_id="", time=0, nbytes=0
    )


def test_quarantine_is_not_for_ever() -> None:
    """The pause doubles up to an hour; forgiving ends it at once; a rollback is never forgiven."""
    now = [0.0]
    quarantine = Quarantine(30.0, lambda: now[0])
    one, two = checkpoint_of(1), checkpoint_of(2)
    for tries, seconds in enumerate((30, 60, 120), 1):
        quarantine.add(one, "load", ValueError("x"))
        assert quarantine.facts()[0]["tries"] == tries
        now[0] += seconds - 1
        assert quarantine.holds(one)
        now[0] += 1
        assert not quarantine.holds(one)
    for _ in range(100):
        quarantine.add(one, "load", ValueError(""))
    assert quarantine.facts()[0]["retry_in"] == LONGEST
    assert quarantine.facts()[0]["reason"] == "ValueError"
    quarantine.add(two, "load", OSError("x"), soon=True)
    assert quarantine.facts()[1]["retry_in"] == 5
    quarantine.bar(two, "rolled back")
    quarantine.forgive()
    assert not quarantine.holds(one)
    assert quarantine.holds(two)
    assert not quarantine.holds(checkpoint_of(3))
    quarantine.release(two)
    assert not quarantine.holds(two)
    for step in range(2 * MOST):
        quarantine.add(checkpoint_of(step), "load", ValueError("x"))
    assert len(quarantine) == MOST


# ---------------------------------------------------------------- all of it at once


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["swap", "inplace"])
async def test_fifty_reloads_ten_of_them_bad(tmp_path: Path, strategy: Any) -> None:
    """No request fails, each sees one version and that is the one it is told, none goes back in time."""
    run = tmp_path / "run"
    chosen = random.Random(7)
    kinds: list[Callable[[Path, int], None] | str] = [*BAD, "validation", "deleted"]
    bad = dict(zip(chosen.sample(range(2, 50), len(kinds)), kinds, strict=True))
    models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    refused = [step for step, kind in bad.items() if kind == "validation"]
    deleted = [step for step, kind in bad.items() if kind == "deleted"]

    class Deleting(FaultyStore):
        async def open(self, key: str) -> Any:
            for step in deleted:
                if key.startswith(f"step-{step:08d}/"):
                    shutil.rmtree(run / f"step-{step:08d}", ignore_errors=True)
            return await super().open(key)

    def build() -> Net:
        model = Net()
        models.add(model)
        return model

    def validate(model: Net) -> bool:
        return not model.versions() & set(map(float, refused))

    seen: list[int] = []
    done = asyncio.Event()

    async def client(pause: float) -> None:
        while not done.is_set():
            async with reloader.use() as live:
                step, versions = live.step, live.model.versions()
                seen.append(step)
                await asyncio.sleep(pause)
                assert versions | live.model.versions() == {float(step)}
            await asyncio.sleep(0)

    store = Deleting(LocalStore(run))
    options: dict[str, Any] = {"strategy": strategy, "validate": validate, "retry": 3600, "gate_timeout": 20}
    async with Reloader(store, build, poll=POLL, **options) as reloader, asyncio.TaskGroup() as group:
        commit(run, 1)
        await reloader.ready()
        for pause in (0.0, 0.001, 0.01, 0.05):
            group.create_task(client(pause))
        for step in range(2, 52):
            kind = bad.get(step)
            failures = reloader.status()["failures"]
            if callable(kind):
                kind(run, step)
            else:
                commit(run, step)
            if step in bad:
                await waited(partial(more_failures, reloader, failures), 30)
            else:
                async with asyncio.timeout(30):
                    await reloader.wait_for(step)
        done.set()
    status = reloader.status()
    assert [h["step"] for h in status["history"] if h["outcome"] == "failed"] == sorted(bad)
    assert status["reloads"] == 41
    assert seen == sorted(seen)
    assert len(set(seen)) > 20
    assert not set(seen) & set(bad)
    await waited(lambda: len(models) == 0)  # an idle thread holds the last thing it made for half a second
    assert leases(run) == {}


def more_failures(reloader: Reloader[Any], before: int) -> bool:
    """Whether there are more by now."""
    return int(reloader.status()["failures"]) > before


SERVE = """
import asyncio, sys, torch, aiockpt
async def main():
    async with aiockpt.Reloader(sys.argv[1], lambda: torch.nn.Linear(3, 2), ttl=2.0) as reloader:
        print((await reloader.ready()).step, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def start_server(run: Path) -> subprocess.Popen[str]:
    """Another process that serves the run."""
    command = [sys.executable, "-c", SERVE, str(run)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)


@pytest.mark.slow
async def test_a_killed_server_frees_its_lease(tmp_path: Path) -> None:
    """After its time to live a trainer that keeps one step deletes what the dead one served."""
    run = tmp_path / "run"
    await save(run, {"model": nn.Linear(3, 2)}, 1)
    with start_server(run) as server:
        assert server.stdout is not None
        assert await asyncio.to_thread(server.stdout.readline) == "1\n"
        async with Saver(run, keep=KeepLast(1), keep_grace=0) as saver:
            await saver.save({"model": nn.Linear(3, 2)}, step=2)
            await saver._housekeeping.drain()
            async with Catalog(run) as catalog:
                assert 1 in await catalog.steps()
                server.kill()
                await asyncio.to_thread(server.wait)
                await asyncio.sleep(2.5)
                for step in (3, 4, 5):
                    await saver.save({"model": nn.Linear(3, 2)}, step=step)
                    await saver._housekeeping.drain()
                assert 1 not in await catalog.steps()
