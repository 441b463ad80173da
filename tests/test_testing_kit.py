"""The test kit does what it says: its doubles pass things on and fail as told."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from aiockpt._threads import Lane, offload
from aiockpt.storage import MANIFEST, Store
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyFiles, FaultyStore, FileOp, StoreContract
from aiockpt.testing._steps import new_id, raw_tree, write_file, write_step
from tests.store_child import scripted


class TestFaultyStorePassesOn(StoreContract):
    """Without a fault a FaultyStore is as good as the store in it."""

    def make_store(self, tmp_path: Path) -> Store:
        return FaultyStore(LocalStore(tmp_path / "run"))

    def raw_files(self, store: Store) -> Mapping[str, bytes]:
        return raw_tree(Path(store.url))


class TestFaultyFilesPassOn(StoreContract):
    """Without a fault FaultyFiles are as good as the real calls."""

    def make_store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "run", files=FaultyFiles(keep_data=True))

    def raw_files(self, store: Store) -> Mapping[str, bytes]:
        return raw_tree(Path(store.url))


# ------------------------------------------------------------ FaultyStore


async def test_operations_are_named_and_counted() -> None:
    """Store, attempt, sink and source operations stand in one list, in order."""
    store = FaultyStore(MemoryStore())
    await store.prepare()
    attempt = await store.begin("step", "a" * 32)
    await write_file(attempt, "model", bytes(5000), block=4096)
    await attempt.commit(b"m")
    source = await store.open("step/aaaaaaaa-model")
    await source.read_into(8, [memoryview(bytearray(2)), memoryview(bytearray(3))])
    await source.aclose()
    assert store.operations == [
        f"store.prepare {store.url}",
        "store.begin step",
        "attempt.create model",
        "sink.write model@0+4096",
        "sink.write model@4096+4096",
        "sink.finish model",
        "attempt.commit step",
        "store.open step/aaaaaaaa-model",
        "source.read_into step/aaaaaaaa-model@8+5",
        "source.aclose step/aaaaaaaa-model",
    ]
    assert not store.fired


async def test_error_and_after() -> None:
    """`error` fails with nothing done, `after` with all of it done; once each."""
    inner = MemoryStore()
    store = FaultyStore(inner, 0, "error", errno=errno.EDQUOT)
    with pytest.raises(OSError) as caught:
        await store.put("a", b"1")
    assert (caught.value.errno, caught.value.filename) == (errno.EDQUOT, "a")
    assert store.fired
    assert not inner._bucket.files
    await store.put("a", b"1")
    with pytest.raises(OSError):
        await FaultyStore(inner, 0, "after").put("b", b"2")
    assert inner._bucket.files == {"a": b"1", "b": b"2"}


async def test_stall() -> None:
    """A stalled operation waits for its release, and others pass it by."""
    store = FaultyStore(MemoryStore(), 0, "stall")
    task = asyncio.create_task(store.put("a", b"1"))
    await store.stalled.wait()
    await store.put("b", b"2")
    assert not task.done()
    with pytest.raises(FileNotFoundError):
        await store.get("a")
    store.release.set()
    await task
    assert await store.get("a") == b"1"


async def test_tear() -> None:
    """Half a write goes through, but never half of what is whole or nothing by contract."""
    inner = MemoryStore()
    store = FaultyStore(inner, 2, "tear")
    attempt = await store.begin("step", "a" * 32)
    sink = await attempt.create("model", 0)
    with pytest.raises(OSError):
        await sink.write(0, memoryview(bytes(3 * 4096)))
    await sink.finish(4096)
    assert inner._bucket.files["step/aaaaaaaa-model"] == bytes(4096)
    store = FaultyStore(inner, 1, "tear")
    attempt = await store.begin("other", "b" * 32)
    with pytest.raises(OSError):
        await attempt.put("part", b"12345678")
    assert inner._bucket.files["other/bbbbbbbb-part"] == b"1234"
    with pytest.raises(OSError):
        await FaultyStore(inner, 0, "tear").put("key", b"12345678")
    assert "key" not in inner._bucket.files


async def test_full() -> None:
    """From there on every write finds no space, while reads and removals work, until healed."""
    store = FaultyStore(MemoryStore(), 2, "full")
    await store.put("a", b"1")
    assert await store.get("a") == b"1"
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            await store.put("b", b"2")
        assert caught.value.errno == errno.ENOSPC
        assert await store.get("a") == b"1"
    await store.delete("a")
    store.heal()
    await store.put("b", b"2")


async def test_cancel() -> None:
    """The callback may cancel the task at just this operation."""
    inner = MemoryStore()

    async def body() -> None:
        task = asyncio.current_task()
        assert task is not None
        store = FaultyStore(inner, 1, "cancel", on_fault=task.cancel)
        await store.put("a", b"1")
        await store.put("b", b"2")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(body())
    assert inner._bucket.files == {"a": b"1"}


async def test_a_lost_reply_leaks_no_descriptor(tmp_path: Path) -> None:
    """What was opened and never received is closed (the leak check watches)."""
    store = LocalStore(tmp_path)
    await write_step(store, "step", {"a": b"1"})
    with pytest.raises(OSError):
        await FaultyStore(store, 0, "after").open("step/a")
    faulty = FaultyStore(store, 1, "after")
    attempt = await faulty.begin("other", new_id())
    with pytest.raises(OSError):
        await attempt.create("a", 0)
    await attempt.abort()
    for n, call in enumerate(("open_reader", "lock", "open_writer")):
        files = FaultyFiles(n and n * 2 - 2, "after")
        lossy = LocalStore(tmp_path, files=files)
        with pytest.raises(OSError):
            await lossy.open("step/a") if n == 0 else await write_step(lossy, f"s{n}", {"a": b""})
        assert files.operations[n and n * 2 - 2].startswith(call)
    await store.sweep()
    assert sorted(raw_tree(tmp_path)) == ["step/a", f"step/{MANIFEST}"]


# ------------------------------------------------------------ FaultyFiles


async def test_files_stall_in_their_thread(tmp_path: Path) -> None:
    """A stalled call to the disk keeps its thread, and only that."""
    for call in (0, 2):  # the blocking `create`, the asynchronous `write`
        files = FaultyFiles(call + 1, "stall")
        store = LocalStore(tmp_path / str(call), files=files)
        (tmp_path / str(call)).mkdir()
        task = asyncio.create_task(store.prepare() if call == 0 else scripted(store))
        await offload(files.stalled.wait, lane=Lane.CONTROL)
        assert await LocalStore(tmp_path).list() != []
        assert not task.done()
        files.release.set()
        await task


async def test_torn_files(tmp_path: Path) -> None:
    """`tear` leaves half of the bytes on the disk, as a crash could."""
    files = FaultyFiles(0, "tear", keep_data=True)
    with pytest.raises(OSError):
        await offload(files.create, str(tmp_path / "a"), b"12345678", lane=Lane.CONTROL)
    assert raw_tree(tmp_path) == {"a": b"1234"}
    files = FaultyFiles(1, "tear")
    file = await files.open_writer(str(tmp_path / "b"), 0)
    with pytest.raises(OSError):
        await file.write(0, memoryview(b"x" * 8192))
    await file.finish(file.position)
    assert (tmp_path / "b").read_bytes() == b"x" * 4096
    assert [(e.op, e.nbytes) for e in files.log][1] == ("write", 4096)


async def test_files_cancel_from_their_thread(tmp_path: Path) -> None:
    """The callback runs in the thread, and reaches the task through its loop."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    files = FaultyFiles(0, "cancel", on_fault=lambda: loop.call_soon_threadsafe(task.cancel))
    store = LocalStore(tmp_path, files=files)
    with pytest.raises(asyncio.CancelledError):
        await store.begin("step", new_id())
    task.uncancel()
    assert files.operations[:2] != []
    assert raw_tree(tmp_path) == {}
    assert await store.sweep() == []


