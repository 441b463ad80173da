"""Host memory for saves: page-aligned blocks, reused, under one budget of bytes.

A block belongs to exactly one of pool, stager, writer. It returns to its pool only when
no thread can touch it any more. Fresh memory is many times slower to fill than reused
memory, so a pool keeps its blocks for life, but gives idle ones up when another pool of
the same budget waits: otherwise two savers could starve each other with memory that
neither uses.

Blocks are granted strictly in save order. Whoever holds a block must be able to give it
back without getting another one; then any budget of `MIN_BLOCKS` or more makes progress.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import os
import threading
import weakref

from aiockpt._block import BLOCK_BYTES, MIN_BLOCKS, PAGE, Block
from aiockpt._cgroup import budget_warning, default_budget
from aiockpt.errors import UsageError

__all__ = [
    "BLOCK_BYTES",
    "MIN_BLOCKS",
    "PAGE",
    "Block",
    "BlockPool",
    "ByteBudget",
    "budget_warning",
    "default_budget",
]


class _Waiter:
    """A request for a block; smaller keys are served first."""

    def __init__(self, pool: BlockPool, order: int, future: asyncio.Future[None] | None) -> None:
        self.pool = pool
        self.key = (order, next(pool.budget._arrivals))
        self.future = future
        self.thread = threading.get_ident()
        self.block: Block | None = None

    def wake(self, error: Exception | None = None) -> bool:
        """Tell the task; returns False if its loop is no more."""
        if self.future is None:
            return True
        try:
            if self.thread == threading.get_ident():
                self._settle(error)
            else:  # savers in several threads may share a budget
                self.future.get_loop().call_soon_threadsafe(self._settle, error)
        except RuntimeError:
            return False
        return True

    def _settle(self, error: Exception | None) -> None:
        assert self.future is not None
        if self.future.done():
            return  # cancelled: `acquire` gives the block back when it runs
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class ByteBudget:
    """So many bytes of host memory at most, for one saver or for several.

    Savers in several threads may share one.

    Args:
        total: the limit in bytes.
    """

    def __init__(self, total: int) -> None:
        if total <= 0:
            raise UsageError(f"a budget must be a positive number of bytes, not {total}")
        self.total = total
        self._lock = threading.RLock()  # a collection inside may end in a method of ours
        self._pools: weakref.WeakSet[BlockPool] = weakref.WeakSet()
        self._waiters: list[_Waiter] = []
        self._arrivals = itertools.count()
        self._orders = itertools.count()

    @property
    def used(self) -> int:
        """Bytes of all blocks that exist, idle ones included."""
        with self._lock:
            return sum(pool.held_bytes for pool in self._pools)

    @property
    def waiting(self) -> int:
        """How many requests for a block are waiting."""
        return len(self._waiters)

    def next_order(self) -> int:
        """A number for a new save, above those given before to any saver of this budget."""
        return next(self._orders)

    def __repr__(self) -> str:
        return f"ByteBudget({self.total})"

    def _ask(self, waiter: _Waiter) -> None:
        with self._lock:
            bisect.insort(self._waiters, waiter, key=lambda w: w.key)
            self._serve()

    def _withdraw(self, waiter: _Waiter) -> None:
        """Forget a request whose task will not take the block, granted or not."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if waiter.block is not None:
                waiter.pool._put(waiter.block)
                waiter.block = None
            self._serve()

    def _serve(self) -> None:
        """Grant blocks while the first in line can have one; the lock is held."""
        while self._waiters:
            first = self._waiters[0]
            if first.future is None or not first.future.done():  # or its task was cancelled
                first.block = first.pool._take()
                if first.block is None:
                    return  # nobody overtakes: what comes free next is for the first
            self._waiters.pop(0)
            if first.block is not None and not first.wake():
                first.pool._put(first.block)
                first.block = None

    def _make_room(self, nbytes: int) -> bool:
        """Drop idle blocks of any pool until `nbytes` fit; drops none if that cannot be."""
        missing = self.used + nbytes - self.total
        if missing > sum(pool.idle_bytes for pool in self._pools):
            return False
        for pool in list(self._pools):
            while missing > 0 and pool._idle:
                missing -= pool._idle.pop(0).nbytes
        return missing <= 0


