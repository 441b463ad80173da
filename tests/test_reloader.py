"""A reloader serves the newest good version; each request keeps the one it began with."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt import (
    Catalog,
    Live,
    MemoryShortError,
    Reloader,
    ReloadError,
    StepNotFoundError,
    UsageError,
    Watched,
    _preparing,
    _waking,
)
from tests.proof import save
from tests.serving import POLL, Net, answer, commit, leases, served, waited, weights


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Only polls, except where hints are what a test is about."""
    if "hints" not in request.fixturenames:
        monkeypatch.setattr(_waking, "_plug", lambda: None)


@pytest.fixture
def hints() -> None:
    """File notices are on."""


def reloader_of(run: Path, **options: Any) -> Reloader[Net]:
    """A quick one."""
    return Reloader(run, Net, **{"poll": POLL, "retry": 0.05, **options})


# ---------------------------------------------------------------- the plain course


async def test_alone_it_serves_what_is_committed(tmp_path: Path) -> None:
    """A run and a way to build are enough; the model is in evaluation mode, and wholly the checkpoint's."""
    run = tmp_path / "run"
    commit(run, 1)
    async with Reloader(run, Net, poll=POLL) as reloader:
        async with reloader.use() as live:
            assert isinstance(live, Live)
            assert (live.step, live.model.versions()) == (1, {1.0})
            assert not live.model.training
            assert live.save_id == live.checkpoint.save_id == (await reloader.catalog.get(1)).save_id
        with pytest.raises(UsageError, match="inside"):
            _ = live.model
        commit(run, 2)
        assert (await reloader.wait_for(2)).step == 2
        assert await answer(reloader) == (2, {2.0})


async def test_a_request_keeps_the_version_it_began_with(tmp_path: Path) -> None:
    """Across reloads; the old version goes when its last user leaves, and not before."""
    run = tmp_path / "run"
    commit(run, 1)
    async with reloader_of(run, drain_timeout=0) as reloader:
        async with reloader.use() as first:
            old = weakref.ref(first.model)
            async with reloader.use() as also_first:
                assert also_first.model is first.model
                commit(run, 2)
                await reloader.wait_for(2)
                async with reloader.use() as second:
                    assert (second.step, second.model.versions()) == (2, {2.0})
                assert (also_first.step, also_first.model.versions()) == (1, {1.0})
                assert [v["step"] for v in reloader.status()["draining"]] == [1]
            commit(run, 3)
            await reloader.wait_for(3)
            assert first.model.versions() == {1.0}
            assert old() is not None
        assert old() is None
        await waited(lambda: not reloader.status()["draining"])


async def test_the_next_waits_for_those_who_use_the_old_one(tmp_path: Path) -> None:
    """So that there are never three at once; but not for ever."""
    run = tmp_path / "run"
    commit(run, 1)
    async with reloader_of(run, drain_timeout=3600) as reloader:
        await reloader.ready()
        async with reloader.use():
            commit(run, 2)
            await reloader.wait_for(2)
            commit(run, 3)
            await asyncio.sleep(10 * POLL)
            assert served(reloader) == 2
        await reloader.wait_for(3)
        assert "drain" in reloader.status()["history"][1]["seconds"]


async def test_before_there_is_anything(tmp_path: Path) -> None:
    """Requests and `ready` wait; the run need not exist; closing sends them away."""
    run = tmp_path / "run"
    async with reloader_of(run) as reloader:
        waiting = asyncio.create_task(answer(reloader))
        ready = asyncio.create_task(reloader.ready())
        await asyncio.sleep(3 * POLL)
        assert not waiting.done()
        assert not run.exists()
        assert (reloader.status()["state"], reloader.status()["ready"]) == ("starting", False)
        commit(run, 1)
        assert await waiting == (1, {1.0})
        assert (await ready).step == 1
    async with reloader_of(tmp_path / "none") as reloader:
        waiting = asyncio.create_task(answer(reloader))
        await asyncio.sleep(3 * POLL)
    with pytest.raises(UsageError, match="closed"):
        await waiting
    with pytest.raises(UsageError, match="closed"):
        await reloader.ready()
    with pytest.raises(UsageError, match="once"):
        await reloader.__aenter__()
    await reloader.aclose()


