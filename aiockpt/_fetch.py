"""Carry out planned reads: from the store, verified, to where they belong.

One task group a load, with a few workers that each have at most one read and one block
in hand. Bytes that go to living tensors pass through a block and are verified there, and
are copied on while they are in the processor's cache; bytes of new tensors are read to
where they stay and verified in place, before anybody sees them. When a load fails or is
cancelled at any point, no thread is left inside a block and no file stays open.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import anyio
import torch
import xxhash

from ._manifest import HEX, PIECE_BYTES, ShardRecord, digest
from ._memory import Block, BlockPool
from ._reads import Part, Run
from ._table import TensorTable
from ._threads import offload
from .errors import CorruptCheckpointError, StorageError
from .storage import Source, Store

__all__ = ["Fetch", "Filling", "LoadProgress", "Place", "in_parallel"]

WORKERS: Final = 4
"""Reads in flight."""
OPEN_FIRST: Final = 16
"""Files opened before the first is read: what is open, a deletion elsewhere cannot take away."""

Job = TypeVar("Job")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load has come; handed to `progress=` after each read."""

    step: int
    read: int
    """Bytes of data read, and verified unless that was declined."""
    total: int
    """Bytes there are to read; a load with `atomic=True` may read some twice."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's files are."""

    store: Store
    folder: str
    step: int

    def corrupt(self, reason: str, file: str, path: str | None = None) -> CorruptCheckpointError:
        """The error for damage in one of its files."""
        return CorruptCheckpointError(reason, step=self.step, file=file, path=path)

    async def open(self, file: str) -> Source:
        """Open one of its files.

        Raises:
            FileNotFoundError: it is gone, or the whole folder is.
            StorageError: the store failed.
        """
        try:
            return await self.store.open(f"{self.folder}/{file}")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError.wrap(error, "open", file=file, step=self.step) from error

    async def close(self, source: Source) -> None:
        """Close one of its files."""
        # What closing a file says after it was only read is no news about what was read.
        with contextlib.suppress(OSError):
            await source.aclose()

    def check_size(self, source: Source, file: str, nbytes: int) -> None:
        """Refuse a file of another length than the manifest says.

        Raises:
            CorruptCheckpointError: it is.
        """
        if source.size != nbytes:
            raise self.corrupt(f"the file has {source.size} bytes instead of {nbytes}", file)

    async def read(self, source: Source, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read from one of its files.

        Raises:
            CorruptCheckpointError: the file ends too early.
            StorageError: the store failed.
        """
        try:
            await source.read_into(offset, buffers)
        except EOFError as error:
            raise self.corrupt("the file ends too early", file) from error
        except OSError as error:
            raise StorageError.wrap(error, "read", file=file, step=self.step) from error


class Filling(Protocol):
    """Takes what is read; `Targets` is one."""

    def memory(self, row: int, first: int, nbytes: int) -> memoryview:
        """Where bytes of a row may be read to directly; only for runs that are `direct`."""

    def fill(self, parts: Iterable[Part], block: torch.Tensor, touched: dict[str, None]) -> None:
        """Copy verified bytes out of a block; in a thread, several at a time."""


@dataclass(slots=True)
class _Open:
    """A shard's file and how many reads it is still needed for."""

    reads: int
    source: Source | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)


