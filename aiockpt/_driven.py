"""The writer as a saver drives it: with the saver's blocks, copied at once, or watched."""

from __future__ import annotations

from collections.abc import Callable

from ._capture import Captured
from ._content import SavePlan
from ._memory import BlockPool
from ._threads import Lane, offload
from .writer import CheckpointWriter


class DrivenWriter(CheckpointWriter):
    """What a saver needs of a writer beside the phases."""

    async def watch(self, captured: Captured) -> None:
        """Plan it, and see to it that what is written is the state as it is now."""
        await self.plan_captured(captured)
        await self._guard(offload(self._content.bear_witness, lane=Lane.STAGE), "cannot read")

    def use(self, pool: BlockPool, order: int) -> None:
        """Take blocks from `pool`; saves with smaller `order` get theirs first."""
        self._pool, self._order = pool, order

    def fill_now(self, captured: Captured, pool_for: Callable[[SavePlan], BlockPool]) -> None:
        """Plan and copy everything on this thread, now; see `Content.fill`."""
        self._content.lay_out(captured)
        self._planned()
        self._pool, self._filled = self._content.fill(pool_for)

    def open_files(self) -> list[str]:
        """Names of data files that are being written."""
        return self._pipeline.open_files() if self._pipeline is not None else []
