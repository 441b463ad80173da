"""What the DCP adapters refuse, by name, before anything is written or touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
from aiockpt import PickleRefusedError, SaveError, UnsupportedStateError, UsageError
from aiockpt.integrations.dcp import AioStorageReader, AioStorageWriter
from aiockpt.integrations.dcp._machine import Lease
from tests.dcp_one import Odd, load, planned, save, settled, step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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
