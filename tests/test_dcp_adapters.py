"""The adapters in one process: what each method of DCP's storage interface promises."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import aiockpt
from aiockpt import PickleRefusedError, SaveError, StepExistsError, UnsupportedStateError, UsageError
from aiockpt._files import RangeFile
from aiockpt._manifest import PIECE_BYTES
from aiockpt.integrations import dcp
from aiockpt.integrations.dcp import AioStorageReader, AioStorageWriter
from aiockpt.integrations.dcp._machine import Lease

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Odd:
    """What has no codec."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.n == self.n

    def __hash__(self) -> int:
        return self.n


def save(state: dict[str, Any], where: Path, writer: AioStorageWriter | None = None, **kwargs: Any) -> Any:
    """By DCP, in one process; a failure of this rank comes out as it was raised."""
    writer = writer or AioStorageWriter()
    try:
        return state_dict_saver.save(
            state, checkpoint_id=where, storage_writer=writer, no_dist=True, **kwargs
        )
    except CheckpointException as error:
        cause = error.failures[0][0]
    raise cause


def load(state: dict[str, Any], where: Path, reader: AioStorageReader | None = None, **kwargs: Any) -> None:
    """The other way."""
    reader = reader or AioStorageReader()
    try:
        state_dict_loader.load(state, checkpoint_id=where, storage_reader=reader, no_dist=True, **kwargs)
    except CheckpointException as error:
        cause = error.failures[0][0]
    else:
        return
    raise cause


def step_of(run: Path, step: int = 1) -> Path:
    """The folder of a step."""
    return run / f"step-{step:08d}"


def litter(run: Path) -> list[str]:
    """What a failed save may leave."""
    return [p.name for p in run.iterdir() if p.name.startswith(".")] if run.exists() else []


def settled(run: Path) -> bool:
    """Whether the clean-up in the background comes to its end."""
    deadline = time.monotonic() + 10
    while litter(run) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return not litter(run)


# ---------------------------------------------------------------- writer


def test_ids_are_checked_without_touching_the_disk(tmp_path: Path) -> None:
    """A path or URL with a run and a name; nothing need exist, nothing is made."""
    for kind in (AioStorageWriter, AioStorageReader):
        for good in (
            tmp_path / "new" / "step-00000001",
            "run/x",
            "memory://run/step-1",
            "file:///a/b/",
            "/a/b",
        ):
            assert kind.validate_checkpoint_id(good), good
        for bad in (
            "",
            "/",
            "step-00000001/..",
            "memory://x",
            "nowhere://run/step-1",
            "run/.hidden",
            7,
            None,
        ):
            assert not kind.validate_checkpoint_id(bad), bad  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="checkpoint_id"):
            kind("/")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["digits", "step-1", "step-00000001x"])
def test_a_name_that_is_no_step_is_refused(name: str, tmp_path: Path) -> None:
    """Else no catalog would ever find it; nothing is made."""
    with pytest.raises(UsageError, match="names no step"):
        save({"a": 1}, tmp_path / "run" / name)
    assert not (tmp_path / "run").exists()


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


def test_use_collectives_false_is_refused(tmp_path: Path) -> None:
    """By its name, before anything else happens."""
    with pytest.raises(UsageError, match="use_collectives=False"):
        AioStorageWriter(step_of(tmp_path)).set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(UsageError, match="checkpoint_id"):
        AioStorageWriter().set_up_storage_writer(True, rank=0, use_collectives=True)


