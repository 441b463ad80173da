"""One save of one rank, from the plan of all ranks to the commit; coroutines on the adapter's loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from aiockpt._capture import Captured
from aiockpt._listing import read_run
from aiockpt._log import log
from aiockpt._manifest import MANIFEST, MANIFEST_LIMIT, PartRecord
from aiockpt._memory import BlockPool
from aiockpt._names import StepNames, new_save_id
from aiockpt._pinned import pinned_if_any
from aiockpt._place import open_run
from aiockpt._records import UserFile
from aiockpt._runfiles import RunFiles
from aiockpt._threads import Lane, offload
from aiockpt.checkpoint import Checkpoint
from aiockpt.errors import CheckpointError, StepExistsError, StorageError, UsageError
from aiockpt.layouts import Layout
from aiockpt.reader import as_budget, block_bytes
from aiockpt.storage import Attempt, Store, open_store
from aiockpt.writer import CheckpointWriter

from ._machine import Lease
from ._rows import collect
from ._shares import Share, Ticket, share_out
from ._where import Where

__all__ = ["Options", "Save"]


@dataclass(frozen=True)
class Options:
    """How to save; plain and picklable."""

    overwrite: bool = False
    metrics: Mapping[str, float] | None = None
    meta: Any = None
    files: Mapping[str, UserFile] | None = None
    layout: Layout | None = None
    budget: int | None = None
    allow_pickle: bool = False


class _ShareWriter(CheckpointWriter):
    """The writer, for a state that is only collected once it is known who writes what."""

    _own: BlockPool | None = None

    def limit(self, budget: int | None) -> None:
        """Use no more than that many bytes for blocks."""
        if budget is not None:
            total = as_budget(budget)
            self._pool = self._own = BlockPool(total, block_bytes=block_bytes(total))

    def close_pool(self) -> None:
        """Free the blocks; no thread may be at work any more."""
        if self._own is not None:
            self._own.close()

    async def plan_share(self, collecting: Awaitable[Captured]) -> None:
        """Plan what comes of `collecting`; when that fails, the save is over."""
        await self.plan_captured(await self._guard(collecting, "cannot collect the state of"))


class Save:
    """One save, as one rank sees it.

    Args:
        options: how to save.
        place: where to.
        rank: this process's number.
        is_coordinator: whether it is the one that begins and commits.
    """

    def __init__(self, options: Options, place: Where, rank: int, *, is_coordinator: bool) -> None:
        self.options = options
        self.place = place
        self.rank = rank
        self.is_coordinator = is_coordinator
        self.pid = os.getpid()
        self._lease: Lease | None = None
        self._store: Store | None = None
        self._attempt: Attempt | None = None
        self._writer: _ShareWriter | None = None
        self._older: list[str] = []

    @property
    def lease(self) -> Lease:
        """The loop that it runs on, from its first use to `close`."""
        if self._lease is None:
            self._lease = Lease()
        return self._lease

    # The coordinator, when all plans are known

    async def begin(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """Decide what each rank writes, and begin the attempt they all write into.

        Raises:
            UsageError: the folder cannot be a step of the run, or the plans cannot be stored.
            StepExistsError: the step is committed already.
            StorageError: the store failed.
        """
        store = self._store = open_store(self.place.run)
        names = (await read_run(store)).names
        step, generation = self._numbers(names)
        # Refuse what must be refused before the run is touched.
        ticket = Ticket(self.place.name, "", step, 0, new_save_id(), "", len(plans))
        share_out(plans, ticket)
        try:
            await store.prepare()
            await store.sweep(unless=partial(_is_wanted, store))
            run_id = await open_run(store, names, None, RunFiles({}))
            name, generation = await self._free_name(store, names, step, generation)
            ticket = Ticket(self.place.name, name, step, generation, ticket.save_id, run_id, len(plans))
            self._attempt = await store.begin(name, ticket.save_id)
        except CheckpointError:
            raise
        except OSError as error:
            raise StorageError.wrap(error, "begin a save in", file=self.place.id, step=step) from error
        return await offload(share_out, plans, ticket, lane=Lane.CONTROL)

    def _numbers(self, names: StepNames) -> tuple[int, int]:
        found = names.parse(self.place.name)
        if found is None:
            raise UsageError(
                f"checkpoint_id ends in {self.place.name!r}, which names no step; this run calls its steps "
                f"like {names.folder(100)!r} ({names.step_format!r})",
                file=self.place.id,
            )
        return found

    async def _free_name(self, store: Store, names: StepNames, step: int, generation: int) -> tuple[str, int]:
        """The folder to write, and its generation."""
        found = {}
        for entry in await store.list():
            numbers = names.parse(entry.name)
            if numbers is not None and numbers[0] == step:
                found[numbers[1]] = entry.name
        committed = [name for name in found.values() if await _is_committed(store, name)]
        if committed and not self.options.overwrite:
            raise StepExistsError(
                f"step {step} is committed already; AioStorageWriter(overwrite=True) writes it anew",
                step=step,
                file=f"{self.place.run}/{committed[-1]}",
            )
        self._older = committed
        if generation in found:
            generation = max(found) + 1
        return names.folder(step, generation), generation

    # Every rank

    async def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's share, durably.

        Raises:
            CheckpointError: it failed; nothing is visible, and no other rank can commit.
        """
        share: Share = plan.storage_data
        self._check(share)
        store = self._store = self._store or open_store(self.place.run)
        attempt = self._attempt or await self._attach(store, share.ticket)
        collecting = offload(collect, share, plan.items, planner, self.options.allow_pickle, lane=Lane.STAGE)
        writer = self._writer = self._make_writer(store, attempt, share)
        try:
            await writer.plan_share(collecting)
            record = await writer.write()
        finally:
            writer.close_pool()
        results = [WriteResult(item.index, _nbytes(item), None) for item in plan.items]
        # One more than items: a rank may have none, and its part is needed all the same.
        return [*results, WriteResult(MetadataIndex(""), record.part.size, record)]

    def _check(self, share: Share) -> None:
        if not isinstance(share, Share):
            raise UsageError(
                "the plan does not come from AioStorageWriter.prepare_global_plan: plan caching "
                "(enable_plan_caching=True) and planners that drop storage_data are not supported"
            )
        if share.ticket.asked != self.place.name or share.rank != self.rank:
            raise UsageError(
                f"rank {self.rank} saves {self.place.name!r} and got the plan of rank {share.rank} for "
                f"{share.ticket.asked!r}: two saves overlap on one process group; give each its own, or wait"
            )

    async def _attach(self, store: Store, ticket: Ticket) -> Attempt:
        try:
            return await store.attach(ticket.name, ticket.save_id)
        except FileNotFoundError as error:
            raise StorageError(
                f"rank {self.rank} does not see in {self.place.run} the save that rank 0 began: it was "
                "aborted, or the ranks do not share this folder",
                errno=errno.ENOENT,
                step=ticket.step,
                file=self.place.id,
            ) from error

    def _make_writer(self, store: Store, attempt: Attempt, share: Share) -> _ShareWriter:
        options, ticket = self.options, share.ticket
        mine = self.is_coordinator  # its writer makes the manifest
        writer = _ShareWriter(
            store,
            step=ticket.step,
            save_id=ticket.save_id,
            run_id=ticket.run_id,
            name=ticket.name,
            generation=ticket.generation,
            metrics=options.metrics if mine else None,
            meta=options.meta if mine else None,
            files=options.files if mine else None,
            layout=options.layout,
            rank=share.rank,
            world=ticket.world,
            allow_pickle=options.allow_pickle,
            attempt=attempt,
        )
        writer.limit(options.budget)
        return writer

    # The coordinator, when all ranks have written

    async def finish(self, results: Iterable[Iterable[WriteResult]]) -> Checkpoint:
        """Commit.

        Raises:
            SaveError: a rank's part is missing, or they do not make every tensor whole.
            CheckpointError: the commit failed; nothing is visible.
        """
        data = [result.storage_data for rank in results for result in rank]
        parts = [record for record in data if isinstance(record, PartRecord)]
        if self._writer is None or self._store is None:
            raise UsageError("finish comes after write_data on the coordinator")
        checkpoint = await self._writer.finish(parts)
        for name in self._older:
            await _retire(self._store, name)
        return checkpoint

    def written(self, failed: bool) -> None:
        """The end of this rank's work, but for a coordinator that may still commit."""
        if failed or not self.is_coordinator:
            self.close()

    def close(self) -> None:
        """Let go; what was not committed is removed in the background. Any number of times."""
        if self._lease is not None:
            self._lease.close(self._end)

    async def _end(self) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            # Only by the coordinator: from another rank it would end what the others still write.
            if self.is_coordinator and self._writer is not None:
                await self._writer.abort()
            elif self.is_coordinator and self._attempt is not None:
                await self._attempt.abort()
            if self._store is not None:
                await self._store.aclose()


def _nbytes(item: Any) -> int:
    if item.tensor_data is None:
        return 0
    size = item.tensor_data.properties.dtype.itemsize
    for n in item.tensor_data.chunk.sizes:
        size *= n
    return int(size)


async def _is_wanted(store: Store, name: str) -> bool:
    """Whether somebody has leased or promoted a step."""
    return name in {folder for folder, _ in await pinned_if_any(store)}


async def _retire(store: Store, name: str) -> None:
    """Delete a step that was written anew, unless it is leased or promoted."""
    wanted = partial(_is_wanted, store, name)
    try:
        # Asked before as well: who is to stay must not be out of sight for a moment.
        if not await wanted():
            await store.retire(name, unless=wanted)
    except OSError as error:
        log.warning("%s: %s, which was written anew, could not be deleted: %s", store.url, name, error)


async def _is_committed(store: Store, name: str) -> bool:
    try:
        await store.get(f"{name}/{MANIFEST}", limit=MANIFEST_LIMIT)
    except FileNotFoundError:
        return False
    return True
