"""Files that belong to a whole run: written once, named with their digests in `run.json`.

The content is read and fixed when the saver enters; it is written in the background,
like a save, while training has begun. A file that is there and has the digest that
`run.json` says is not written again, so a resumed run costs one reading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ._manifest import digest
from ._records import UserFile, check_files, content_of
from ._threads import Lane, offload
from .errors import UsageError
from .storage import Store

__all__ = ["FOLDER", "RunFiles"]

FOLDER = "files"
"""Where they lie in the run."""


class RunFiles:
    """The `run_files=` of one saver.

    Args:
        files: content, or the path of a file to copy, by name.

    Raises:
        UsageError: a name is not usable.
    """

    def __init__(self, files: Mapping[str, UserFile]) -> None:
        self._given = check_files(files)
        self._data: dict[str, bytes] = {}
        self.record: dict[str, dict[str, Any]] = {}
        """Size and digest by name, as in `run.json`."""

    async def read(self) -> None:
        """Fix the content.

        Raises:
            OSError: a file to copy cannot be read.
        """
        for name, content in self._given.items():
            self._data[name], self.record[name] = await offload(_take, content, lane=Lane.BULK)
        self._given.clear()

    def merge(self, found: Any) -> dict[str, dict[str, Any]]:
        """What `run.json` is to say of files, given what it says.

        Raises:
            UsageError: a file of the run has other content.
        """
        merged = dict(found) if isinstance(found, dict) else {}
        for name, record in self.record.items():
            if merged.setdefault(name, record) != record:
                message = (
                    f"run_files: {name} is not what this run began with; run files are written once a run. "
                    "Use a new run folder, or save it with each step (files=)"
                )
                raise UsageError(message, file=f"{FOLDER}/{name}")
        return merged

    async def write(self, store: Store) -> None:
        """Write what is not there yet.

        Raises:
            OSError: the store failed.
        """
        while self._data:
            name = next(iter(self._data))
            if not await self._there(store, name):
                await store.put(f"{FOLDER}/{name}", self._data[name])
            del self._data[name]

    async def _there(self, store: Store, name: str) -> bool:
        with contextlib.suppress(OSError):
            record = self.record[name]
            data = await store.get(f"{FOLDER}/{name}", limit=record["size"])
            return bool(await offload(digest, data, lane=Lane.BULK) == record["digest"])
        return False


def _take(content: Any) -> tuple[bytes, dict[str, Any]]:
    data = content_of(content)
    return data, {"size": len(data), "digest": digest(data)}
