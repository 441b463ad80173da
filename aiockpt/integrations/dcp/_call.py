"""One blocking save through DCP: what it was given, and its run on the thread."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter

from aiockpt.errors import UsageError
from aiockpt.pending import Phase

from ._handle import PendingDcpSave
from ._observed import ObservedWriter

__all__ = ["CheckpointId", "SaveCall", "asked", "text"]

CheckpointId = str | os.PathLike[str]


def asked(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with its top-level objects asked for theirs, as DCP does it.

    Raises:
        UsageError: it is not a dict.
    """
    if not isinstance(state_dict, dict):
        raise UsageError(f"DCP saves a dict of names; this is a {type(state_dict).__name__}")
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()
    }


def text(checkpoint_id: CheckpointId | None) -> str | None:
    """The id for messages."""
    return None if checkpoint_id is None else os.fspath(checkpoint_id)


@dataclass
class SaveCall:
    """The arguments of a save, captured."""

    state: dict[str, Any]
    checkpoint_id: CheckpointId | None
    storage_writer: StorageWriter | None
    planner: SavePlanner | None
    process_group: ProcessGroup | None
    no_dist: bool
    copies: bool = False
    stager: AsyncStager | None = None

    def run(self, pending: PendingDcpSave) -> Metadata:
        """Copy if that is wanted, then save; returns when it is finished on all ranks."""
        pending.reach(Phase.CALLED)
        if self.copies:
            with self._stager() as stager:
                # The stager owns the copy until it is closed: its buffers are used again after that.
                self.state = _copied(stager, self.state)
                pending.reach(Phase.STAGED)
                return self._save(pending)
        return self._save(pending)

    def _save(self, pending: PendingDcpSave) -> Metadata:
        inner = _storage_setup(self.storage_writer, self.checkpoint_id, reader=False)
        assert isinstance(inner, StorageWriter)
        metadata: Metadata = save(
            self.state,
            checkpoint_id=self.checkpoint_id,
            storage_writer=ObservedWriter(inner, pending.reach),
            planner=self.planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
        )
        return metadata

    @contextlib.contextmanager
    def _stager(self) -> Iterator[AsyncStager]:
        """The caller's stager, or one for this save alone, whose buffers no other save will overwrite."""
        if self.stager is not None:
            yield self.stager
            return
        own = DefaultStager(StagingOptions(False, False, False, False))
        try:
            yield own
        finally:
            own.close()


def _copied(stager: AsyncStager, state: dict[str, Any]) -> dict[str, Any]:
    """The stager's copy, once it is whole."""
    copy = stager.stage(state)
    if isinstance(copy, concurrent.futures.Future):
        return copy.result()
    if stager.should_synchronize_after_execute:
        stager.synchronize_staging()
    return copy
