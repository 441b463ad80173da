"""What nobody may delete: checkpoints that a reader has leased or somebody promoted."""

from __future__ import annotations

from collections.abc import Collection

from ._aliases import promoted
from ._leases import leased
from .storage import Store

__all__ = ["pinned", "pinned_if_any"]


async def pinned(store: Store) -> Collection[tuple[str, str]]:
    """(folder, save id) of each.

    Raises:
        OSError: it cannot be known now; nothing may be deleted then.
    """
    return await leased(store) | await promoted(store)


async def pinned_if_any(store: Store) -> Collection[tuple[str, str]]:
    """The same, without a trace in a run where nobody has ever leased or promoted anything.

    On a network file system the very first lease of a run may be seen too late.

    Raises:
        OSError: as `pinned`.
    """
    names = {entry.name for entry in await store.list()}
    return await pinned(store) if names & {"leases", "aliases"} else ()
