"""`AioStorageWriter` in one process: what DCP's storage interface promises."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    WriteItem,
    WriteItemType,
)

import aiockpt
from aiockpt import SaveError, StepExistsError, UsageError
from aiockpt.integrations import dcp
from aiockpt.integrations.dcp import AioStorageReader, AioStorageWriter
from tests.dcp_one import litter, load, planned, save, settled, step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


async def test_a_run_with_names_of_its_own(tmp_path: Path) -> None:
    """`run.json` says what steps are called; the checkpoint belongs to that run."""
    async with aiockpt.Saver(tmp_path, step_format="ckpt_{:d}") as saver:
        await saver.save({"a": 1}, step=3)
    with pytest.raises(UsageError, match="like 'ckpt_100'"):
        await asyncio.to_thread(save, {"a": 1}, step_of(tmp_path))
    writer = AioStorageWriter(tmp_path / "ckpt_4", meta={"by": "dcp"}, files={"config.json": "{}"})
    await asyncio.to_thread(save, {"a": 2}, tmp_path / "ckpt_4", writer)
    newest = await aiockpt.latest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.meta, newest.files) == (4, {"by": "dcp"}, ("config.json",))
    assert newest.run_id == saver.run_id
    assert writer.checkpoint == newest
    assert await aiockpt.load(tmp_path) == {"a": 2}


def test_a_step_is_written_once_unless_overwritten(tmp_path: Path) -> None:
    """`overwrite=True` makes a new generation, which the same id then reads."""
    save({"a": 1}, step_of(tmp_path))
    with pytest.raises(StepExistsError, match="overwrite=True"):
        save({"a": 2}, step_of(tmp_path))
    save({"a": 3}, step_of(tmp_path), AioStorageWriter(overwrite=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "step-00000001.1"]
    target = {"a": 0}
    load(target, step_of(tmp_path))
    assert target == {"a": 3}


async def test_a_leased_step_outlives_being_overwritten(tmp_path: Path) -> None:
    """Whoever reads the old generation keeps it; the next save of the step takes it away."""
    await asyncio.to_thread(save, {"a": 1}, step_of(tmp_path))
    async with aiockpt.Catalog(tmp_path) as catalog:
        old = await catalog.get(1)
        async with catalog.lease(old):
            await asyncio.to_thread(save, {"a": 2}, step_of(tmp_path), AioStorageWriter(overwrite=True))
            assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001", "step-00000001.1"]
            assert await catalog.load() == {"a": 2}
        await asyncio.to_thread(save, {"a": 3}, step_of(tmp_path), AioStorageWriter(overwrite=True))
        assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001.2"]


def test_write_data_returns_at_once_and_errors_come_from_wait(tmp_path: Path) -> None:
    """While the planner still works, the future is there already."""
    gate = threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            assert gate.wait(20)
            raise ValueError("on purpose")

    planner = Slow()
    planner.set_up_planner({"w": torch.ones(4)}, is_coordinator=True)
    writer = AioStorageWriter(step_of(tmp_path))
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    outcome = writer.write_data(planner.finish_plan(plan), planner)
    assert not outcome.done()
    gate.set()
    with pytest.raises(SaveError, match="on purpose"):
        outcome.wait()
    assert outcome.done()
    assert not [p for p in tmp_path.iterdir() if "step" in p.name]


def test_an_interrupt_ends_the_save(tmp_path: Path) -> None:
    """Ctrl-C in `wait`: raised once no thread is at work any more, and nothing is left."""
    inside, gate = threading.Event(), threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            inside.set()
            assert gate.wait(20)
            return super().resolve_data(write_item)

    def strike() -> None:
        assert inside.wait(20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        gate.set()

    planner, writer = Slow(), AioStorageWriter(step_of(tmp_path))
    (plan,) = planned(writer, planner)
    striker = threading.Thread(target=strike)
    outcome = writer.write_data(plan, planner)
    striker.start()
    with pytest.raises(KeyboardInterrupt):
        outcome.wait()
    striker.join()
    assert outcome.done()
    assert not [p for p in tmp_path.iterdir() if "step" in p.name]


def test_a_small_budget_is_enough(tmp_path: Path) -> None:
    """A state of many times the budget is written and read through a few blocks."""
    state = {"w": torch.arange(6 << 20, dtype=torch.float32), "v": torch.ones(3 << 18).reshape(3, -1).t()}
    save(state, step_of(tmp_path), AioStorageWriter(budget=4 << 20))
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(target, step_of(tmp_path), AioStorageReader(budget=2 << 20))
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor)
    for kind in (AioStorageWriter, AioStorageReader):
        with pytest.raises(UsageError, match="too small"):
            kind(budget=1000)


async def test_with_the_coroutines(tmp_path: Path) -> None:
    """The adapters serve `await dcp.save(...)` and `await dcp.load(...)` of this package."""
    state = {"w": torch.arange(9.0), "n": 3}
    await dcp.save(state, checkpoint_id=step_of(tmp_path), storage_writer=AioStorageWriter(), no_dist=True)
    target = {"w": torch.zeros(9), "n": 0}
    await dcp.load(target, checkpoint_id=step_of(tmp_path), storage_reader=AioStorageReader(), no_dist=True)
    assert torch.equal(target["w"], state["w"])  # type: ignore[arg-type]
    assert target["n"] == 3
    with pytest.raises(aiockpt.RanksFailedError) as error:
        await dcp.save(
            state, checkpoint_id=step_of(tmp_path), storage_writer=AioStorageWriter(), no_dist=True
        )
    assert isinstance(error.value.failures[0], StepExistsError)


def test_only_the_view_is_stored(tmp_path: Path) -> None:
    """A slice of a large tensor takes as many bytes as it has, and strides are resolved."""
    large = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    state = {
        "row": large[5],
        "column": large[:, 7],
        "t": large[:3, :5].t(),
        "conj": torch.ones(2).to(torch.complex64).conj(),
    }
    metadata = save(state, step_of(tmp_path))
    files = [p for p in step_of(tmp_path).iterdir() if p.suffix == ".safetensors"]
    assert sum(p.stat().st_size for p in files) < 20_000
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(target, step_of(tmp_path))
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name
    assert metadata.storage_meta.save_id


def test_a_planner_that_transforms_is_asked_for_its_archives(tmp_path: Path) -> None:
    """What it makes of an object is stored, read back without running code."""

    class Doubling(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            twice = object * 2 if write_item.type == WriteItemType.BYTE_IO else object
            return super().transform_object(write_item, twice)

    save({"n": 21, "text": "ab"}, step_of(tmp_path), planner=Doubling())
    target = {"n": 0, "text": ""}
    load(target, step_of(tmp_path))
    assert target == {"n": 42, "text": "abab"}


def test_two_saves_of_one_writer_at_once(tmp_path: Path) -> None:
    """Each thread has a save of its own: both checkpoints are right."""
    writer = AioStorageWriter()
    states = [{"w": torch.full((1000,), float(i)), "n": i} for i in range(4)]
    futures = [
        state_dict_saver.async_save(
            state, checkpoint_id=step_of(tmp_path, i), storage_writer=writer, no_dist=True
        )
        for i, state in enumerate(states)
    ]
    for future in futures:
        future.result()  # type: ignore[union-attr]
    for i, state in enumerate(states):
        target = {"w": torch.zeros(1000), "n": -1}
        load(target, step_of(tmp_path, i))
        assert torch.equal(target["w"], state["w"])  # type: ignore[arg-type]
        assert target["n"] == i


def test_the_adapters_are_configuration(tmp_path: Path) -> None:
    """They pickle, in the middle of a save too, and the copy saves by itself."""
    writer = AioStorageWriter(step_of(tmp_path), metrics={"loss": 1.0})
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    copy = pickle.loads(pickle.dumps(writer))
    state_dict_saver.save({"a": 1}, storage_writer=copy, no_dist=True)
    reader = pickle.loads(pickle.dumps(AioStorageReader(step_of(tmp_path))))
    target = {"a": 0}
    state_dict_loader.load(target, storage_reader=reader, no_dist=True)
    assert target == {"a": 1}
    assert (copy.checkpoint_id, reader.checkpoint_id) == (step_of(tmp_path), step_of(tmp_path))
    assert copy.storage_meta().checkpoint_id == str(step_of(tmp_path))


def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """The next reset, or the end of the writer, removes what it began."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(4)}, is_coordinator=True)
    writer = AioStorageWriter(step_of(tmp_path))
    for end in ("reset", "gone"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        plans, _ = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = writer.prepare_global_plan(plans)
        writer.write_data(plan, planner).wait()
        assert litter(tmp_path)
        if end == "reset":
            writer.reset(step_of(tmp_path))
        else:
            del writer
        assert settled(tmp_path)


def test_a_forked_child_saves_by_itself(tmp_path: Path) -> None:
    """Though its parent was in the middle of a save on the same thread."""
    writer = AioStorageWriter(step_of(tmp_path))
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            save({"a": 5}, step_of(tmp_path), writer)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(aiockpt.load(tmp_path)) == {"a": 5}


def test_a_run_in_memory(tmp_path: Path) -> None:
    """Any store of aiockpt will do."""
    writer, reader = AioStorageWriter("memory://dcp-adapters/step-00000001"), AioStorageReader()
    state_dict_saver.save({"w": torch.arange(5), "n": 1}, storage_writer=writer, no_dist=True)
    target = {"w": torch.zeros(5, dtype=torch.int64), "n": 0}
    state_dict_loader.load(
        target, checkpoint_id="memory://dcp-adapters/step-00000001", storage_reader=reader, no_dist=True
    )
    assert torch.equal(target["w"], torch.arange(5))  # type: ignore[arg-type]
    assert target["n"] == 1
