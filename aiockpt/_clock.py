"""Look into a folder of a run, and know that what is seen is not older than the question.

Listings of network file systems may be late, and clocks of hosts differ. So whoever must
not miss an entry first puts a probe there and lists until he sees it: what was written
before the probe is seen then, too. And whoever asks for the age of an entry compares its
time with the probe's, both given by the store: the clocks of hosts are never asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import uuid
from dataclasses import dataclass

from .storage import Entry, Store

__all__ = ["View", "look"]

PROBE = re.compile(r"probe-[0-9a-f]{32}")
TRIES = 60
"""How often a folder is listed until the probe is seen."""
PAUSE = 0.5
"""The longest pause between two of these, in seconds."""
OLD_SECONDS = 600.0
"""A probe that is older was left behind by somebody who died."""


@dataclass(frozen=True, slots=True)
class View:
    """What a folder held, and when."""

    entries: list[Entry]
    """Its files, without probes."""
    now: float | None
    """The store's time; None where the store does not say."""

    def age(self, entry: Entry) -> float | None:
        """Seconds since the entry was written, by the store's clock; None where that is unknown."""
        if self.now is None or entry.modified is None:
            return None
        return self.now - entry.modified


async def look(store: Store, folder: str) -> View:
    """List a folder's files, missing none that was written before this call. Makes the folder.

    Raises:
        OSError: the store failed, or its listings are too late to be of use (EAGAIN).
    """
    name = f"probe-{uuid.uuid4().hex}"
    key = f"{folder}/{name}"
    try:
        await store.put(key, b"")
        entries = await _until_seen(store, folder, name)
    finally:
        with contextlib.suppress(OSError):  # it will be removed as an old one
            await store.delete(key)
    probes = {entry.name: entry for entry in entries if PROBE.fullmatch(entry.name)}
    found = [entry for entry in entries if not entry.is_folder and entry.name not in probes]
    view = View(found, probes[name].modified)
    for probe in probes.values():
        age = view.age(probe)
        if age is not None and age > OLD_SECONDS:
            with contextlib.suppress(OSError):
                await store.delete(f"{folder}/{probe.name}")
    return view


async def _until_seen(store: Store, folder: str, name: str) -> list[Entry]:
    for number in range(TRIES):
        with contextlib.suppress(FileNotFoundError):  # the folder itself may be too new to be seen
            entries = await store.list(folder)
            if any(entry.name == name for entry in entries):
                return entries
        await asyncio.sleep(min(PAUSE, 0.005 * number))
    raise OSError(
        errno.EAGAIN, f"{os.strerror(errno.EAGAIN)}: listings are out of date", f"{store.url}/{folder}"
    )
