"""Updates in place keep addresses; requests queue and see one version; a failure leaves the old one whole."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aiockpt import Reloader, ReloadError, RequestAbortedError, Watched, _exchange, _waking
from aiockpt._exchange import Exchange
from tests.proof import save
from tests.serving import POLL, Net, answer, commit, leases, served, waited, weights
from tests.test_reloader import Tied


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only polls."""
    monkeypatch.setattr(_waking, "_plug", lambda: None)


def reloader_of(run: Path, **options: Any) -> Reloader[Net]:
    """A quick one."""
    defaults: dict[str, Any] = {"poll": POLL, "retry": 3600, "gate_timeout": 0.1, "strategy": "inplace"}
    return Reloader(run, Net, **{**defaults, **options})


async def test_addresses_stay(tmp_path: Path) -> None:
    """The model is the same object, its tensors lie where they lay; only their content is new."""
    run = tmp_path / "run"
    commit(run, 1)
    async with reloader_of(run) as reloader:
        async with reloader.use() as live:
            model = live.model
            addresses = [t.data_ptr() for t in model.state_dict().values()]
        for step in (2, 3):
            commit(run, step)
            await reloader.wait_for(step)
            async with reloader.use() as live:
                assert live.model is model
                assert (live.step, live.model.versions()) == (step, {float(step)})
            assert [t.data_ptr() for t in model.state_dict().values()] == addresses
        stages = list(reloader.status()["history"][-1]["seconds"])
        assert stages[:7] == ["lease", "memory", "load", "cover", "finite", "gate", "copy"]
        await waited(lambda: leases(run) == {2: 1, 3: 1})
        assert (await reloader.rollback()).step == 2
        assert await answer(reloader) == (2, {2.0})


async def test_requests_queue_at_the_gate(tmp_path: Path) -> None:
    """While the update waits for those inside, new ones wait; then they see the new version only."""
    run = tmp_path / "run"
    commit(run, 1)
    async with reloader_of(run, gate_timeout=20) as reloader:
        async with reloader.use() as live:
            commit(run, 2)
            await waited(lambda: (reloader.status()["reloading"] or {}).get("stage") == "gate")
            queued = [asyncio.create_task(answer(reloader)) for _ in range(3)]
            await asyncio.sleep(5 * POLL)
            assert not any(task.done() for task in queued)
            assert live.model.versions() == {1.0}
        assert await asyncio.gather(*queued) == [(2, {2.0})] * 3


async def test_defer(tmp_path: Path) -> None:
    """Requests that do not leave: the gate opens again, the update is tried later, nothing is quarantined."""
    run = tmp_path / "run"
    commit(run, 1)
    async with reloader_of(run, gate_timeout=0.03) as reloader:
        async with reloader.use() as live:
            commit(run, 2)
            await waited(lambda: [h["outcome"] for h in reloader.status()["history"]].count("deferred") > 1)
            assert live.model.versions() == {1.0}
            assert await asyncio.wait_for(answer(reloader), 20) == (1, {1.0})
            assert reloader.status()["quarantined"] == []
            assert reloader.status()["failures"] == 0
        await reloader.wait_for(2)
        async with reloader.use():
            commit(run, 3)
            with pytest.raises(ReloadError, match="did not leave") as caught:
                await reloader.reload()
            assert caught.value.stage == "gate"


async def test_proceed(tmp_path: Path) -> None:
    """The update comes all the same; a request that is inside sees the change."""
    run = tmp_path / "run"
    commit(run, 1)
    async with reloader_of(run, on_busy="proceed") as reloader, reloader.use() as live:
        commit(run, 2)
        await reloader.wait_for(2)
        assert live.step == 1
        async with reloader.use() as other:
            assert (other.step, other.model.versions()) == (2, {2.0})


