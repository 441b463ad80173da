"""The test kit does what it says: its doubles fail as told, and its contract finds faults."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from aiockpt._threads import Lane, offload
from aiockpt.errors import UsageError
from aiockpt.storage import MANIFEST, Attempt, Entry, Sink, Store, open_store
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyFiles, FaultyStore, FileOp, Kind, StoreContract
from aiockpt.testing._steps import new_id, raw_tree, write_file, write_step
from tests.store_child import DATA, FILES, NAME, scripted, start

KINDS: tuple[Kind, ...] = ("error", "after", "tear", "full")


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


# ------------------------------------------------------------ a save that stops anywhere


def judge(raw: Mapping[str, bytes], *, prefixed: bool) -> bool:
    """Check that the step is whole or absent beside the user's file; returns which."""
    assert raw["notes.txt"] == b"mine"
    step = {key.rpartition("-" if prefixed else "/")[2]: data for key, data in raw.items() if NAME in key}
    if not step:
        assert list(raw) == ["notes.txt"]
        return False
    step = {key.rpartition("/")[2]: data for key, data in step.items()}
    assert sorted(step) == sorted(FILES)
    assert len(raw) == 4
    assert step["model"] == DATA
    assert step["part"] == DATA[:100]
    return True


async def operations_of(store: FaultyStore | LocalStore, log: list[str]) -> int:
    """Count the operations of the scripted save on a store that works."""
    await store.prepare()
    before = len(log)
    await scripted(store)
    return len(log) - before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["local", "memory"])
async def test_a_save_may_fail_at_any_store_operation(tmp_path: Path, where: str, kind: Kind) -> None:
    """Afterwards the step is there or not, wholly, and a sweep leaves no trace of the rest."""

    def make(path: Path) -> LocalStore | MemoryStore:
        return LocalStore(path) if where == "local" else MemoryStore(str(path))

    async def raw(store: LocalStore | MemoryStore) -> Mapping[str, bytes]:
        if isinstance(store, LocalStore):
            return await offload(raw_tree, Path(store.path), lane=Lane.CONTROL)
        return {key: bytes(data) for key, data in store._bucket.files.items()}

    healthy = FaultyStore(make(tmp_path / "healthy"))
    count = await operations_of(healthy, healthy.operations)
    assert count == 8
    outcomes = []
    for n in range(count):
        inner = make(tmp_path / str(n))
        await inner.prepare()
        await inner.put("notes.txt", b"mine")
        store = FaultyStore(inner, n, kind)
        with contextlib.suppress(OSError):
            await scripted(store)
        assert store.fired
        store.heal()
        await store.aclose()
        again = make(tmp_path / str(n))
        await again.sweep()
        outcomes.append(judge(await raw(again), prefixed=where == "memory"))
        await again.delete_folder(NAME)
        await scripted(again)
        assert judge(await raw(again), prefixed=where == "memory")
    # Only a lost reply of the commit itself leaves a step behind a failed save.
    assert outcomes == [kind == "after" and n == count - 1 for n in range(count)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_save_may_fail_at_any_call_to_the_disk(tmp_path: Path, kind: Kind) -> None:
    """The same one floor below, down to the single flush and rename."""
    files = FaultyFiles()
    store = LocalStore(tmp_path / "healthy", files=files)
    await store.prepare()
    before = len(files.operations)
    await scripted(store)
    names = [text.split()[0] for text in files.operations[before:]]
    outcomes = []
    for n in range(len(names)):
        path = tmp_path / str(n)
        path.mkdir()
        (path / "notes.txt").write_bytes(b"mine")
        files = FaultyFiles(n, kind)
        store = LocalStore(path, files=files)
        with contextlib.suppress(OSError):
            await scripted(store)
        assert files.fired
        files.heal()
        await LocalStore(path).sweep()
        outcomes.append(judge(raw_tree(path), prefixed=False))
        await store.delete_folder(NAME)
        await scripted(store)
        assert judge(raw_tree(path), prefixed=False)
    # A rename needs no space; one whose reply got lost has happened all the same.
    commit = names.index("rename") + (kind not in ("after", "full"))
    expected = [n >= commit for n in range(len(names))]
    assert outcomes == expected


KILLS = ("mkdir", "open_writer", "write", "finish", "create", "sync_dir", "rename", "unlink")


async def test_a_save_may_be_killed(tmp_path: Path) -> None:
    """After SIGKILL the step is whole or absent; another process sweeps what is left."""
    files = FaultyFiles()
    store = LocalStore(tmp_path / "healthy", files=files)
    await store.prepare()
    before = len(files.operations)
    await scripted(store)
    names = [text.split()[0] for text in files.operations[before:]]
    # The last of a kind: the flush after the rename, the manifest rather than the part.
    kills = [(kind, len(names) - 1 - names[::-1].index(kind)) for kind in KILLS]
    children = []
    for kind, n in kills:
        path = tmp_path / kind
        path.mkdir()
        (path / "notes.txt").write_bytes(b"mine")
        children.append(start("die-in-files", path, n))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "notes.txt").write_bytes(b"mine")
    children.append(start("die-in-store", tmp_path / "store", 7))
    for child in children:
        child.communicate()
        assert child.returncode == -9
    rename = dict(kills)["rename"]
    for kind, n in [*kills, ("store", 0)]:
        path = tmp_path / kind
        swept = await LocalStore(path).sweep()
        assert judge(raw_tree(path), prefixed=False) == (n > rename)
        assert swept == ([] if n > rename or kind == "mkdir" else [NAME])


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


