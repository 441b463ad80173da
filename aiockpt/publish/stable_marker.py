"""An empty file in the step's folder, for readers that wait for a name to appear."""

from __future__ import annotations

import contextlib

from .._manifest import MANIFEST_LIMIT, decode_manifest
from .._threads import Lane, offload
from ..checkpoint import Checkpoint
from ..storage import MANIFEST, Store
from . import Publisher, check_published_name

__all__ = ["StableMarker"]


class StableMarker(Publisher):
    """`STEP/STABLE` appears once the step is committed, never before.

    The step's manifest names the marker beforehand, so that readers of ours do not take it
    for damage. A step whose manifest does not, saved without this publisher, is left alone.

    Args:
        name: of the marker.

    Raises:
        UsageError: the name cannot be used.
    """

    repeats = True

    def __init__(self, name: str = "STABLE") -> None:
        self.marker: str = check_published_name(name)

    async def publish(self, store: Store, checkpoint: Checkpoint) -> None:
        if not await self._expected(store, checkpoint):
            return
        key = f"{checkpoint.name}/{self.marker}"
        with contextlib.suppress(FileExistsError):
            await store.put(key, b"", if_absent=True)
        if not await self._expected(store, checkpoint):
            # It was deleted meanwhile, and the marker has made its folder anew.
            await store.delete(key)
            if not await store.list(checkpoint.name):
                await store.delete_folder(checkpoint.name)

    async def _expected(self, store: Store, checkpoint: Checkpoint) -> bool:
        """Whether the step is there and its manifest tolerates the marker."""
        try:
            data = await store.get(f"{checkpoint.name}/{MANIFEST}", limit=MANIFEST_LIMIT)
        except FileNotFoundError:
            return False
        manifest = await offload(decode_manifest, data, lane=Lane.CONTROL)
        return self.marker in manifest.markers and manifest.save_id == checkpoint.save_id
