"""Loading without a target: the state as saved, from no more bytes than needed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from aiockpt import _fetch
from aiockpt._dtypes import BY_NAME
from aiockpt._manifest import PIECE_BYTES
from aiockpt._short import load
from aiockpt.errors import (
    UsageError,
)
from aiockpt.layouts.per_item import PerItem
from aiockpt.reader import LoadProgress
from aiockpt.storage import open_store
from aiockpt.testing import FaultyStore
from tests.leaks import descriptors
from tests.loading import MIB, data_read, mixed
from tests.make_checkpoint import alike, make_checkpoint, raw
from tests.strategies import same, states


async def test_the_state_comes_back(tmp_path: Path) -> None:
    """Types, order, bits and ties are those of the saved state."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    assert alike(await load(tmp_path), state)


@settings(max_examples=40)
@given(state=states())
def test_any_state_comes_back(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever can be stored comes back as it was, read through files."""
    run = tmp_path_factory.mktemp("run")
    make_checkpoint(run, state, 1)
    assert same(asyncio.run(load(run)), state)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
async def test_every_dtype_comes_back(tmp_path: Path) -> None:
    """Each storable dtype keeps its bits, its dtype and its alignment."""
    state = {
        "t": {name: torch.randint(0, 255, (48,), dtype=torch.uint8).view(d) for name, d in BY_NAME.items()}
    }
    state["t"]["odd"] = torch.zeros(3, dtype=torch.uint8)
    make_checkpoint(tmp_path, state, 1)
    loaded = await load(tmp_path)
    assert list(loaded["t"]) == list(state["t"])
    for name, tensor in state["t"].items():
        assert loaded["t"][name].dtype == tensor.dtype
        assert raw(loaded["t"][name]) == raw(tensor)
        assert loaded["t"][name].data_ptr() % tensor.element_size() == 0


async def test_each_tensor_owns_its_memory(tmp_path: Path) -> None:
    """Restored tensors are writable and share memory only where they were tied."""
    flat = torch.randn(300)
    state = {"a": flat[:100], "b": flat[50:150], "c": flat.expand(4, 300), "d": flat[:100]}
    make_checkpoint(tmp_path, state, 1)
    loaded = await load(tmp_path)
    assert loaded["a"] is loaded["d"]
    assert {loaded[k].untyped_storage().nbytes() for k in "ab"} == {400}
    before = loaded["b"].clone()
    loaded["a"].zero_()
    loaded["c"][0].zero_()
    assert torch.equal(loaded["b"], before)
    assert torch.equal(loaded["c"][1], flat)


async def test_large_tensors_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most bytes of a large tensor go straight to its memory, without a copy through a block."""
    state = {"a": torch.randn(9 * MIB // 4 + 17), "b": torch.randn(5 * MIB // 4)}
    make_checkpoint(tmp_path, state, 1)
    direct: list[int] = []
    plain = _fetch.Fetch._read_direct

    async def spy(self: _fetch.Fetch, source: Any, run: Any, *rest: Any) -> None:
        direct.append(run.nbytes)
        await plain(self, source, run, *rest)

    monkeypatch.setattr(_fetch.Fetch, "_read_direct", spy)
    assert alike(await load(tmp_path), state)
    assert sum(direct) == sum(t.nbytes for t in state.values())


async def test_many_shards_need_few_descriptors(tmp_path: Path) -> None:
    """Hundreds of files are read with a few of them open, and none afterwards."""
    state = {"m": {f"k{i}": torch.full((100,), float(i)) for i in range(300)}}
    make_checkpoint(tmp_path, state, 1, layout=PerItem(shard_bytes=400))
    before = len(descriptors())
    most = 0

    def watch(_: LoadProgress) -> None:
        nonlocal most
        most = max(most, len(descriptors()) - before)

    assert alike(await load(tmp_path, progress=watch), state)
    assert 0 < most <= 24
    assert len(descriptors()) == before


async def test_files_are_never_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is memory-mapped: loading works where that is impossible."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    import mmap

    real = mmap.mmap

    def refuse(fileno: int, *args: Any, **options: Any) -> Any:
        if fileno != -1:
            raise OSError(19, "ENODEV")
        return real(fileno, *args, **options)

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert alike(await load(tmp_path), state)


@pytest.mark.parametrize(
    ("paths", "pick"),
    [
        (["model"], lambda s: {"model": s["model"]}),
        (["epoch"], lambda s: {"epoch": 4}),
        (
            ["optim/state/0/step"],
            lambda s: {"optim": {"state": {0: {"step": s["optim"]["state"][0]["step"]}}}},
        ),
        (["trainer/deep/x/1/y"], lambda s: {"trainer": {"deep": {"x": {1: {"y": 2}}}}}),
        (["trainer/names", "loose"], lambda s: {"trainer": {"names": ("a", 1, None)}, "loose": s["loose"]}),
        (["model/tied"], lambda s: {"model": OrderedDict(tied=s["model"]["w"])}),
        ([""], lambda s: s),
    ],
)
async def test_paths_select(
    tmp_path: Path, paths: list[str], pick: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """`paths=` gives what lies under them, in the same nesting, a leaf within a plain value too."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    assert alike(await load(tmp_path, paths=paths), pick(state))


async def test_paths_read_nothing_else(tmp_path: Path) -> None:
    """Only the pieces that hold wanted bytes are read."""
    state = {"a": {f"t{i}": torch.randn(2 * MIB) for i in range(4)}, "b": torch.randn(MIB), "n": {"x": 1}}
    make_checkpoint(tmp_path, state, 1)

    async def read(*paths: str) -> int:
        store = FaultyStore(open_store(tmp_path))
        await load(store, paths=paths)
        return data_read(store)

    assert await read("n") == 0
    assert await read("b") == 4 * MIB
    assert await read("a/t1") == 8 * MIB
    assert await read("a/t1", "a/t1", "b") == 12 * MIB


async def test_a_part_of_a_piece_costs_a_piece(tmp_path: Path) -> None:
    """A small tensor costs the pieces it lies in, since only those can be verified."""
    make_checkpoint(tmp_path, {"m": {"big": torch.randn(4 * MIB), "small": torch.ones(3)}}, 1)
    store = FaultyStore(open_store(tmp_path))
    loaded = await load(store, paths=["m/small"])
    assert alike(loaded, {"m": {"small": torch.ones(3)}})
    assert 0 < data_read(store) <= PIECE_BYTES


@pytest.mark.parametrize("path", ["modell", "model/v", "optim/state/1", "trainer/deep/x/2", "model/w/0"])
async def test_a_path_to_nothing_is_an_error(tmp_path: Path, path: str) -> None:
    """A path that selects nothing is named, before anything is read."""
    make_checkpoint(tmp_path, mixed(), 1)
    store = FaultyStore(open_store(tmp_path))
    with pytest.raises(UsageError) as caught:
        await load(store, paths=["epoch", path])
    assert repr(path) in str(caught.value)
    assert caught.value.path == path
    assert data_read(store) == 0


async def test_near_paths_are_named(tmp_path: Path) -> None:
    """The message for a mistyped path names the right one."""
    make_checkpoint(tmp_path, mixed(), 1)
    with pytest.raises(UsageError, match="near: model"):
        await load(tmp_path, paths=["modle"])


@pytest.mark.parametrize("paths", [[], [3], None])
async def test_wrong_paths(tmp_path: Path, paths: Any) -> None:
    """`paths=` is refused when empty, not text, or combined with `into=`."""
    make_checkpoint(tmp_path, mixed(), 1)
    into = {"epoch": 0} if paths is None else None
    with pytest.raises(UsageError, match="paths="):
        await load(tmp_path, into=into, paths=["epoch"] if paths is None else paths)


async def test_map_location(tmp_path: Path) -> None:
    """The CPU by default; a device, or a function from path to device, on request."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    for place in (None, "cpu", torch.device("cpu"), lambda path: "cpu"):
        assert alike(await load(tmp_path, map_location=place), state)
    picked = await load(tmp_path, map_location=lambda path: "meta" if path.startswith("model") else "cpu")
    assert picked["model"]["w"].device.type == "meta"
    assert picked["loose"].device.type == "cpu"


async def test_meta_reads_nothing(tmp_path: Path) -> None:
    """On the meta device shapes and dtypes come without any data being read."""
    make_checkpoint(tmp_path, mixed(), 1)
    store = FaultyStore(open_store(tmp_path))
    loaded = await load(store, map_location="meta")
    assert data_read(store) == 0
    assert not any("read_into" in operation for operation in store.operations)
    assert loaded["model"]["w"].device.type == "meta"
    assert loaded["model"]["w"].shape == (1 << 20,)


async def test_generators_stay_on_the_host(tmp_path: Path) -> None:
    """RNG states and arrays are in host memory, wherever everything else goes."""
    import random

    state: dict[str, Any] = {
        "py": random.getstate(),
        "np": np.random.get_state(),
        "th": torch.get_rng_state(),
        "gen": torch.Generator().manual_seed(3),
        "arr": np.arange(5.0),
    }
    make_checkpoint(tmp_path, state, 1)
    expected = (random.random(), np.random.rand(), torch.rand(1))
    loaded = await load(tmp_path, map_location="meta")
    random.setstate(loaded["py"])
    np.random.set_state(loaded["np"])
    torch.set_rng_state(loaded["th"])
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert type(loaded["py"]) is tuple
    assert type(loaded["py"][1]) is tuple
    assert torch.equal(loaded["gen"].get_state(), state["gen"].get_state())
    assert np.array_equal(loaded["arr"], state["arr"])


@pytest.mark.parametrize(
    "place", ["cuda:99", "nonsense", 3.5, torch.device("cuda", 99), lambda path: "cuda:99"]
)
async def test_a_bad_device_fails_first(tmp_path: Path, place: Any) -> None:
    """A device that cannot be used is an error before any data is read."""
    make_checkpoint(tmp_path, mixed(), 1)
    store = FaultyStore(open_store(tmp_path))
    with pytest.raises(UsageError):
        await load(store, map_location=place)
    assert data_read(store) == 0
