"""The short forms: one call for one run, with a catalog of its own."""

from __future__ import annotations

import os
from typing import Any, Unpack, overload

from ._memory import ByteBudget
from ._watching import Watch, WatchOptions
from .catalog import Catalog, LoadOptions, Valid
from .checkpoint import Checkpoint
from .storage import Store

__all__ = ["latest", "load", "watch"]


async def latest(
    run: str | os.PathLike[str] | Store, valid: Valid = "manifest", *, step_format: str | None = None
) -> Checkpoint | None:
    """The newest valid checkpoint of a run, or None; see `Catalog.latest`."""
    async with Catalog(run, step_format=step_format) as catalog:
        return await catalog.latest(valid)


@overload
async def load(
    run: str | os.PathLike[str] | Store,
    checkpoint: Checkpoint | int | None = None,
    *,
    into: None = None,
    budget: int | ByteBudget | None = None,
    allow_pickle: bool = False,
    step_format: str | None = None,
    **options: Unpack[LoadOptions],
) -> Any: ...


@overload
async def load(
    run: str | os.PathLike[str] | Store,
    checkpoint: Checkpoint | int | None = None,
    *,
    into: object,
    budget: int | ByteBudget | None = None,
    allow_pickle: bool = False,
    step_format: str | None = None,
    **options: Unpack[LoadOptions],
) -> Checkpoint: ...


async def load(
    run: str | os.PathLike[str] | Store,
    checkpoint: Checkpoint | int | None = None,
    *,
    into: Any = None,
    budget: int | ByteBudget | None = None,
    allow_pickle: bool = False,
    step_format: str | None = None,
    **options: Unpack[LoadOptions],
) -> Any:
    """Load a checkpoint of a run, the newest valid one by default; see `Catalog.load`."""
    async with Catalog(run, budget=budget, allow_pickle=allow_pickle, step_format=step_format) as catalog:
        found: Any = await catalog.load(checkpoint, into=into, **options)
        return found


def watch(
    run: str | os.PathLike[str] | Store,
    *,
    after: int | Checkpoint | None = None,
    poll: float = 1.0,
    every: bool = False,
    follow: str = "latest",
    cursor: str | None = None,
    ttl: float = 60.0,
    allow_pickle: bool = False,
    step_format: str | None = None,
) -> Watch:
    """The checkpoints of a run as they are committed, each leased meanwhile; see `Catalog.watch`.

        async for checkpoint in aiockpt.watch("runs/digits", after=400):
            await checkpoint.load(into={"model": model})

    Args:
        run: the run's folder or URL, or a store; it need not be there yet.
        allow_pickle: whether pickled values may be unpickled.
        step_format: names of the steps' folders.
        after: see `Catalog.watch`, as for the others.
        poll: seconds between two looks.
        every: all in place of the newest.
        follow: `latest` or `alias:NAME`.
        cursor: a name for `checkpoint.ack()`.
        ttl: of the leases, in seconds.

    Raises:
        UsageError: an option is wrong.
    """
    options = WatchOptions(after=after, poll=poll, every=every, follow=follow, cursor=cursor, ttl=ttl)
    catalog = Catalog(run, allow_pickle=allow_pickle, step_format=step_format)
    return Watch(catalog.loader, options, finish=catalog.aclose)