async def test_the_whole_state_is_the_model(tmp_path: Path) -> None:
    """Where the state has no entry `model`; another entry can be named."""
    whole, named = tmp_path / "whole", tmp_path / "named"
    await save(whole, weights(4), 4)
    commit(named, 5, weights(1), ema=weights(5))
    async with reloader_of(whole) as reloader:
        assert await answer(reloader) == (4, {4.0})
    async with reloader_of(named, item="ema") as reloader:
        assert await answer(reloader) == (5, {5.0})
    async with reloader_of(named, item="other") as reloader:
        await waited(lambda: reloader.status()["failures"])
        assert "selects nothing with 'other'" in reloader.status()["history"][0]["reason"]


async def test_closing_waits_for_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Up to `drain_timeout`; new ones are refused at once; leases go with it."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    async with reloader:
        use = reloader.use()
        live = await use.__aenter__()
        closing = asyncio.create_task(reloader.aclose())
        await asyncio.sleep(3 * POLL)
        assert not closing.done()
        with pytest.raises(UsageError, match="closed"):
            await answer(reloader)
        assert live.model.versions() == {1.0}
        await use.__aexit__(None, None, None)
        await closing
    assert leases(run) == {}
    assert reloader.status()["state"] == "closed"
    async with reloader_of(run, drain_timeout=0.05) as stuck:
        use = stuck.use()
        await use.__aenter__()
        await stuck.aclose()
    assert "while 1 requests use it" in caplog.text
    await use.__aexit__(None, None, None)


async def test_nothing_of_it_on_the_loop(tmp_path: Path) -> None:
    """Functions that are not async run in threads, the others on the loop, each in its turn."""
    run = tmp_path / "run"
    commit(run, 1)
    main = threading.get_ident()
    calls: list[tuple[str, bool]] = []

    def build() -> Net:
        calls.append(("build", threading.get_ident() == main))
        return Net()

    def validate(model: Net) -> None:
        assert model.versions() == {1.0}
        calls.append(("validate", threading.get_ident() == main))

    async def warm_up(model: Net) -> None:
        await asyncio.sleep(0)
        assert model.versions() == {1.0}
        calls.append(("warm_up", threading.get_ident() == main))

    async with Reloader(run, build, validate=validate, warm_up=warm_up, poll=POLL) as reloader:
        await reloader.ready()
    assert calls == [("build", False), ("validate", False), ("warm_up", True)]
    order = list(reloader.status()["history"][0]["seconds"])
    assert order == ["lease", "memory", "build", "load", "cover", "finite", "validate", "warm_up", "swap"]


@pytest.mark.parametrize("kind", ["sync", "async", "other"])
async def test_a_loader_of_ones_own(tmp_path: Path, kind: str) -> None:
    """It gets the leased checkpoint and a fresh model with memory; or it makes another object."""
    run = tmp_path / "run"
    commit(run, 1)

    def sync(checkpoint: Watched, model: Net) -> None:
        assert not any(p.is_meta for p in model.parameters())
        state = aiockpt.sync.load(checkpoint.run, checkpoint, paths="model")
        model.load_state_dict(state["model"])

    async def on_loop(checkpoint: Watched, model: Net) -> None:
        assert leases(run) == {1: 1}
        await checkpoint.load(into={"model": model})

    async def other(checkpoint: Watched, _: Any) -> Any:
        return {"step": checkpoint.step, "state": await checkpoint.load(paths=["model"])}

    loads: dict[str, Any] = {"sync": sync, "async": on_loop, "other": other}
    built: Any = Net if kind != "other" else lambda: None
    reloader: Reloader[Any] = Reloader(run, built, load=loads[kind], poll=POLL)
    async with reloader, reloader.use() as live:
        if kind == "other":
            assert live.model["step"] == 1
        else:
            assert live.model.versions() == {1.0}


# ---------------------------------------------------------------- building on the meta device


class Rotary(Net):
    """Keeps a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freq", torch.arange(3.0), persistent=False)


class Hidden(Net):
    """Keeps tensors where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"deep": [torch.arange(3.0)]}


