"""Public bug reports about the structure of a state: keys, containers, prefixes, counts."""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aiockpt
from aiockpt import Catalog, CheckpointError, Saver, StateMismatchError, UsageError, _plan
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles
from tests.proof import case, save, steps
from tests.same import same


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run, of which every invariant is checked afterwards."""
    with case(tmp_path) as folder:
        yield folder / "run"


async def test_keys_keep_their_types_over_and_over(run: Path) -> None:
    """`1`, `"1"` and `True` stay apart; what was restored can be saved again, unchanged.

    pytorch/pytorch#153842, HorizonRobotics/alf#1441: a scheduler ended up with 25 and "25".
    """
    weight = nn.Parameter(torch.ones(2))
    optim = torch.optim.Adam([weight])
    weight.sum().backward()
    optim.step()
    state = {
        "optim": optim.state_dict(),
        "milestones": Counter({25: 1, 75: 2}),
        "mix": {1: "i", "1": "s", "True": "t", (1, "1"): torch.zeros(1), None: 0, 1.5: 1},
    }
    await save(run, state, 1)
    first = await aiockpt.load(run)
    await save(run, first, 2)
    second = await aiockpt.load(run)
    assert same(first, state)
    assert same(second, first)
    assert type(second["milestones"]) is Counter
    assert second["milestones"][25] == 1
    assert list(map(type, second["mix"])) == [int, str, str, tuple, type(None), float]
    optim.load_state_dict(second["optim"])


async def test_empty_containers_stay_and_full_ones_come_whole(run: Path) -> None:
    """Empties keep their kind; what the target holds has no say in what a list restores to.

    pytorch/pytorch#137327, #192225: `[]` in a fresh object did not match the checkpoint.
    """
    sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).state_dict()
    state = {"a": [], "b": {}, "c": (), "d": [{}, []], "opt": sgd, "e": {"f": {"g": ()}}}
    await save(run, state, 1)
    assert same(await aiockpt.load(run), state)
    await save(run, {"log": [{"k": 1}, {"k": 2}], "w": torch.ones(1)}, 2)
    target: dict[str, Any] = {"log": [], "w": torch.zeros(1)}
    async with Catalog(run) as catalog:
        found = await catalog.load(into=target)
    assert [*found.values.get("log", target["log"])] == [{"k": 1}, {"k": 2}]
    assert target["w"].item() == 1


async def test_random_states_are_taken_by_their_setters(run: Path) -> None:
    """The streams of Python, numpy and torch go on where they were; tuples stay tuples.

    Lightning-AI/pytorch-lightning#9400: `random.setstate` got a list.
    """
    state = {"py": random.getstate(), "np": np.random.get_state(), "th": torch.get_rng_state()}
    await save(run, state, 1)
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    async with Catalog(run) as catalog:
        found = await catalog.load(map_location="cpu")
    assert type(found["py"]) is tuple
    assert type(found["py"][1]) is tuple
    random.setstate(found["py"])
    np.random.set_state(found["np"])
    torch.set_rng_state(found["th"])
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("saved_wrapped", [True, False])
async def test_prefixes_of_wrappers_never_load_nothing(run: Path, prefix: str, saved_wrapped: bool) -> None:
    """A compiled or DDP model against a bare one: a loud mismatch that says why, or a right load.

    huggingface/pytorch-image-models#2003, train-llm-from-scratch#36, pytorch/torchtitan#2622.
    """
    bare = nn.Linear(2, 2)
    wrapped = {prefix + name: tensor for name, tensor in bare.state_dict().items()}
    await save(run, {"model": wrapped if saved_wrapped else bare.state_dict()}, 1)
    holder: Any = nn.Linear(2, 2)
    if not saved_wrapped:
        for name in reversed(prefix.rstrip(".").split(".")):
            outer = nn.Module()
            outer.add_module(name, holder)
            holder = outer
    before = [p.clone() for p in holder.parameters()]
    async with Catalog(run) as catalog:
        with pytest.raises(StateMismatchError, match=prefix.rstrip(".").split(".")[-1]):
            await catalog.load(into={"model": holder})
        with pytest.raises(StateMismatchError):
            await catalog.load(into={"model": holder}, strict=False)
        assert next(iter((await catalog.load())["model"])).startswith(prefix) is saved_wrapped
    assert all(torch.equal(p, b) for p, b in zip(holder.parameters(), before, strict=True))


async def test_a_module_of_that_name_is_not_renamed(run: Path) -> None:
    """A user's own `module` and `_orig_mod_head` are names like any other."""
    net = nn.ModuleDict({"module": nn.Linear(1, 1), "_orig_mod_head": nn.Linear(1, 1)})
    await save(run, {"model": net}, 1)
    assert next(iter((await aiockpt.load(run))["model"])) == "module.weight"
    twin = nn.ModuleDict({"module": nn.Linear(1, 1), "_orig_mod_head": nn.Linear(1, 1)})
    async with Catalog(run) as catalog:
        await catalog.load(into={"model": twin})
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