# ------------------------------------------------------------ the contract finds faults


class Bad(MemoryStore):
    """A store to be spoiled."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(str(tmp_path))


class ReplacesOnPut(Bad):
    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        await super().put(key, data)


class HidesFiles(Bad):
    async def list(self, folder: str = "") -> list[Entry]:
        return [entry for entry in await super().list(folder) if not entry.name.startswith(".")]


class DeletesByPrefix(Bad):
    async def delete_folder(self, folder: str) -> None:
        for key in list(self._bucket.files):
            if key.startswith(folder):
                del self._bucket.files[key]


class ForgetsLimits(Bad):
    async def get(self, key: str, *, limit: int = 1 << 30) -> bytes:
        return await super().get(key)


class SweepsTheLiving(Bad):
    async def sweep(self) -> builtins.list[str]:
        for attempt, upload in self._bucket.attempts.items():
            for key in upload.keys:
                del self._bucket.files[key]
            del attempt
        return []


class RetiresAttempts(Bad):
    async def retire(self, name: str) -> None:
        await self.delete_folder(name)


class _Wrapped(Bad):
    """Spoils its attempts by the methods of `spoil`."""

    spoil: Mapping[str, Callable[..., Awaitable[object]]] = {}

    async def begin(self, name: str, save_id: str) -> Attempt:
        attempt = await super().begin(name, save_id)
        for method, how in self.spoil.items():
            setattr(attempt, method, how.__get__(attempt))
        return attempt


async def _replace(attempt: Attempt, manifest: bytes) -> None:
    attempt.store._bucket.files[f"{attempt.name}/{MANIFEST}"] = manifest  # type: ignore[attr-defined]


async def _nothing(attempt: Attempt) -> None:
    pass


async def _early(attempt: Attempt, filename: str, data: bytes) -> None:
    attempt.store._bucket.files[f"{attempt.name}/{MANIFEST}"] = data  # type: ignore[attr-defined]


class CommitsOverOthers(_Wrapped):
    spoil = {"commit": _replace}


class AbortsNothing(_Wrapped):
    spoil = {"abort": _nothing}


class ShowsTooEarly(_Wrapped):
    spoil = {"put": _early}


class PadsFiles(Bad):
    async def begin(self, name: str, save_id: str) -> Attempt:
        attempt = await super().begin(name, save_id)
        create = attempt.create

        async def padded(filename: str, nbytes: int) -> Sink:
            sink = await create(filename, nbytes)
            finish = sink.finish

            async def whole(nbytes: int) -> None:
                await finish(-(-nbytes // 4096) * 4096)

            sink.finish = whole  # type: ignore[method-assign]
            return sink

        attempt.create = padded  # type: ignore[method-assign]
        return attempt


FAULTS: list[tuple[type[Bad], str]] = [
    (ReplacesOnPut, "test_put_if_absent"),
    (ReplacesOnPut, "test_create_only_put_has_one_winner"),
    (HidesFiles, "test_list"),
    (DeletesByPrefix, "test_deletes_are_exact_and_idempotent"),
    (ForgetsLimits, "test_get_refuses_what_is_missing_or_too_long"),
    (SweepsTheLiving, "test_sweep_removes_only_what_is_dead"),
    (RetiresAttempts, "test_retire_spares_attempts"),
    (CommitsOverOthers, "test_a_commit_never_replaces"),
    (CommitsOverOthers, "test_one_of_many_commits_wins"),
    (AbortsNothing, "test_an_abort_leaves_nothing"),
    (ShowsTooEarly, "test_nothing_shows_before_the_commit"),
    (PadsFiles, "test_big_aligned_writes"),
]


@pytest.mark.parametrize(("store", "test"), FAULTS, ids=lambda v: v if isinstance(v, str) else v.__name__)
async def test_the_contract_finds(tmp_path: Path, store: type[Bad], test: str) -> None:
    """A store with a fault fails the test that is about it, and a good one passes it."""

    class Contract(StoreContract):
        make: type[MemoryStore]

        def make_store(self, tmp_path: Path) -> Store:
            return store(tmp_path) if self.make is Bad else MemoryStore(f"{tmp_path}/good")

        def raw_files(self, store: Store) -> Mapping[str, bytes]:
            assert isinstance(store, MemoryStore)
            return {key: bytes(data) for key, data in store._bucket.files.items()}

    contract = Contract()
    Contract.make = MemoryStore
    await getattr(contract, test)(tmp_path)
    Contract.make = Bad
    with pytest.raises((AssertionError, OSError, KeyError, pytest.fail.Exception)):
        await getattr(contract, test)(tmp_path)


# ------------------------------------------------------------ finding a store


TAPE = """
from aiockpt.storage.memory import MemoryStore
def open_url(url):
    return MemoryStore(url)