class Odd(Net):
    """Looks at values while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.number = float(torch.arange(3.0).sum().item())


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight


async def test_models_that_lose_something_on_meta_are_built_for_real(tmp_path: Path) -> None:
    """Others cost no second copy; none ever serves with a tensor that has no content."""
    run = tmp_path / "run"
    commit(run, 1)
    devices: list[str] = []

    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            devices.append(self.one.weight.device.type)

    for build, built in ((Plain, ["meta"]), (Rotary, []), (Hidden, []), (Odd, [])):
        devices.clear()
        reloader: Reloader[Any] = Reloader(run, build, poll=POLL)
        async with reloader, reloader.use() as live:
            tensors = [*live.model.parameters(), *live.model.buffers()]
            assert not any(t.is_meta for t in tensors)
            assert live.model.two(live.model.one(torch.ones(1, 4))).tolist() == [[15.0 + 0.0] * 2]
            if build is Rotary:
                assert live.model.freq.tolist() == [0, 1, 2]
            if build is Hidden:
                assert live.model.table["deep"][0].tolist() == [0, 1, 2]
            if build is Odd:
                assert live.model.number == 3.0
        assert devices == built
    devices.clear()
    async with Reloader(run, Plain, meta=False, poll=POLL) as plain:
        await plain.ready()
    assert devices == ["cpu"]


async def test_ties_stay(tmp_path: Path) -> None:
    """What was one parameter is one piece of memory again."""
    run = tmp_path / "run"
    await save(run, {"model": Tied()}, 1)
    reloader: Reloader[Tied] = Reloader(run, Tied, poll=POLL)
    async with reloader, reloader.use() as live:
        assert live.model.one.weight.data_ptr() == live.model.two.weight.data_ptr()


async def test_a_recurrent_and_a_compiled_model(tmp_path: Path) -> None:
    """Modules that keep lists of their weights see the loaded ones; a wrapper's names are not asked for."""
    run = tmp_path / "run"
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4)
    await save(run, {"model": lstm}, 1)
    x = torch.randn(2, 1, 3)
    for build in (lambda: nn.LSTM(3, 4), lambda: torch.compile(nn.LSTM(3, 4), backend="eager")):
        reloader: Reloader[Any] = Reloader(run, build, poll=POLL)
        async with reloader, reloader.use() as live:
            model = getattr(live.model, "_orig_mod", live.model)
            assert torch.equal(model(x)[0], lstm(x)[0])


async def test_cast(tmp_path: Path) -> None:
    """Dtypes are compared, and converted on request."""
    run = tmp_path / "run"
    commit(run, 1, {name: t.to(torch.bfloat16) for name, t in weights(1).items()})
    async with reloader_of(run) as reloader:
        await waited(lambda: reloader.status()["failures"])
        assert "saved dtype torch.bfloat16" in reloader.status()["history"][0]["reason"]
    async with reloader_of(run, cast=True) as reloader, reloader.use() as live:
        assert live.model.one.weight.dtype == torch.float32
        assert live.model.versions() == {1.0}


# ---------------------------------------------------------------- which version


async def test_identity_is_the_save(tmp_path: Path) -> None:
    """A step written anew is served; what was deleted, or only touched, changes nothing."""
    run = tmp_path / "run"
    commit(run, 1)
    folder = commit(run, 2)
    async with reloader_of(run) as reloader:
        assert await answer(reloader) == (2, {2.0})
        commit(run, 2, weights(9))
        await waited(lambda: reloader.status()["reloads"] == 2)
        assert await answer(reloader) == (2, {9.0})
        for file in folder.iterdir():
            file.touch()
        for path in sorted(run.rglob("*"), reverse=True):
            if "leases" not in path.parts:
                path.rmdir() if path.is_dir() else path.unlink()
        await asyncio.sleep(8 * POLL)
        assert await answer(reloader) == (2, {9.0})
        assert reloader.status()["reloads"] == 2
        commit(run, 3)
        await reloader.wait_for(3)


