"""Loading without a target: the state as saved, verified, from no more bytes than needed."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from aiockpt import _fetch
from aiockpt._dtypes import BY_NAME
from aiockpt._manifest import PIECE_BYTES
from aiockpt._memory import BlockPool
from aiockpt.catalog import Catalog, load
from aiockpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PickleRefusedError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from aiockpt.layouts.per_item import PerItem
from aiockpt.reader import CheckpointReader, LoadProgress
from aiockpt.storage import open_store
from aiockpt.testing import FaultyStore
from tests.leaks import descriptors, threads
from tests.make_checkpoint import Made, alike, edit_page, make_checkpoint, raw
from tests.strategies import same, states

MIB = 1 << 20
SMALL = 2 * PIECE_BYTES
"""The smallest budget a load takes."""


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are back in their pool are poisoned and checked: no thread may touch one.

    For small budgets: checking a block takes longer than reading into it.
    """
    monkeypatch.setattr(BlockPool, "poison", True)


def mixed() -> dict[str, Any]:
    """A state with large, small, tied, strided and empty tensors among plain values."""
    big = torch.randn(1 << 20)
    return {
        "model": OrderedDict(w=big, tied=big, small=torch.arange(7), empty=torch.empty(0, 3)),
        "optim": {"state": {0: {"step": torch.tensor(3.0), "avg": torch.randn(300, 1000).t()}}},
        "epoch": 4,
        "trainer": {"best": float("nan"), "names": ("a", 1, None), "deep": {"x": [1, {"y": 2}]}},
        "loose": torch.ones(2, dtype=torch.bool),
    }


def data_read(store: FaultyStore) -> int:
    """Bytes of data sections that were read (headers are read from offset 0)."""
    found = 0
    for operation in store.operations:
        match = re.fullmatch(r"source\.read_into .*@(\d+)\+(\d+)", operation)
        found += int(match[2]) if match and int(match[1]) else 0
    return found


# ------------------------------------------------------------------ the whole state


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
    assert 0 < most <= _fetch.OPEN_FIRST + _fetch.WORKERS
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


# ------------------------------------------------------------------ parts of it


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


