"""Catalog and the short forms, for code that is not async."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from .. import _short, catalog
from ..checkpoint import Checkpoint
from ._bridge import Bridge
from ._door import Door, blocking, like, once
from ._lease import Lease

__all__ = ["Catalog", "Lease", "latest", "load"]


class Catalog(Door[catalog.Catalog]):
    """The checkpoints of one run: `aiockpt.Catalog` with methods that block.

    A context manager; entering it is not required. Several threads may use it at once.

    Args:
        run: the run's folder or URL, or a store.
        **options: see `aiockpt.Catalog`.

    Raises:
        UsageError: an option is wrong.
    """

    what = "catalog"

    @like(catalog.Catalog.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(catalog.Catalog(*args, **options))
        self._leases: set[Lease] = set()

    steps = blocking(catalog.Catalog.steps)
    checkpoints = blocking(catalog.Catalog.checkpoints)
    latest = blocking(catalog.Catalog.latest)
    get = blocking(catalog.Catalog.get)
    load = blocking(catalog.Catalog.load)
    restore = blocking(catalog.Catalog.restore)
    verify = blocking(catalog.Catalog.verify)
    read_file = blocking(catalog.Catalog.read_file)
    promote = blocking(catalog.Catalog.promote)
    alias = blocking(catalog.Catalog.alias)
    aliases = blocking(catalog.Catalog.aliases)
    demote = blocking(catalog.Catalog.demote)
    prune = blocking(catalog.Catalog.prune)
    leases = blocking(catalog.Catalog.leases)
    wait_for = blocking(catalog.Catalog.wait_for)

    def lease(
        self, checkpoint: Checkpoint | int | None = None, *, ttl: float = 60.0, purpose: str = ""
    ) -> Lease:
        """Keep a checkpoint from being deleted: `with catalog.lease() as lease:`.

        A thread of the catalog renews it, whatever the caller's does meanwhile. See
        `aiockpt.Catalog.lease`.

        Raises:
            UsageError: an option is wrong.
        """
        lease = Lease(self, self._inner.lease(checkpoint, ttl=ttl, purpose=purpose))
        self._leases.add(lease)
        return lease

    def _give_up(self, lease: Lease) -> None:
        """Let a lease go, on a loop that is still there."""
        self._leases.discard(lease)
        bridge = self._bridge
        if bridge is not None and not self._closed:
            bridge.check()
            bridge.run(lambda: lease.inner.__aexit__(None, None, None), patient=True, gone=lambda: None)

    async def _finish(self) -> None:
        leases, self._leases = self._leases, set()
        for lease in leases:
            await lease.inner.__aexit__(None, None, None)
        await self._inner.aclose()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of leases and of the store, if it was opened here; any number of times."""
        bridge, closed, self._closed = self._bridge, self._closed, True
        if bridge is None or closed:
            return
        bridge.check()
        try:
            bridge.run(self._finish, patient=True, gone=lambda: None)
        finally:
            bridge.close()

    def __del__(self) -> None:
        bridge: Bridge | None = getattr(self, "_bridge", None)
        if bridge is not None and not self._closed:
            bridge.wind_down(self._inner.aclose)

    def _make_bridge(self) -> Bridge:
        return Bridge(self.what)


latest = once(_short.latest)
load = once(_short.load)