class _Extra(nn.Linear):
    """A layer with state of its own kind."""

    got: Any = None

    def get_extra_state(self) -> Any:
        return {"v": 3, "t": torch.ones(1), "b": b"\0x"}

    def set_extra_state(self, state: Any) -> None:
        self.got = state


async def test_extra_state_of_modules_and_keys_behind_keys(run: Path) -> None:
    """Dicts, tensors and bytes under `_extra_state` come back; a key below a weight is reported.

    deepmodeling/deepmd-kit#4147, pytorch/pytorch#123510.
    """
    net = nn.Sequential(_Extra(1, 1), _Extra(1, 1))
    await save(run, {"model": net}, 1)
    twin = nn.Sequential(_Extra(1, 1), _Extra(1, 1))
    async with Catalog(run) as catalog:
        await catalog.load(into={"model": twin})
    first: Any = twin[0]
    assert same(first.got, {"v": 3, "t": torch.ones(1), "b": b"\0x"})
    assert same(_independent(twin.state_dict()["1.weight"]), _independent(net.state_dict()["1.weight"]))
    await save(run, {"model": {**net.state_dict(), "0.weight.foo": torch.ones(1)}}, 2)
    async with Catalog(run) as catalog:
        with pytest.raises(StateMismatchError, match=r"0\.weight\.foo"):
            await catalog.load(into={"model": twin})


class _Training:
    """Two optimizers, three schedulers, a scaler and an order of data, all of one run."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
        )
        half = [*self.net[0].parameters(), *self.net[1].parameters()]
        self.sgd = torch.optim.SGD(half, lr=0.1, momentum=0.9)
        self.adam = torch.optim.Adam(self.net[4].parameters(), lr=torch.tensor(0.01))
        schedulers = torch.optim.lr_scheduler
        self.schedulers = [
            schedulers.CosineAnnealingWarmRestarts(self.sgd, 3),
            schedulers.LambdaLR(self.adam, lambda n: 0.9**n),
            schedulers.MultiStepLR(self.sgd, [4, 9]),
        ]
        self.scaler = torch.amp.GradScaler("cpu")
        self.order = torch.Generator().manual_seed(5)
        self.seen: list[int] = []

    def state(self) -> dict[str, Any]:
        return {
            "net": self.net,
            "optims": {"sgd": self.sgd, "adam": self.adam},
            "schedulers": dict(enumerate(self.schedulers)),
            "scaler": self.scaler,
            "order": self.order,
            "rng": aiockpt.RngState(),
        }

    def train(self, batches: int) -> None:
        data = torch.arange(400.0).view(100, 4) / 400
        for _ in range(batches):
            rows = torch.randint(100, (8,), generator=self.order)
            self.seen += rows.tolist()
            self.sgd.zero_grad()
            self.adam.zero_grad()
            self.net(data[rows]).square().mean().backward()
            self.sgd.step()
            self.adam.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for scheduler in self.schedulers:
                    scheduler.step()


async def test_a_resumed_run_is_the_uninterrupted_one(run: Path) -> None:
    """Weights, moments, schedules and the order of the data go on bit by bit.

    huggingface/accelerate#2016, #4071; verl-project/verl#5725: a resumed run saw other batches.
    """
    whole = _Training()
    whole.train(20)
    begun = _Training()
    begun.train(10)
    async with Saver(run) as saver:
        await saver.save(begun.state(), step=10)
    resumed = _Training()
    async with Saver(run) as saver:
        found = await saver.restore(resumed.state())
        assert found is not None
        if "order" in found.values:
            resumed.order = found.values["order"]
    resumed.train(10)
    assert begun.seen + resumed.seen == whole.seen
    for name, tensor in whole.net.state_dict().items():
        assert torch.equal(resumed.net.state_dict()[name], tensor), name
    for one, other in ((whole.sgd, resumed.sgd), (whole.adam, resumed.adam)):
        assert same(_independent(other.state_dict()), _independent(one.state_dict()))
    for one, other in zip(whole.schedulers, resumed.schedulers, strict=True):  # type: ignore[assignment]
        assert one.state_dict().keys() == other.state_dict().keys()
        assert one.state_dict()["_last_lr"] == other.state_dict()["_last_lr"]


def _independent(state: Any) -> Any:
    """A copy without ties between tensors: those of live objects are not the point."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _independent(value) for key, value in state.items()}
    return [_independent(value) for value in state] if isinstance(state, list) else state