class Replay:
    """A tree in memory, on which events of a log are done again."""

    def __init__(self, log: list[FileOp]) -> None:
        self.content: dict[int, bytearray] = {}
        self.names: dict[str, int | None] = {}
        for event in log:
            if event.ended is not None:
                assert event.began < event.ended
                getattr(self, f"do_{event.op}", lambda event: None)(event)

    def files(self, root: Path) -> dict[str, bytes]:
        found = {os.path.relpath(name, root): number for name, number in self.names.items()}
        return {key: bytes(self.content[number]) for key, number in found.items() if number is not None}

    def do_create(self, event: FileOp) -> None:
        assert event.file is not None
        assert event.path not in self.names
        self.names[event.path] = event.file
        self.content[event.file] = bytearray()

    def do_lock(self, event: FileOp) -> None:
        number = self.names.setdefault(event.path, -len(self.content) - 1)
        self.content[number or 0] = bytearray()

    def do_write(self, event: FileOp) -> None:
        assert event.file is not None
        assert event.data is not None
        assert len(event.data) == event.nbytes
        self.content[event.file][event.offset :] = event.data

    def do_truncate(self, event: FileOp) -> None:
        assert event.file is not None
        del self.content[event.file][event.nbytes :]

    def do_link(self, event: FileOp) -> None:
        assert event.target is not None
        for name in list(self.names):
            if name == event.path or name.startswith(f"{event.path}/"):
                self.names[event.target + name[len(event.path) :]] = self.names[name]

    def do_rename(self, event: FileOp) -> None:
        self.do_link(event)
        for name in list(self.names):
            if name == event.path or name.startswith(f"{event.path}/"):
                del self.names[name]

    do_replace = do_rename

    def do_mkdir(self, event: FileOp) -> None:
        self.names[event.path] = None

    def do_unlink(self, event: FileOp) -> None:
        del self.names[event.path]

    do_rmdir = do_unlink


async def test_the_log_tells_everything(tmp_path: Path) -> None:
    """Replaying the log in memory gives the very files that are on the disk."""
    files = FaultyFiles(keep_data=True)
    store = LocalStore(tmp_path / "run", files=files)
    await store.prepare()
    await store.put("leases/a", b"1", if_absent=True)
    await store.put("leases/a", b"2")
    await scripted(store)
    await write_step(store, "step-1", {"a": bytes(5000), "b": b"b"})
    lost = await store.begin("step-2", new_id())
    await lost.put("part", b"part")
    sink = await lost.create("gone", 4096)
    await sink.discard()
    await store.retire("step-1")
    raw = raw_tree(tmp_path)
    assert len(raw) == 6
    assert Replay(files.log).files(tmp_path) == raw
    await lost.abort()
    assert Replay(files.log).files(tmp_path) == raw_tree(tmp_path)
