"""DCP's save and load as coroutines, over torch's own writers and readers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.checkpoint.storage import WriteResult

from aiockpt.errors import CheckpointError, RanksFailedError, UsageError
from aiockpt.integrations.dcp import PendingDcpSave, drain, load, save, stage
from aiockpt.pending import Phase

pytestmark = [
    # DCP says at each call without a process group that it works alone: that is what is wanted here.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]


class Refusing(FileSystemWriter):
    """A disk that says no as soon as data come."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        raise OSError(28, "No space left on device")


class Slow(FileSystemWriter):
    """Counts how many saves are inside it at once."""

    inside = 0
    most = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        type(self).inside += 1
        type(self).most = max(self.most, self.inside)
        time.sleep(0.05)
        try:
            return super().write_data(plan, planner)
        finally:
            type(self).inside -= 1


class Held(FileSystemWriter):
    """Waits for leave before it writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.leave = threading.Event()
        self.came = threading.Event()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self.came.set()
        assert self.leave.wait(30)
        return super().write_data(plan, planner)


def state(value: float = 1.0) -> dict[str, Any]:
    """Tensors of several kinds and a plain value."""
    return {"w": torch.full((64, 3), value), "deep": {"s": torch.tensor(value)}, "step": int(value)}


def stock(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What torch's own load finds there."""
    stock_load(like, checkpoint_id=path)
    return like


async def test_save_returns_when_stock_load_can_read_it(tmp_path: Path) -> None:
    """The oracle is torch's own reader."""
    metadata = await save(state(3.0), checkpoint_id=tmp_path / "c")
    assert set(metadata.state_dict_metadata) == {"w", "deep.s", "step"}
    got = stock(tmp_path / "c", state(0.0))
    assert torch.equal(got["w"], torch.full((64, 3), 3.0))
    assert got["deep"]["s"].item() == 3.0
    assert got["step"] == 3


async def test_load_fills_in_place(tmp_path: Path) -> None:
    """Stock save, our load, with a reader given by name."""
    stock_save(state(5.0), checkpoint_id=tmp_path / "c")
    into = state(0.0)
    w = into["w"]
    await load(into, storage_reader=FileSystemReader(tmp_path / "c"))
    assert into["w"] is w
    assert torch.equal(w, torch.full((64, 3), 5.0))
    assert into["step"] == 5


async def test_objects_are_asked_at_the_call(tmp_path: Path) -> None:
    """A later step of the optimizer's counter belongs to a later save."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    call = save({"optim": optimizer}, checkpoint_id=tmp_path / "c")
    optimizer.param_groups[0] = optimizer.param_groups[0] | {"lr": 0.25}
    await call
    got = stock(tmp_path / "c", {"optim": {"param_groups": [{"lr": 0.0}]}})
    assert got["optim"]["param_groups"][0]["lr"] == 0.5


async def test_huggingface_storage_both_ways(tmp_path: Path) -> None:
    """A writer that makes no `.metadata` at all."""
    tensors = {"a.weight": torch.randn(8, 4), "b": torch.arange(5)}
    await save(tensors, storage_writer=HuggingFaceStorageWriter(path=str(tmp_path)))
    into = {name: torch.zeros_like(t) for name, t in tensors.items()}
    await load(into, storage_reader=HuggingFaceStorageReader(path=str(tmp_path)))
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)


async def test_stage_copies_then_the_state_may_change(tmp_path: Path) -> None:
    """What is changed after `stage` returned is not in the checkpoint."""
    writer = Held(tmp_path / "c")
    live = state(1.0)
    pending = await stage(live, storage_writer=writer)
    live["w"].fill_(9.0)
    live["deep"]["s"].fill_(9.0)
    writer.leave.set()
    await pending
    got = stock(tmp_path / "c", state(0.0))
    assert torch.equal(got["w"], torch.ones(64, 3))
    assert got["deep"]["s"].item() == 1.0


async def test_phases_come_as_they_are_reached(tmp_path: Path) -> None:
    """Staged before planned, written not before the writer is done."""
    writer = Held(tmp_path / "c")
    pending = await stage(state(), storage_writer=writer)
    await pending.planned()
    reached: list[Phase] = [pending.phase]
    assert not pending.done()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pending.written()
    writer.leave.set()
    await pending.written()
    await pending.committed()
    reached.append(pending.phase)
    assert reached == [Phase.STAGED, Phase.COMMITTED]
    assert pending.done()
    assert pending.exception() is None


async def test_the_loop_turns_while_dcp_works(tmp_path: Path) -> None:
    """The writer sleeps; the loop does not."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    ticking = asyncio.create_task(turn())
    await save(state(), storage_writer=Slow(tmp_path / "c"))
    ticking.cancel()
    assert turns >= 3


