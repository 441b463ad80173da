"""`AioStorageWriter`: DCP plans, gathers and tells the ranks apart; the writing and the commit are ours."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from aiockpt._records import UserFile
from aiockpt.checkpoint import Checkpoint
from aiockpt.errors import UsageError
from aiockpt.layouts import Layout
from aiockpt.reader import as_budget

from ._machine import Outcome
from ._save import Options, Save
from ._shares import check_items
from ._threadwise import Threadwise
from ._where import is_id, where

__all__ = ["AioStorageWriter"]

CheckpointId = str | os.PathLike[str]


class AioStorageWriter(StorageWriter):
    """Lets `torch.distributed.checkpoint` save into a run of aiockpt.

    For `dcp.save`, `dcp.async_save` (threads and processes) and the coroutines of this package.
    What it writes is an ordinary checkpoint: a `Catalog` lists it, `aiockpt.load` gives the nested
    state back, and `AioStorageReader` any rank's part of it. Until the commit on the coordinator
    nothing is visible; when any rank fails, nothing ever is.

    The object is configuration and pickles; each thread that saves with it has a save of its own,
    so that two saves with one writer do not disturb each other.

    Args:
        checkpoint_id: path or URL of the step's folder, such as `runs/a/step-00000100`: the folder
            above it is the run. The `checkpoint_id=` of a save goes first.
        overwrite: write a step that is committed already anew; the old one goes after the commit.
        metrics: numbers by name, kept in the manifest.
        meta: plain values, kept in the manifest.
        files: the user's own files to commit with the step, by name.
        layout: which tensor goes into which file.
        budget: bytes of host memory for blocks on each rank.
        allow_pickle: pickle what has no codec.

    Raises:
        UsageError: the id is none, or the budget too small.
    """

    def __init__(
        self,
        checkpoint_id: CheckpointId | None = None,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
        meta: Any = None,
        files: Mapping[str, UserFile] | None = None,
        layout: Layout | None = None,
        budget: int | None = None,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__()
        if checkpoint_id is not None:
            where(checkpoint_id)
        as_budget(budget)
        self.checkpoint: Checkpoint | None = None
        """What was committed last, on the coordinator."""
        self._options = Options(overwrite, metrics, meta, files, layout, budget, allow_pickle)
        self._id = checkpoint_id
        self._start()

    def _start(self) -> None:
        self._asked: dict[int, CheckpointId] = {}
        self._saves: Threadwise[Save] = Threadwise()
        weakref.finalize(self, self._saves.close_all).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_id": self._id, "checkpoint": self.checkpoint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def checkpoint_id(self) -> CheckpointId | None:
        """The id of the next save of this thread."""
        return self._asked.get(threading.get_ident(), self._id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new write: a save of this thread that was not finished is given up.

        Raises:
            UsageError: `checkpoint_id` is none.
        """
        self._saves.drop()
        if checkpoint_id is not None:
            where(checkpoint_id)
            self._id = self._asked[threading.get_ident()] = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take in who this rank is.

        Raises:
            UsageError: `use_collectives=False`, or no usable checkpoint id.
        """
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False is not supported: every rank would commit a checkpoint of its own; "
                "leave it out, or let each rank save into a run of its own with no_dist=True"
            )
        place = where(self._asked.pop(threading.get_ident(), self._id))
        rank = int(kwargs.get("rank", 0))
        self._saves.put(Save(self._options, place, rank, is_coordinator=is_coordinator))

    def storage_meta(self) -> StorageMeta | None:
        """What the planner may know of the storage."""
        checkpoint_id = self.checkpoint_id
        return None if checkpoint_id is None else StorageMeta(checkpoint_id=os.fspath(checkpoint_id))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what could not be stored, while every rank still listens.

        Raises:
            UnsupportedStateError: naming every leaf of the plan that cannot be stored.
            UsageError: the planner caches plans.
        """
        if not plan.usable:
            raise UsageError(
                "enable_plan_caching=True is not supported: a cached plan belongs to an earlier save"
            )
        check_items(plan.items)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save on the coordinator; the plans come back with what each rank needs to know.

        Raises:
            UsageError: the id names no step of the run, a tensor is not held exactly once, or two
                leaves have one name. Nothing was written.
            StepExistsError: the step is committed already.
            StorageError: the store failed.
        """
        save = self._save()
        try:
            return save.lease.run(lambda: save.begin(plans))
        except BaseException:
            self._saves.drop()
            raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Outcome[list[WriteResult]]:  # type: ignore[override]
        """Begin to write this rank's share.

        Returns:
            At once: a future, whose `wait` raises what went wrong.

        Raises:
            UsageError: called on the adapter's own loop, or the planner caches plans.
        """
        if getattr(planner, "_enable_plan_caching", False):
            raise UsageError(
                "enable_plan_caching=True is not supported: a cached plan belongs to an earlier save"
            )
        save = self._save()
        outcome = save.lease.start(lambda: save.write(plan, planner))
        outcome.then(save.written)
        return outcome

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator: from its return on a crash cannot lose the checkpoint.

        Raises:
            CheckpointError: the commit failed; nothing is visible.
        """
        save = self._save()
        try:
            self.checkpoint = save.lease.run(lambda: save.finish(results))
        finally:
            self._saves.drop()
        metadata.storage_meta = StorageMeta(checkpoint_id=save.place.id, save_id=self.checkpoint.save_id)

    def _save(self) -> Save:
        save = self._saves.get()
        if save is None:
            raise UsageError("call set_up_storage_writer first, on the same thread")
        return save

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it is the path or URL of a folder in a run, of a scheme we know; touches no file."""
        return is_id(checkpoint_id)
