"""aiockpt converts checkpoints of other formats, and stock torch and safetensors agree in both directions."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import aiockpt
from aiockpt import _threads
from aiockpt.convert import _drive, safetensors_
from aiockpt.convert._leaf import Content
from tests.formats import NEW_DTYPES, rich_state
from tests.make_checkpoint import alike
from tests.same import same

quiet_dcp = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*no_dist")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
async def test_a_file_of_torch_save_becomes_a_run(tmp_path: Path, legacy: bool) -> None:
    """Every kind of tensor and value comes out as `torch.load(weights_only=True)` gives it, ties included."""
    state = rich_state()
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
    done = await aiockpt.convert(tmp_path / "w.pt", tmp_path / "run", to="aiockpt", step=7)
    assert (done.source, done.target, done.dropped) == ("torch", "aiockpt", ())
    loaded = await aiockpt.load(tmp_path / "run", 7)
    assert alike(loaded, torch.load(tmp_path / "w.pt", weights_only=True))
    assert loaded["model"]["tied"] is loaded["model"]["head"]
    assert sorted(os.listdir(tmp_path)) == ["run", "w.pt"]


async def test_a_run_becomes_a_file_that_stock_torch_loads(tmp_path: Path) -> None:
    """Written by a saver, converted, and read with weights_only and mmap."""
    state = rich_state() | {"new": {name: torch.arange(8).to(getattr(torch, name)) for name in NEW_DTYPES}}
    async with aiockpt.Saver(tmp_path / "run") as saver:
        await saver.save(state, step=3)
    await aiockpt.convert(tmp_path / "run", tmp_path / "w.pt", to="torch")
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "w.pt", weights_only=True, mmap=mmap)
        expected = await aiockpt.load(tmp_path / "run")
        assert alike(loaded, expected)
        assert loaded["model"]["tied"].data_ptr() == loaded["model"]["head"].data_ptr()


async def test_a_module_loads_its_converted_state(tmp_path: Path) -> None:
    """The versions that a module's state dict carries survive from file to file."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    await aiockpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded._metadata == torch.load(tmp_path / "a.pt", weights_only=True)._metadata
    assert loaded._metadata["1"] == {"version": 2}
    model.load_state_dict(loaded)


def _dcp_state() -> dict[str, Any]:
    state = rich_state()
    del state["optim"]["state"][1]  # Distributed Checkpoint has no place for what is empty
    return state


