"""One save's data files: blocks are staged by one task, hashed and written by a few.

The stager takes blocks from the pool in save order, has them filled by the stage lane's
thread and queues them in file order. Each of the writers takes the next block, hashes
its pieces in a thread, waits for the turn of its block in its file, and writes it
through aiofiles; while one writes, another hashes. A file is cut, flushed and closed by
a task of its own, so that the next file need not wait for the disk.

A block belongs to exactly one of pool, stager, queue, writer. Every thread is waited
for, cancelled or not, before its block goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ._capture import Source
from ._manifest import ShardRecord, digest, piece_digests
from ._memory import Block, BlockPool
from ._plan import BlockPlan, ShardPlan, plan_blocks
from ._stage import fill_block
from ._table import TensorTable
from ._threads import Lane, offload, settle
from ._witness import Witness
from .errors import DrainTimeoutError
from .storage import Attempt, Sink

WRITERS: Final = 3
"""Tasks that hash and write: while as many write as files are open at once, one more hashes."""


@dataclass(slots=True)
class Progress:
    """Bytes of a save so far."""

    total: int = 0
    staged: int = 0
    written: int = 0
    notify: Callable[[], None] | None = None
    """Called on the loop when a number has changed."""

    def add(self, *, staged: int = 0, written: int = 0) -> None:
        """Count bytes and tell whoever listens."""
        self.staged += staged
        self.written += written
        if self.notify is not None:
            self.notify()


@dataclass(slots=True)
class _File:
    """A shard while it is written."""

    plan: ShardPlan
    sink: Sink | None = None
    turn: int = 0
    """Offset of the block whose turn it is."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    pieces: list[str] = field(default_factory=list)
    header_digest: str = ""
    done: bool = False


Job = tuple[BlockPlan, Block, int, str]
"""A filled block, how many bytes of it are to be written, and its digests ("": not known yet)."""


def fill_all(
    plans: Sequence[BlockPlan], table: TensorTable, sources: Sequence[Source | None], pool: BlockPool
) -> list[Job] | None:
    """Copy everything on this thread, now; None if the pool has not enough free blocks."""
    jobs: list[Job] = []
    order = pool.budget.next_order()
    try:
        for plan in plans:
            block = pool.acquire_nowait(order)
            if block is None:
                break
            jobs.append((plan, block, 0, ""))
            jobs[-1] = (plan, block, fill_block(block.tensor, plan, table, sources), "")
        else:
            return jobs
    except BaseException:
        release_all(jobs, pool)
        raise
    release_all(jobs, pool)
    return None


def release_all(jobs: list[Job], pool: BlockPool) -> None:
    """Give back blocks that nobody will write."""
    while jobs:
        pool.release(jobs.pop()[1])


