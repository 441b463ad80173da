"""Which checkpoint a reader that follows a run goes to next.

A follower is asked again and again, and told what was delivered. What counts as news is
the identity of a checkpoint, (step, save id), never its number alone:

- `latest` goes to the newest valid step above the last one. A step below it is news only
  when the last one is gone and the step was born since: then the run was rewound. That
  the newest one is deleted is no news, whoever is at the last one stays there.
- `latest` with `every` goes through all that are there, in order, and then as they come.
- `alias:NAME` goes wherever the alias points, back as well: that is a rollback.

A damaged step is passed over and looked at again each time; it is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from ._aliases import Aliases, check_alias
from ._finding import Finder
from ._listing import Candidate, UnfinishedError, VanishedError
from .checkpoint import Checkpoint
from .errors import CorruptCheckpointError, StepNotFoundError, UnsupportedFormatError, UsageError

__all__ = ["EveryFollower", "Follower", "LatestFollower", "Skip", "follower", "identity"]

Skip = Callable[[Checkpoint], bool]
"""Whether a checkpoint is not wanted now."""

TRIES: Final = 20
"""How often in a row a step may vanish while it is looked at, before the next poll is waited for."""
_ALIAS: Final = "alias:"


def identity(checkpoint: Checkpoint) -> tuple[int, str]:
    """What a checkpoint is, whatever else is known of it."""
    return checkpoint.step, checkpoint.save_id


def never(_: Checkpoint) -> bool:
    """Skip nothing."""
    return False


class Follower(Protocol):
    """Goes from checkpoint to checkpoint."""

    async def next(self, skip: Skip = never) -> Checkpoint | None:
        """The one to go to, or None while there is nothing new.

        Raises:
            StorageError: the store failed.
            CorruptCheckpointError: `run.json` or the alias is damaged.
        """

    def delivered(self, checkpoint: Checkpoint) -> None:
        """Go on from here."""

    async def settle(self, checkpoint: Checkpoint) -> None:
        """Go on from here, and take nothing that is there already for news."""


def follower(
    finder: Finder, follow: object, *, every: bool = False, after: int | Checkpoint | None = None
) -> Follower:
    """The follower that options name.

    Raises:
        UsageError: they name none.
    """
    if isinstance(after, bool) or not isinstance(after, (int, Checkpoint, type(None))):
        raise UsageError(f"after= is a step or a Checkpoint, not {after!r:.80}")
    if follow == "latest":
        return EveryFollower(finder, after) if every else LatestFollower(finder, after)
    if not isinstance(follow, str) or not follow.startswith(_ALIAS):
        raise UsageError(f"follow= is 'latest' or 'alias:NAME', not {follow!r:.80}")
    if every:
        raise UsageError("every=True goes with follow='latest': an alias is at one checkpoint at a time")
    return AliasFollower(finder, follow.removeprefix(_ALIAS), after)


class LatestFollower:
    """The newest valid checkpoint."""

    def __init__(self, finder: Finder, after: int | Checkpoint | None) -> None:
        self._finder = finder
        self._floor = after if isinstance(after, int) else -1
        self._last = after if isinstance(after, Checkpoint) else None
        self._known: set[str] = set()
        """Folders that were there at the last look."""
        self._barred: set[str] = set()
        """Folders that were there when somebody went back to an older checkpoint."""
        self._ids: dict[str, str] = {}
        """The save id by folder, of those that were delivered."""

    async def next(self, skip: Skip = never) -> Checkpoint | None:
        """The newest valid one that is news."""
        for _ in range(TRIES):
            present = await self._present()
            try:
                found = await self._newest(present, skip)
            except VanishedError:
                continue  # whoever deleted it has a newer one
            self._see(present)
            return found
        return None

    def delivered(self, checkpoint: Checkpoint) -> None:
        """Go on from here."""
        self._last = checkpoint
        self._ids[checkpoint.name] = checkpoint.save_id

    async def settle(self, checkpoint: Checkpoint) -> None:
        """Go on from here; only what is committed from now on is news."""
        self._barred = {candidate.name for candidate in await self._present()}
        self.delivered(checkpoint)

    async def _present(self) -> list[Candidate]:
        return [c for c in await self._finder.candidates() if c.step > self._floor]

    def _see(self, present: Iterable[Candidate]) -> None:
        self._known = {candidate.name for candidate in present}
        self._barred &= self._known
        self._ids = {name: save_id for name, save_id in self._ids.items() if name in self._known}

    async def _newest(self, present: list[Candidate], skip: Skip) -> Checkpoint | None:
        for candidate in self._news(present):
            found = await inspected(self._finder, candidate)
            if self._is_last(candidate, found):
                return None
            if found is not None and found.save_id != self._ids.get(candidate.name) and not skip(found):
                return found
        return None

    def _is_last(self, candidate: Candidate, found: Checkpoint | None) -> bool:
        """Whether we are there already; one that was damaged since counts as well."""
        last = self._last
        if last is None or candidate.name != last.name:
            return False
        return found is None or identity(found) == identity(last)

    def _news(self, present: list[Candidate]) -> Iterator[Candidate]:
        """What may be news, newest first, down to the last one itself."""
        last = self._last
        place = (-1, -1) if last is None else (last.step, last.generation)
        for candidate in reversed(present):
            if last is not None and candidate.name == last.name:
                yield candidate
            elif candidate.name in self._barred:
                continue
            elif (candidate.step, candidate.generation) > place or candidate.name not in self._known:
                yield candidate
            elif candidate.name in self._ids:
                yield candidate  # unless it was written anew it is none


class EveryFollower:
    """All valid checkpoints, oldest first."""

    def __init__(self, finder: Finder, after: int | Checkpoint | None) -> None:
        self._finder = finder
        self._after = after
        self._done: dict[str, str] | None = None
        """The save id by folder, of what was delivered; "" for what was there before that."""

    async def next(self, skip: Skip = never) -> Checkpoint | None:
        """The oldest one that was not delivered yet."""
        present = await self._finder.candidates()
        if isinstance(self._after, int):
            present = [candidate for candidate in present if candidate.step > self._after]
        done = self._look_back(present)
        for candidate in present:
            # That a folder was written anew under its old name is looked for at the newest only.
            if candidate.name in done and candidate is not present[-1]:
                continue
            try:
                found = await inspected(self._finder, candidate)
            except VanishedError:
                continue
            if found is not None and done.get(candidate.name) not in ("", found.save_id) and not skip(found):
                return found
        return None

    def delivered(self, checkpoint: Checkpoint) -> None:
        """It need not come again."""
        if self._done is None:
            self._done = {}
        self._done[checkpoint.name] = checkpoint.save_id

    async def settle(self, checkpoint: Checkpoint) -> None:
        """Nothing that is there already need come."""
        self._done = {candidate.name: "" for candidate in await self._finder.candidates()}
        self.delivered(checkpoint)

    def _look_back(self, present: list[Candidate]) -> dict[str, str]:
        """Forget what is gone: should it come again, it is another one."""
        names = {candidate.name for candidate in present}
        if self._done is None:
            after = self._after
            place = (after.step, after.generation) if isinstance(after, Checkpoint) else (-1, -1)
            self._done = {c.name: "" for c in present if (c.step, c.generation) <= place}
            if isinstance(after, Checkpoint) and after.name in self._done:
                self._done[after.name] = after.save_id
        self._done = {name: save_id for name, save_id in self._done.items() if name in names}
        return self._done


class AliasFollower:
    """Where an alias points."""

    def __init__(self, finder: Finder, alias: str, after: int | Checkpoint | None) -> None:
        check_alias(alias)
        self._aliases = Aliases(finder)
        self._alias = alias
        self._last = after

    async def next(self, skip: Skip = never) -> Checkpoint | None:
        """What the alias points at, unless that is where we are."""
        try:
            found = await self._aliases.alias(self._alias)
        except StepNotFoundError:  # not promoted yet, or gone: who is somewhere stays there
            return None
        return None if self._is_last(found) or skip(found) else found

    def delivered(self, checkpoint: Checkpoint) -> None:
        """Go on from here."""
        self._last = checkpoint

    async def settle(self, checkpoint: Checkpoint) -> None:
        """Go on from here; where the alias points is news all the same."""
        self.delivered(checkpoint)

    def _is_last(self, found: Checkpoint) -> bool:
        if isinstance(self._last, int):
            return found.step == self._last
        return self._last is not None and identity(found) == identity(self._last)


async def inspected(finder: Finder, candidate: Candidate) -> Checkpoint | None:
    """The record of a step, None where it is damaged (which is told) or no step yet.

    Raises:
        VanishedError: it was deleted meanwhile.
        StorageError: the store failed.
    """
    try:
        return (await finder.inspect(candidate))[0]
    except UnfinishedError:
        return None
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        finder.tell(candidate, error)
        return None