"""


def test_a_store_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in `storage/` makes its scheme work with nothing else touched."""
    import aiockpt.storage

    with pytest.raises(UsageError, match="tape://"):
        open_store("tape://drive/1")
    (tmp_path / "tape.py").write_text(TAPE)
    (tmp_path / "disc.py").write_text("import no_such_package_at_all")
    monkeypatch.setattr(aiockpt.storage, "__path__", [*aiockpt.storage.__path__, str(tmp_path)])
    try:
        assert open_store("tape://drive/1").url == "memory://tape://drive/1"
        assert open_store("TAPE://x").url == "memory://TAPE://x"
        with pytest.raises(UsageError, match="no_such_package_at_all"):
            open_store("disc://x")
        with pytest.raises(UsageError, match=r"known are disc://, file://, memory://, tape://"):
            open_store("drum://x")
    finally:
        sys.modules.pop("aiockpt.storage.tape", None)
        vars(aiockpt.storage).pop("tape", None)


def test_open_store(tmp_path: Path) -> None:
    """Stores pass through, paths and URLs find their members, all else is refused."""
    store = MemoryStore("x")
    assert open_store(store) is store
    assert open_store("memory://x").url == "memory://x"
    assert isinstance(open_store(tmp_path), LocalStore)
    assert isinstance(open_store("relative/run"), LocalStore)
    assert isinstance(open_store(Path("tape://x")), LocalStore)
    for bad in ("", "memory://", "local://x", "a.b://x", "_folder://x", "nul\0", "s3://bucket/run"):
        if bad == "_folder://x":  # no scheme begins like that: it is an odd path
            assert isinstance(open_store(bad), LocalStore)
            continue
        with pytest.raises(UsageError):
            open_store(bad)
    for wrong in (3, None, b"path", object()):
        with pytest.raises(UsageError):
            open_store(wrong)  # type: ignore[arg-type]