class Pipeline:
    """Carries out the plan of one save's data files.

    Args:
        attempt: where the files go.
        table: the rows, planned.
        shards: the files.
        sources: the rows' tensors.
        pool: host memory.
        order: blocks are granted to smaller numbers first.
        progress: counted up as bytes move.
        staged: called on the loop once the last byte of the state was copied.
        filled: all the blocks, if they have been filled already; they are ours now.
        witness: knows what the blocks have to contain.
    """

    def __init__(
        self,
        attempt: Attempt,
        table: TensorTable,
        shards: Sequence[ShardPlan],
        sources: Sequence[Source | None],
        pool: BlockPool,
        *,
        order: int,
        progress: Progress,
        staged: Callable[[], None],
        filled: Sequence[Job] | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._attempt = attempt
        self._table = table
        self._shards = shards
        self._sources = sources
        self._pool = pool
        self._order = order
        self._progress = progress
        self._staged = staged
        self._witness = witness
        self._files = [_File(shard) for shard in shards]
        self._queue: asyncio.Queue[Job | None] = asyncio.Queue()
        self._filled = filled is not None
        for job in filled or ():
            self._queue.put_nowait(job)
            progress.staged += job[0].nbytes

    async def run(self) -> list[ShardRecord]:
        """Write every file, durably.

        Returns:
            The files' records, in order.

        Raises:
            ExceptionGroup: of what failed first; all threads have ended, all blocks are
                back in the pool, every file is closed. The attempt's owner removes it.
        """
        try:
            async with anyio.create_task_group() as group:
                for _ in range(WRITERS):
                    group.start_soon(self._write_all, group)
                if not self._filled:
                    await self._stage_all()
                self._staged()
                for _ in range(WRITERS):
                    self._queue.put_nowait(None)
        finally:
            await self._clean_up()
        return [self._record(file) for file in self._files]

    def open_files(self) -> list[str]:
        """Names of the files that are being written."""
        return [file.plan.name for file in self._files if file.sink is not None]

    def _record(self, file: _File) -> ShardRecord:
        plan = file.plan
        name = self._attempt.prefix + plan.name
        return ShardRecord(name, len(plan.header), plan.nbytes, file.header_digest, "".join(file.pieces))

    async def _stage_all(self) -> None:
        plans = plan_blocks(self._table, self._shards, self._pool.block_bytes)
        # Planned in the thread too, one block ahead: thousands of small leaves lie in one.
        plan = await offload(next, plans, None, lane=Lane.STAGE)
        while plan is not None:
            block = await self._pool.acquire(self._order)
            try:
                padded, pieces, following = await offload(self._fill, block, plan, plans, lane=Lane.STAGE)
            except BaseException:
                self._pool.release(block)
                raise
            self._progress.add(staged=plan.nbytes)
            self._queue.put_nowait((plan, block, padded, pieces))
            plan = following

    def _fill(
        self, block: Block, plan: BlockPlan, plans: Iterator[BlockPlan]
    ) -> tuple[int, str, BlockPlan | None]:
        # `block.tensor` maps the memory on first use, which belongs into the thread.
        padded = fill_block(block.tensor, plan, self._table, self._sources)
        pieces = ""
        if self._witness is not None:
            pieces = piece_digests(block.view[: plan.nbytes])
            self._witness.check(plan, pieces)
        return padded, pieces, next(plans, None)

    async def _write_all(self, group: TaskGroup) -> None:
        for file in self._files:
            if not file.plan.nbytes and not file.done:
                file.done = True
                await self._finish(file)
        while (job := await self._queue.get()) is not None:
            plan, block, padded, pieces = job
            file = self._files[plan.shard]
            try:
                await self._write(file, plan, block, padded, pieces)
            finally:
                self._pool.release(block)
            if file.turn >= file.plan.nbytes:
                group.start_soon(self._finish, file)

    async def _write(self, file: _File, plan: BlockPlan, block: Block, padded: int, pieces: str) -> None:
        pieces = pieces or await offload(piece_digests, block.view[: plan.nbytes], lane=Lane.BULK)
        while file.turn != plan.offset:
            moved = file.moved
            await moved.wait()
        sink = await self._open(file)
        await sink.write(len(file.plan.header) + plan.offset, block.view[:padded])
        file.pieces.append(pieces)
        self._progress.add(written=plan.nbytes)
        file.turn += plan.nbytes
        file.moved.set()
        file.moved = asyncio.Event()

    async def _open(self, file: _File) -> Sink:
        if file.sink is None:
            file.sink = await self._attempt.create(file.plan.name, file.plan.size)
            aligned, file.header_digest = await offload(_aligned, file.plan.header, lane=Lane.BULK)
            with aligned, memoryview(aligned) as view:
                await file.sink.write(0, view)
        return file.sink

    async def _finish(self, file: _File) -> None:
        sink = await self._open(file)
        await sink.finish(file.plan.size)
        file.sink = None
        file.done = True

    async def _clean_up(self) -> None:
        """Give back what a failure left: queued blocks, open files."""
        self.drop_queue()
        await settle(self._discard_all())

    def drop_queue(self) -> None:
        """Give back the blocks that nobody will write."""
        while not self._queue.empty():
            job = self._queue.get_nowait()
            if job is not None:
                self._pool.release(job[1])

    async def _discard_all(self) -> None:
        for file in self._files:
            sink, file.sink = file.sink, None
            if sink is not None:
                # A file whose thread is stuck must not keep the others open.
                with contextlib.suppress(DrainTimeoutError):
                    await sink.discard()


def _aligned(header: bytes) -> tuple[mmap.mmap, str]:
    """The header in memory that direct I/O takes, which a bytes object is not; its digest."""
    memory = mmap.mmap(-1, len(header))
    memory[:] = header
    return memory, digest(header)