@dataclass(slots=True)
class Fetch:
    """The reads of one load.

    Args:
        place: the checkpoint.
        table: its tensors.
        shards: records of its data files.
        pool: where blocks come from.
        verify: whether pieces and headers are checked.
        progress: told after each read.
    """

    place: Place
    table: TensorTable
    shards: Sequence[ShardRecord]
    pool: BlockPool
    verify: bool = True
    progress: Callable[[LoadProgress], object] | None = None
    touched: dict[str, None] = field(default_factory=dict)
    """Paths of living targets that hold bytes of the checkpoint by now."""
    total: int = 0
    _read: int = 0
    _order: int = 0

    def __post_init__(self) -> None:
        self._order = self.pool.budget.next_order()

    async def fill(self, runs: Sequence[Run], targets: Filling | None = None) -> None:
        """Read the runs into the targets; without targets, only verify.

        Args:
            runs: what to read.
            targets: where it goes.

        Raises:
            FileNotFoundError: a file is gone.
            CorruptCheckpointError: a piece or header does not match its checksum.
            StorageError: the store failed.
        """
        jobs: list[int | Run] = []
        seen: set[int] = set()
        # One file after the other, so that few are open: a header, then what is read of that file.
        for run in runs:
            if self.verify and run.shard not in seen:
                jobs.append(run.shard)
            seen.add(run.shard)
            jobs.append(run)
        async with self._opened(jobs) as files:

            async def work(job: int | Run) -> None:
                shard = job if isinstance(job, int) else job.shard
                source = await self._source(files, shard)
                if isinstance(job, int):
                    await self._check_header(source, self.shards[job])
                elif job.direct and targets is not None:
                    await self._read_direct(source, job, targets)
                else:
                    await self._read_staged(source, job, targets)
                await self._done_with(files[shard])
                self._report(0 if isinstance(job, int) else job.nbytes)

            await in_parallel(work, jobs)

    @asynccontextmanager
    async def _opened(self, jobs: Iterable[int | Run]) -> AsyncIterator[dict[int, _Open]]:
        files: dict[int, _Open] = {}
        for job in jobs:
            shard = job if isinstance(job, int) else job.shard
            files.setdefault(shard, _Open(0)).reads += 1
        try:
            for shard in list(files)[:OPEN_FIRST]:
                await self._source(files, shard)
            yield files
        finally:
            with anyio.CancelScope(shield=True):
                for file in files.values():
                    await self._close(file)

    async def _source(self, files: dict[int, _Open], shard: int) -> Source:
        file = files[shard]
        async with file.lock:
            if file.source is None:
                file.source = await self.place.open(self.shards[shard].name)
                self.place.check_size(file.source, self.shards[shard].name, self.shards[shard].size)
        return file.source

    async def _done_with(self, file: _Open) -> None:
        file.reads -= 1
        if file.reads == 0:
            await self._close(file)

    async def _close(self, file: _Open) -> None:
        if file.source is not None:
            source, file.source = file.source, None
            await self.place.close(source)

    @asynccontextmanager
    async def block(self) -> AsyncIterator[Block]:
        """A block of the pool, which has it back when the body is left."""
        block = await self.pool.acquire(self._order)
        try:
            yield block
        finally:
            self.pool.release(block)

    async def _check_header(self, source: Source, record: ShardRecord) -> None:
        found = await self.stream_digest(source, record.name, record.header)
        if found != record.header_digest:
            raise self.place.corrupt("the header does not match its checksum", record.name)

    async def stream_digest(self, source: Source, file: str, nbytes: int) -> str:
        """The digest of a file's first bytes, read block by block."""
        state = xxhash.xxh3_64()
        async with self.block() as block:
            for offset in range(0, nbytes, block.nbytes):
                view = block.view[: min(block.nbytes, nbytes - offset)]
                await self.place.read(source, file, offset, [view])
                await offload(state.update, view)
        return state.hexdigest()

    async def _read_staged(self, source: Source, run: Run, targets: Filling | None) -> None:
        record = self.shards[run.shard]
        async with self.block() as block:
            view = block.view[: run.nbytes]
            await self.place.read(source, record.name, record.header + run.offset, [view])
            await offload(self._take, run, [view], block.tensor, targets)

    async def _read_direct(self, source: Source, run: Run, targets: Filling) -> None:
        record = self.shards[run.shard]
        buffers = [targets.memory(row, first, nbytes) for row, first, nbytes, _ in run.parts]
        await self.place.read(source, record.name, record.header + run.offset, buffers)
        if self.verify:
            await offload(self._check, run, buffers)

    def _take(
        self, run: Run, buffers: Sequence[memoryview], block: torch.Tensor, targets: Filling | None
    ) -> None:
        """Verify a block and copy what it holds to the targets."""
        if self.verify:
            self._check(run, buffers)
        if targets is not None:
            targets.fill(run.parts, block, self.touched)

    def _check(self, run: Run, buffers: Sequence[memoryview]) -> None:
        record = self.shards[run.shard]
        for index, found in zip(run.pieces(), piece_digests(buffers), strict=True):
            if found != record.pieces[index * HEX : (index + 1) * HEX]:
                begin = index * PIECE_BYTES
                raise self.place.corrupt(
                    f"piece {index} of the data does not match its checksum",
                    record.name,
                    self._path_at(run.shard, begin, begin + PIECE_BYTES),
                )

    def _path_at(self, shard: int, begin: int, end: int) -> str | None:
        """The path of the first tensor with bytes in that part of a shard."""
        table = self.table
        for row in table.stored():
            at = table.begin[row]
            if table.shard[row] == shard and at < end and at + table.nbytes[row] > begin:
                return table.path[row]
        return None

    def _report(self, nbytes: int) -> None:
        self._read += nbytes
        if self.progress is not None and nbytes:
            self.progress(LoadProgress(self.place.step, self._read, self.total))


def piece_digests(buffers: Sequence[memoryview]) -> Iterator[str]:
    """The digest of every piece of the bytes that the buffers hold one after the other."""
    state, left = xxhash.xxh3_64(), PIECE_BYTES
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            take = min(left, len(buffer) - at)
            if take == PIECE_BYTES:
                yield digest(buffer[at : at + take])
            else:
                state.update(buffer[at : at + take])
                left -= take
            at += take
            if left == 0:
                yield state.hexdigest()
                state, left = xxhash.xxh3_64(), PIECE_BYTES
    if left < PIECE_BYTES:
        yield state.hexdigest()


async def in_parallel(work: Callable[[Job], Awaitable[None]], jobs: Sequence[Job]) -> None:
    """Do the jobs in their order, a few at a time.

    The first error cancels the others, is waited for and comes out bare, without a group.
    """
    failed: list[Exception] = []
    rest = iter(jobs)

    async def worker() -> None:
        for job in rest:
            try:
                await work(job)
            except Exception as error:
                failed.append(error)
                group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(min(WORKERS, len(jobs))):
            group.start_soon(worker)
    if failed:
        try:
            raise failed[0]
        finally:
            failed.clear()  # the error's traceback holds this frame: no cycle may keep the buffers alive