async def test_abort(tmp_path: Path) -> None:
    """Requests that do not leave are ended with an error of their own; a real cancellation stays one."""
    run = tmp_path / "run"
    commit(run, 1)

    async def slow(seconds: float = 30) -> str:
        try:
            async with reloader.use():
                await asyncio.sleep(seconds)
        except RequestAbortedError as error:
            aborted.append(error.step)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0)
            return "aborted"
        return "answered"

    aborted: list[int | None] = []
    async with reloader_of(run, on_busy="abort") as reloader:
        await reloader.ready()
        requests = [asyncio.create_task(slow()), asyncio.create_task(slow()), asyncio.create_task(slow(0.02))]
        cancelled = asyncio.create_task(slow())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        commit(run, 2)
        cancelled.cancel()
        await reloader.wait_for(2)
        assert await asyncio.gather(*requests) == ["aborted", "aborted", "answered"]
        assert aborted == [1, 1]
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await answer(reloader) == (2, {2.0})


async def test_a_request_that_will_not_be_aborted(tmp_path: Path) -> None:
    """One that cleans up for long defers the update after all."""
    run = tmp_path / "run"
    commit(run, 1)
    stay = asyncio.Event()

    async def stubborn() -> None:
        async with reloader.use() as live:
            try:
                await asyncio.sleep(30)
            finally:
                await stay.wait()
                assert live.model.versions() == {1.0}

    async with reloader_of(run, on_busy="abort", gate_timeout=0.03) as reloader:
        await reloader.ready()
        request = asyncio.create_task(stubborn())
        await asyncio.sleep(0.01)
        commit(run, 2)
        await waited(lambda: "deferred" in [h["outcome"] for h in reloader.status()["history"]])
        stay.set()
        with pytest.raises(RequestAbortedError):
            await request
        await reloader.wait_for(2)


async def test_a_check_that_fails_puts_the_old_weights_back(tmp_path: Path) -> None:
    """It runs on the model that serves while the gate is closed; no request ever sees what it refuses."""
    run = tmp_path / "run"
    commit(run, 1)
    checked: list[set[float]] = []

    async def validate(model: Net) -> bool:
        checked.append(model.versions())
        await asyncio.sleep(5 * POLL)
        return model.versions() != {2.0}

    async with reloader_of(run, validate=validate) as reloader:
        await reloader.ready()
        commit(run, 2)
        await waited(lambda: len(checked) == 2)
        assert await answer(reloader) == (1, {1.0})
        await waited(lambda: reloader.status()["failures"])
        assert reloader.status()["quarantined"][0]["stage"] == "validate"
        commit(run, 3)
        await reloader.wait_for(3)
        assert checked == [{1.0}, {2.0}, {3.0}]


