"""A store that goes wrong at the operation of your choice."""

from __future__ import annotations

import asyncio
import builtins
import errno as errnos
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from .._threads import Lane, offload
from ..storage import Attempt, Entry, LockFile, Sink, Source, Store, Wanted, WantedStep
from ._faults import Faults, Kind

__all__ = ["FaultyStore"]

T = TypeVar("T")

ALIGNMENT = 4096
"""Half a write is cut to this, so that the torn half is still a legal write."""


class FaultyStore:
    """Pass everything on to `inner`, count it, and fail at operation `fail_at`.

    Operations of the store itself, its attempts, sinks and sources count alike. An
    operation is written as `<object>.<method> <subject>`: `store.list leases`,
    `attempt.create model`, `sink.write model@4096+8192`, `source.read_into step/model@0+64`.

    `tear` writes half of what a `sink.write` or `attempt.put` was given; anything else
    is whole or nothing by contract, so there it is the same as `error`.

    Args:
        inner: a working store.
        fail_at: index into `operations`; None: nothing fails.
        kind: what happens there.
        errno: of the error raised (`full` always says ENOSPC).
        on_fault: called for kind `cancel`; say `task.cancel`.

    Attributes:
        stalled: set once an operation stalls.
        release: set it to let the stalled operation go on.
    """

    def __init__(
        self,
        inner: Store,
        fail_at: int | None = None,
        kind: Kind = "error",
        *,
        errno: int = errnos.EIO,
        on_fault: Callable[[], object] | None = None,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.faults = Faults(fail_at, kind, errno=errno, on_fault=on_fault)
        self.stalled = asyncio.Event()
        self.release = asyncio.Event()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.faults.fail_at}, {self.faults.kind!r})"

    @property
    def operations(self) -> list[str]:
        """Every operation so far, in the order they began."""
        return self.faults.operations

    @property
    def fired(self) -> bool:
        """Whether the fault has happened."""
        return self.faults.fired

    def heal(self) -> None:
        """Let everything work from now on, stalled operations too."""
        self.faults.heal()
        self.release.set()

    async def list(self, folder: str = "") -> list[Entry]:
        return await self.call("store.list", folder, lambda: self.inner.list(folder))

    async def get(self, key: str, *, limit: int = 1 << 30) -> bytes:
        return await self.call("store.get", key, lambda: self.inner.get(key, limit=limit))

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        put = self.inner.put
        await self.call("store.put", key, lambda: put(key, data, if_absent=if_absent), writes=True)

    async def delete(self, key: str) -> None:
        await self.call("store.delete", key, lambda: self.inner.delete(key))

    async def delete_folder(self, folder: str) -> None:
        await self.call("store.delete_folder", folder, lambda: self.inner.delete_folder(folder))

    async def open(self, key: str) -> Source:
        source = await self.call("store.open", key, lambda: self.inner.open(key), lose=_close)
        return _FaultySource(self, source, key)

    async def prepare(self) -> None:
        await self.call("store.prepare", self.url, self.inner.prepare, writes=True)

    async def room(self) -> int | None:
        return await self.call("store.room", self.url, self.inner.room)

    async def begin(self, name: str, save_id: str) -> Attempt:
        begin = self.inner.begin
        attempt = await self.call("store.begin", name, lambda: begin(name, save_id), writes=True)
        return _FaultyAttempt(self, attempt)

    async def attach(self, name: str, save_id: str) -> Attempt:
        attempt = await self.call("store.attach", name, lambda: self.inner.attach(name, save_id))
        return _FaultyAttempt(self, attempt)

    async def sweep(self, *, unless: WantedStep | None = None) -> builtins.list[str]:
        return await self.call("store.sweep", self.url, lambda: self.inner.sweep(unless=unless))

    async def retire(self, name: str, *, unless: Wanted | None = None) -> bool:
        return await self.call("store.retire", name, lambda: self.inner.retire(name, unless=unless))

    async def lock(self) -> LockFile | bytes:
        lock = await self.call("store.lock", self.url, self.inner.lock, writes=True, lose=_unlock)
        return lock if isinstance(lock, bytes) else _FaultyLock(self, lock)

    async def aclose(self) -> None:
        await self.call("store.aclose", self.url, self.inner.aclose)

    async def call(
        self,
        operation: str,
        subject: str,
        do: Callable[[], Awaitable[T]],
        *,
        writes: bool = False,
        tear: Callable[[], Awaitable[object]] | None = None,
        lose: Callable[[T], Awaitable[object]] | None = None,
    ) -> T:
        """Count one operation and do it, or what the fault makes of it."""
        fault = self.faults.next(f"{operation} {subject}", writes=writes)
        if fault == "stall":
            self.stalled.set()
            await self.release.wait()
        if fault is None or fault == "stall":
            return await do()
        if fault == "after":
            reply = await do()
            if lose is not None:
                await lose(reply)
        elif fault == "tear" and tear is not None:
            await tear()
        raise self.faults.error(subject)