# ------------------------------------------------------------------ devices


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

    state = {
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


# ------------------------------------------------------------------ options


async def test_progress(tmp_path: Path) -> None:
    """Progress is told after each read and ends at the total."""
    make_checkpoint(tmp_path, {"a": torch.randn(12 * MIB)}, 3)
    told: list[LoadProgress] = []
    await load(tmp_path, progress=told.append, budget=4 * MIB)
    assert [p.read for p in told] == sorted({p.read for p in told})
    assert len(told) > 3
    assert {p.total for p in told} == {48 * MIB}
    assert told[-1].read == 48 * MIB
    assert {p.step for p in told} == {3}


async def test_a_small_budget_is_enough(tmp_path: Path) -> None:
    """Two blocks of one piece load any state; less is refused."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    assert alike(await load(tmp_path, budget=2 * PIECE_BYTES), state)
    with pytest.raises(UsageError, match="too small"):
        await load(tmp_path, budget=2 * PIECE_BYTES - 1)


def flip(made: Made, name: str, at: int) -> None:
    """Change one bit of a file."""
    file = made.folder / name
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


async def test_verify_false_skips_the_data_only(tmp_path: Path) -> None:
    """Without verification a flipped bit of the data comes through; atomic is refused then."""
    made = make_checkpoint(tmp_path, {"a": torch.zeros(MIB)}, 1)
    flip(made, next(iter(made.shards)), -1)
    loaded = await load(tmp_path, verify=False)
    assert int((loaded["a"] != 0).sum()) == 1
    with pytest.raises(UsageError, match="atomic"):
        await load(tmp_path, verify=False, atomic=True)
    with pytest.raises(CorruptCheckpointError):
        await load(tmp_path)


async def test_pickles_are_refused_first(tmp_path: Path) -> None:
    """A pickled value is refused by path before any data is read; what is not selected does not count."""
    state = {
        "a": torch.randn(MIB),
        "odd": {"x": complex, "t": torch.ones(1)},
        "plain": {"y": [complex], "z": 1},
    }
    make_checkpoint(tmp_path, state, 1, allow_pickle=True)
    store = FaultyStore(open_store(tmp_path))
    for paths in (None, ["plain"], ["plain/y"], ["plain/y/0"], ["odd"], ["odd/x"]):
        with pytest.raises(PickleRefusedError) as caught:
            await load(store, paths=paths)
        assert caught.value.step == 1
        assert (caught.value.path or "").startswith(("odd", "plain"))
    assert data_read(store) == 0
    assert (await load(tmp_path, paths=["plain/z", "odd/t"]))["plain"] == {"z": 1}
    assert (await load(tmp_path, allow_pickle=True))["plain"]["y"] == [complex]


async def test_nothing_to_load(tmp_path: Path) -> None:
    """An empty or missing run has nothing to load, and says so."""
    for run in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StepNotFoundError):
            await load(run)
        with pytest.raises(StepNotFoundError):
            await load(run, 3)
    with pytest.raises(UsageError):
        await load(tmp_path, True)


async def test_several_parts_are_refused_by_name(tmp_path: Path) -> None:
    """A checkpoint of several processes is refused, not half loaded."""
    made = make_checkpoint(tmp_path, mixed(), 1)
    made.parts = 3
    made.write()
    with pytest.raises(CheckpointError, match="3 parts"):
        await load(tmp_path)


# ------------------------------------------------------------------ faults and cancellation


def quiet() -> None:
    """Nothing of a load is left: no file open, no thread inside anything."""
    gc.collect()
    assert not [name for name in descriptors().values() if "safetensors" in name]
    assert all(thread.daemon for thread in threads())


@pytest.mark.usefixtures("poisoned")
async def test_every_fault_is_a_typed_error(tmp_path: Path) -> None:
    """Whichever store operation fails, the error is ours and nothing stays open.

    But for closing a file that was only read, which says nothing about what was read.
    """
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    probe = FaultyStore(open_store(tmp_path))
    await load(probe, budget=SMALL)
    total = len(probe.operations)
    assert total > 8
    for n in range(total):
        store = FaultyStore(open_store(tmp_path), n)
        try:
            assert alike(await load(store, budget=SMALL), state)
        except StorageError as error:
            assert error.errno is not None
        else:
            assert "aclose" in store.operations[n]
        assert store.fired
        quiet()
        store.heal()
    assert alike(await load(tmp_path, budget=SMALL), state)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("how", ["native", "twice", "scope", "timeout"])
async def test_cancelled_anywhere(tmp_path: Path, how: str) -> None:
    """A load cancelled at any store operation ends at once and leaves nothing behind."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    probe = FaultyStore(open_store(tmp_path))
    await load(probe, into=target(), strict=False, budget=SMALL)
    for n in range(len(probe.operations)):
        await cancel_at(tmp_path, n, how)
        quiet()
    assert alike(await load(tmp_path), state)


def target() -> dict[str, Any]:
    """Living tensors for part of the state."""
    return {"loose": torch.zeros(2, dtype=torch.bool), "model": {"w": torch.zeros(1 << 20)}}


async def cancel_at(run: Path, n: int, how: str) -> None:
    """Load, and be cancelled when the n-th operation begins."""
    scope = anyio.CancelScope()

    async def work() -> None:
        with scope:
            async with asyncio.timeout(None) as limit:
                timeouts.append(limit)
                await load(store, into=target(), strict=False, budget=SMALL)
                done.append(True)

    def strike() -> None:
        if how == "scope":
            scope.cancel()
        elif how == "timeout":
            timeouts[0].reschedule(0.0)
        else:
            task.cancel()
            if how == "twice":
                asyncio.get_running_loop().call_soon(task.cancel)

    timeouts: list[asyncio.Timeout] = []
    done: list[bool] = []
    store = FaultyStore(open_store(run), n, "cancel", on_fault=strike)
    task = asyncio.create_task(work())
    outcome = (await asyncio.gather(task, return_exceptions=True))[0]
    assert store.fired
    if how == "scope":
        assert outcome is None
        assert not done
    elif how == "timeout":
        assert isinstance(outcome, TimeoutError)
    else:
        assert isinstance(outcome, asyncio.CancelledError)


async def test_a_stalled_read_is_waited_for_by_the_others(tmp_path: Path) -> None:
    """While one read hangs the loop goes on; once it is released the load completes."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    probe = FaultyStore(open_store(tmp_path))
    await load(probe)
    reads = [i for i, operation in enumerate(probe.operations) if "read_into" in operation]
    store = FaultyStore(open_store(tmp_path), reads[-1], "stall")
    task = asyncio.create_task(load(store))
    await store.stalled.wait()
    await asyncio.sleep(0)
    assert not task.done()
    store.release.set()
    assert alike(await task, state)


# ------------------------------------------------------------------ phases by hand


async def test_reader_phases(tmp_path: Path) -> None:
    """The four phases can be scheduled one by one; planning reads no data."""
    state = mixed()
    made = make_checkpoint(tmp_path, state, 1)
    store = FaultyStore(open_store(tmp_path))
    reader = CheckpointReader(store, made.folder.name, step=1)
    saved = await reader.metadata()
    assert "model/w" in saved.table.path
    plan = await reader.plan(paths=["model"])
    assert plan.nbytes >= 4 * MIB
    assert data_read(store) == 0
    await reader.read(plan)
    assert data_read(store) == plan.nbytes
    loaded = await reader.apply(plan)
    assert alike(loaded.state, {"model": state["model"]})


@pytest.mark.usefixtures("poisoned")
async def test_two_loads_share_a_budget(tmp_path: Path) -> None:
    """Loads of one catalog at the same time share its blocks without deadlock."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    async with Catalog(tmp_path, budget=2 * PIECE_BYTES) as catalog:
        loaded = await asyncio.gather(*(catalog.load() for _ in range(4)))
    assert all(alike(one, state) for one in loaded)


# ------------------------------------------------------------------ hostile numbers


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": [2**62, 2**62]},
        {"dims": [-1, 3]},
        {"dims": [2**70, 0]},
        {"ndim": [3]},
        {"ndim": [-1]},
        {"dtype": [7]},
        {"dtype": [-1]},
        {"shard": [1]},
        {"shard": [-1]},
        {"begin": [4]},
        {"begin": [-4]},
        {"begin": [2**63]},
        {"alias": [0]},
        {"alias": [5]},
        {"path": ["m/(("]},
        {"path": ["/".join("x" * 300)]},
        {"path": ["m/t", "m/t"]},
        {"flags": [9]},
        {"flags": [2**80]},
        {"seq": ["x"]},
    ],
)
async def test_hostile_tables(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Whatever a well-sealed part says, the answer is a typed error."""
    made = make_checkpoint(tmp_path, {"m": {"t": torch.ones(2, 3)}}, 1)
    edit_page(made.part, "tensors", 0, **changes)
    made.write()
    with pytest.raises(CorruptCheckpointError) as caught:
        await load(tmp_path)
    assert caught.value.step == 1
    assert caught.value.file is not None


async def test_impossible_empty_shape(tmp_path: Path) -> None:
    """A shape without elements that no tensor can have is damage, not a crash."""
    made = make_checkpoint(tmp_path, {"m": {"t": torch.ones(0, 3), "u": torch.ones(1)}}, 1)
    for dims in ([0, 2**64], [0, 2**62]):
        edit_page(made.part, "tensors", 0, dims=[*dims, 1])
        made.write()
        with pytest.raises(CorruptCheckpointError):
            await load(tmp_path)


async def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    """A small file cannot claim a thousand tensors of its whole length."""
    made = make_checkpoint(tmp_path, {"m": {f"t{i}": torch.ones(10) for i in range(3)}}, 1)
    edit_page(made.part, "tensors", 0, begin=[0, 0, 80])
    made.write()
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        await load(tmp_path)


# ------------------------------------------------------------------ memory

PEAK = """
import asyncio, resource, sys
import torch
from aiockpt.catalog import load

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

async def main(run, living):
    if living:
        into = {"m": {f"w{i}": torch.zeros(10 << 20) for i in range(8)}}
        await load(run, into={"m": {"w0": into["m"]["w0"]}}, strict=False)  # warms everything up
    else:
        into = None
        await load(run, paths=["small"])
    before = peak()
    loaded = await load(run, into=into)
    state = into if living else loaded
    assert all(bool((state["m"][f"w{i}"] == i + 1).all()) for i in range(8))
    print(peak() - before)

asyncio.run(main(sys.argv[1], sys.argv[2] == "into"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("living", [False, True])
def test_peak_memory(tmp_path: Path, living: bool) -> None:
    """A load takes the state's size and a little; a load into living tensors a few blocks."""
    state = {"m": {f"w{i}": torch.full((10 << 20,), float(i + 1)) for i in range(8)}, "small": torch.ones(1)}
    make_checkpoint(tmp_path, state, 1)
    nbytes = 8 * 40 * MIB
    command = [sys.executable, "-c", PEAK, str(tmp_path), "into" if living else "fresh"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    growth = int(done.stdout)
    assert growth < (6 * 16 * MIB if living else 1.2 * nbytes)
