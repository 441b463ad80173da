"""Watching a run: the checkpoints as they are committed, each leased while it is used.

An async generator inside, so that its end is known: when the loop over it is left, by
`break`, an error or a cancellation, Python drops the generator, the event loop closes it,
and closing lets go of the lease and of what listens. Whoever keeps the watch in a
variable closes it himself, or enters it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Self, Unpack, overload

from ._cursors import Cursor
from ._following import Follower, follower, identity
from ._leases import Lease
from ._loader import Loader, LoadOptions
from ._ttl import check_ttl
from ._waking import Patience, Waker, as_poll
from .checkpoint import Checkpoint
from .errors import CheckpointError, StepNotFoundError, UsageError

__all__ = ["Watch", "WatchOptions", "Watched", "wait_for"]


@dataclass(frozen=True, slots=True, eq=False)
class Watched(Checkpoint):
    """A checkpoint that a watch has come to: leased until the next one is asked for.

    Equal to any record of the same checkpoint.
    """

    lease: Lease | None = field(default=None, repr=False)
    """Keeps it from being deleted meanwhile."""
    cursor: Cursor | None = field(default=None, repr=False)

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return (self.run, self.name, *identity(self)) == (other.run, other.name, *identity(other))

    def __reduce__(self) -> tuple[Any, ...]:
        """What travels is the record; the lease stays with its process."""
        return _plain, (*(getattr(self, f.name) for f in fields(Checkpoint)),)

    @overload
    async def load(self, *, into: None = None, **options: Unpack[LoadOptions]) -> Any: ...

    @overload
    async def load(self, *, into: object, **options: Unpack[LoadOptions]) -> Checkpoint: ...

    async def load(self, *, into: Any = None, **options: Unpack[LoadOptions]) -> Any:
        """Load it, as `Catalog.load` does; only while it is leased.

        Raises:
            UsageError: the watch has gone on.
            As `Lease.load`.
        """
        if self.lease is None:
            raise UsageError("this copy of the record has no lease: use `catalog.load`", step=self.step)
        return await self.lease.load(into=into, **options)

    async def ack(self) -> None:
        """Remember durably, under the watch's `cursor=`, that it was dealt with.

        Raises:
            UsageError: the watch has no cursor.
            StorageError: the store failed; the place before is remembered, or this one.
        """
        if self.cursor is None:
            raise UsageError("ack() needs a watch with cursor='name'", step=self.step)
        await self.cursor.put(self)


def _plain(*values: Any) -> Checkpoint:
    return Checkpoint(*values)


def watched(checkpoint: Checkpoint, lease: Lease, cursor: Cursor | None = None) -> Watched:
    """The record with its lease."""
    values = {f.name: getattr(checkpoint, f.name) for f in fields(Checkpoint)}
    return Watched(**values, lease=lease, cursor=cursor)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """See `Catalog.watch`."""

    after: int | Checkpoint | None = None
    poll: float = 1.0
    every: bool = False
    follow: str = "latest"
    cursor: str | None = None
    ttl: float = 60.0

    def __post_init__(self) -> None:
        as_poll(self.poll)
        check_ttl(self.ttl)
        if self.cursor is not None and self.after is not None:
            raise UsageError("after= and cursor= both say where to begin: leave one of them out")


class Watch:
    """The checkpoints of a run as they come: an async iterator, see `Catalog.watch`.

    Closed by itself when a loop over it is left; or by `aclose`, or as an async context manager.
    """

    def __init__(
        self, loader: Loader, options: WatchOptions, *, finish: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        cursor = None if options.cursor is None else Cursor(loader.store, options.cursor)
        follower(loader.finder, options.follow, every=options.every, after=options.after)  # refuse now
        self._steps = _checkpoints(loader, options, cursor, finish)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Watched:
        return await self._steps.__anext__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of the lease and listen no more; any number of times."""
        await self._steps.aclose()


async def _checkpoints(
    loader: Loader,
    options: WatchOptions,
    cursor: Cursor | None,
    finish: Callable[[], Awaitable[None]] | None,
) -> AsyncGenerator[Watched, None]:
    waker = Waker(loader.store)
    look = _Look(loader, options, cursor)
    try:
        while True:
            lease, pause = await look.lease()
            if lease is None:
                await waker.wait(pause)
                continue
            try:
                yield watched(lease.checkpoint, lease, cursor)
            finally:
                await lease.__aexit__(None, None, None)
            look.delivered(lease.checkpoint)
    finally:
        waker.close()
        if finish is not None:
            await finish()


class _Look:
    """Looks for the next checkpoint and takes its lease; trouble is logged once and waited out."""

    def __init__(self, loader: Loader, options: WatchOptions, cursor: Cursor | None) -> None:
        self._loader = loader
        self._options = options
        self._cursor = cursor
        self._follower: Follower | None = None
        self._patience = Patience(options.poll, loader.store.url)

    async def lease(self) -> tuple[Lease | None, float]:
        """The next checkpoint, leased; or None, and how long to wait before the next look."""
        try:
            checkpoint = await (await self._following()).next()
            if checkpoint is None:
                return None, self._patience.worked()
            lease = Lease(self._loader, checkpoint, self._options.ttl, "watch")
            await lease.__aenter__()
        except StepNotFoundError:  # deleted just now
            return None, min(0.05, self._options.poll)
        except UsageError:
            raise
        except CheckpointError as error:
            return None, self._patience.failed(error)
        self._patience.worked()
        return lease, 0.0

    def delivered(self, checkpoint: Checkpoint) -> None:
        """The body has seen it."""
        assert self._follower is not None
        self._follower.delivered(checkpoint)

    async def _following(self) -> Follower:
        if self._follower is None:
            options = self._options
            after = options.after if self._cursor is None else await self._cursor.get()
            self._follower = follower(self._loader.finder, options.follow, every=options.every, after=after)
        return self._follower


async def wait_for(loader: Loader, step: int, poll: float) -> Checkpoint:
    """Wait until a step is committed; see `Catalog.wait_for`."""
    if isinstance(step, bool) or not isinstance(step, int):
        raise UsageError(f"wait_for takes a step, not {step!r:.80}")
    following = follower(loader.finder, "latest", every=True, after=step - 1)
    patience = Patience(as_poll(poll), loader.store.url)
    waker = Waker(loader.store)
    try:
        while True:
            try:
                found = await following.next()
                pause = patience.worked()
            except UsageError:
                raise
            except CheckpointError as error:
                found, pause = None, patience.failed(error)
            if found is not None:
                return found
            await waker.wait(pause)
    finally:
        waker.close()
