"""Data files of a checkpoint of our own, as foreign code reads bytes: blocking, by ranges, verified.

Whole pieces are read into one window and checked there; a conversion goes through a file
from front to back, so that each piece is read about once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from .._fetch import Place, piece_digests
from .._manifest import HEX, PIECE_BYTES, digest
from .._saved import Saved
from ..storage import Source
from ._leaf import view_of

__all__ = ["Shards"]


class Shards:
    """The data files of one checkpoint; made on the loop, read from one other thread at a time.

    Args:
        place: the checkpoint.
        saved: what it holds.
        nbytes: of the window, whole pieces.
        verify: whether headers and pieces are checked.
    """

    def __init__(self, place: Place, saved: Saved, nbytes: int, verify: bool) -> None:
        self._place = place
        self._records = saved.shards
        self._nbytes = nbytes
        self._verify = verify
        self._loop = asyncio.get_running_loop()
        self._window: torch.Tensor | None = None
        self._held: tuple[int, int] = (-1, 0)
        self._source: Source | None = None
        self._opened = -1

    def storage(self, number: int) -> _Shard:
        """A file's data section."""
        return _Shard(self, number)

    def read_into(self, number: int, offset: int, view: memoryview) -> None:
        """Fill the view with bytes of a file's data section."""
        while len(view):
            base = offset // self._nbytes * self._nbytes
            if self._held != (number, base):
                self._held = (-1, 0)
                self._wait(self._load(number, base))
                self._held = (number, base)
            assert self._window is not None
            at = offset - base
            take = min(len(view), self._nbytes - at)
            view[:take] = view_of(self._window)[at : at + take]
            view, offset = view[take:], offset + take

    def _wait(self, call: Coroutine[Any, Any, None]) -> None:
        """Let the loop do it, and wait in this thread."""
        asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _load(self, number: int, base: int) -> None:
        record = self._records[number]
        source = await self._open(number)
        size = min(self._nbytes, record.nbytes - base)
        view = self._memory()[:size]
        await self._place.read(source, record.name, record.header + base, [view])
        if not self._verify:
            return
        for index, found in enumerate(piece_digests([view]), base // PIECE_BYTES):
            if found != record.pieces[index * HEX : (index + 1) * HEX]:
                raise self._place.corrupt(
                    f"piece {index} of the data does not match its checksum", record.name
                )

    def _memory(self) -> memoryview:
        if self._window is None:
            self._window = torch.empty(self._nbytes, dtype=torch.uint8)
        return view_of(self._window)

    async def _open(self, number: int) -> Source:
        if self._opened == number and self._source is not None:
            return self._source
        await self.close()
        record = self._records[number]
        self._source = await self._place.open(record.name)
        self._opened = number
        self._place.check_size(self._source, record.name, record.size)
        if self._verify:
            header = bytearray(record.header)
            await self._place.read(self._source, record.name, 0, [memoryview(header)])
            if digest(bytes(header)) != record.header_digest:
                raise self._place.corrupt("the header does not match its checksum", record.name)
        return self._source

    async def close(self) -> None:
        """Let go of the open file."""
        source, self._source = self._source, None
        if source is not None:
            await self._place.close(source)


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file's data section."""

    shards: Shards
    number: int

    @property
    def nbytes(self) -> int:
        return self.shards._records[self.number].nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        self.shards.read_into(self.number, offset, view)
