"""Deleting by hand what a policy lets go."""

from __future__ import annotations

from functools import partial

from ._door import translate
from ._finding import Finder
from ._manifest import Manifest
from ._pinned import pinned, pinned_if_any
from ._retention import Retention
from .checkpoint import Checkpoint
from .policies import Keep
from .storage import Store

__all__ = ["prune"]


async def prune(store: Store, finder: Finder, keep: Keep, *, dry_run: bool) -> tuple[int, ...]:
    """The steps that went, or would go; see `Catalog.prune`."""
    newest = await finder.newest(_nothing)
    if newest is None:
        return ()
    run_id = newest[0].run_id
    # Where nobody ever leased or promoted anything, a dry run leaves no trace.
    look = pinned_if_any if dry_run else pinned
    retention = Retention(store, finder.checkpoints, partial(look, store))
    try:
        doomed = await retention.plan(keep, run_id)
    except OSError as error:
        raise translate(error, "cannot look for what may go in", step=None) from error
    if dry_run:
        return tuple(checkpoint.step for checkpoint in doomed)
    return tuple(await retention.apply(keep, run_id))


async def _nothing(_: Checkpoint, __: Manifest) -> None:
    return None
