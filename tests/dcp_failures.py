"""Ranks that fail or die in the middle of a save, for the tests of the DCP adapters."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from aiockpt.integrations.dcp import AioStorageReader, AioStorageWriter
from tests.dcp_states import full_tensors, load_mixed, mixed_state

PHASES = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")


class UnpicklableError(ValueError):
    """DCP alone would make a hang of it."""

    def __init__(self) -> None:
        super().__init__("it cannot travel")
        self.lock = threading.Lock()


def fail() -> None:
    """In the words of a user's planner."""
    raise ValueError("on purpose")


def fail_oddly() -> None:
    """With an error that cannot be sent to other ranks."""
    raise UnpicklableError


def die() -> None:
    """As a machine does."""
    os._exit(9)


class FailingPlanner(DefaultSavePlanner):
    """A planner that does something bad in one phase."""

    def __init__(self, phase: str, act: Callable[[], None]) -> None:
        super().__init__()
        self._phase, self._act = phase, act

    def _at(self, phase: str) -> None:
        if phase == self._phase:
            self._act()

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._at("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    # DCP looks for the name of a parameter.
    set_up_planner.__signature__ = __import__("inspect").signature(  # type: ignore[attr-defined]
        DefaultSavePlanner.set_up_planner
    )

    def create_local_plan(self) -> Any:
        self._at("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._at("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self._at("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._at("resolve_data")
        return super().resolve_data(write_item)


def attempt(run: Path, step: int, writer: AioStorageWriter, planner: Any = None) -> dict[int, str] | None:
    """Save; None, or what each failed rank raised, by its name."""
    try:
        save(
            mixed_state(full_tensors()),
            checkpoint_id=run / f"step-{step:08d}",
            storage_writer=writer,
            planner=planner,
        )
    except CheckpointException as error:
        return {rank: type(cause).__name__ for rank, (cause, _) in error.failures.items()}
    return None


def fail_everywhere(run: Path) -> list[tuple[str, int, dict[int, str] | None, list[str]]]:
    """Each phase fails on each rank, with one writer: (phase, rank, failures, steps seen after it)."""
    writer = AioStorageWriter()
    assert attempt(run, 1, writer) is None
    story = []
    for phase in PHASES:
        for rank in range(dist.get_world_size()):
            if phase == "create_global_plan" and rank:
                continue
            mine = rank == dist.get_rank()
            failures = attempt(run, 2, writer, FailingPlanner(phase if mine else "", fail))
            dist.barrier()
            story.append((phase, rank, failures, sorted(p.name for p in run.glob("step-*"))))
            dist.barrier()
    mine = dist.get_rank() == 1
    story.append(
        ("odd", 1, attempt(run, 2, writer, FailingPlanner("resolve_data" if mine else "", fail_oddly)), [])
    )
    assert attempt(run, 2, writer) is None
    return story


def lose_the_name(run: Path) -> dict[int, str] | None:
    """While they write, somebody else takes the step's name."""

    def take() -> None:
        (run / "step-00000001").mkdir(parents=True, exist_ok=True)
        (run / "step-00000001" / "theirs").touch()

    return attempt(run, 1, AioStorageWriter(), FailingPlanner("resolve_data", take))


def die_at(run: Path, step: int, phase: str, who: int) -> str:
    """One rank dies in a phase; what the others are told."""
    writer = AioStorageWriter()
    mine = who == dist.get_rank()
    if phase == "written" and mine:
        _die_after_write(writer)
    elif phase == "finish" and mine:
        writer.finish = lambda *_, **__: die()  # type: ignore[method-assign]
    planner = FailingPlanner(phase if mine else "", die)
    try:
        save(
            mixed_state(full_tensors()),
            checkpoint_id=run / f"step-{step:08d}",
            storage_writer=writer,
            planner=planner,
        )
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def _die_after_write(writer: AioStorageWriter) -> None:
    write = writer.write_data

    def write_and_die(*args: Any) -> Any:
        write(*args).wait()
        die()

    writer.write_data = write_and_die  # type: ignore[method-assign,assignment]


class FailingLoadPlanner(DefaultLoadPlanner):
    """Fails when it is asked for a tensor."""

    def resolve_tensor(self, read_item: Any) -> Any:
        raise ValueError("on purpose")


def fail_to_load(run: Path, step: int) -> dict[int, str]:
    """Rank 1 cannot take what is read; then both load it without trouble."""
    planner = FailingLoadPlanner() if dist.get_rank() == 1 else None
    failures: dict[int, str] = {}
    try:
        load(
            mixed_state(full_tensors()),
            storage_reader=AioStorageReader(run / f"step-{step:08d}"),
            planner=planner,
        )
    except CheckpointException as error:
        failures = {rank: type(cause).__name__ for rank, (cause, _) in error.failures.items()}
    assert load_mixed(run, step) == []
    return failures


def save_in_background(run: Path, kind: str) -> list[str]:
    """`async_save` in a thread or process, twice with one writer; changes after it do not count."""
    writer = AioStorageWriter()
    for step in (1, 2):
        state = mixed_state(full_tensors())
        future = async_save(
            state,
            checkpoint_id=str(run / f"step-{step:08d}"),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
        for tensor in state["model"].values():
            tensor.to_local().fill_(77)
        assert isinstance(future, torch.futures.Future) is False
        future.result()  # type: ignore[union-attr]
    _async_process_executor._CHECKPOINT_PROCESS = None
    gc.collect()  # which ends the process
    return load_mixed(run, 2)