async def test_rollback_of_the_latest(tmp_path: Path) -> None:
    """Back to what served before, not to what lies below; only what is committed later is followed."""
    run = tmp_path / "run"
    commit(run, 1)
    async with reloader_of(run) as reloader:
        await reloader.wait_for(1)
        async with reloader.use():
            for step in (2, 3):  # 2 is never served: the newest wins
                commit(run, step)
        await reloader.wait_for(3)
        assert (await reloader.rollback()).step == 1
        assert await answer(reloader) == (1, {1.0})
        await asyncio.sleep(8 * POLL)
        assert served(reloader) == 1
        quarantined = reloader.status()["quarantined"]
        assert [(q["step"], q["retry_in"]) for q in quarantined] == [(3, None)]
        assert "rolled back to step 1" in quarantined[0]["reason"]
        with pytest.raises(StepNotFoundError, match="nothing before"):
            await reloader.rollback()
        assert served(reloader) == 1
        commit(run, 4)
        await reloader.wait_for(4)
        assert [h["why"] for h in reloader.status()["history"]] == ["follow", "follow", "rollback", "follow"]


async def test_rollback_moves_the_alias(tmp_path: Path) -> None:
    """So that every replica follows, also one that never served the version before."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        commit(run, step)
    async with Catalog(run) as catalog:
        await catalog.promote(1)
        await catalog.promote(3)
        async with (
            reloader_of(run, follow="alias:production") as one,
            reloader_of(run, follow="alias:production") as other,
        ):
            await one.wait_for(3)
            await other.wait_for(3)
            assert {lease.step for lease in await one.replicas()} == {3}
            assert (await one.rollback()).step == 1
            assert (await catalog.alias()).step == 1
            await waited(lambda: served(other) == 1)
            async with asyncio.timeout(20):
                while [lease.step for lease in await one.replicas()] != [1, 1]:  # noqa: ASYNC110
                    await asyncio.sleep(POLL)
            await catalog.promote(2)
            await waited(lambda: served(one) == served(other) == 2)


async def test_pin_and_unpin(tmp_path: Path) -> None:
    """A pin holds against commits; a pin that fails changes nothing; then the newest is followed again."""
    run = tmp_path / "run"
    for step in (1, 2):
        commit(run, step)
    commit(run, 3, {**weights(3), "scale": torch.full((5,), math.nan)})
    async with reloader_of(run, retry=3600) as reloader:
        await reloader.wait_for(2)
        assert (await reloader.pin(1)).step == 1
        commit(run, 4)
        await asyncio.sleep(8 * POLL)
        assert (served(reloader), reloader.status()["pinned"]) == (1, 1)
        with pytest.raises(ReloadError, match="NaN"):
            await reloader.pin(3)
        with pytest.raises(StepNotFoundError):
            await reloader.pin(77)
        with pytest.raises(UsageError, match="unpin"):
            await reloader.rollback()
        assert (served(reloader), reloader.status()["pinned"]) == (1, 1)
        await reloader.pin(await reloader.catalog.get(1))
        await reloader.unpin()
        await reloader.wait_for(4)
        await reloader.unpin()
        assert reloader.status()["pinned"] is None


async def test_reload_looks_at_once(tmp_path: Path) -> None:
    """Also at what has failed before; what fails again is an error to who asked."""
    run = tmp_path / "run"
    commit(run, 1)
    said = [False]
    async with reloader_of(run, poll=3600, retry=3600, validate=lambda _: said[0]) as reloader:
        await waited(lambda: reloader.status()["failures"])
        with pytest.raises(ReloadError, match="validate"):
            await reloader.reload()
        assert [q["tries"] for q in reloader.status()["quarantined"]] == [2]
        said[0] = True
        assert await reloader.reload()
        assert served(reloader) == 1
        assert reloader.status()["quarantined"] == []
        assert not await reloader.reload()


# ---------------------------------------------------------------- leases


async def test_a_trainer_that_keeps_one_step(tmp_path: Path) -> None:
    """Never deletes what is being loaded, what serves, or the way back; nothing stays leased after that."""
    from aiockpt import Saver
    from aiockpt.policies.keep import KeepLast

    run = tmp_path / "run"
    async with Saver(run, keep=KeepLast(1), keep_grace=0) as saver:
        held = asyncio.Event()

        async def slow(_: Net) -> None:
            await asyncio.wait_for(held.wait(), 20)

        async with reloader_of(run, warm_up=slow) as reloader:
            await saver.save({"model": weights(1)}, step=1)
            await waited(lambda: reloader.status()["reloading"])
            for step in (2, 3):
                await saver.save({"model": weights(step)}, step=step)
            await saver._housekeeping.drain()
            assert await reloader.catalog.steps() == (1, 3)
            assert [lease.purpose for lease in await reloader.catalog.leases()] == ["loading"]
            held.set()
            await reloader.wait_for(3)
            await waited(lambda: leases(run) == {1: 1, 3: 1})
            await waited(lambda: not reloader.status()["reloading"])
            purposes = {lease.step: lease.purpose for lease in await reloader.catalog.leases()}
            assert purposes == {1: "served before", 3: "serving"}
            for step in (4, 5):
                await saver.save({"model": weights(step)}, step=step)
                await reloader.wait_for(step)
            assert (await reloader.rollback()).step == 4
        assert leases(run) == {}


async def test_a_lost_lease_is_taken_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the loop stood still for too long; where the checkpoint has gone that is said."""
    run = tmp_path / "run"
    folder = commit(run, 1)
    async with reloader_of(run) as reloader:
        await reloader.ready()
        version = reloader._switching.serving.current
        assert version is not None
        assert version.lease is not None
        lost, version.lease._lost = version.lease, True
        await waited(lambda: version.lease not in (None, lost))
        assert leases(run) == {1: 1}
        folder.rename(tmp_path / "gone")
        assert version.lease is not None
        version.lease._lost = True
        await waited(lambda: "leased no more" in caplog.text)
        assert await answer(reloader) == (1, {1.0})