async def test_what_is_written_can_be_read_however_large_its_header(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header never outgrows the limit: there are more files; a name too long alone is refused.

    kohya-ss/sd-scripts#1380, run-ai/runai-model-streamer#121: saved, and refused by its own reader.
    """
    monkeypatch.setattr(_plan, "HEADER_LIMIT", 16 << 10)
    state = {"m": {f"{'k' * 200}{i}": torch.full((1,), i) for i in range(600)}}
    await save(run, state, 1)
    assert len(list((run / "step-00000001").glob("*.safetensors"))) > 5
    assert same(await aiockpt.load(run), state)
    with pytest.raises(CheckpointError, match="too long"):
        await save(run, {"m": {"k" * (17 << 10): torch.ones(1)}}, 2)
    assert await steps(run) == (1,)


async def test_what_no_reader_would_take_is_refused(run: Path) -> None:
    """Metadata that would make a manifest or the run's record unreadable, before anything is visible.

    kohya-ss/sd-scripts#1380: the user's own metadata made the file unreadable.
    """
    await save(run, {"w": torch.ones(1)}, 1)
    with pytest.raises(UsageError, match="64 MiB"):
        await save(run, {"w": torch.ones(1)}, 2, meta={"tags": "x" * (65 << 20)})
    assert await steps(run) == (1,)
    await save(run, {"w": torch.ones(1)}, 2, meta={"tags": "x" * (1 << 20)})
    found = await aiockpt.latest(run)
    assert found is not None
    assert len(found.meta["tags"]) == 1 << 20
    for meta in ({"tags": "x" * (1 << 20)}, {"loss": float("nan")}, {"model": object()}):
        with pytest.raises(UsageError, match="meta"):
            async with Saver(run.parent / "other", meta=meta):
                pass
    async with Saver(run.parent / "other", meta={"note": "é"}) as saver:
        await saver.save({"w": torch.ones(1)}, step=1)
    with (run / "step-00000002" / "manifest.json").open("r+b") as file:
        file.truncate(1 << 28)
    found = await aiockpt.latest(run)
    assert found is not None
    assert found.step == 1
    shutil.rmtree(run / "step-00000002")


def _calls(run: Path, count: int) -> Callable[[], Any]:
    async def act() -> tuple[int, int]:
        files = FaultyFiles()
        store = LocalStore(run / str(count), files=files)
        await save(store, {f"a.{i}": torch.full((32,), i) for i in range(count)}, 1)
        async with Catalog(store) as catalog:
            found = await catalog.load()
        assert len(found) == count
        assert found[f"a.{count - 1}"][0] == count - 1
        return len(files.operations), len(list((run / str(count)).rglob("*.*")))

    return act


async def test_thousands_of_tiny_tensors_cost_few_calls(run: Path) -> None:
    """The calls to the disk do not grow with the number of tensors, and neither do the files.

    safetensors/safetensors#361, XLabs-AI/x-flux#122, InternLM/xtuner#1859.
    """
    few, files = await _calls(run, 1000)()
    many, more = await _calls(run, 8000)()
    assert many <= few + 10
    assert more == files < 10
