"""What one save consists of: captured rows, planned files, the user's own files, records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._capture import Captured
from ._chunks import Share
from ._commit import build_manifest
from ._manifest import FileRecord, Manifest, PartRecord, ShardRecord, encode_part
from ._memory import BLOCK_BYTES, BlockPool
from ._names import part_name
from ._pages import build_part
from ._pipeline import Job, fill_all
from ._plan import ShardPlan, plan_blocks, plan_shards
from ._records import UserFile, check_files, content_of, count_items, encode_extra, put_file
from ._table import TensorTable
from ._threads import Lane, offload
from ._witness import Witness
from .errors import BusyError, UsageError
from .layouts import Layout
from .storage import Attempt

__all__ = ["Content", "SavePlan"]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a save will write; nothing has been written when it exists."""

    tensors: int
    nbytes: int
    """Bytes of tensor data; tied tensors count once."""
    files: tuple[tuple[str, int], ...]
    """(name, bytes) of the data files."""
    block_bytes: int
    """Bytes of host memory that would hold all of it at once, in whole blocks."""


class Content:
    """One rank's share of a save.

    Args:
        step: completed steps.
        save_id: of the save.
        rank: this process's number.
        world: how many ranks write a part.
        layout: which tensor goes into which file.
        metrics: numbers by name.
        meta: plain values.
        files: the user's own files.
        markers: empty files that may come into the folder after the commit.

    Raises:
        UsageError: a metric is no number, a file's name is not usable.
        UnsupportedStateError: meta cannot be stored.
    """

    def __init__(
        self,
        step: int,
        save_id: str,
        rank: int,
        world: int,
        layout: Layout,
        *,
        metrics: Mapping[str, float] | None,
        meta: Any,
        files: Mapping[str, UserFile] | None,
        markers: Sequence[str] = (),
    ) -> None:
        self.step = step
        self.save_id = save_id
        self.captured: Captured | None = None
        self.shards: list[ShardPlan] = []
        self.witness: Witness | None = None
        self.rank, self._world = rank, world
        self._layout = layout
        self._extra = {**encode_extra(metrics, meta, step), "markers": markers}
        self._files = check_files(files or {})

    def lay_out(self, captured: Captured) -> None:
        """Plan the data files; linear in the leaves, so rather in a thread.

        Raises:
            UsageError: the name of one of the user's files is needed for the checkpoint's own.
        """
        self.captured = captured
        shards = plan_shards(captured.table, self._layout, rank=self.rank)
        taken = {shard.name for shard in shards} | {part_name(rank) for rank in range(self._world)}
        taken.update(self._extra["markers"])
        clash = sorted(taken & self._files.keys())
        if clash:
            message = f"files= may not use the name {clash[0]!r}: the checkpoint needs it"
            raise UsageError(message, step=self.step)
        self.shards = shards

    def bear_witness(self) -> None:
        """Remember what the state was; reads all of it, so in a thread."""
        assert self.captured is not None
        self.witness = Witness(self.table, self.shards, self.captured.sources, self.step)

    def plan(self) -> SavePlan:
        """What will be written."""
        nbytes = sum(shard.nbytes for shard in self.shards)
        files = tuple((shard.name, shard.size) for shard in self.shards)
        # A block never holds parts of two files.
        blocks = sum(-(-shard.nbytes // BLOCK_BYTES) for shard in self.shards)
        return SavePlan(len(self.table), nbytes, files, blocks * BLOCK_BYTES)

    @property
    def table(self) -> TensorTable:
        """The planned rows."""
        assert self.captured is not None
        return self.captured.table

    def fill(self, pool_for: Callable[[SavePlan], BlockPool]) -> tuple[BlockPool, list[Job]]:
        """Copy everything on this thread, now; the state may change afterwards.

        Args:
            pool_for: gives the pool.

        Raises:
            BusyError: the pool has not enough free blocks; nothing was kept.
        """
        captured = self.captured
        assert captured is not None
        pool = pool_for(self.plan())
        plans = list(plan_blocks(captured.table, self.shards, pool.block_bytes))
        jobs = fill_all(plans, captured.table, captured.sources, pool)
        if jobs is None:
            message = f"step {self.step}: the budget has no room to copy the whole state at once"
            raise BusyError(message, step=self.step)
        captured.release()
        return pool, jobs

    async def put(self, attempt: Attempt, shards: Sequence[ShardRecord]) -> PartRecord:
        """Store what stands beside the data files, now that these are written."""
        part = await offload(self._encode_part, shards, lane=Lane.CONTROL)
        records = [FileRecord(s.name, "shard", s.size, s.digest()) for s in shards]
        for name, content in self._files.items():
            data = await offload(content_of, content, lane=Lane.BULK)
            records.append(await put_file(attempt, name, data, "user"))
        return PartRecord(
            rank=self.rank,
            world=self._world,
            save_id=self.save_id,
            part=await put_file(attempt, part_name(self.rank), part, "part"),
            files=records,
            items=count_items(self.table),
            shares=self._shares() if self._world > 1 or self.table.chunks else [],
        )

    def _shares(self) -> list[Share]:
        table = self.table
        return [
            (table.path[row], table.dtype[row], table.whole(row), table.offsets(row), table.shape[row])
            for row in range(len(table))
        ]

    def _encode_part(self, shards: Sequence[ShardRecord]) -> bytes:
        assert self.captured is not None
        flat, rank, world = self.captured.flat, self.rank, self._world
        return encode_part(build_part(self.table, flat, shards, rank=rank, world=world, save_id=self.save_id))

    def manifest(self, parts: Sequence[PartRecord], run_id: str) -> Manifest:
        """The root manifest over all parts.

        Raises:
            SaveError: a part is missing, double, or of another save.
        """
        return build_manifest(parts, step=self.step, save_id=self.save_id, run_id=run_id, **self._extra)