# ---------------------------------------------------------------- facts


async def test_status_and_events_are_plain(tmp_path: Path) -> None:
    """JSON holds them; the stream tells each step of each reload, and ends with the reloader."""
    run = tmp_path / "run"
    commit(run, 1)
    reloader = reloader_of(run)
    events = reloader.events()
    async with reloader:
        await reloader.ready()
        commit(run, 2, {**weights(2), "scale": torch.full((5,), math.inf)})
        await waited(lambda: reloader.status()["failures"])
        commit(run, 3)
        await reloader.wait_for(3)
        await waited(lambda: "drain" in reloader.status()["history"][-1]["seconds"])
        status = json.loads(json.dumps(reloader.status()))
    seen = [(event["event"], event["step"]) async for event in events if event["event"] != "stage"]
    good = [("found", 3), ("swapped", 3), ("drained", 3)]
    assert seen == [("found", 1), ("swapped", 1), ("found", 2), ("failed", 2), *good]
    assert [event async for event in reloader.events()] == []
    assert (status["state"], status["ready"], status["reloads"], status["failures"]) == (
        "serving",
        True,
        2,
        1,
    )
    assert [h["outcome"] for h in status["history"]] == ["swapped", "failed", "swapped"]
    failed = status["history"][1]
    assert (failed["stage"], failed["error"]) == ("finite", "ReloadError")
    assert "scale" in failed["reason"]
    assert failed["total"] >= failed["seconds"]["load"] >= 0
    assert (status["serving"]["step"], status["previous"]["step"]) == (3, 1)


async def test_a_slow_listener_misses_the_oldest() -> None:
    """And nothing grows without end; one that is dropped is forgotten."""
    from aiockpt._reloadlog import UNREAD, ReloadLog

    log = ReloadLog()
    events = log.events()
    for number in range(UNREAD + 5):
        log.publish("stage", {"step": number})
    assert (await anext(events))["step"] == 5
    del events
    gc.collect()
    assert len(log._listeners) == 0


# ---------------------------------------------------------------- options


