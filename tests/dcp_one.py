"""One process saves and loads through DCP, for the tests of the adapters."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    SavePlan,
)

from aiockpt.integrations.dcp import AioStorageReader, AioStorageWriter


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


def planned(writer: AioStorageWriter, planner: DefaultSavePlanner, world: int = 1) -> list[SavePlan]:
    """The plans of that many ranks, all but the first of them empty."""
    planner.set_up_planner({"w": torch.ones(4)}, is_coordinator=True)
    plans, _ = planner.create_global_plan(
        [planner.create_local_plan(), *[SavePlan([], None, {})] * (world - 1)]
    )
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    return writer.prepare_global_plan(plans)


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
