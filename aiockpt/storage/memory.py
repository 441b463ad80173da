"""Keep a run in this process's memory: `memory://name`, for tests and hand-overs.

It behaves as an object store does: there are no folders but what keys imply, nothing
can be renamed, and a step begins to exist when its manifest is put, last and never over
another. Hence several attempts for one step write side by side under its final name,
and file names carry the first digits of the save id.

An attempt is alive while the `Attempt` object that began it is, and its store is open:
what a lock is to a process, a reference is here. A forked child has its own copy.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .._threads import Lane, offload
from ..errors import UsageError
from . import (
    MANIFEST,
    Attempt,
    Entry,
    LockFile,
    Sink,
    Source,
    Wanted,
    WantedStep,
    check_filename,
    check_key,
    check_name,
    check_save_id,
)
from ._lock import MemoryLock

__all__ = ["MemoryStore", "open_url"]


def open_url(url: str) -> MemoryStore:
    """Open `memory://name`; the same name is the same run all over the process."""
    return MemoryStore(url.partition("://")[2])


def _error(code: int, key: str) -> OSError:
    return OSError(code, os.strerror(code), key)


@dataclass
class _Bucket:
    """The content of one run, shared by all the store objects of its name."""

    files: dict[str, bytes | bytearray] = field(default_factory=dict)
    modified: dict[str, float] = field(default_factory=dict)
    exists: bool = False
    lock: weakref.ref[MemoryLock] | None = None
    attempts: dict[tuple[str, str], _Upload] = field(default_factory=dict)

    def under(self, folder: str) -> Iterator[str]:
        start = f"{folder}/" if folder else ""
        return (key for key in list(self.files) if key.startswith(start))

    def put(self, key: str, data: bytes | bytearray, *, if_absent: bool) -> None:
        if if_absent and key in self.files:
            raise _error(errno.EEXIST, key)
        self.files[key] = data
        self.modified[key] = time.monotonic()
        self.exists = True

    def holder(self) -> MemoryLock | None:
        """Who holds the run's lock, if that one is still alive and in this process."""
        found = self.lock() if self.lock is not None else None
        return found if found is not None and found.alive() else None


@dataclass
class _Upload:
    """What the bucket knows of an unfinished attempt."""

    owner: weakref.ref[_MemoryAttempt]
    keys: set[str] = field(default_factory=set)

    def alive(self) -> bool:
        owner = self.owner()
        return owner is not None and not owner.store.closed


_BUCKETS: dict[str, _Bucket] = {}


class MemoryStore:
    """A run in memory.

    Args:
        name: shared by all stores of that name in this process; without it the run
            belongs to this object alone.
    """

    def __init__(self, name: str | None = None) -> None:
        if name == "":
            raise UsageError("memory:// needs a name, as in memory://run")
        self.url = f"memory://{name}" if name else f"memory://#{id(self):x}"
        self.closed = False
        self._bucket = _BUCKETS.setdefault(name, _Bucket()) if name else _Bucket()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def list(self, folder: str = "") -> list[Entry]:
        await _turn()
        start = len(check_key(folder, root=True)) + bool(folder)
        found: dict[str, Entry] = {}
        for key in self._bucket.under(folder):
            name, slash, _ = key[start:].partition("/")
            size = None if slash else len(self._bucket.files[key])
            modified = None if slash else self._bucket.modified.get(key)
            found[name] = Entry(name, size, bool(slash), modified)
        if not found and (folder or not self._bucket.exists):
            raise _error(errno.ENOENT, folder)
        return [found[name] for name in sorted(found)]

    async def get(self, key: str, *, limit: int = 1 << 30) -> bytes:
        await _turn()
        data = self._find(key)
        if len(data) > limit:
            raise _error(errno.EFBIG, key)
        return bytes(data)

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        await _turn()
        self._bucket.put(check_key(key), bytes(data), if_absent=if_absent)

    async def delete(self, key: str) -> None:
        await _turn()
        self._bucket.files.pop(check_key(key), None)

    async def delete_folder(self, folder: str) -> None:
        await _turn()
        self._bucket.files.pop(f"{check_key(folder)}/{MANIFEST}", None)
        for key in self._bucket.under(folder):
            self._bucket.files.pop(key, None)

    async def open(self, key: str) -> Source:
        await _turn()
        return _MemorySource(key, self._find(key))

    async def prepare(self) -> None:
        await _turn()
        self._bucket.exists = True

    async def room(self) -> int | None:
        await _turn()
        return None

    async def begin(self, name: str, save_id: str) -> Attempt:
        await _turn()
        attempt = _MemoryAttempt(self, self._bucket, check_name(name), check_save_id(save_id))
        if attempt.id in self._bucket.attempts:
            raise _error(errno.EEXIST, name)
        self._bucket.attempts[attempt.id] = _Upload(weakref.ref(attempt))
        self._bucket.exists = True
        return attempt

    async def attach(self, name: str, save_id: str) -> Attempt:
        await _turn()
        attempt = _MemoryAttempt(self, self._bucket, check_name(name), check_save_id(save_id))
        if attempt.id not in self._bucket.attempts:
            raise _error(errno.ENOENT, name)
        return attempt

    async def sweep(self, *, unless: WantedStep | None = None) -> builtins.list[str]:
        await _turn()
        attempts = self._bucket.attempts
        stale = [key for key, upload in attempts.items() if not upload.alive()]
        for key in stale:
            _drop(self._bucket, attempts.pop(key).keys)
        return sorted(name for name, _ in stale)

    async def retire(self, name: str, *, unless: Wanted | None = None) -> bool:
        await _turn()
        key = f"{check_name(name)}/{MANIFEST}"
        manifest = self._bucket.files.pop(key, None)
        wanted = True
        try:
            wanted = manifest is not None and unless is not None and await unless()
        finally:
            if wanted and manifest is not None:
                self._bucket.files.setdefault(key, manifest)
        if wanted:
            return False
        busy = {key for upload in self._bucket.attempts.values() for key in upload.keys}
        _drop(self._bucket, set(self._bucket.under(name)) - busy)
        return True

    async def lock(self) -> LockFile | bytes:
        await _turn()
        holder = self._bucket.holder()
        if holder is not None:
            return holder.record
        lock = MemoryLock(self._bucket.holder, lambda: self.closed)
        self._bucket.lock = weakref.ref(lock)
        return lock

    async def aclose(self) -> None:
        self.closed = True

    def _find(self, key: str) -> bytes | bytearray:
        try:
            return self._bucket.files[check_key(key)]
        except KeyError:
            raise _error(errno.ENOENT, key) from None