async def test_options_are_checked(tmp_path: Path) -> None:
    """At the call."""
    wrong: list[dict[str, Any]] = [
        {"build": None},
        {"validate": 3},
        {"load": "x"},
        {"warm_up": 1},
        {"strategy": "copy"},
        {"on_busy": "wait"},
        {"follow": "newest"},
        {"follow": "alias:a/b"},
        {"poll": 0},
        {"ttl": -1},
        {"retry": -1},
        {"gate_timeout": "5"},
        {"drain_timeout": math.nan},
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            Reloader(tmp_path, **{"build": Net, **options})


@pytest.mark.parametrize("kind", ["no module", "async build", "same model"])
async def test_a_recipe_that_cannot_work(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Ends the reloader: that is told to who waits, in the log, in the status, and at the exit."""
    run = tmp_path / "run"
    commit(run, 1)
    model = Net()

    async def build() -> Net:
        return model

    built: Any = {"no module": dict, "async build": build, "same model": lambda: model}[kind]
    reloader: Reloader[Any] = Reloader(run, built, poll=POLL)
    with caplog.at_level(logging.ERROR, "aiockpt"), pytest.raises(UsageError, match="build="):
        async with reloader:
            if kind == "same model":
                await reloader.ready()
                commit(run, 2)
                with pytest.raises(UsageError, match="make a new one"):
                    await reloader.wait_for(2)
                assert (await answer(reloader)) == (1, {1.0})
            else:
                for wait in (reloader.ready, lambda: answer(reloader)):
                    with pytest.raises((UsageError, ReloadError), match="build="):
                        await wait()
            assert reloader.status()["state"] == "failed"
            assert "build=" in reloader.status()["error"]
    assert "the reloader has ended" in caplog.text
    assert leases(run) == {}


async def test_a_bug_of_ours_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when the body ends well, nor when it raises: then it is a note."""
    run = tmp_path / "run"
    commit(run, 1)
    with pytest.raises(ZeroDivisionError):
        async with reloader_of(run) as reloader:
            await reloader.ready()
            monkeypatch.setattr(reloader._switching.versions, "tidy", lambda: 1 // 0)
            await waited(lambda: reloader.status()["state"] == "failed")
            assert await answer(reloader) == (1, {1.0})
    with pytest.raises(ValueError, match="the body") as caught:
        async with reloader_of(run) as reloader:
            await reloader.ready()
            monkeypatch.setattr(reloader._switching.versions, "tidy", lambda: 1 // 0)
            await waited(lambda: reloader.status()["state"] == "failed")
            raise ValueError("the body")
    assert "ZeroDivisionError" in caught.value.__notes__[0]


async def test_memory_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room nothing is read, what serves serves on, and it is tried again."""
    run = tmp_path / "run"
    commit(run, 1)
    left = [1 << 40]
    monkeypatch.setattr(_preparing, "memory_left", lambda: left[0])
    async with reloader_of(run) as reloader:
        await reloader.ready()
        left[0] = 10
        commit(run, 2)
        await waited(lambda: reloader.status()["failures"] > 1)
        history = reloader.status()["history"][-1]
        assert (history["stage"], history["error"]) == ("memory", "MemoryShortError")
        assert served(reloader) == 1
        with pytest.raises(MemoryShortError, match="are left") as caught:
            await reloader.pin(2)
        assert isinstance(caught.value, MemoryError)
        left[0] = 1 << 40
        await reloader.wait_for(2)


def test_a_forgotten_reloader_leaves_nothing(tmp_path: Path) -> None:
    """One that is never closed ends with its loop: no lease, no thread, no error."""
    run = tmp_path / "run"
    commit(run, 1)

    async def main() -> None:
        reloader = await reloader_of(run).__aenter__()
        await reloader.ready()
        await waited(lambda: not reloader.status()["reloading"])
        assert leases(run) == {1: 1}

    asyncio.run(main())
    assert leases(run) == {}


async def test_a_commit_is_served_at_once(tmp_path: Path, hints: None) -> None:
    """On a local disk with watchfiles, whatever the poll; an unpin and a drained version wake it too."""
    run = tmp_path / "run"
    commit(run, 1)
    async with reloader_of(run, poll=3600) as reloader:
        await reloader.ready()
        for step in (2, 3):
            await asyncio.sleep(0.2)
            commit(run, step)
            async with asyncio.timeout(20):
                await reloader.wait_for(step)
        await reloader.pin(1)
        await reloader.unpin()
        async with asyncio.timeout(20):
            await reloader.wait_for(3)
        async with reloader.use():
            commit(run, 4)
            async with asyncio.timeout(20):
                await reloader.wait_for(4)
            commit(run, 5)
            await asyncio.sleep(0.3)
        async with asyncio.timeout(20):
            await reloader.wait_for(5)
