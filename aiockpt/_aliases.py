"""Aliases: names for checkpoints, such as `production`. Retention never deletes what one points at.

An alias is a small file, `aliases/<name>.json`, replaced in one step: a reader sees the
old or the new one, and of two who promote at once the last one wins. As with a lease, it
is written first and the checkpoint looked at after that: whoever deletes looks at the
aliases again once the step is out of sight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass
from typing import Any, Final

from ._clock import look
from ._finding import Finder
from ._log import log
from .checkpoint import Checkpoint
from .errors import CheckpointError, CorruptCheckpointError, StepNotFoundError, StorageError, UsageError
from .storage import Store

__all__ = ["Aliases", "check_alias", "promoted"]


FOLDER: Final = "aliases"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LIMIT = 1 << 16
"""The longest alias that is read."""
TRIES = 5
"""How often a step that was moved aside for a moment is looked for."""
_SAVE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Pointer:
    """What an alias says."""

    name: str
    """The checkpoint's folder."""
    step: int
    save_id: str

    def facts(self) -> dict[str, Any]:
        """For the file."""
        return {"name": self.name, "step": self.step, "save_id": self.save_id}

    @classmethod
    def decode(cls, data: bytes) -> Pointer:
        """What the file of an alias says.

        Raises:
            ValueError: it is none.
        """
        try:
            found: Any = json.loads(data)
            sound = isinstance(found["name"], str) and type(found["step"]) is int
            sound = sound and _SAVE_ID.fullmatch(found["save_id"]) is not None
            pointer = cls(found["name"], found["step"], found["save_id"])
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        if not sound:
            raise ValueError("not an alias")
        return pointer


class Aliases:
    """The aliases of one run.

    Args:
        finder: of the run.
    """

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self._store = finder.store

    async def promote(self, checkpoint: Checkpoint | int, alias: str) -> Checkpoint:
        """Let an alias point at a checkpoint; see `Catalog.promote`."""
        key = check_alias(alias)
        found = (await self._finder.resolve(checkpoint))[0]
        old = await self._get(key)
        record = {
            "format": 0,
            "alias": alias,
            **Pointer(found.name, found.step, found.save_id).facts(),
            "since": time.time(),
            "previous": _previous(old),
        }
        data = json.dumps(record, indent=2).encode() + b"\n"
        try:
            await self._store.put(key, data)
        except OSError as error:
            raise StorageError.wrap(error, "write", file=key, step=found.step) from error
        try:
            return (await self._finder.resolve(found))[0]
        except BaseException:
            await self._take_back(key, data, old)
            raise

    async def alias(self, alias: str) -> Checkpoint:
        """The checkpoint that an alias points at; see `Catalog.alias`."""
        key = check_alias(alias)
        for tries in range(TRIES):
            data = await self._get(key)
            if data is None:
                raise StepNotFoundError(f"{self._store.url} has no alias {alias!r}", file=key)
            try:
                return await self._follow(key, data)
            except StepNotFoundError:
                if tries == TRIES - 1:
                    raise
                await asyncio.sleep(0.02)  # moved aside, it comes back once the alias was seen
        raise AssertionError

    async def aliases(self) -> dict[str, Checkpoint]:
        """Every alias that points at a checkpoint; see `Catalog.aliases`."""
        try:
            entries = await self._store.list(FOLDER)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StorageError.wrap(error, "list", file=FOLDER) from error
        found: dict[str, Checkpoint] = {}
        for name in sorted(filter(None, (_alias_of(entry.name) for entry in entries))):
            try:
                found[name] = await self.alias(name)
            except (StepNotFoundError, CorruptCheckpointError) as error:
                log.warning("%s: the alias %s is passed over: %s", self._store.url, name, error)
        return found

    async def previous(self, alias: str) -> Checkpoint:
        """The checkpoint that an alias pointed at before the last time it was moved.

        Raises:
            StepNotFoundError: there is no such alias, or nothing was before; or it is gone.
            As `alias`.
        """
        key = check_alias(alias)
        data = await self._get(key)
        try:
            before = None if data is None else json.loads(data).get("previous")
        except (ValueError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"not an alias: {error}", file=key) from error
        if before is None:
            message = f"{self._store.url}: nothing is known from before the alias {alias!r} was last moved"
            raise StepNotFoundError(message, file=key)
        return await self._follow(key, json.dumps(before).encode())

    async def demote(self, alias: str) -> None:
        """Remove an alias; see `Catalog.demote`."""
        key = check_alias(alias)
        try:
            await self._store.delete(key)
        except OSError as error:
            raise StorageError.wrap(error, "remove", file=key) from error

    async def _follow(self, key: str, data: bytes) -> Checkpoint:
        try:
            pointer = Pointer.decode(data)
        except ValueError as error:
            raise CorruptCheckpointError(f"not an alias: {error}", file=key) from error
        return await self._finder.named(pointer.name, pointer.save_id)

    async def _get(self, key: str) -> bytes | None:
        try:
            return await self._store.get(key, limit=LIMIT)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError.wrap(error, "read", file=key) from error

    async def _take_back(self, key: str, ours: bytes, old: bytes | None) -> None:
        """The checkpoint went meanwhile: the alias is as it was, unless somebody else changed it."""
        with contextlib.suppress(OSError, CheckpointError):
            if await self._get(key) == ours:
                await (self._store.delete(key) if old is None else self._store.put(key, old))


async def promoted(store: Store) -> set[tuple[str, str]]:
    """(folder, save id) of what aliases point at: never to be deleted.

    Only for the run's writer: it writes a probe.

    Raises:
        OSError: nobody can tell what is promoted: the store failed, or an alias is damaged.
    """
    found: set[tuple[str, str]] = set()
    for entry in (await look(store, FOLDER)).entries:
        if _alias_of(entry.name) is None:
            continue
        key = f"{FOLDER}/{entry.name}"
        try:
            pointer = Pointer.decode(await store.get(key, limit=LIMIT))
        except FileNotFoundError:
            continue
        except ValueError as error:
            message = (
                f"{key} is damaged ({error}): until it is promoted anew or removed nothing can be deleted"
            )
            raise StorageError(message, file=key) from error
        found.add((pointer.name, pointer.save_id))
    return found


def _previous(old: bytes | None) -> dict[str, Any] | None:
    try:
        return None if old is None else Pointer.decode(old).facts()
    except ValueError:
        return None


def _alias_of(filename: str) -> str | None:
    name = filename.removesuffix(".json")
    return name if name != filename and NAME.fullmatch(name) else None


def check_alias(alias: object) -> str:
    """The key of an alias.

    Raises:
        UsageError: it is no name for one.
    """
    if not isinstance(alias, str) or not NAME.fullmatch(alias):
        raise UsageError(f"an alias is letters, digits, '.', '_' and '-', at most 64, not {alias!r:.80}")
    return f"{FOLDER}/{alias}.json"
