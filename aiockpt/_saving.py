"""What a saver does behind its verbs: write a step, commit it, retire what it replaces."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

from ._beside import Beside
from ._housekeeping import Housekeeping
from ._log import log
from ._place import Places
from ._ranks import Coordinator
from ._request import Request
from ._reserve import Reserve
from ._running import Running
from .checkpoint import Checkpoint
from .errors import CheckpointError, DrainTimeoutError
from .pending import PendingSave, Phase
from .storage import Store


class Saving(Running[Request]):
    """The saves of one saver.

    Args:
        store: of the run.
        places: decides the folders.
        reserve: gives the blocks.
        housekeeping: deletes what retention lets go.
        beside: told of everything.
        coordinator: connects the ranks.
    """

    def __init__(
        self,
        store: Store,
        places: Places,
        reserve: Reserve,
        housekeeping: Housekeeping,
        beside: Beside,
        coordinator: Coordinator,
    ) -> None:
        super().__init__(beside.ledger)
        self.reserve = reserve
        self.housekeeping = housekeeping
        self.beside = beside
        self._coordinator = coordinator
        self.after_commit: list[Callable[[PendingSave, Checkpoint], None]] = []
        """Told at once of each commit, on the loop; must neither block nor raise."""
        self._store = store
        self._places = places

    @property
    def newest(self) -> int:
        """The highest committed step, -1 for none."""
        return self._places.newest

    def _about(self, entry: Request) -> tuple[str | None, int | None]:
        return self._store.url, entry.step

    def _begun(self, entry: Request) -> None:
        self.beside.begun(entry.pending)

    def _failed(self, entry: Request, error: CheckpointError) -> None:
        self.beside.failed(entry.pending, error)

    async def _carry_out(self, entry: Request) -> None:
        entry.retire = await self._write(entry)
        await self._commit(entry)

    async def _write(self, request: Request) -> list[str]:
        """Admission, plan, stage, write; returns older folders of the same step."""
        pending, writer = request.pending, request.writer
        await self.ledger.admit(request)
        writer.name, writer.generation, retire = await self._places.find(
            request.step, overwrite=request.overwrite
        )
        plan = await writer.plan_captured(request.captured)
        await self._check_room(sum(size for _, size in plan.files))
        pool = await self.reserve.pool(plan)
        writer.use(pool, pool.budget.next_order())
        writer.on_staged = partial(self._staged, pending)
        pending._reach(Phase.PLANNED)
        request.record = await writer.write()
        pending._reach(Phase.WRITTEN)
        return retire

    def _staged(self, pending: PendingSave) -> None:
        pending._reach(Phase.STAGED)
        self.beside.staged(pending)

    async def _check_room(self, nbytes: int) -> None:
        """Refuse what cannot fit before anything is written; the reservation of each file has the last word.

        Raises:
            OSError: ENOSPC.
        """
        room = await self._store.room()
        if room is not None and room < nbytes:
            reason = f"{nbytes} bytes are needed and {room} are free"
            raise OSError(errno.ENOSPC, reason, self._store.url)

    async def _commit(self, request: Request) -> None:
        await self.ledger.turn(request)
        await self._places.lock.check()
        request.committing = True
        assert request.record is not None
        writer = request.writer
        try:
            # Of many ranks the first one commits, once it has every other's record.
            await writer.finish(await self._coordinator.gather(request.record))
        finally:
            # Also when it was cancelled: the commit goes on to its end then.
            if writer.checkpoint is not None:
                self._places.newest = max(self._places.newest, request.step)
                request.pending._commit(writer.checkpoint)
                for tell in self.after_commit:
                    tell(request.pending, writer.checkpoint)
                self.beside.committed(request.pending, writer.checkpoint)

    async def _wind_up(self, entry: Request) -> None:
        """The step was written anew: take older generations away. Failing that is no failure."""
        for name in entry.retire:
            try:
                await self.housekeeping.retention.retire(name)
            except OSError as error:
                log.warning("%s: cannot remove %s, which was written anew: %s", self._store.url, name, error)

    def _write_off_memory(self) -> None:
        self.reserve.write_off()

    async def _close(self, deadline: float | None, seconds: float | None) -> CheckpointError | None:
        await self.beside.close(deadline)
        late = await self.housekeeping.close(deadline, self._abandon)
        self.reserve.close()
        if not late:
            return None
        return DrainTimeoutError(
            f"deleting checkpoints that retention lets go did not end within {seconds or 0.0:g} s; "
            "nothing else is lost, and what is left of them is removed later"
        )
