"""Loading as a catalog does it: find the checkpoint, read it, hand it over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from ._devices import MapLocation
from ._finding import Finder, Found
from ._manifest import Manifest
from ._memory import ByteBudget
from .checkpoint import Checkpoint
from .progress import look_at_load
from .reader import CheckpointReader, Loaded, LoadProgress
from .storage import Store

__all__ = ["LoadOptions", "Loader"]


class LoadOptions(TypedDict, total=False):
    """How to load; see `Catalog.load`."""

    paths: Iterable[str] | None
    map_location: MapLocation
    strict: bool
    cast: bool
    verify: bool
    atomic: bool
    progress: Callable[[LoadProgress], object] | bool | None


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads checkpoints of one run."""

    finder: Finder
    store: Store
    """Where files are read from: the run, or some of its files that are open already."""
    budget: ByteBudget | None
    allow_pickle: bool

    def reader(self, checkpoint: Checkpoint, manifest: Manifest) -> CheckpointReader:
        """A reader of a checkpoint that was found."""
        return CheckpointReader(
            self.store,
            checkpoint.name,
            step=checkpoint.step,
            budget=self.budget,
            allow_pickle=self.allow_pickle,
            manifest=manifest,
        )

    async def load(
        self, checkpoint: Checkpoint | int | None, into: Any, options: LoadOptions
    ) -> tuple[Checkpoint, Loaded] | None:
        """Load a checkpoint, None for the newest valid one; None if there is no checkpoint at all."""

        async def use(checkpoint: Checkpoint, manifest: Manifest) -> Loaded:
            return (await self.load_found((checkpoint, manifest), into, options))[1]

        if checkpoint is not None:
            return await self.load_found(await self.finder.resolve(checkpoint), into, options)
        newest = await self.finder.newest(use)
        if newest is None:
            return None
        found, loaded, skipped = newest
        return _filled(found, loaded, skipped), loaded

    async def load_found(self, found: Found, into: Any, options: LoadOptions) -> tuple[Checkpoint, Loaded]:
        """Load a checkpoint that was found."""
        loaded = await self._load(self.reader(*found), into, **options)
        return _filled(found[0], loaded, ()), loaded

    async def _load(
        self,
        reader: CheckpointReader,
        into: Any,
        *,
        paths: Iterable[str] | None = None,
        map_location: MapLocation = None,
        strict: bool = True,
        cast: bool = False,
        verify: bool = True,
        atomic: bool = False,
        progress: Callable[[LoadProgress], object] | bool | None = None,
    ) -> Loaded:
        plan = await reader.plan(into, paths=paths, map_location=map_location, strict=strict, cast=cast)
        async with look_at_load(reader.step, progress) as told:
            await reader.read(plan, verify=verify, atomic=atomic, progress=told)
        return await reader.apply(plan)


def _filled(checkpoint: Checkpoint, loaded: Loaded, skipped: tuple[tuple[int, str], ...]) -> Checkpoint:
    return replace(checkpoint, values=loaded.values, report=loaded.report, skipped=skipped)