@pytest.mark.parametrize("make", [save, stage])
async def test_a_failure_is_an_exception_of_ours(tmp_path: Path, make: Callable[..., Awaitable[Any]]) -> None:
    """DCP's own is a BaseException; the failures of the ranks are kept, and it goes through pickle."""
    with pytest.raises(RanksFailedError, match=r"rank 0: OSError.*No space left") as caught:
        await (await _twice(make(state(), storage_writer=Refusing(tmp_path / "c"))))
    assert isinstance(caught.value.failures[0], OSError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.failures[0].errno == 28
    await save(state(), checkpoint_id=tmp_path / "d")  # and the next one works
    await drain()  # what was awaited is not told again


async def _twice(made: Awaitable[Any]) -> Awaitable[Any]:
    """A staged save's handle, or an awaitable of what `save` gave."""
    result = await made
    assert isinstance(result, PendingDcpSave)
    return result


async def test_a_task_group_sees_an_ordinary_error(tmp_path: Path) -> None:
    """No BaseExceptionGroup, which would pass every `except*  Exception`."""
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(_save(Refusing(tmp_path / "c")))


async def _until(true: Callable[[], bool]) -> None:
    """Look again and again: what it waits for happens on another thread."""
    async with asyncio.timeout(30):
        for _ in itertools.count():
            if true():
                return
            await asyncio.sleep(0.005)


async def _save(writer: FileSystemWriter) -> None:
    await save(state(), storage_writer=writer)


async def test_missing_checkpoint(tmp_path: Path) -> None:
    """Whatever DCP makes of it, an error of ours names the place."""
    with pytest.raises(CheckpointError, match=r"loading .*nothing through DCP"):
        await load(state(), checkpoint_id=tmp_path / "nothing")


async def test_a_state_that_is_no_dict() -> None:
    """Refused at the call."""
    with pytest.raises(UsageError, match="a dict of names; this is a list"):
        save([torch.ones(1)], checkpoint_id="c")  # type: ignore[arg-type]


async def test_a_lost_failure_is_logged_and_raised_by_drain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and once."""
    with caplog.at_level(logging.ERROR, "aiockpt"):
        pending = await stage(state(), storage_writer=Refusing(tmp_path / "c"))
        await _until(pending.done)
    assert "nobody waits for it" in caplog.text
    with pytest.raises(RanksFailedError, match="No space"):
        await drain()
    await drain()


class Broken:
    """A stager whose future fails; what DCP says of it is not to be believed."""

    _synchronize_after_execute = True

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)

    @property
    def should_synchronize_after_execute(self) -> bool:
        return True

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        failed: Future[dict[str, Any]] = Future()
        failed.set_exception(MemoryError("no pinned memory"))
        return failed

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        self.executor.shutdown()


async def test_staging_that_failed_is_no_success(tmp_path: Path) -> None:
    """DCP's `staging_completion` says success for exactly this stager."""
    stager = Broken()
    lie = async_save(state(), checkpoint_id=tmp_path / "a", async_stager=stager)
    assert isinstance(lie, AsyncSaveResponse)
    assert lie.staging_completion.exception() is None  # the trap, if it is still there
    with pytest.raises(BaseException, match="no pinned memory"):
        lie.upload_completion.result()
    with pytest.raises(RanksFailedError, match="no pinned memory"):
        await stage(state(), checkpoint_id=tmp_path / "b", stager=stager)
    assert not (tmp_path / "b").exists()
    stager.close()


async def test_overlapping_saves_take_turns(tmp_path: Path) -> None:
    """One writer in two saves leaves no checkpoint at all with stock `async_save`."""
    Slow.most = 0
    writer = Slow(tmp_path / "unused")
    saves = [
        await stage(state(float(n)), checkpoint_id=tmp_path / str(n), storage_writer=writer)
        for n in (1, 2, 3)
    ]
    await drain()
    assert Slow.most == 1
    assert all(pending.phase is Phase.COMMITTED for pending in saves)
    for n in (1, 2, 3):
        assert torch.equal(stock(tmp_path / str(n), state(0.0))["w"], torch.full((64, 3), float(n)))


async def test_a_cancelled_save_ends_when_nothing_reads_the_state_any_more(tmp_path: Path) -> None:
    """A collective cannot be left half-way: the wait goes on, then the cancellation."""
    writer = Held(tmp_path / "c")
    task = asyncio.create_task(_save(writer))
    await _until(writer.came.is_set)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    writer.leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert torch.equal(stock(tmp_path / "c", state(0.0))["w"], torch.ones(64, 3))


async def test_a_wait_on_the_handle_owns_nothing(tmp_path: Path) -> None:
    """Cancelled by an anyio scope, the save goes on."""
    writer = Held(tmp_path / "c")
    pending = await stage(state(), storage_writer=writer)
    with anyio.move_on_after(0.05) as scope:
        await pending
    assert scope.cancelled_caught
    writer.leave.set()
    await pending


async def test_never_awaited_writes_nothing(tmp_path: Path) -> None:
    """There is no fire and forget."""
    call: Any = save(state(), checkpoint_id=tmp_path / "c")
    with pytest.warns(RuntimeWarning, match="never awaited"):
        del call
    await drain()
    assert not (tmp_path / "c").exists()


PROGRAM = """
import asyncio, sys, time, torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from aiockpt.integrations.dcp import stage

class Slow(FileSystemWriter):
    def write_data(self, plan, planner):
        time.sleep(1.5)
        return super().write_data(plan, planner)

async def main():
    await stage({"w": torch.ones(4)}, storage_writer=Slow(sys.argv[1]))

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_program_that_ends_keeps_its_staged_save(tmp_path: Path) -> None:
    """Nobody drained it; it is written all the same, and the log says why the end takes so long."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "c")],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert b"waiting for saves through DCP" in done.stderr
    assert torch.equal(stock(tmp_path / "c", {"w": torch.zeros(4)})["w"], torch.ones(4))


RANK = """
import asyncio, sys, torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from aiockpt.errors import RanksFailedError
from aiockpt.integrations.dcp import drain, load, save, stage

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = DeviceMesh("cpu", [0, 1])
own = dist.new_group()  # distribute_tensor communicates on the default group while saves run

def state(value):
    return {"w": distribute_tensor(torch.arange(7.0) + value, mesh, [Shard(0)])}

class Fails(FileSystemWriter):
    def write_data(self, plan, planner):
        if rank == 1:
            raise OSError(5, "the disk of rank 1")
        return super().write_data(plan, planner)

async def main():
    for n in (1, 2, 3):
        await stage(state(n), checkpoint_id=f"{folder}/{n}", process_group=own)
    try:
        await save(state(4), storage_writer=Fails(f"{folder}/4"), process_group=own)
    except RanksFailedError as error:
        assert list(error.failures) == [1] and "the disk of rank 1" in str(error), error
    else:
        raise AssertionError("no rank was told")
    await save(state(5), checkpoint_id=f"{folder}/5", process_group=own)
    await drain()
    for n in (1, 2, 3, 5):
        into = state(0)
        await load(into, checkpoint_id=f"{folder}/{n}", process_group=own)
        assert torch.equal(into["w"].full_tensor(), torch.arange(7.0) + n), n

asyncio.run(main())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_with_saves_in_the_background(tmp_path: Path) -> None:
    """Saves that overlap on one group take turns; one rank's failure is every rank's; the next one works."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(tmp_path)], stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    try:
        told = [rank.communicate(timeout=50)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