async def _unlock(lock: LockFile | bytes) -> None:
    """Nobody got this one, so nobody else can let it go."""
    if not isinstance(lock, bytes):
        await offload(lambda: lock.release(forget=not lock.read()), lane=Lane.CONTROL)


async def _close(source: Source) -> None:
    """Nobody got this one, so nobody else can give its descriptor back."""
    await source.aclose()


async def _discard(sink: Sink) -> None:
    await sink.discard()


class _FaultyLock:
    """Blocking, for threads: here `stall` and `tear` are the same as `error`."""

    def __init__(self, store: FaultyStore, inner: LockFile) -> None:
        self.place = inner.place
        self._inner = inner
        self._store = store

    def read(self) -> bytes:
        return self._call("lock.read", self._inner.read)

    def write(self, record: bytes) -> None:
        self._call("lock.write", lambda: self._inner.write(record), writes=True)

    def release(self, *, forget: bool) -> None:
        try:
            self._call("lock.release", lambda: self._inner.release(forget=forget))
        except OSError:
            self._inner.release(forget=forget)  # a lock that cannot be let go would outlive the test

    def _call(self, operation: str, do: Callable[[], T], *, writes: bool = False) -> T:
        fault = self._store.faults.next(f"{operation} {self._store.url}", writes=writes)
        if fault is None:
            return do()
        if fault == "after":
            do()
        raise self._store.faults.error(self._store.url)


class _FaultyAttempt:
    def __init__(self, store: FaultyStore, inner: Attempt) -> None:
        self.name = inner.name
        self.save_id = inner.save_id
        self.prefix = inner.prefix
        self._inner = inner
        self._call = store.call
        self._store = store

    async def create(self, filename: str, nbytes: int) -> Sink:
        create = self._inner.create
        sink = await self._call(
            "attempt.create", filename, lambda: create(filename, nbytes), writes=True, lose=_discard
        )
        return _FaultySink(self._store, sink, filename)

    async def put(self, filename: str, data: bytes) -> None:
        put, half = self._inner.put, data[: len(data) // 2]
        await self._call(
            "attempt.put",
            filename,
            lambda: put(filename, data),
            writes=True,
            tear=lambda: put(filename, half),
        )

    async def commit(self, manifest: bytes) -> None:
        await self._call("attempt.commit", self.name, lambda: self._inner.commit(manifest), writes=True)

    async def abort(self) -> None:
        await self._call("attempt.abort", self.name, self._inner.abort)


class _FaultySink:
    def __init__(self, store: FaultyStore, inner: Sink, filename: str) -> None:
        self._inner = inner
        self._call = store.call
        self._filename = filename

    async def write(self, offset: int, data: memoryview) -> None:
        write, half = self._inner.write, data.nbytes // 2 // ALIGNMENT * ALIGNMENT
        await self._call(
            "sink.write",
            f"{self._filename}@{offset}+{data.nbytes}",
            lambda: write(offset, data),
            writes=True,
            tear=lambda: write(offset, data[:half]),
        )

    async def finish(self, nbytes: int) -> None:
        await self._call("sink.finish", self._filename, lambda: self._inner.finish(nbytes), writes=True)

    async def discard(self) -> None:
        try:
            await self._call("sink.discard", self._filename, self._inner.discard)
        except OSError:
            await self._inner.discard()  # no sink's discard fails, and nobody would call it again


class _FaultySource:
    def __init__(self, store: FaultyStore, inner: Source, key: str) -> None:
        self.size = inner.size
        self._inner = inner
        self._call = store.call
        self._key = key

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        await self._call(
            "source.read_into",
            f"{self._key}@{offset}+{nbytes}",
            lambda: self._inner.read_into(offset, buffers),
        )

    async def aclose(self) -> None:
        try:
            await self._call("source.aclose", self._key, self._inner.aclose)
        except OSError:
            await self._inner.aclose()  # an error of close() closes
            raise
