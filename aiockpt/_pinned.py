"""What nobody may delete: checkpoints that a reader has leased or somebody promoted."""

from __future__ import annotations

from collections.abc import Collection

from ._aliases import promoted
from ._leases import leased
from .storage import Store

__all__ = ["pinned"]


async def pinned(store: Store) -> Collection[tuple[str, str]]:
    """(folder, save id) of each.

    Raises:
        OSError: it cannot be known now; nothing may be deleted then.
    """
    return await leased(store) | await promoted(store)
