"""Loads that fail, are cancelled, or are told lies: typed errors, and nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from aiockpt._fetch import WORKERS
from aiockpt._memory import BlockPool
from aiockpt._short import load
from aiockpt.catalog import Catalog
from aiockpt.errors import (
    CorruptCheckpointError,
    StorageError,
)
from aiockpt.layouts.per_item import PerItem
from aiockpt.storage import open_store
from aiockpt.testing import FaultyStore
from tests.loading import SMALL, mixed, quiet
from tests.make_checkpoint import alike, edit_page, make_checkpoint


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are back in their pool are poisoned and checked: no thread may touch one.

    For small budgets: checking a block takes longer than reading into it.
    """
    monkeypatch.setattr(BlockPool, "poison", True)


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
            loaded, error = await load(store, budget=SMALL), None
        except StorageError as caught:
            loaded, error = None, caught
        # Which operation is the n-th differs from time to time: several are in flight.
        if "aclose" in store.operations[n]:
            assert alike(loaded, state)
        else:
            assert error is not None
            assert error.errno is not None
        assert store.fired
        quiet()
        store.heal()
    assert alike(await load(tmp_path, budget=SMALL), state)


async def test_a_failure_ends_the_others(tmp_path: Path) -> None:
    """After the first failed read no new ones are begun, and the error comes out bare."""
    state = {"m": {f"k{i}": torch.full((100,), float(i)) for i in range(60)}}
    make_checkpoint(tmp_path, state, 1, layout=PerItem(shard_bytes=400))
    probe = FaultyStore(open_store(tmp_path))
    await load(probe)
    first = next(i for i, operation in enumerate(probe.operations) if "read_into" in operation)
    store = FaultyStore(open_store(tmp_path), first)
    with pytest.raises(StorageError):
        await load(store)
    begun = [operation for operation in store.operations[first:] if "read_into" in operation]
    assert len(begun) <= 2 * WORKERS


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


@pytest.mark.usefixtures("poisoned")
async def test_two_loads_share_a_budget(tmp_path: Path) -> None:
    """Loads of one catalog at the same time share its blocks without deadlock."""
    state = mixed()
    make_checkpoint(tmp_path, state, 1)
    async with Catalog(tmp_path, budget=SMALL) as catalog:
        loaded = await asyncio.gather(*(catalog.load() for _ in range(4)))
    assert all(alike(one, state) for one in loaded)


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
    for dims in ([0, 2**64], [0, 2**63], [2**63, 0]):
        edit_page(made.part, "tensors", 0, dims=[*dims, 1])
        made.write()
        with pytest.raises(CorruptCheckpointError) as caught:
            await load(tmp_path)
        assert (caught.value.step, caught.value.path) == (1, "m/t")


async def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    """A small file cannot claim a thousand tensors of its whole length."""
    made = make_checkpoint(tmp_path, {"m": {f"t{i}": torch.ones(10) for i in range(3)}}, 1)
    edit_page(made.part, "tensors", 0, begin=[0, 0, 80])
    made.write()
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        await load(tmp_path)