@pytest.mark.parametrize("at", range(4))
async def test_a_copy_that_fails_half_way(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fails, every tensor is the old one again; tied ones as well."""
    run = tmp_path / "run"
    commit(run, 1)
    copies = Copies(at)
    async with reloader_of(run) as reloader:
        await reloader.ready()
        monkeypatch.setattr(_exchange, "_settle", lambda _: None)
        monkeypatch.setattr(Exchange, "__init__", copies.constructor())
        commit(run, 2)
        await waited(lambda: reloader.status()["failures"])
        assert reloader.status()["history"][-1]["stage"] == "copy"
        assert "the device is away" in reloader.status()["history"][-1]["reason"]
        assert copies.count == 2 * (at + 1)
        assert await answer(reloader) == (1, {1.0})
        monkeypatch.undo()


class Copies:
    """Makes the copy of the n-th tensor fail after it has begun."""

    def __init__(self, at: int, *, back: bool = False) -> None:
        self.at = at
        self.back = back
        self.count = 0
        self.make = Exchange.__init__

    def constructor(self) -> Any:
        """In place of the real one."""

        def init(exchange: Exchange, *args: Any) -> None:
            self.make(exchange, *args)
            exchange._todo = [(self.wrapped(living), new) for living, new in exchange._todo]

        return init

    def wrapped(self, living: torch.Tensor) -> Any:
        """A tensor that may refuse."""
        copies = self

        class Living:
            is_cpu = True

            def to(self, *args: Any, **options: Any) -> torch.Tensor:
                return living.to(*args, **options)

            def copy_(self, new: torch.Tensor) -> None:
                copies.count += 1
                living.reshape(-1)[:1].copy_(new.reshape(-1)[:1])
                if copies.count == copies.at + 1 or (copies.back and copies.count > copies.at):
                    raise RuntimeError("the device is away")
                living.copy_(new)

        return Living()


async def test_a_model_that_cannot_be_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mix serves nobody: requests are told, and so is the exit."""
    run = tmp_path / "run"
    commit(run, 1)
    monkeypatch.setattr(Exchange, "__init__", Copies(2, back=True).constructor())
    with pytest.raises(ReloadError, match="a mix"):
        async with reloader_of(run) as reloader:
            await reloader.ready()
            commit(run, 2)
            await waited(lambda: reloader.status()["state"] == "failed")
            with pytest.raises(ReloadError, match="a mix"):
                await answer(reloader)
    assert leases(run) == {}


async def test_tied_and_integer_tensors_come_back(tmp_path: Path) -> None:
    """An exchange and its undoing leave every bit as it was."""
    model = nn.Sequential(Tied(), nn.BatchNorm1d(3))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    new = {name: torch.full_like(t, 7) for name, t in before.items()}
    exchange = Exchange(model, dict(new))
    exchange.forward()
    assert all(torch.equal(t, new[name]) for name, t in model.state_dict().items())
    exchange.back()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


async def test_closed_in_the_middle(tmp_path: Path) -> None:
    """A close while the check runs puts the old weights back, opens the gate and leaves no lease."""
    run = tmp_path / "run"
    commit(run, 1)
    inside, leave = threading.Event(), threading.Event()
    models: list[Net] = []

    def validate(model: Net) -> None:
        models.append(model)
        if model.versions() == {2.0}:
            inside.set()
            leave.wait(20)

    async with reloader_of(run, validate=validate) as reloader:
        await reloader.ready()
        commit(run, 2)
        await waited(inside.is_set)
        closing = asyncio.create_task(reloader.aclose())
        await asyncio.sleep(3 * POLL)
        leave.set()
        await closing
    assert models[-1].versions() == {1.0}
    assert reloader.status()["history"][-1]["outcome"] == "cancelled"
    assert leases(run) == {}


async def test_a_loader_of_ones_own(tmp_path: Path) -> None:
    """It fills a model aside, and that is copied over."""
    run = tmp_path / "run"
    commit(run, 1)

    async def load(checkpoint: Watched, model: Net) -> None:
        await checkpoint.load(into={"model": model})

    async with reloader_of(run, load=load) as reloader:
        async with reloader.use() as live:
            model = live.model
        commit(run, 2)
        await reloader.wait_for(2)
        async with reloader.use() as live:
            assert live.model is model
            assert model.versions() == {2.0}


async def test_only_modules(tmp_path: Path) -> None:
    """Anything else has no memory to copy into: that is said, and ends the reloader."""
    from aiockpt import UsageError

    run = tmp_path / "run"
    commit(run, 1)

    async def load(checkpoint: Watched, _: Any) -> Any:
        return checkpoint.step

    reloader: Reloader[Any] = Reloader(run, lambda: 0, load=load, strategy="inplace", poll=POLL)
    with pytest.raises(UsageError, match="needs a torch module"):
        async with reloader:
            await reloader.ready()
            commit(run, 2)
            await waited(lambda: reloader.status()["state"] == "failed")
            assert served(reloader) == 1


async def test_names_differ(tmp_path: Path) -> None:
    """Compared before the gate is closed."""
    run = tmp_path / "run"
    await save(run, {"model": Net()}, 1)
    async with reloader_of(run) as reloader:
        await reloader.ready()
        commit(run, 2, {**weights(2), "x": torch.ones(1)})
        await waited(lambda: reloader.status()["failures"])
        assert "gate" not in reloader.status()["history"][-1]["seconds"]
