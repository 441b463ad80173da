"""The host memory of one saver: its pool, made when the first state comes, grown for larger ones."""

from __future__ import annotations

from ._cgroup import memory_left
from ._content import SavePlan
from ._log import log
from ._memory import BLOCK_BYTES, BlockPool, ByteBudget, budget_warning, default_budget
from ._threads import Lane, offload


class Reserve:
    """Gives the pool.

    Args:
        budget: what the caller allows; None for the default, which goes by the state's size.
    """

    block_bytes = BLOCK_BYTES
    """Of the blocks; tests take smaller ones."""

    def __init__(self, budget: ByteBudget | None) -> None:
        self._pool = None if budget is None else BlockPool(budget, block_bytes=self.block_bytes)
        self._fixed = budget is not None
        self._left = 0
        self._warned = False

    async def open(self) -> None:
        """Look at the memory that the default depends on."""
        if not self._fixed:
            self._left = await offload(memory_left, lane=Lane.CONTROL)

    async def pool(self, plan: SavePlan) -> BlockPool:
        """The pool for a save."""
        if self._pool is None or plan.block_bytes > self._pool.budget.total:
            await self.open()
        return self.pool_now(plan)

    def pool_now(self, plan: SavePlan) -> BlockPool:
        """The same, by what was known last: reading the memory's limits would block the loop."""
        needed = plan.block_bytes
        if self._pool is None:
            total = default_budget(needed, block_bytes=self.block_bytes, left=self._left)
            self._pool = BlockPool(ByteBudget(total), block_bytes=self.block_bytes)
        elif not self._fixed and needed > self._pool.budget.total:
            # What is left now does not count the blocks that the pool has already.
            left = self._left + self._pool.budget.used
            grown = default_budget(needed, block_bytes=self.block_bytes, left=left)
            self._pool.budget.total = max(self._pool.budget.total, grown)
        warning = None if self._warned else budget_warning(plan.nbytes, self._pool.budget.total)
        if warning:
            self._warned = True
            log.warning(warning)
        return self._pool

    def write_off(self) -> None:
        """Stuck threads have the granted blocks: never use them again."""
        if self._pool is not None:
            self._pool.write_off()

    def close(self) -> None:
        """Free the blocks."""
        if self._pool is not None:
            self._pool.close()
