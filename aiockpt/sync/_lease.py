"""Leases for code that is not async: renewed by the bridge's loop, whatever the caller's thread does."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack, overload

from .._leases import Lease as AsyncLease
from .._loader import LoadOptions
from ..checkpoint import Checkpoint
from ._bridge import Make

__all__ = ["Lease"]

T = TypeVar("T")


class _Owner(Protocol):
    """The catalog, as far as a lease needs it."""

    def _run(self, make: Make[T]) -> T: ...

    def _give_up(self, lease: Lease) -> None: ...


class Lease:
    """Keeps one checkpoint from being deleted: `with catalog.lease(checkpoint) as lease:`.

    Attributes:
        inner: the async lease, for the bridge's loop.
    """

    def __init__(self, owner: _Owner, inner: AsyncLease) -> None:
        self.inner = inner
        self._owner = owner

    @property
    def checkpoint(self) -> Checkpoint:
        """What is leased."""
        return self.inner.checkpoint

    @property
    def lost(self) -> bool:
        """Whether it could not be renewed in time."""
        return self.inner.lost

    @property
    def pinned(self) -> bool:
        """Whether files are held open instead, since the run cannot be written."""
        return self.inner.pinned

    def __enter__(self) -> Self:
        self._owner._run(self.inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner._give_up(self)

    @overload
    def load(self, *, into: None = None, **options: Unpack[LoadOptions]) -> Any: ...

    @overload
    def load(self, *, into: object, **options: Unpack[LoadOptions]) -> Checkpoint: ...

    def load(self, *, into: Any = None, **options: Unpack[LoadOptions]) -> Any:
        """Load the leased checkpoint; see `aiockpt.Lease.load`."""

        async def load() -> Any:
            found: Any = await self.inner.load(into=into, **options)
            return found

        return self._owner._run(load)

    def read_file(self, name: str) -> bytes:
        """One of the user's own files that were committed with it; see `aiockpt.Catalog.read_file`."""
        return self._owner._run(lambda: self.inner.read_file(name))
