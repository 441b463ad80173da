"""A save through DCP, from its call to its end, as phases that can be awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from aiockpt._log import log
from aiockpt.pending import Phase

__all__ = ["PendingDcpSave", "outcome"]

T = TypeVar("T")


class PendingDcpSave(Awaitable[Metadata]):
    """One save through DCP. Made by `stage`; `await pending` is `await pending.committed()`.

    The phases are those of a `PendingSave`, in DCP's order: the copy comes first, the plan is
    made of the copy. `written` is this rank's own share; only `committed` speaks for all ranks,
    and how much it means on disk is the storage writer's matter.

    Attributes:
        checkpoint_id: as given, as text; None when only the writer knows it.
    """

    def __init__(self, checkpoint_id: str | None) -> None:
        self.checkpoint_id = checkpoint_id
        self._reached = {phase: concurrent.futures.Future[None]() for phase in Phase}
        self._ended: concurrent.futures.Future[Metadata] = concurrent.futures.Future()
        self._seen = False
        self._awaited: list[concurrent.futures.Future[Any]] = []

    def __repr__(self) -> str:
        how = "failed" if self.exception() else self.phase.name.lower()
        return f"<PendingDcpSave {self.checkpoint_id} {how}>"

    def __await__(self) -> Generator[Any, None, Metadata]:
        return self.committed().__await__()

    @property
    def phase(self) -> Phase:
        """The last phase it reached. `STAGED` may come before `PLANNED`, but not the other way round."""
        passed = [phase for phase, future in self._reached.items() if _fine(future)]
        return max(passed, default=Phase.CALLED)

    async def staged(self) -> None:
        """Wait until the state may change: a copy of it exists on the host."""
        await self._wait(self._reached[Phase.STAGED])

    async def planned(self) -> None:
        """Wait until the ranks have agreed on who writes what."""
        await self._wait(self._reached[Phase.PLANNED])

    async def written(self) -> None:
        """Wait until the storage writer says that this rank's share is written."""
        await self._wait(self._reached[Phase.WRITTEN])

    async def committed(self) -> Metadata:
        """Wait until all ranks have written and the storage writer has finished the checkpoint.

        Raises:
            RanksFailedError: some ranks failed; `failures` tells what each of them raised.
            CheckpointError: it failed in another way.
        """
        return await self._wait(self._ended)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.done()

    def exception(self) -> BaseException | None:
        """Why it failed; None while it is under way and when it is committed."""
        return self._ended.exception() if self._ended.done() else None

    def unseen(self) -> BaseException | None:
        """Its error, if it failed and no wait has raised that; None from then on."""
        seen, self._seen = self._seen, True
        return None if seen else self.exception()

    @property
    def forgotten(self) -> bool:
        """Whether it has ended and there is nothing to tell."""
        return self.done() and (self._seen or self.exception() is None)

    async def _wait(self, future: concurrent.futures.Future[T]) -> T:
        self._awaited.append(future)
        try:
            return await outcome(future)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._seen = True
            raise
        finally:
            self._awaited.remove(future)

    def then(self, call: Callable[[], None]) -> None:
        """Call when it has ended, on the thread that ends it, or now."""
        self._ended.add_done_callback(lambda _: call())

    # Called on the thread that runs the save.

    def reach(self, phase: Phase) -> None:
        """Note that a phase is reached."""
        if not self._reached[phase].done():
            self._reached[phase].set_result(None)

    def commit(self, metadata: Metadata) -> None:
        """Note the end."""
        for phase in Phase:
            self.reach(phase)
        self._ended.set_result(metadata)

    def fail(self, error: BaseException) -> None:
        """Note the failure; phases that were reached stay reached."""
        if all(future.done() for future in list(self._awaited)):
            log.error("%s, and nobody waits for it", error)
        for future in self._reached.values():
            if not future.done():
                future.set_exception(error)
        self._ended.set_exception(error)


async def outcome(future: concurrent.futures.Future[T]) -> T:
    """Await a future of another thread without owning it: a wait that is cancelled ends only itself."""
    waited = asyncio.wrap_future(future)
    waited.add_done_callback(_retrieve)
    await asyncio.wait({waited})
    return waited.result()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Whoever gave up waiting knows; asyncio need not tell of an error that was never retrieved."""
    if not future.cancelled():
        future.exception()


def _fine(future: concurrent.futures.Future[None]) -> bool:
    return future.done() and future.exception() is None