async def _turn() -> None:
    """Let others run first, as every store with a wire or a disk does."""
    await asyncio.sleep(0)


def _drop(bucket: _Bucket, keys: set[str]) -> None:
    for key in keys:
        bucket.files.pop(key, None)


class _MemoryAttempt:
    """Files go to their final place; the manifest, put once, makes them a step."""

    def __init__(self, store: MemoryStore, bucket: _Bucket, name: str, save_id: str) -> None:
        self.store = store
        self.name = name
        self.save_id = save_id
        self.prefix = f"{save_id[:8]}-"
        self.id = (name, save_id)
        self._bucket = bucket

    async def create(self, filename: str, nbytes: int) -> Sink:
        await _turn()
        key = self._key(filename)
        keys = self._upload().keys
        if key in keys or key in self._bucket.files:
            raise _error(errno.EEXIST, key)
        keys.add(key)
        return _MemorySink(self, key)

    async def put(self, filename: str, data: bytes) -> None:
        await _turn()
        key = self._key(filename)
        keys = self._upload().keys
        if (key in keys or key in self._bucket.files) and self._bucket.files.get(key) != data:
            raise _error(errno.EEXIST, key)
        keys.add(key)
        self._bucket.put(key, bytes(data), if_absent=False)

    async def commit(self, manifest: bytes) -> None:
        await _turn()
        key = f"{self.name}/{MANIFEST}"
        if self._bucket.files.get(key) == manifest:
            self._bucket.attempts.pop(self.id, None)
            return
        self._upload()
        self._bucket.put(key, bytes(manifest), if_absent=True)
        del self._bucket.attempts[self.id]

    async def abort(self) -> None:
        await _turn()
        upload = self._bucket.attempts.pop(self.id, None)
        if upload is not None:
            _drop(self._bucket, upload.keys)

    def land(self, key: str, data: bytearray) -> None:
        """A sink is finished: its bytes become a file, if the attempt still lives."""
        self._upload()
        self._bucket.put(key, data, if_absent=True)

    def forget(self, key: str) -> None:
        """A sink is discarded: its name is free again."""
        upload = self._bucket.attempts.get(self.id)
        if upload is not None:
            upload.keys.discard(key)

    def _key(self, filename: str) -> str:
        return f"{self.name}/{self.prefix}{check_filename(filename)}"

    def _upload(self) -> _Upload:
        try:
            return self._bucket.attempts[self.id]
        except KeyError:
            raise _error(errno.ENOENT, self.name) from None


class _MemorySink:
    """Bytes gathered until `finish`, as a multipart upload gathers them."""

    def __init__(self, attempt: _MemoryAttempt, key: str) -> None:
        self._attempt = attempt
        self._key = key
        self._data: bytearray | None = bytearray()

    async def write(self, offset: int, data: memoryview) -> None:
        if self._data is None:
            raise _error(errno.EBADF, self._key)
        if offset != len(self._data):
            raise ValueError(f"{self._key}: write at {offset}, but the file ends at {len(self._data)}")
        await offload(self._data.extend, data, lane=Lane.BULK)

    async def finish(self, nbytes: int) -> None:
        await _turn()
        if self._data is None:
            raise _error(errno.EBADF, self._key)
        if nbytes > len(self._data):
            raise _error(errno.EINVAL, self._key)
        del self._data[nbytes:]
        self._attempt.land(self._key, self._data)
        self._data = None

    async def discard(self) -> None:
        if self._data is not None:
            self._data = None
            self._attempt.forget(self._key)


class _MemorySource:
    """Reads from a file that is never changed in place, only replaced."""

    def __init__(self, key: str, data: bytes | bytearray) -> None:
        self.size = len(data)
        self._key = key
        self._data = memoryview(data).toreadonly()

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if offset + sum(b.nbytes for b in buffers) > self.size:
            raise EOFError(f"{self._key} ends at {self.size}")
        await offload(self._copy, offset, buffers, lane=Lane.BULK)

    def _copy(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:] = self._data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    async def aclose(self) -> None:
        self._data = memoryview(b"")
