"""Cursors: how far a reader of a run has come, remembered in the run.

A cursor is a small file, `cursors/<name>.json`, replaced in one step. It names the
checkpoint that was dealt with last; it keeps nothing from being deleted.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any, Final

from .checkpoint import Checkpoint
from .errors import CorruptCheckpointError, StorageError, UsageError
from .storage import Store

__all__ = ["Cursor"]

FOLDER: Final = "cursors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LIMIT = 1 << 16
"""The longest cursor that is read."""


class Cursor:
    """One reader's place in a run.

    Args:
        store: the run.
        name: letters, digits, `.`, `_` and `-`.

    Raises:
        UsageError: it is no name for a cursor.
    """

    def __init__(self, store: Store, name: object) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            message = f"a cursor is letters, digits, '.', '_' and '-', at most 64, not {name!r:.80}"
            raise UsageError(message)
        self._store = store
        self._name = name
        self._key = f"{FOLDER}/{name}.json"

    async def get(self) -> Checkpoint | None:
        """The checkpoint that was dealt with last: where it lay, its step and save id, and no more.

        Raises:
            CorruptCheckpointError: the file is no cursor.
            StorageError: the store failed.
        """
        try:
            data = await self._store.get(self._key, limit=LIMIT)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError.wrap(error, "read", file=self._key) from error
        try:
            return _decode(data, self._store.url)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"not a cursor ({error}): remove it to begin anew"
            raise CorruptCheckpointError(message, file=self._key) from error

    async def put(self, checkpoint: Checkpoint) -> None:
        """Remember a checkpoint, durably.

        Raises:
            StorageError: the store failed; the old one is remembered, or this one.
        """
        record = {
            "format": 0,
            "cursor": self._name,
            "name": checkpoint.name,
            "step": checkpoint.step,
            "generation": checkpoint.generation,
            "save_id": checkpoint.save_id,
            "since": time.time(),
        }
        try:
            await self._store.put(self._key, json.dumps(record, indent=2).encode() + b"\n")
        except OSError as error:
            raise StorageError.wrap(error, "write", file=self._key, step=checkpoint.step) from error


def _decode(data: bytes, run: str) -> Checkpoint:
    found: Any = json.loads(data)
    numbers = found["step"], found["generation"]
    texts = found["name"], found["save_id"]
    if not all(type(number) is int for number in numbers) or not all(type(text) is str for text in texts):
        raise ValueError("a field is of the wrong type")
    return Checkpoint(
        run=run,
        name=found["name"],
        step=found["step"],
        save_id=found["save_id"],
        run_id="",
        time=0.0,
        nbytes=0,
        generation=found["generation"],
    )
