"""`AioStorageReader` in one process: bytes, targets, names and objects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
)

import aiockpt
from aiockpt import UsageError
from aiockpt._files import RangeFile
from aiockpt._manifest import PIECE_BYTES
from aiockpt.integrations.dcp import AioStorageReader, AioStorageWriter
from tests.dcp_one import Noting, load, save, step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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
