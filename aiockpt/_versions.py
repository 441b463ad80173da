"""The versions of one reloader that are not gone yet, and their leases.

The lease of what serves tells everybody what this replica serves. The lease of the version
before is kept too: retention would else take away the way back.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Generic, TypeVar

from ._choices import Choices
from ._leases import Lease
from ._log import log
from ._reloadlog import Attempt
from ._serving import Serving, Version
from .catalog import Catalog
from .checkpoint import Checkpoint
from .errors import CheckpointError

__all__ = ["Versions"]

M = TypeVar("M")

REMEMBERED = 20
"""Checkpoints that served before, as places to go back to."""


class Versions(Generic[M]):
    """What serves, what served before, and what requests still use.

    Attributes:
        previous: the version before the one that serves.
        before: the checkpoints that served, oldest first, without the one that does.
    """

    def __init__(self, serving: Serving[M], catalog: Catalog, choices: Choices) -> None:
        self.previous: Version[M] | None = None
        self.before: list[Checkpoint] = []
        self._serving = serving
        self._catalog = catalog
        self._choices = choices
        self._held: list[Version[M]] = []
        self._undrained: dict[int, tuple[Version[M], Attempt]] = {}

    def put(self, version: Version[M], attempt: Attempt) -> None:
        """Let a version serve; the one before goes when its last request leaves."""
        old = self._serving.put(version)
        self._held.append(version)
        if old is not None:
            self.previous = old
            self.before = [*self.before[-REMEMBERED:], old.checkpoint]
            self._undrained[id(old)] = (old, attempt)

    def in_use(self, model: object) -> bool:
        """Whether a model is one of ours."""
        return model is not None and any(version.model is model for version in self._held)

    def draining(self) -> bool:
        """Whether an old version is still used, and not for too long."""
        now, limit = time.monotonic(), self._choices.drain_timeout
        old = [version for version, _ in self._undrained.values()]
        return any(now - (v.retired or now) < limit for v in old if not v.drained.is_set())

    def undrained(self) -> list[dict[str, Any]]:
        """What a status tells of the old ones."""
        return [version.facts() for version, _ in self._undrained.values() if version.users]

    async def tidy(self) -> None:
        """Note who has left; let go of leases that nobody needs."""
        for version, attempt in list(self._undrained.values()):
            if version.drained.is_set():
                del self._undrained[id(version)]
                attempt.drained(version.ended - (version.retired or version.ended))
        for version in list(self._held):
            needed = version is self._serving.current or version is self.previous
            if not needed and version.drained.is_set():
                self._held.remove(version)
                await self._let_go(version)
        for version in self._held:
            if version.lease is not None and version.lease.lost:
                await self._lease_again(version)

    async def relabel(self) -> None:
        """Let the leases say what serves here."""
        for version in self._held:
            if version.lease is not None:
                await version.lease.tell(self._purpose(version))

    def _purpose(self, version: Version[M]) -> str:
        return "serving" if version is self._serving.current else "served before"

    async def _let_go(self, version: Version[M]) -> None:
        lease, version.lease = version.lease, None
        if lease is not None:
            await lease.__aexit__(None, None, None)

    async def _lease_again(self, version: Version[M]) -> None:
        """The loop stood still for too long; what serves is in memory all the same."""
        await self._let_go(version)
        lease = Lease(self._catalog.loader, version.checkpoint, self._choices.ttl, self._purpose(version))
        try:
            await lease.__aenter__()
        except CheckpointError as error:
            url = self._catalog.store.url
            log.warning("%s: step %d is leased no more: %s", url, version.checkpoint.step, error)
        else:
            version.lease = lease

    async def close(self) -> None:
        """Nothing serves any more; wait for the requests that are under way, for so long."""
        current, self._serving.current = self._serving.current, None
        if current is not None:
            current.retire()
        try:
            async with asyncio.timeout(self._choices.drain_timeout):
                for version in self._held:
                    await version.drained.wait()
        except TimeoutError:
            left = sum(len(version.users) for version in self._held)
            log.warning("%s: the reloader is closed while %d requests use it", self._catalog.store.url, left)

    async def let_all_go(self) -> None:
        """Let go of all leases."""
        for version in self._held:
            await self._let_go(version)
