"""aiockpt grants host memory in save order, within the budget, to one owner at a time."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import _block
from aiockpt._block import Block
from aiockpt._cgroup import memory_left
from aiockpt._memory import MIN_BLOCKS, PAGE, BlockPool, ByteBudget, budget_warning, default_budget
from aiockpt._threads import settle
from aiockpt.errors import UsageError

SIZE = 4 * PAGE


def pool_of(count: int, **options: Any) -> BlockPool:
    """A pool of `count` small blocks that checks what it gets back."""
    return BlockPool(count * SIZE, block_bytes=SIZE, poison=True, **options)


async def turns(count: int = 5) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


class TestBlock:
    """A block is one piece of aligned memory with two faces."""

    def test_tensor_and_view_are_the_same_aligned_memory(self) -> None:
        """What is written through one is read through the other."""
        block = Block(SIZE)
        assert block.tensor.data_ptr() % PAGE == 0
        assert (block.tensor.dtype, block.tensor.shape) == (torch.uint8, (SIZE,))
        assert (block.view.format, block.view.nbytes, block.view.readonly) == ("B", SIZE, False)
        block.tensor[5] = 77
        block.view[6:8] = b"ab"
        assert (block.view[5], block.tensor[6:8].tolist()) == (77, [97, 98])

    def test_is_mapped_on_first_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Making a block costs nothing on the loop; both faces come from one mapping."""
        mapped: list[dict[str, int]] = []
        real = mmap.mmap

        def noted(fileno: int, length: int, **options: int) -> mmap.mmap:
            mapped.append(options)
            return real(fileno, length, **options)

        monkeypatch.setattr(mmap, "mmap", noted)
        block = Block(SIZE)
        assert mapped == []
        assert block.view is block.view
        assert block.tensor is block.tensor
        assert mapped == [{"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}]

    def test_lives_as_long_as_anybody_looks_at_it(self) -> None:
        """A thread that was written off may still use its slice after the block is gone."""
        block = Block(SIZE)
        block.view[:4] = b"keep"
        part = block.view[:4]
        tensor = block.tensor
        del block
        gc.collect()
        assert bytes(part) == b"keep"
        assert tensor[0] == ord("k")

    def test_works_where_advice_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel without huge pages gives plain memory."""

        class Refusing(mmap.mmap):
            def madvise(self, *args: int) -> None:
                raise OSError(22, "Invalid argument")

        monkeypatch.setattr(mmap, "mmap", Refusing)
        assert Block(SIZE).tensor.sum() == 0

    @pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
    def test_a_forked_child_sees_nothing_of_it(self) -> None:
        """The child finds zeros, and freeing its copy harms no memory it mapped since."""
        block = Block(1 << 20)
        block.tensor.fill_(9)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(20)
                # Through the views: a tensor's operation may wait for OpenMP threads that a child lacks.
                empty = bytes(block.view) == bytes(1 << 20)
                fresh = [Block(1 << 20) for _ in range(8)]
                for other in fresh:
                    other.view[:] = b"1" * (1 << 20)
                del block
                gc.collect()
                if empty and all(bytes(other.view) == b"1" * (1 << 20) for other in fresh):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert int(block.tensor.min()) == 9


class TestPinning:
    """Blocks are pinned where an accelerator is in use, and pageable where that fails."""

    @pytest.fixture(autouse=True)
    def _nobody_was_warned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_block, "_times_unpinned", iter(range(1000)))

    @staticmethod
    def _pretend(monkeypatch: pytest.MonkeyPatch, offset: int = 0) -> list[int]:
        """Have torch hand out aligned memory as pinned; returns the sizes asked for."""
        asked: list[int] = []
        real = torch.empty

        def empty(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
            assert pin_memory
            asked.append(nbytes)
            room = real(nbytes + 2 * PAGE, dtype=dtype)
            start = -room.data_ptr() % PAGE + offset
            return room[start : start + nbytes]

        monkeypatch.setattr(torch, "empty", empty)
        return asked

    def test_pinned_memory_has_both_faces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """View and tensor share the pinned memory, which lives as long as either; its size is not rounded."""
        asked = self._pretend(monkeypatch)
        block = Block(SIZE, pinned=True)
        block.tensor.fill_(3)
        watch = weakref.ref(block.tensor)
        view = block.view
        assert asked == [SIZE]
        assert bytes(view) == b"\3" * SIZE
        del block
        gc.collect()
        assert watch() is not None
        del view
        gc.collect()
        assert watch() is None

    def test_falls_back_to_pageable_memory_with_one_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """When pinning fails saves go on; the warning comes once, with the first reason."""

        def refuse(*args: object, **options: object) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")

        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.warns(
            RuntimeWarning, match=r"cannot pin host memory \(CUDA error: out of memory\)"
        ) as caught:
            sizes = [Block(SIZE, pinned=True).tensor.numel() for _ in range(3)]
        assert sizes == [SIZE] * 3
        assert len(caught) == 1

    def test_pinned_memory_that_direct_io_refuses_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An allocator that hands out unaligned memory is passed by."""
        self._pretend(monkeypatch, offset=512)
        assert Block(SIZE, pinned=True).tensor.data_ptr() % PAGE == 0

    @pytest.mark.parametrize("started", [True, False])
    def test_pins_by_default_only_for_an_accelerator_in_use(
        self, monkeypatch: pytest.MonkeyPatch, started: bool
    ) -> None:
        """An accelerator that the process has not started is not started by a save."""
        asked = self._pretend(monkeypatch)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
        assert Block(SIZE, pinned=None).tensor.numel() == SIZE
        assert bool(asked) is started

    def test_does_not_pin_without_an_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor where the device module cannot say whether it is in use."""
        asked = self._pretend(monkeypatch)
        for device in (None, torch.device("meta")):
            monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda device=device: device)
            assert Block(SIZE, pinned=None).tensor.numel() == SIZE
        assert asked == []


class TestPool:
    """The pool lends blocks, oldest save first."""

    async def test_reuses_its_blocks(self) -> None:
        """A hundred grants of two blocks map two blocks, the warm one first."""
        pool = pool_of(2)
        blocks = set()
        for _ in range(50):
            pair = [await pool.acquire(0), await pool.acquire(0)]
            assert pool.acquire_nowait(0) is None
            blocks.update(pair)
            for block in pair:
                pool.release(block)
            assert pool.acquire_nowait(0) is pair[-1]
            pool.release(pair[-1])
        assert len(blocks) == 2
        assert pool.budget.used == 2 * SIZE
        pool.close()
        assert pool.budget.used == 0

    async def test_grants_older_saves_first_whatever_came_first(self) -> None:
        """Waiting requests are served by order, equal ones in the order of their calls."""
        pool = pool_of(2)
        held = [await pool.acquire(0), await pool.acquire(0)]
        served: list[tuple[int, int]] = []

        async def ask(order: int, number: int) -> None:
            block = await pool.acquire(order)
            served.append((order, number))
            await asyncio.sleep(0)
            pool.release(block)

        wanted = [(order, number) for number in range(3) for order in (3, 1, 2)]
        tasks = [asyncio.create_task(ask(*each)) for each in wanted]
        await turns()
        assert pool.acquire_nowait(9) is None
        pool.release(held.pop())
        await asyncio.gather(*tasks)
        assert served == sorted(wanted)
        pool.release(held.pop())
        pool.close()

    async def test_a_younger_save_never_overtakes(self) -> None:
        """A block that an older save waits for is refused to a younger one, awaiting or not."""
        pool = pool_of(2)
        first, second = await pool.acquire(5), await pool.acquire(5)
        older = asyncio.create_task(pool.acquire(1))
        await turns()
        pool.release(first)  # granted to `older` here, although its task has not run yet
        assert pool.acquire_nowait(0) is None
        younger = asyncio.create_task(pool.acquire(2))
        await turns()
        assert (await older) is first
        assert not younger.done()
        pool.release(second)
        pool.release(await younger)
        pool.release(first)
        pool.close()

    @pytest.mark.parametrize("granted", [False, True])
    async def test_a_cancelled_request_swallows_no_block(self, granted: bool) -> None:
        """Cancelled while waiting, or in the moment of the grant: the next in line gets the block."""
        pool = pool_of(2)
        held = [await pool.acquire(0), await pool.acquire(0)]
        dying = asyncio.create_task(pool.acquire(1))
        next_one = asyncio.create_task(pool.acquire(2))
        await turns()
        if granted:
            pool.release(held.pop())
            dying.cancel()
        else:
            dying.cancel()
            pool.release(held.pop())
        with pytest.raises(asyncio.CancelledError):
            await dying
        held.append(await next_one)
        for block in held:
            pool.release(block)
        assert pool.idle_bytes == pool.held_bytes == 2 * SIZE
        assert pool.budget.waiting == 0
        pool.close()

    async def test_a_request_dropped_with_its_coroutine_swallows_no_block(self) -> None:
        """A coroutine that is closed while it waits leaves the line."""
        pool = pool_of(2)
        held = [await pool.acquire(0), await pool.acquire(0)]
        request = pool.acquire(1)
        request.send(None)
        assert pool.budget.waiting == 1
        request.close()
        assert pool.budget.waiting == 0
        for block in held:
            pool.release(block)
        pool.close()

    async def test_refuses_a_block_it_did_not_lend(self) -> None:
        """Twice released, or another pool's: an error, and the block is not doubled."""
        pool = pool_of(2)
        block = await pool.acquire(0)
        pool.release(block)
        for stray in (block, Block(SIZE)):
            with pytest.raises(UsageError, match="not out of this pool"):
                pool.release(stray)
        assert pool.held_bytes == SIZE
        pool.close()

    @pytest.mark.parametrize(
        ("budget", "size", "says"),
        [(SIZE, SIZE, "too small"), (0, SIZE, "positive"), (SIZE, 100, "multiple"), (SIZE, 0, "multiple")],
    )
    def test_refuses_sizes_that_cannot_work(self, budget: int, size: int, says: str) -> None:
        """Less than the documented minimum of blocks is an error at once, not a hang later."""
        with pytest.raises(UsageError, match=says):
            BlockPool(budget, block_bytes=size)

    async def test_close_lets_waiting_requests_go_and_frees_late_blocks(self) -> None:
        """Waiters get an error; blocks that are out are freed on return; a second close does nothing."""
        pool = pool_of(2)
        held = [await pool.acquire(0), await pool.acquire(0)]
        waiting = asyncio.create_task(pool.acquire(1))
        await turns()
        pool.close()
        with pytest.raises(UsageError, match="closed"):
            await waiting
        with pytest.raises(UsageError, match="closed"):
            await pool.acquire(0)
        with pytest.raises(UsageError, match="closed"):
            pool.acquire_nowait(0)
        watch = weakref.ref(held[0])
        while held:
            pool.release(held.pop())
        assert watch() is None
        pool.close()
        assert pool.budget.used == 0

    async def test_blocks_of_stuck_threads_are_never_lent_again(self) -> None:
        """Written-off blocks stay charged; releasing them is harmless and frees nothing."""
        pool = pool_of(3)
        stuck = await pool.acquire(0)
        assert pool.write_off() == SIZE
        pool.release(stuck)
        pool.release(stuck)
        others = [await pool.acquire(1), await pool.acquire(1)]
        assert stuck not in others
        assert pool.acquire_nowait(1) is None
        for block in others:
            pool.release(block)
        pool.close()
        assert pool.budget.used == SIZE

    @pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
    async def test_a_forked_child_cannot_use_it(self) -> None:
        """In a child, forked with the lock taken, requests are refused and clean-up does nothing."""
        pool = pool_of(2)
        block = await pool.acquire(0)
        with pool.budget._lock:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.alarm(20)
                    pool.release(block)
                    pool.close()
                    try:
                        pool.acquire_nowait(0)
                    except UsageError:
                        code = 0 if pool.held_bytes == SIZE else 2
                finally:
                    os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0  # noqa: ASYNC222
        pool.release(block)
        pool.close()


class TestPoison:
    """In test mode the pool finds out who writes into memory that is not theirs."""

    async def test_names_a_block_that_was_written_to_in_the_pool(self) -> None:
        """The next grant, or close, raises; the block is not used again and no memory is lost."""
        pool = pool_of(2)
        block = await pool.acquire(0)
        view = block.view
        pool.release(block)
        view[100:103] = b"xyz"
        with pytest.raises(AssertionError, match=r"block 0 was written to .* 3 bytes, the first at 100"):
            await pool.acquire(0)
        assert pool.held_bytes == 0
        fresh = pool.acquire_nowait(0)
        assert fresh is not None
        assert fresh is not block
        late = fresh.view
        pool.release(fresh)
        late[0] = 1
        with pytest.raises(AssertionError, match="block 1"):
            pool.close()

    async def test_accepts_blocks_left_alone_and_overwrites_what_they_held(self) -> None:
        """A returned block holds the pattern, not the old bytes."""
        pool = pool_of(2)
        block = await pool.acquire(0)
        block.tensor.fill_(1)
        pool.release(block)
        assert set(block.view) == {_block.POISON}
        assert await pool.acquire(0) is block
        pool.release(block)
        pool.close()

    async def test_can_be_switched_on_for_all_pools(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tests of savers switch it on from outside; by default it is off."""
        assert BlockPool(2 * SIZE, block_bytes=SIZE).poison is False
        monkeypatch.setattr(BlockPool, "poison", True)
        assert BlockPool(2 * SIZE, block_bytes=SIZE).poison is True


class TestSharedBudget:
    """Several savers under one budget never starve each other."""

    async def test_idle_blocks_go_to_the_pool_that_waits(self) -> None:
        """Memory that one pool only keeps warm is given up for another."""
        budget = ByteBudget(4 * SIZE)
        one, other = BlockPool(budget, block_bytes=SIZE), BlockPool(budget, block_bytes=2 * SIZE)
        for block in [await one.acquire(0) for _ in range(4)]:
            one.release(block)
        assert (one.idle_bytes, budget.used) == (4 * SIZE, 4 * SIZE)
        big = await other.acquire(1)
        assert (one.idle_bytes, budget.used) == (2 * SIZE, 4 * SIZE)
        small = await one.acquire(2)
        waiting = asyncio.create_task(other.acquire(3))
        await turns()
        assert not waiting.done()  # one small block idle, one in use: no room for a big one
        assert one.idle_bytes == SIZE
        one.release(small)
        second = await asyncio.wait_for(waiting, 10)
        assert budget.used == 4 * SIZE
        for block in (big, second):
            other.release(block)
        one.close()
        other.close()

    async def test_order_holds_between_pools(self) -> None:
        """A free block of its own pool is not for a younger save while an older one waits elsewhere."""
        budget = ByteBudget(4 * SIZE)
        small, big = BlockPool(budget, block_bytes=SIZE), BlockPool(budget, block_bytes=2 * SIZE)
        held = [await small.acquire(0) for _ in range(4)]
        older = asyncio.create_task(big.acquire(budget.next_order()))
        await turns()
        small.release(held.pop())
        assert small.acquire_nowait(budget.next_order()) is None
        small.release(held.pop())
        big.release(await asyncio.wait_for(older, 10))
        for block in held:
            small.release(block)
        small.close()
        big.close()

    async def test_a_forgotten_pool_returns_its_memory(self) -> None:
        """A pool that was dropped without close no longer counts."""
        budget = ByteBudget(2 * SIZE)
        pool = BlockPool(budget, block_bytes=SIZE)
        pool.release(await pool.acquire(0))
        assert budget.used == SIZE
        del pool
        gc.collect()
        assert budget.used == 0

    @pytest.mark.parametrize("count", [MIN_BLOCKS, 3, 5])
    @pytest.mark.parametrize("seed", range(4))
    async def test_never_deadlocks(self, count: int, seed: int) -> None:
        """Savers of several pools with random cancellations all end; nothing is lost or over the budget."""
        rng = random.Random(seed)
        budget = ByteBudget(count * SIZE)
        pools = [BlockPool(budget, block_bytes=SIZE, poison=True) for _ in range(3)]
        owner: dict[int, int] = {}

        async def write(pool: BlockPool, block: Block, who: int) -> None:
            try:
                await turns(rng.randrange(4))
                assert owner.pop(id(block)) == who
                assert int(block.tensor[0]) == who
            finally:
                pool.release(block)

        async def save(pool: BlockPool, order: int) -> None:
            writes = []
            try:
                for _ in range(8):
                    block = await pool.acquire(order)
                    assert id(block) not in owner
                    owner[id(block)] = order
                    block.tensor[0] = order
                    assert budget.used <= budget.total
                    writes.append(asyncio.create_task(write(pool, block, order)))
            finally:
                await settle(asyncio.gather(*writes))

        tasks = [asyncio.create_task(save(pools[n % 3], budget.next_order())) for n in range(12)]
        for _ in range(30):
            await turns(2)
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done)
        assert owner == {}
        assert budget.waiting == 0
        assert all(pool.idle_bytes == pool.held_bytes for pool in pools)
        for pool in pools:
            pool.close()
        assert budget.used == 0

    def test_savers_in_several_threads_share_one(self) -> None:
        """Loops in four threads contend for two blocks; each request is served in its own loop."""
        budget = ByteBudget(2 * SIZE)
        errors: list[BaseException] = []

        async def save() -> None:
            pool = BlockPool(budget, block_bytes=SIZE, poison=True)
            for _ in range(50):
                block = await asyncio.wait_for(pool.acquire(budget.next_order()), 20)
                await asyncio.sleep(0)
                block.tensor[0] = 1
                pool.release(block)
            pool.close()

        def run() -> None:
            try:
                asyncio.run(save())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert budget.used == 0

    async def test_a_request_of_a_dead_loop_is_passed_by(self) -> None:
        """A loop that was closed with a request waiting does not hold up the others."""
        pool = pool_of(2)
        held = [await pool.acquire(0), await pool.acquire(0)]
        requests = []

        def other_thread() -> None:
            loop = asyncio.new_event_loop()
            request = loop.create_task(pool.acquire(1))
            loop.run_until_complete(turns())
            loop.close()
            requests.append(request)

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        alive = asyncio.create_task(pool.acquire(2))
        await turns()
        pool.release(held.pop())
        held.append(await asyncio.wait_for(alive, 10))
        for block in held:
            pool.release(block)
        pool.close()
        task: Any = requests[0]
        task._log_destroy_pending = False  # its loop is gone, and asyncio would say so when it is collected


@pytest.fixture
def system(tmp_path: Path) -> Callable[[dict[str, str]], int]:
    """Ask for the memory left on a made-up system."""

    def left(files: dict[str, str]) -> int:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return memory_left(str(tmp_path / "proc"), str(tmp_path / "cg"))

    return left


MEMINFO = {"proc/meminfo": "MemTotal:  2000 kB\nMemAvailable:    1000 kB\n"}


class TestDefaultBudget:
    """The default budget leaves the training its memory."""

    def test_without_groups_the_hosts_memory_counts(self, system: Callable[[dict[str, str]], int]) -> None:
        """MemAvailable, in bytes."""
        assert system(MEMINFO) == 1000 * 1024

    def test_a_system_that_says_nothing_leaves_nothing(self, system: Callable[[dict[str, str]], int]) -> None:
        """Without procfs the budget is the minimum rather than a guess."""
        assert system({}) == 0

    @pytest.mark.parametrize(
        ("files", "left"),
        [
            ({"cg/a/b/memory.max": "500000"}, 400_000),
            ({"cg/a/b/memory.max": "max"}, 1000 * 1024),
            ({"cg/a/b/memory.max": "max", "cg/a/b/memory.high": "300000"}, 200_000),
            (
                {"cg/a/b/memory.max": "500000", "cg/a/memory.max": "250000", "cg/a/memory.current": "240000"},
                10_000,
            ),
            ({"cg/a/b/memory.max": "500000", "cg/a/b/memory.stat": "anon 1\ninactive_file 90000\n"}, 490_000),
            ({"cg/a/b/memory.max": "50000"}, 0),
        ],
    )
    def test_the_tightest_limit_of_version_2_counts(
        self, system: Callable[[dict[str, str]], int], files: dict[str, str], left: int
    ) -> None:
        """Of max and high, of the group and those above; droppable page cache counts as left."""
        base = MEMINFO | {"proc/self/cgroup": "0::/a/b\n", "cg/a/b/memory.current": "100000"}
        assert system(base | files) == left

    def test_version_1_counts_too(self, system: Callable[[dict[str, str]], int]) -> None:
        """Also in a container, where the path in /proc is the host's and the mount's root is our group."""
        found = system(
            MEMINFO
            | {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/123\n0::/\n",
                "cg/memory/memory.limit_in_bytes": "600000",
                "cg/memory/memory.usage_in_bytes": "500000",
                "cg/memory/memory.stat": "total_inactive_file 100000\n",
            }
        )
        assert found == 200_000

    def test_this_system_leaves_some(self) -> None:
        """The real files can be read."""
        assert 0 < memory_left() < 1 << 50

    def test_is_the_state_but_at_most_its_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """40 % of what is left, over the local ranks, in whole blocks, never below the minimum."""
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        size = 1000
        assert default_budget(4500, block_bytes=size, left=100_000) == 5000
        assert default_budget(90_000, block_bytes=size, left=100_000) == 40_000
        assert default_budget(90_000, block_bytes=size, left=100_000, local_ranks=8) == 5000
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert default_budget(90_000, block_bytes=size, left=100_000) == 10_000
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
        assert default_budget(90_000, block_bytes=size, left=100_000) == 40_000
        assert default_budget(0, block_bytes=size, left=0) == MIN_BLOCKS * size
        assert default_budget(1 << 60) % (16 << 20) == 0

    def test_warns_only_when_the_state_does_not_fit(self) -> None:
        """The text has both sizes and the expected time."""
        assert budget_warning(100, 100) is None
        text = budget_warning(5 << 30, 1 << 30, bytes_per_second=2e9)
        assert text is not None
        for fact in ("5.00 GiB", "1.00 GiB", "2.1 s", "2.0 GB/s", "budget="):
            assert fact in text
