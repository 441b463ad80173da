"""A checkpoint's files, opened at once and held: what is open can be read when its name is gone."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, cast

from .errors import StepNotFoundError, StorageError
from .storage import Source, Store

__all__ = ["Pins"]


class Pins:
    """Open files of one folder of a store.

    Args:
        store: the run.
        folder: the checkpoint's.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._sources: dict[str, Source] = {}

    async def open(self, names: Sequence[str], step: int) -> None:
        """Open all of them.

        Raises:
            StepNotFoundError: one is gone already.
            StorageError: one cannot be opened.
        """
        for name in names:
            key = f"{self._folder}/{name}"
            try:
                self._sources[key] = await self._store.open(key)
            except FileNotFoundError as error:
                message = f"step {step} was deleted before its files were open"
                raise StepNotFoundError(message, step=step, file=key) from error
            except OSError as error:
                raise StorageError.wrap(error, "open", file=key, step=step) from error

    def view(self) -> Store:
        """The store, as seen through the open files."""
        return cast(Store, _View(self._store, self._sources))

    async def aclose(self) -> None:
        """Let go of all of them."""
        while self._sources:
            await self._sources.popitem()[1].aclose()


class _View:
    """A store that reads some of its files through what is open."""

    def __init__(self, store: Store, sources: dict[str, Source]) -> None:
        self._inner = store
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open(self, key: str) -> Source:
        source = self._sources.get(key)
        return await self._inner.open(key) if source is None else _Shared(source)

    async def get(self, key: str, *, limit: int = 1 << 30) -> bytes:
        source = self._sources.get(key)
        if source is None:
            return await self._inner.get(key, limit=limit)
        if source.size > limit:
            raise OSError(errno.EFBIG, f"has more than {limit} bytes", key)
        data = bytearray(source.size)
        if data:
            await source.read_into(0, [memoryview(data)])
        return bytes(data)


class _Shared:
    """A file that is closed by its owner, not by its reader."""

    def __init__(self, source: Source) -> None:
        self.size = source.size
        self._source = source

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        await self._source.read_into(offset, buffers)

    async def aclose(self) -> None:
        pass