@quiet_dcp
async def test_a_folder_of_dcp_becomes_a_run(tmp_path: Path) -> None:
    """Saved by stock `dcp.save`: all is there again, its keys as text, as DCP does it."""
    state = _dcp_state()
    await asyncio.to_thread(state_dict_saver.save, state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    await aiockpt.convert(tmp_path / "dcp", tmp_path / "run", to="aiockpt")
    loaded = await aiockpt.load(tmp_path / "run")
    assert loaded["values"] == state["values"]
    assert torch.equal(loaded["optim"]["state"]["0"]["exp_avg"], state["optim"]["state"][0]["exp_avg"])
    assert loaded["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert torch.equal(loaded["tensors"][1]["inside"], torch.zeros(2))
    for name, tensor in state["odd"].items():
        assert torch.equal(loaded["odd"][name], tensor), name
        assert loaded["odd"][name].dtype == tensor.dtype


@quiet_dcp
async def test_stock_dcp_loads_what_was_written(tmp_path: Path) -> None:
    """A saver's run, converted: `dcp.load` fills a target of the same structure with the same bytes."""
    state = _dcp_state()
    async with aiockpt.Saver(tmp_path / "run") as saver:
        await saver.save(state, step=1)
    await aiockpt.convert(tmp_path / "run", tmp_path / "dcp", to="dcp")
    assert sorted(os.listdir(tmp_path / "dcp")) == [".metadata", "__0_0.distcp"]
    target = _zeros(state)
    await asyncio.to_thread(state_dict_loader.load, target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    flat = dict(_leaves(state, ""))
    assert flat.keys() == dict(_leaves(target, "")).keys()
    for path, value in _leaves(target, ""):
        same = torch.equal(value, flat[path]) if isinstance(value, torch.Tensor) else value == flat[path]
        assert same, path


@quiet_dcp
async def test_tied_tensors_lie_once_in_a_folder_of_dcp(tmp_path: Path) -> None:
    """Two names, one place in the file; they are tied again when it is read."""
    big = torch.randn(50_000)
    torch.save({"a": big, "b": {"c": big}}, tmp_path / "w.pt")
    await aiockpt.convert(tmp_path / "w.pt", tmp_path / "dcp", to="dcp")
    assert (tmp_path / "dcp" / "__0_0.distcp").stat().st_size < 1.1 * big.nbytes
    await aiockpt.convert(tmp_path / "dcp", tmp_path / "run", to="aiockpt")
    loaded = await aiockpt.load(tmp_path / "run")
    assert loaded["a"] is loaded["b"]["c"]
    target: dict[str, Any] = {"a": torch.zeros(50_000), "b": {"c": torch.zeros(50_000)}}
    await asyncio.to_thread(state_dict_loader.load, target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(target["a"], big)
    assert torch.equal(target["b"]["c"], big)


async def test_safetensors_both_ways(tmp_path: Path) -> None:
    """One file and a sharded folder: the reference library reads them, and they come back."""
    state = {"model": {"w": torch.randn(40, 30), "b": torch.randn(7).bfloat16(), "s": torch.tensor(2)}}
    torch.save(state, tmp_path / "w.pt")
    await aiockpt.convert(tmp_path / "w.pt", tmp_path / "one.safetensors", to="safetensors", item="model")
    assert alike(_sorted(safetensors.torch.load_file(tmp_path / "one.safetensors")), _sorted(state["model"]))
    await aiockpt.convert(tmp_path / "w.pt", tmp_path / "many", to="safetensors", max_shard_bytes=1000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["model.b", "model.s", "model.w"]
    for name, file in index["weight_map"].items():
        assert torch.equal(
            safetensors.torch.load_file(tmp_path / "many" / file)[name], state["model"][name[6:]]
        )
    for source in ("one.safetensors", "many"):
        await aiockpt.convert(tmp_path / source, tmp_path / f"{source}.pt", to="torch")
        loaded = torch.load(tmp_path / f"{source}.pt", weights_only=True)
        assert alike([loaded[name] for name in sorted(loaded)], [state["model"][n] for n in "bsw"])


async def test_a_file_of_the_reference_library_is_read(tmp_path: Path) -> None:
    """What `save_file` and `save_model` write, tied weights included."""
    model = torch.nn.Module()
    model.a = torch.nn.Linear(3, 3)
    model.b = torch.nn.Linear(3, 3)
    model.b.weight = model.a.weight
    safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))
    await aiockpt.convert(tmp_path / "m.safetensors", tmp_path / "run", to="aiockpt")
    loaded = await aiockpt.load(tmp_path / "run")
    assert loaded["a.weight"] is loaded["b.weight"]
    assert set(loaded) == {"a.weight", "b.weight", "a.bias", "b.bias"}


async def test_a_tensor_called_as_the_format_is_no_tie(tmp_path: Path) -> None:
    """Files say `format: pt` in the place where ties are noted."""
    safetensors.torch.save_file({"pt": torch.ones(2)}, tmp_path / "m.safetensors", {"format": "pt"})
    await aiockpt.convert(tmp_path / "m.safetensors", tmp_path / "run", to="aiockpt")
    assert list(await aiockpt.load(tmp_path / "run")) == ["pt"]


async def test_what_a_target_cannot_hold_is_refused_by_path(tmp_path: Path) -> None:
    """Values in safetensors, a path in torch's format: an error with every path, or left out on request."""
    state = {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128), "epoch": 3, "where": Path("/x")}
    async with aiockpt.Saver(tmp_path / "run") as saver:
        await saver.save(state, step=1)
    with pytest.raises(aiockpt.UnsupportedStateError) as caught:
        await aiockpt.convert(tmp_path / "run", tmp_path / "s", to="safetensors")
    assert [path for path, _ in caught.value.problems] == ["epoch", "where"]
    done = await aiockpt.convert(tmp_path / "run", tmp_path / "s", to="safetensors", drop=True)
    assert done.dropped == ("epoch", "where", "c")
    with pytest.raises(aiockpt.UnsupportedStateError, match="where: a pathlib"):
        await aiockpt.convert(tmp_path / "run", tmp_path / "t.pt", to="torch")
    assert sorted(os.listdir(tmp_path)) == ["run", "s"]


async def test_everything_a_run_can_hold_goes_to_another_run(tmp_path: Path) -> None:
    """Arrays, generators, sparse tensors, containers of all kinds; a saver goes on with the result."""
    shared = torch.randn(1000)
    state: dict[Any, Any] = {
        "sparse": torch.eye(4).to_sparse(),
        "array": np.arange(5),
        "scalar": np.float32(2.5),
        "lists": defaultdict(list, x=[shared]),
        "pair": (shared, {"again": shared}),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "rng": np.random.default_rng(3),
        "blob": b"z" * 100_000,
        "empty": {},
        "c128": torch.ones(2, dtype=torch.complex128),
        3: "an int key",
    }
    async with aiockpt.Saver(tmp_path / "run") as saver:
        await saver.save(state, step=4)
    done = await aiockpt.convert(tmp_path / "run" / "step-00000004", tmp_path / "two", to="aiockpt")
    loaded = await aiockpt.load(done.dst, 4)
    assert loaded.pop("rng").bit_generator.state == state.pop("rng").bit_generator.state
    assert torch.equal(loaded.pop("sparse").to_dense(), state.pop("sparse").to_dense())
    assert same(loaded, state)
    async with aiockpt.Saver(done.dst) as saver:
        restored = await saver.restore()
        assert restored is not None
        assert restored.step == 4
        await saver.save(state, step=5)
    assert (await aiockpt.convert(done.dst, tmp_path / "w.pt", to="torch", item="parameter")).tensors == 1


async def test_arrays_beyond_the_budget_are_refused_by_path(tmp_path: Path) -> None:
    """They are read whole: what comes to more than the budget is said before it is read."""
    async with aiockpt.Saver(tmp_path / "run") as saver:
        await saver.save({"a": {"b": np.zeros(9 << 20, np.uint8)}}, step=1)
    with pytest.raises(aiockpt.UsageError, match=r"^a/b.*budget") as caught:
        await aiockpt.convert(tmp_path / "run", tmp_path / "two", to="aiockpt", budget=8 << 20)
    assert caught.value.path is not None
    assert os.listdir(tmp_path) == ["run"]


async def test_nothing_is_replaced_unless_that_is_said(tmp_path: Path) -> None:
    """A file or folder that is there stays; `overwrite=True` replaces it whole."""
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    for to in ("aiockpt", "dcp", "torch", "safetensors"):
        there = tmp_path / to
        there.mkdir()
        (there / "mine").write_text("kept")
        with pytest.raises(aiockpt.UsageError, match="overwrite=True"):
            await aiockpt.convert(tmp_path / "w.pt", there, to=to)
        assert (there / "mine").read_text() == "kept"
        await aiockpt.convert(tmp_path / "w.pt", there, to=to, overwrite=True)
        assert not (there / "mine").exists()
        await aiockpt.convert(tmp_path / "w.pt", there, to=to, overwrite=True)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


async def test_a_cancelled_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after the present hop, and the half-written file is gone."""
    torch.save({f"w{i}": torch.zeros(1 << 20) for i in range(8)}, tmp_path / "w.pt")
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    some = _drive._some

    def slow(steps: Any) -> bool:
        loop.call_soon_threadsafe(begun.set)
        return some(steps)

    monkeypatch.setattr(_drive, "_some", slow)
    monkeypatch.setattr(_drive, "_HOP_BYTES", 1)
    task = asyncio.create_task(aiockpt.convert(tmp_path / "w.pt", tmp_path / "b.pt", to="torch"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(tmp_path) == ["w.pt"]
    _threads.trim()


async def test_bytes_that_change_on_the_way_to_the_disk_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is read back and compared: a wrong byte is an error, and nothing appears."""
    torch.save({"w": torch.zeros(100)}, tmp_path / "w.pt")
    publish, real = [], _drive.flush

    def spoil(path: str) -> None:
        real(path)
        data = next(Path(path).glob("*.safetensors"))
        data.write_bytes(data.read_bytes()[:-1] + b"\1")
        publish.append(path)

    monkeypatch.setattr(safetensors_, "flush", spoil)
    with pytest.raises(aiockpt.ForeignFormatError, match="the bytes of w"):
        await aiockpt.convert(tmp_path / "w.pt", tmp_path / "out", to="safetensors")
    assert publish
    assert os.listdir(tmp_path) == ["w.pt"]


def test_code_that_is_not_async_converts_too(tmp_path: Path) -> None:
    """`aiockpt.sync.convert` is the same verb."""
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    done = aiockpt.sync.convert(tmp_path / "w.pt", tmp_path / "run", to="aiockpt")
    assert done.tensors == 1
    assert torch.equal(aiockpt.sync.load(tmp_path / "run")["w"], torch.ones(2))


async def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    """A target that is none, a budget too small, an item that is not there, a source that is not there."""
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    for options, match in (
        ({"to": "onnx"}, "to= is one of"),
        ({"to": "torch", "budget": 1 << 20}, "at least 8 MiB"),
        ({"to": "torch", "item": "x"}, "no top-level entry 'x'"),
    ):
        with pytest.raises(aiockpt.UsageError, match=match):
            await aiockpt.convert(tmp_path / "w.pt", tmp_path / "o", **options)
    with pytest.raises(aiockpt.UsageError, match="no such file"):
        await aiockpt.convert(tmp_path / "none", tmp_path / "o", to="torch")
    assert os.listdir(tmp_path) == ["w.pt"]


def _zeros(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _zeros(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_zeros(child) for child in value]
    return torch.zeros_like(value).contiguous() if isinstance(value, torch.Tensor) else 0


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, child in value.items() for leaf in _leaves(child, f"{path}/{key}")]
    if isinstance(value, list):
        return [leaf for i, child in enumerate(value) for leaf in _leaves(child, f"{path}/{i}")]
    return [(path, value)]


def _sorted(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in sorted(state)}


@pytest.mark.parametrize("source", ["run", "w.pt"])
@pytest.mark.parametrize("to", ["aiockpt", "dcp", "torch", "safetensors"])
async def test_cancelled_anywhere_it_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, to: Any
) -> None:
    """From each kind of source to each target: what was begun is gone when the call returns."""
    state = {f"w{i}": torch.full((1 << 18,), i) for i in range(6)}
    torch.save(state, tmp_path / "w.pt")
    async with aiockpt.Saver(tmp_path / "run") as saver:
        await saver.save(state, step=1)
    begun, loop, read = asyncio.Event(), asyncio.get_running_loop(), Content.read

    def slow(self: Content, first: int, out: torch.Tensor, room: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.02)
        read(self, first, out, room)

    monkeypatch.setattr(Content, "read", slow)
    monkeypatch.setattr(_drive, "_HOP_BYTES", 1)
    task = asyncio.create_task(aiockpt.convert(tmp_path / source, tmp_path / "out", to=to))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(os.listdir(tmp_path)) == ["run", "w.pt"]


async def test_many_conversions_at_a_time(tmp_path: Path) -> None:
    """More of them than there are threads: none waits for a thread that waits for it."""
    state: dict[str, Any] = {"w": torch.randn(1 << 20), "blob": b"x" * 5000}
    async with aiockpt.Saver(tmp_path / "run") as saver:
        await saver.save(state, step=1)
    calls = [aiockpt.convert(tmp_path / "run", tmp_path / f"{i}.pt", to="torch") for i in range(10)]
    async with asyncio.timeout(30):
        await asyncio.gather(*calls)
    for i in range(10):
        assert torch.equal(torch.load(tmp_path / f"{i}.pt", weights_only=True)["w"], state["w"])