def test_plan_caching_is_refused(tmp_path: Path) -> None:
    """A cached plan carries the identity of another save."""
    with pytest.raises(UsageError, match="enable_plan_caching"):
        save({"a": torch.ones(2)}, step_of(tmp_path), planner=DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(UsageError, match="enable_plan_caching"):
        AioStorageWriter(step_of(tmp_path)).prepare_local_plan(SavePlan([], usable=False))
    assert settled(tmp_path)


def test_what_cannot_be_stored_is_named_before_the_save(tmp_path: Path) -> None:
    """Every leaf at once, and nothing is made."""
    state = {"q": torch.eye(2).to_sparse(), "b": torch.empty(2, dtype=torch.bits8)}
    with pytest.raises(UnsupportedStateError, match=r"(?s)sparse_coo.*bits8"):
        save(state, tmp_path / "run" / "step-00000001")
    assert not (tmp_path / "run").exists()


def test_out_of_turn_is_refused(tmp_path: Path) -> None:
    """The methods come in DCP's order, on one thread."""
    writer = AioStorageWriter(step_of(tmp_path))
    with pytest.raises(UsageError, match="set_up_storage_writer first"):
        writer.prepare_global_plan([])
    with pytest.raises(UsageError, match="set_up_storage_writer first"):
        writer.write_data(SavePlan([]), DefaultSavePlanner())
    reader = AioStorageReader(step_of(tmp_path))
    with pytest.raises(UsageError, match="read_metadata first"):
        reader.read_data(None, DefaultLoadPlanner())  # type: ignore[arg-type]


def chunk_plan(*boxes: tuple[int, int]) -> SavePlan:
    """A plan of chunks of one tensor of 4 elements."""
    size = torch.Size([4])
    items = []
    for offset, n in boxes:
        chunk = ChunkStorageMetadata(torch.Size([offset]), torch.Size([n]))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), size)
        items.append(WriteItem(MetadataIndex("w", [offset]), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


@pytest.mark.parametrize(("boxes", "why"), [([(0, 2)], "hole"), ([(0, 3), (1, 3)], "overlap")])
def test_a_plan_with_a_hole_or_an_overlap_is_refused(
    boxes: list[tuple[int, int]], why: str, tmp_path: Path
) -> None:
    """In a single process too, where DCP does not look; nothing is made."""
    writer = AioStorageWriter(tmp_path / "run" / "step-00000001")
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    with pytest.raises(UsageError, match=why) as error:
        writer.prepare_global_plan([chunk_plan(*boxes)])
    assert error.value.path == "w"
    assert not (tmp_path / "run").exists()


def objects(paths: dict[str, tuple[str | int, ...]], *written: str) -> SavePlan:
    """A plan that knows these names and writes some of them, as objects."""
    return SavePlan([WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in written], None, paths)


@pytest.mark.parametrize(
    ("plans", "why"),
    [
        ([objects({"a.b": ("a", "b")}, "a.b"), objects({"a.b": ("a.b",)})], "both called"),
        (
            [objects({"a.b": ("a", "b")}, "a.b"), objects({"a": ("a",)}, "a")],
            "a leaf on one rank and a container",
        ),
        (
            [objects({"a.b": ("a", "b")}, "a.b"), objects({"a.0": ("a", 0)}, "a.0")],
            "a list on one rank and a dict",
        ),
        ([objects({"a": ("a",), "b": ("a",)}, "a", "b")], "have one place"),
        ([objects({"a": ("a",)}, "a"), objects({"a": ("a",)}, "a")], "one object twice"),
    ],
)
def test_ranks_that_mean_different_things_are_refused(
    plans: list[SavePlan], why: str, tmp_path: Path
) -> None:
    """Two leaves with one flat name, or with one place in the state; nothing is made."""
    writer = AioStorageWriter(step_of(tmp_path / "run"))
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    with pytest.raises(UsageError, match=why):
        writer.prepare_global_plan(plans)
    assert not (tmp_path / "run").exists()


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


def planned(writer: AioStorageWriter, planner: DefaultSavePlanner, world: int = 1) -> list[SavePlan]:
    """The plans of that many ranks, all but the first of them empty."""
    planner.set_up_planner({"w": torch.ones(4)}, is_coordinator=True)
    plans, _ = planner.create_global_plan(
        [planner.create_local_plan(), *[SavePlan([], None, {})] * (world - 1)]
    )
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    return writer.prepare_global_plan(plans)


def test_the_plan_of_another_save_is_refused(tmp_path: Path) -> None:
    """Two saves that overlap on one process group get each other's plans: nothing is mixed."""
    planner, writer = DefaultSavePlanner(), AioStorageWriter(step_of(tmp_path, 1))
    (plan,) = planned(writer, planner)
    other = AioStorageWriter(step_of(tmp_path, 2))
    other.set_up_storage_writer(False, rank=0, use_collectives=True)
    with pytest.raises(UsageError, match="two saves overlap"):
        other.write_data(plan, planner).wait()
    with pytest.raises(UsageError, match="does not come from"):
        writer.write_data(SavePlan(plan.items), planner).wait()


def test_ranks_must_share_the_folder(tmp_path: Path) -> None:
    """A rank that sees another disk says so; the error names the folder."""
    planner, writer = DefaultSavePlanner(), AioStorageWriter(step_of(tmp_path / "here"))
    plans = planned(writer, planner, 2)
    elsewhere = AioStorageWriter(step_of(tmp_path / "there"))
    elsewhere.set_up_storage_writer(False, rank=1, use_collectives=True)
    with pytest.raises(aiockpt.StorageError, match="do not share this folder"):
        elsewhere.write_data(plans[1], planner).wait()
    results = [writer.write_data(plans[0], planner).value()]
    with pytest.raises(SaveError, match=r"ranks \[0\] do not make a checkpoint of 2"):
        writer.finish(Metadata({}), results)
    assert settled(tmp_path / "here")


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


class Lying(DefaultSavePlanner):
    """Gives something else than it planned."""

    def __init__(self, lie: torch.Tensor) -> None:
        super().__init__()
        self._lie = lie

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._lie


@pytest.mark.parametrize(
    "lie", [torch.ones(3), torch.ones(2, 2), torch.ones(4, dtype=torch.int32), torch.ones(4, device="meta")]
)
def test_a_tensor_that_was_not_planned_is_refused(lie: torch.Tensor, tmp_path: Path) -> None:
    """Another shape, or another dtype of the same size, would be read back as something else."""
    with pytest.raises(SaveError, match="planned were"):
        save({"w": torch.ones(4)}, step_of(tmp_path), planner=Lying(lie))
    assert settled(tmp_path)


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


@pytest.mark.parametrize("archive", [True, False])
def test_pickle_is_said_twice(archive: bool, tmp_path: Path) -> None:
    """What has no codec is refused by the writer, then by the reader, unless both are told."""

    class Plain(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return super().resolve_data(write_item)

    planner = Plain() if archive else None
    state = {"odd": {"deep": Odd(3)}, "n": 1}
    with pytest.raises(UnsupportedStateError, match="odd/deep"):
        save(state, step_of(tmp_path), planner=planner)
    save(state, step_of(tmp_path), AioStorageWriter(allow_pickle=True), planner=planner)
    target: dict[str, Any] = {"n": 0}
    load(target, step_of(tmp_path))
    assert target == {"n": 1}
    with pytest.raises(PickleRefusedError, match="allow_pickle"):
        load({"odd": {"deep": None}}, step_of(tmp_path))
    target = {"odd": {"deep": None}}
    load(target, step_of(tmp_path), AioStorageReader(allow_pickle=True))
    assert target["odd"]["deep"] == Odd(3)


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


def test_called_on_its_own_loop_it_raises(tmp_path: Path) -> None:
    """Where waiting would never end."""
    lease = Lease()

    async def inside() -> None:
        save({"a": 1}, step_of(tmp_path))

    try:
        with pytest.raises(UsageError, match="wait for itself"):
            lease.run(inside)
    finally:
        lease.close()


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


# ---------------------------------------------------------------- reader


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes each read of a data file asks for."""
    seen: list[int] = []
    original = RangeFile.read_into

    async def read_into(self: RangeFile, offset: int, buffers: Any) -> None:
        seen.append(sum(len(buffer) for buffer in buffers))
        await original(self, offset, buffers)

    monkeypatch.setattr(RangeFile, "read_into", read_into)
    return iter([seen])


class Noting(DefaultLoadPlanner):
    """Counts what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.resolved: list[str] = []
        self.committed: list[str] = []

    def resolve_tensor(self, read_item: Any) -> Any:
        self.resolved.append(read_item.dest_index.fqn)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)
        super().commit_tensor(read_item, tensor)


def test_only_the_wanted_bytes_are_read(tmp_path: Path, read_bytes: Iterator[list[int]]) -> None:
    """A box of rows costs its own pieces, not the tensor; a tensor that is not asked for costs nothing."""
    (seen,) = read_bytes
    rows, columns = 64, PIECE_BYTES // 8  # two rows a piece
    state = {
        "w": torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns),
        "v": torch.ones(4 * columns),
    }
    save(state, step_of(tmp_path))
    seen.clear()
    target = {"w": torch.zeros(rows, columns)}
    boxed = BoxPlanner(offset=10, length=6)
    load(target, step_of(tmp_path), planner=boxed)
    assert torch.equal(target["w"][10:16], state["w"][10:16])
    assert not target["w"][:10].any()
    assert not target["w"][16:].any()
    assert sum(n for n in seen if n != 4096) == 3 * PIECE_BYTES  # beside the file's header
    assert boxed.committed == ["w"]
    nothing = BoxPlanner(offset=3, length=0)
    load(target, step_of(tmp_path), planner=nothing)
    assert nothing.committed == ["w"]


class BoxPlanner(Noting):
    """Asks for some rows of one tensor."""

    def __init__(self, *, offset: int, length: int) -> None:
        super().__init__()
        self._offset, self._length = offset, length

    def create_local_plan(self) -> Any:
        import dataclasses

        plan = super().create_local_plan()
        (item,) = plan.items
        lengths = torch.Size([self._length, *item.lengths[1:]])
        offsets = torch.Size([self._offset, 0])
        plan.items = [
            dataclasses.replace(item, dest_offsets=offsets, storage_offsets=offsets, lengths=lengths)
        ]
        return plan


def test_targets_of_any_form_are_filled_and_committed_once(tmp_path: Path) -> None:
    """Strided, wider, of another dtype, 0-d and empty; tensors that span blocks too."""
    big = torch.arange(5 * PIECE_BYTES, dtype=torch.float32).reshape(5, PIECE_BYTES)
    state = {
        "big": big,
        "m": torch.arange(12.0).reshape(3, 4),
        "i": torch.arange(5),
        "p": torch.tensor(2.5),
        "e": torch.empty(0, 3),
    }
    state["f8"] = torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu)
    save(state, step_of(tmp_path))
    target = {
        "big": torch.zeros(PIECE_BYTES, 5).t(),
        "m": torch.zeros(3, 8)[:, ::2],
        "i": torch.zeros(5, dtype=torch.float64),
        "p": torch.tensor(0.0, requires_grad=True),
        "e": torch.empty(0, 3),
        "f8": torch.tensor([4.0, 4.0]).to(torch.float8_e8m0fnu),
    }
    planner = Noting()
    load(target, step_of(tmp_path), planner=planner)
    for name, tensor in state.items():
        assert torch.equal(target[name].float(), tensor.float()), name
    filled = sorted(state.keys() - {"e"})  # for which DCP plans no read
    assert (sorted(planner.committed), sorted(planner.resolved)) == (filled, filled)


