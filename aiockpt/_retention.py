"""Deletion after a commit: what the policy lets go, and what nothing may take away.

The policy is pure and sees only committed, readable checkpoints of this run. What stays
besides: the newest valid one always, and the one before it while the newest is younger
than a grace time; the one the run was resumed from; whatever a reader has leased or
somebody promoted. Damaged steps and steps of a newer format are no candidates at all: the
first are evidence, of the second we know nothing.

A step is first moved aside. Then the leases are looked at again, and it comes back if a
reader was faster; a reader writes his lease before he looks at the manifest, so one of
the two sees the other. A failed deletion is logged, and tried again after the next commit.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

from ._log import log
from .checkpoint import Checkpoint
from .errors import UsageError
from .policies import Keep
from .storage import Store

__all__ = ["Pinned", "Retention", "goners"]


Pinned = Callable[[], Awaitable[Collection[tuple[str, str]]]]
"""Gives (folder, save id) of what readers have leased or somebody promoted."""


def goners(
    checkpoints: Sequence[Checkpoint], keep: Keep, run_id: str, protected: Collection[str] = ()
) -> list[Checkpoint]:
    """The checkpoints that may be deleted, oldest first. Pure.

    Args:
        checkpoints: the valid ones of a run folder, in any order.
        keep: the policy.
        run_id: only checkpoints of this run are candidates.
        protected: folders that stay whatever the policy says.

    Raises:
        UsageError: the policy returned something else than steps.
        Exception: whatever the policy raised.
    """
    ours = sorted((c for c in checkpoints if c.run_id == run_id), key=lambda c: (c.step, c.generation))
    if not ours:
        return []
    stay = _as_steps(keep(ours)) | {ours[-1].step}
    return [c for c in ours if c.step not in stay and c.name not in protected]


def _as_steps(found: object) -> set[int]:
    """What a policy returned. Taken for steps, anything else would let every checkpoint go."""
    try:
        return {operator.index(step) for step in found}  # type: ignore[attr-defined]
    except TypeError as error:
        message = f"a policy returns the steps that stay, as ints, not {found!r:.80}: nothing was deleted"
        raise UsageError(message) from error


class Retention:
    """Deletes what may go, for a saver or for `Catalog.prune`.

    Args:
        store: of the run.
        listing: gives the valid checkpoints.
        pinned: gives what is leased or promoted.
        pinned_if_any: the same, cheaper where nothing ever was.
        grace: seconds after a commit during which the step before it stays as well.
        clock: monotonic seconds.
        fence: raises OSError once the run is somebody else's.
    """

    def __init__(
        self,
        store: Store,
        listing: Callable[[], Awaitable[Sequence[Checkpoint]]],
        pinned: Pinned,
        *,
        pinned_if_any: Pinned | None = None,
        grace: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        fence: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._store = store
        self._listing = listing
        self._pinned = pinned
        self._pinned_if_any = pinned_if_any or pinned
        self._grace = grace
        self._clock = clock
        self._fence = fence
        self._committed: tuple[str, float] | None = None
        self.passed_over: Collection[str] = ()
        """Folders that a restore found damaged: they are evidence, and stand for nothing."""
        self.resumed_from: str | None = None
        """The folder the run was resumed from; it stays."""
        self.retained: int | None = None
        """How many checkpoints the last pass left; None before there was one."""

    def committed(self, name: str) -> None:
        """A checkpoint was committed just now: its grace time begins."""
        self._committed = (name, self._clock())

    def grace_left(self) -> float:
        """Seconds until the step before the newest one may go."""
        if self._committed is None:
            return 0.0
        return max(0.0, self._grace - (self._clock() - self._committed[1]))

    async def plan(self, keep: Keep, run_id: str) -> list[Checkpoint]:
        """What may be deleted now, oldest first.

        Raises:
            OSError: the store failed.
            UsageError: the policy returned something else than steps.
            Exception: whatever the policy raised.
        """
        return (await self._plan(keep, run_id))[0]

    async def _plan(self, keep: Keep, run_id: str) -> tuple[list[Checkpoint], str, int]:
        """What may be deleted; the newest one's folder, which makes up for it; how many there are."""
        found = [c for c in await self._listing() if c.name not in self.passed_over]
        protected = {name for name, _ in await self._pinned()}
        if self.resumed_from is not None:
            protected.add(self.resumed_from)
        if self.grace_left() > 0 and len(found) > 1:
            protected.add(sorted(found, key=lambda c: (c.step, c.generation))[-2].name)
        ours = [c for c in found if c.run_id == run_id]
        newest = max(ours, key=lambda c: (c.step, c.generation), default=None)
        return goners(found, keep, run_id, protected), "" if newest is None else newest.name, len(ours)

    async def apply(self, keep: Keep, run_id: str) -> list[int]:
        """Delete what may go; returns the steps that went.

        Never raises for the store's sake: what could not be deleted is logged.

        Raises:
            UsageError: the policy returned something else than steps.
            Exception: whatever the policy raised.
        """
        gone: list[int] = []
        try:
            doomed, newest, found = await self._plan(keep, run_id)
        except OSError as error:
            log.warning("cannot look for checkpoints to delete, the next commit tries again: %s", error)
            return gone
        for checkpoint in doomed:
            if await self._delete(checkpoint, newest):
                gone.append(checkpoint.step)
        self.retained = found - len(gone)
        return gone

    async def retire(self, name: str) -> bool:
        """Delete a folder that was written anew, unless it is leased or promoted; returns whether it went.

        Raises:
            OSError: the store failed.
        """

        async def wanted() -> bool:
            return name in {folder for folder, _ in await self._pinned_if_any()}

        # Asked before as well: who is to stay must not be out of sight for a moment.
        return not await wanted() and await self._store.retire(name, unless=wanted)

    async def _delete(self, checkpoint: Checkpoint, newest: str) -> bool:
        async def wanted() -> bool:
            if (checkpoint.name, checkpoint.save_id) in await self._pinned():
                return True
            # Somebody may have gone back to this one since, and retired what came after it.
            return newest not in {entry.name for entry in await self._store.list()}

        try:
            if self._fence is not None:
                await self._fence()
            return await self._store.retire(checkpoint.name, unless=wanted)
        except OSError as error:
            log.warning(
                "cannot delete %s, the next commit tries again: %s",
                checkpoint.name,
                error,
                extra={"step": checkpoint.step},
            )
            return False
