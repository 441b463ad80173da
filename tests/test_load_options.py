"""How a load can be told to go about it: options, phases by hand, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aiockpt._manifest import PIECE_BYTES
from aiockpt._short import load
from aiockpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PickleRefusedError,
    StepNotFoundError,
    UsageError,
)
from aiockpt.reader import CheckpointReader, LoadProgress
from aiockpt.storage import open_store
from aiockpt.testing import FaultyStore
from tests.loading import MIB, data_read, flip, mixed
from tests.make_checkpoint import alike, make_checkpoint


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


async def test_verify_false_skips_the_data_only(tmp_path: Path) -> None:
    """Without verification a flipped bit of the data comes through; atomic is refused then."""
    made = make_checkpoint(tmp_path, {"a": torch.zeros(MIB)}, 1)
    flip(made.folder, next(iter(made.shards)), -1)
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


async def test_parts_that_do_not_belong_together_are_damage(tmp_path: Path) -> None:
    """Parts of which each claims to be the only one are refused, not half loaded."""
    made = make_checkpoint(tmp_path, mixed(), 1)
    made.parts = 3
    made.write()
    with pytest.raises(CheckpointError, match="no checkpoint of 1 rank"):
        await load(tmp_path)


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


PEAK = """
import asyncio, sys
import torch
from aiockpt._short import load

def peak():
    # Not ru_maxrss: a child process inherits that of its parent.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

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
    assert living or growth > 0.9 * nbytes  # else it was not measured
