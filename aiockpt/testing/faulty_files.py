"""Calls to the disk that go wrong at the one of your choice, and a log of them all."""

from __future__ import annotations

import errno as errnos
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from .._files import BlockFile, FileSystem, Io, Lock, RangeFile
from .._threads import Lane, offload
from ._faults import Faults, Kind
from ._filelog import FileLog, FileOp

__all__ = ["FaultyFiles"]

T = TypeVar("T")
ALIGNMENT = 4096


class FaultyFiles(FileSystem):
    """The real calls to the disk, counted, recorded, and failing at `fail_at`.

    Counts each call of a `FileSystem` method and of its files as one operation, written
    `<method> <path>`, with `@offset+length` for writes and reads. `create` and `finish`
    are one operation and several events of the log.

    `tear`: half of the bytes of a `create` or `write` are on the disk; for all other
    calls it is the same as `error`. `cancel`: `on_fault` is called in the thread that
    makes the call, so it is for `loop.call_soon_threadsafe`.

    Args:
        fail_at: index into `operations`; None: nothing fails.
        kind: what happens there.
        errno: of the error raised (`full` always says ENOSPC).
        on_fault: called for kind `cancel`.
        keep_data: keep a copy of all bytes written in the log.

    Attributes:
        stalled: set once an operation stalls: its thread is stuck.
        release: set it to let the stalled operation go on.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        kind: Kind = "error",
        *,
        errno: int = errnos.EIO,
        on_fault: Callable[[], object] | None = None,
        keep_data: bool = False,
    ) -> None:
        self.faults = Faults(fail_at, kind, errno=errno, on_fault=on_fault)
        self.events = FileLog(keep_data=keep_data)
        self.stalled = threading.Event()
        self.release = threading.Event()

    @property
    def log(self) -> list[FileOp]:
        """Every event so far, in the order they began."""
        return self.events.log

    @property
    def operations(self) -> list[str]:
        """Every operation so far, in the order they began."""
        return self.faults.operations

    @property
    def fired(self) -> bool:
        """Whether the fault has happened."""
        return self.faults.fired

    def heal(self) -> None:
        """Let everything work from now on, stalled calls too."""
        self.faults.heal()
        self.release.set()

    def mkdir(self, path: str) -> None:
        self._call("mkdir", path, super().mkdir, path, writes=True)

    def rename(self, src: str, dst: str) -> None:
        self._call("rename", src, super().rename, src, dst, target=dst)

    def replace(self, src: str, dst: str) -> None:
        self._call("replace", src, super().replace, src, dst, target=dst)

    def link(self, src: str, dst: str) -> None:
        self._call("link", src, super().link, src, dst, target=dst, writes=True)

    def symlink(self, target: str, path: str) -> None:
        self._call("symlink", path, super().symlink, target, path, writes=True)

    def read_link(self, path: str) -> str | None:
        return self._call("read_link", path, super().read_link, path)

    def unlink(self, path: str) -> None:
        self._call("unlink", path, super().unlink, path)

    def rmdir(self, path: str) -> None:
        self._call("rmdir", path, super().rmdir, path)

    def scandir(self, path: str) -> list[tuple[str, bool, int, float]]:
        return self._call("scandir", path, super().scandir, path)

    def stat_size(self, path: str) -> int:
        return self._call("stat_size", path, super().stat_size, path)

    def free(self, path: str) -> int | None:
        return self._call("free", path, super().free, path)

    def exists(self, path: str) -> bool:
        return self._call("exists", path, super().exists, path)

    def sync_dir(self, path: str) -> None:
        self._call("sync_dir", path, super().sync_dir, path, writes=True)

    def read(self, path: str, limit: int) -> bytes:
        return self._call("read", path, super().read, path, limit)

    def lock(self, path: str) -> Lock | None:
        return self._call("lock", path, super().lock, path, writes=True, lose=_release)

    def peek_lock(self, path: str) -> bytes:
        return self._call("peek_lock", path, super().peek_lock, path)

    def read_lock(self, lock: Lock) -> bytes:
        return self._call("read_lock", lock.path, super().read_lock, lock)

    def write_lock(self, lock: Lock, data: bytes) -> None:
        write, half = super().write_lock, data[: len(data) // 2]
        tear = partial(write, lock, half)
        self._call("write_lock", lock.path, write, lock, data, writes=True, tear=tear)

    def create(self, path: str, data: bytes) -> None:
        fault = self._next(f"create {path}", writes=True)
        done = data[: len(data) // 2] if fault == "tear" else data
        if fault in ("error", "full"):
            raise self.faults.error(path)
        file = self.events.new_file()
        events = [
            self.events.begin("create", path, file=file),
            self.events.begin("write", path, file=file, nbytes=len(done), data=done),
            self.events.begin("fsync", path, file=file),
        ]
        super().create(path, done)
        self.events.end(*events)
        if fault is not None:
            raise self.faults.error(path)

    async def open_writer(self, path: str, nbytes: int, io: Io = "auto") -> BlockFile:
        file = self.events.new_file()
        make = partial(super().open_writer, path, nbytes, io)
        inner = await self.call(
            "open_writer",
            path,
            make,
            events=[("create", {"file": file})],
            writes=True,
            lose=BlockFile.discard,
        )
        return cast(BlockFile, _FaultyBlockFile(self, inner, path, file))

    async def open_reader(self, path: str, io: Io = "auto") -> RangeFile:
        make = partial(super().open_reader, path, io)
        inner = await self.call("open_reader", path, make, events=[("open", {})], lose=RangeFile.close)
        return cast(RangeFile, _FaultyRangeFile(self, inner, path))

    def _next(self, operation: str, *, writes: bool) -> Kind | None:
        fault = self.faults.next(operation, writes=writes)
        if fault != "stall":
            return fault
        self.stalled.set()
        self.release.wait()
        return None

    def _call(
        self,
        op: str,
        path: str,
        do: Callable[..., T],
        *args: object,
        target: str | None = None,
        writes: bool = False,
        lose: Callable[[T], object] | None = None,
        tear: Callable[[], object] | None = None,
    ) -> T:
        fault = self._next(f"{op} {path}", writes=writes)
        if fault == "tear" and tear is not None:
            tear()
        if fault not in (None, "after"):
            raise self.faults.error(path)
        event = self.events.begin(op, path, target=target)
        result = do(*args)
        self.events.end(event)
        if fault is None:
            return result
        if lose is not None:
            lose(result)
        raise self.faults.error(path)

    async def call(
        self,
        operation: str,
        path: str,
        do: Callable[[], Awaitable[T]],
        *,
        events: Sequence[tuple[str, dict[str, object]]],
        subject: str = "",
        writes: bool = False,
        tear: Callable[[], Awaitable[object]] | None = None,
        lose: Callable[[T], Awaitable[object]] | None = None,
    ) -> T:
        """Count, record and do one asynchronous operation, or what the fault makes of it."""
        fault = self.faults.next(f"{operation} {path}{subject}", writes=writes)
        if fault == "stall":
            self.stalled.set()
            await offload(self.release.wait, lane=Lane.BULK)
            fault = None
        if fault == "tear" and tear is not None:
            await tear()
        if fault not in (None, "after"):
            raise self.faults.error(path)
        begun = [self.events.begin(op, path, **facts) for op, facts in events]  # type: ignore[arg-type]
        result = await do()
        self.events.end(*begun)
        if fault is None:
            return result
        if lose is not None:
            await lose(result)
        raise self.faults.error(path)


def _release(lock: Lock | None) -> None:
    """Nobody got this lock, so nobody else can let it go."""
    if lock is not None:
        lock.release()


class _FaultyBlockFile:
    def __init__(self, files: FaultyFiles, inner: BlockFile, path: str, file: int) -> None:
        self.path = path
        self._files = files
        self._inner = inner
        self._file = file

    @property
    def direct(self) -> bool:
        return self._inner.direct

    @property
    def position(self) -> int:
        return self._inner.position

    async def write(self, offset: int, view: memoryview) -> None:
        half = view.nbytes // 2 // ALIGNMENT * ALIGNMENT

        async def tear() -> None:
            event = self._event(offset, view.cast("B")[:half])
            await self._inner.write(offset, view.cast("B")[:half])
            self._files.events.end(event)

        facts: dict[str, object] = {"file": self._file, "offset": offset, "nbytes": view.nbytes, "data": view}
        await self._files.call(
            "write",
            self.path,
            partial(self._inner.write, offset, view),
            events=[("write", facts)],
            subject=f"@{offset}+{view.nbytes}",
            writes=True,
            tear=tear,
        )

    def _event(self, offset: int, view: memoryview) -> FileOp:
        return self._files.events.begin(
            "write", self.path, file=self._file, offset=offset, nbytes=view.nbytes, data=view
        )

    async def finish(self, nbytes: int) -> None:
        file = self._file
        events: list[tuple[str, dict[str, object]]] = [
            ("truncate", {"file": file, "nbytes": nbytes}),
            ("fsync", {"file": file}),
        ]
        try:
            finish = partial(self._inner.finish, nbytes)
            await self._files.call("finish", self.path, finish, events=events, writes=True)
        except OSError:
            await _let_go(self._inner)
            raise

    async def discard(self) -> None:
        try:
            discard = self._inner.discard
            await self._files.call("discard", self.path, discard, events=[("unlink", {"file": self._file})])
        except OSError:
            await _let_go(self._inner)  # quiet, as the real one: the file stays


async def _let_go(file: BlockFile) -> None:
    """The contract of a failed `finish` is that the descriptor is closed all the same."""
    await file._close()


class _FaultyRangeFile:
    def __init__(self, files: FaultyFiles, inner: RangeFile, path: str) -> None:
        self.path = path
        self.size = inner.size
        self._files = files
        self._inner = inner

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        await self._files.call(
            "read_into",
            self.path,
            partial(self._inner.read_into, offset, buffers),
            events=[("read", {"offset": offset, "nbytes": nbytes})],
            subject=f"@{offset}+{nbytes}",
        )

    async def close(self) -> None:
        try:
            await self._files.call("close", self.path, self._inner.close, events=[("close", {})])
        except OSError:
            await self._inner.close()  # as the kernel does: an error of close() closes
            raise