class BlockPool:
    """The blocks of one saver; its methods are for the loop's thread.

    Args:
        budget: what it shares with others, or a number of bytes for itself.
        block_bytes: the size of each block, a multiple of `PAGE`.
        pinned: whether to pin the blocks; by default if the process uses an accelerator.
    """

    poison = False
    """Test mode: returned blocks are filled with a pattern and checked before the next grant."""

    def __init__(
        self,
        budget: ByteBudget | int,
        *,
        block_bytes: int = BLOCK_BYTES,
        pinned: bool | None = None,
        poison: bool | None = None,
    ) -> None:
        self.budget = budget if isinstance(budget, ByteBudget) else ByteBudget(budget)
        self.block_bytes = block_bytes
        if block_bytes <= 0 or block_bytes % PAGE:
            raise UsageError(f"block_bytes must be a multiple of {PAGE}, not {block_bytes}")
        if self.budget.total < MIN_BLOCKS * block_bytes:
            raise UsageError(
                f"a budget of {self.budget.total} bytes is too small: "
                f"{MIN_BLOCKS} blocks of {block_bytes} bytes are the least"
            )
        if poison is not None:
            self.poison = poison
        self._pinned = pinned
        self._pid = os.getpid()
        self._idle: list[Block] = []
        self._out: set[Block] = set()
        self._lost: set[Block] = set()  # part of `_out`
        self._numbers = itertools.count()
        self._closed = False
        with self.budget._lock:
            self.budget._pools.add(self)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool's blocks, granted and idle."""
        return (len(self._idle) + len(self._out)) * self.block_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of the blocks that wait for their next use."""
        return len(self._idle) * self.block_bytes

    async def acquire(self, order: int) -> Block:
        """Wait for a block; requests of smaller `order`, older saves, come first.

        Raises:
            UsageError: the pool is closed, or belongs to the process this one was forked from.
        """
        self._refuse_if_unusable()
        waiter = _Waiter(self, order, asyncio.get_running_loop().create_future())
        self.budget._ask(waiter)
        try:
            if waiter.block is None:
                assert waiter.future is not None
                await waiter.future
        except BaseException:
            self.budget._withdraw(waiter)  # a block may have been granted to the dying task meanwhile
            raise
        assert waiter.block is not None
        return self._checked(waiter.block)

    def acquire_nowait(self, order: int) -> Block | None:
        """A block if one is free and no older request waits for it, else None."""
        self._refuse_if_unusable()
        waiter = _Waiter(self, order, None)
        self.budget._ask(waiter)
        if waiter.block is None:
            self.budget._withdraw(waiter)
            return None
        return self._checked(waiter.block)

    def release(self, block: Block) -> None:
        """Give a block back; no thread may touch it any more."""
        if os.getpid() != self._pid or block in self._lost:
            return  # a forked child unwinding its copy of our stack; or a stuck thread has the block
        with self.budget._lock:
            if block not in self._out:
                raise UsageError(f"block {block.number} is not out of this pool: released twice?")
            if self.poison:
                block.poison()
            self._put(block)
            self.budget._serve()

    def close(self) -> None:
        """Free the blocks: idle ones now, granted ones when they are released; idempotent.

        Requests that still wait get a `UsageError`.
        """
        if os.getpid() != self._pid:
            return
        with self.budget._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for waiter in [w for w in self.budget._waiters if w.pool is self]:
                self.budget._waiters.remove(waiter)
                waiter.wake(UsageError("the pool was closed while a request for a block waited"))
            self.budget._serve()
        if self.poison:
            for block in idle:
                block.check()

    def write_off(self) -> int:
        """Never use the granted blocks again: stuck threads have them; returns their bytes.

        They stay charged to the budget, for the memory is in use as long as the process lives.
        """
        with self.budget._lock:
            self._lost |= self._out
            return len(self._lost) * self.block_bytes

    def _take(self) -> Block | None:
        """A block for whoever is first in line, warm if possible; the budget's lock is held."""
        if self._idle:
            block = self._idle.pop()
        elif self.budget._make_room(self.block_bytes):
            block = Block(self.block_bytes, number=next(self._numbers), pinned=self._pinned)
        else:
            return None
        self._out.add(block)
        return block

    def _put(self, block: Block) -> None:
        """Take a block back; the budget's lock is held."""
        self._out.remove(block)
        if not self._closed:
            self._idle.append(block)

    def _checked(self, block: Block) -> Block:
        if self.poison:
            try:
                block.check()
            except AssertionError:
                with self.budget._lock:  # the evidence is in the message; the block is not used again
                    self._out.remove(block)
                    self.budget._serve()
                raise
        return block

    def _refuse_if_unusable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this pool belongs to the parent process: a forked child needs a saver of its own"
            )
        if self._closed:
            raise UsageError("the pool is closed")
