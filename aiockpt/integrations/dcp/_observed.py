"""A storage writer as DCP sees it, with an eye on how far the save has come."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from aiockpt.pending import Phase

__all__ = ["ObservedWriter"]


class ObservedWriter(StorageWriter):
    """Hands every call on to `inner`, and tells `reach` which phases that proves."""

    def __init__(self, inner: StorageWriter, reach: Callable[[Phase], None]) -> None:
        self._inner = inner
        self._reach = reach
        # DCP looks for a parameter of this very name before it passes rank= and use_collectives=.
        self._takes_kwargs = "kwargs" in inspect.signature(inner.set_up_storage_writer).parameters

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The inner writer's; DCP's log asks for it."""
        return getattr(self._inner, "checkpoint_id", None)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._inner.set_up_storage_writer(is_coordinator, *args, **(kwargs if self._takes_kwargs else {}))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self._inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self._inner.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self._reach(Phase.PLANNED)  # all ranks have agreed, or DCP would not have come here
        written = self._inner.write_data(plan, planner)
        watched: Any = _Watched(written, lambda: self._reach(Phase.WRITTEN))
        return watched  # type: ignore[no-any-return]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._inner.finish(metadata, results)

    def storage_meta(self) -> StorageMeta | None:
        return self._inner.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never asked: DCP asks classes before it makes a writer, and this one has one."""
        return False


class _Watched:
    """A future that tells when its wait has succeeded; DCP asks it for no more than these two."""

    def __init__(self, inner: torch.futures.Future[list[WriteResult]], then: Callable[[], None]) -> None:
        self._inner = inner
        self._then = then

    def wait(self) -> list[WriteResult]:
        results = self._inner.wait()
        self._then()
        return results

    def value(self) -> list[WriteResult]:
        return self._inner.value()