def test_no_unverified_byte_reaches_a_target(tmp_path: Path) -> None:
    """A flipped bit fails the load, and the tensor it is in stays as it was, uncommitted."""
    save({"w": torch.ones(1000)}, step_of(tmp_path))
    file = next(step_of(tmp_path).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    planner = Noting()
    target = {"w": torch.full((1000,), 5.0)}
    with pytest.raises(aiockpt.CorruptCheckpointError, match="checksum"):
        load(target, step_of(tmp_path), planner=planner)
    assert torch.equal(target["w"], torch.full((1000,), 5.0))
    assert planner.committed == []


async def test_what_a_saver_wrote_is_flattened_as_dcp_would(tmp_path: Path) -> None:
    """Every kind of value under the name that torch gives it; arrays and tuples of tensors as objects."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    state: dict[str, Any] = {
        "model": torch.nn.Linear(2, 3).state_dict(),
        "optim": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "list": [1, [torch.ones(2), {"x": 1}], []],
        "plain": [1, 2, (3, 4)],
        "pairs": [(torch.ones(1), 2)],
        "array": numpy.arange(6).reshape(2, 3),
        "nan": float("nan"),
        "deep": {"er": [{"a": {"b": [[{"c": 1}]]}}]},
        "empty": {},
    }
    async with aiockpt.Saver(tmp_path) as saver:
        await saver.save(state, step=1)
    flat, paths = flatten_state_dict(state)
    metadata = await asyncio.to_thread(AioStorageReader(step_of(tmp_path)).read_metadata)
    assert set(metadata.state_dict_metadata) == set(flat)
    assert metadata.planner_data == paths
    target: dict[str, Any] = {
        "array": None,
        "pairs": [()],
        "plain": [],
        "list": [0, [torch.zeros(2), {"x": 0}], [5]],
    }
    await asyncio.to_thread(load, target, step_of(tmp_path))
    assert numpy.array_equal(target["array"], state["array"])
    assert torch.equal(target["pairs"][0][0], torch.ones(1))
    assert target["plain"] == [1, 2, (3, 4)]
    assert torch.equal(target["list"][1][0], torch.ones(2))
    assert (target["list"][0], target["list"][1][1], target["list"][2]) == (1, {"x": 1}, [])


async def test_names_that_collide_once_flattened_are_refused(tmp_path: Path) -> None:
    """The error names both leaves; `aiockpt.load` still reads them."""
    async with aiockpt.Saver(tmp_path) as saver:
        await saver.save({"a": {"b": 1}, "a.b": 2}, step=1)
        await saver.save({"a": {1: 1, "1": 2}}, step=2)
        await saver.save([1, 2], step=3)
    for step, why in ((1, "both 'a/b' and 'a.b'"), (2, "both 'a/1'"), (3, "a dict at the top")):
        with pytest.raises(UsageError, match=why):
            await asyncio.to_thread(AioStorageReader(step_of(tmp_path, step)).read_metadata)


def test_no_checkpoint_says_so(tmp_path: Path) -> None:
    """DCP makes an AssertionError of it, which quotes us."""
    save({"a": 1}, step_of(tmp_path))
    with pytest.raises(AssertionError, match="has no step 2"):
        load({"a": 0}, step_of(tmp_path, 2))
    with pytest.raises(aiockpt.StepNotFoundError):
        AioStorageReader(step_of(tmp_path, 2)).read_metadata()
    with pytest.raises(UsageError, match="names no step"):
        AioStorageReader(tmp_path / "best").read_metadata()


def test_ranks_must_read_the_same_save(tmp_path: Path) -> None:
    """A step that is written anew between two ranks' looks is noticed."""
    save({"a": torch.ones(2)}, step_of(tmp_path))
    plans = []
    for _ in range(2):
        reader = AioStorageReader(step_of(tmp_path))
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True, rank=0, use_collectives=True)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({"a": torch.zeros(2)}, metadata, True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        save({"a": torch.ones(2)}, step_of(tmp_path), AioStorageWriter(overwrite=True))
    assert reader.prepare_global_plan(plans[:1]) == plans[:1]
    with pytest.raises(UsageError, match="different saves"):
        reader.prepare_global_plan(plans)
    with pytest.raises(UsageError, match="do not come from"):
        reader.set_up_storage_reader(Metadata({}), True)


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
