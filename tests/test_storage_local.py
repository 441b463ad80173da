"""A local store keeps the contract, and the promises only a folder can make."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from aiockpt._files import FileSystem
from aiockpt.storage import MANIFEST, Store
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles, StoreContract
from aiockpt.testing._steps import new_id, raw_tree, read_step, write_file, write_step
from tests.refusing import Refusing


class TestLocalStore(StoreContract):
    """A folder passes the contract."""

    def make_store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "a" / "run")

    def raw_files(self, store: Store) -> Mapping[str, bytes]:
        return raw_tree(Path(store.url))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that exists."""
    path = tmp_path / "run"
    path.mkdir()
    return path


async def test_the_order_of_a_commit(run: Path) -> None:
    """A commit flushes the files, their folder, renames, flushes the run, drops the lock."""
    files = FaultyFiles()
    store = LocalStore(run, files=files)
    attempt = await store.begin("step", new_id())
    await write_file(attempt, "a", b"data")
    await attempt.put("part", b"part")
    await attempt.commit(b"m")
    hidden = f"{run}/.step.{attempt.save_id}"
    done = [(e.op, e.path, e.target) for e in files.log if e.op != "read"]
    assert done == [
        ("lock", f"{hidden}.lock", None),
        ("mkdir", hidden, None),
        *((op, f"{hidden}/a", None) for op in ("create", "write", "truncate", "fsync")),
        *((op, f"{hidden}/part", None) for op in ("create", "write", "fsync")),
        *((op, f"{hidden}/{MANIFEST}", None) for op in ("create", "write", "fsync")),
        ("sync_dir", hidden, None),
        ("rename", hidden, f"{run}/step"),
        ("sync_dir", str(run), None),
        ("unlink", f"{hidden}.lock", None),
    ]
    assert all(event.ended is not None for event in files.log)


async def test_every_new_folder_is_flushed_into_its_parent(tmp_path: Path) -> None:
    """Each folder made for a run or a key outlives a power loss."""
    files = FaultyFiles()
    store = LocalStore(tmp_path / "a" / "b" / "run", files=files)
    await store.prepare()
    await store.put("leases/x/y", b"")
    made = [event for event in files.log if event.op == "mkdir" and event.ended is not None]
    assert len(made) == 5
    for event in made:
        parent = os.path.dirname(event.path)
        assert any(e.op == "sync_dir" and e.path == parent and e.began > event.began for e in files.log)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
async def test_modes_follow_the_umask(tmp_path: Path, umask: int) -> None:
    """Files come out 0666 and folders 0777, less the umask."""
    before = os.umask(umask)
    try:
        store = LocalStore(tmp_path / "a" / "run")
        await store.prepare()
        await store.put("leases/x", b"")
        await store.put("run.json", b"", if_absent=True)
        await write_step(store, "step", {"a": b"", "b": bytes(5 << 20)})
    finally:
        os.umask(before)
    found = list((tmp_path / "a").rglob("*"))
    assert len(found) == 8
    for path in found:
        want = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == want, path


@pytest.mark.parametrize("what", ["empty", "full", "file"])
async def test_a_taken_name_is_never_replaced(run: Path, what: str) -> None:
    """Anything a user has under a step's name stays, and the commit is FileExistsError."""
    taken = run / "step"
    if what == "file":
        taken.write_bytes(b"mine")
    else:
        taken.mkdir()
        if what == "full":
            (taken / "notes").write_bytes(b"mine")
    before = raw_tree(run)
    with pytest.raises(FileExistsError) as caught:
        await write_step(LocalStore(run), "step", {"a": b""})
    assert caught.value.filename == str(taken)
    assert raw_tree(run) == before


async def test_a_spurious_file_exists_error_is_retried(tmp_path: Path) -> None:
    """A network file system may say "exists" and "is no folder" about one new folder."""

    class Stale(FileSystem):
        lies = 2

        def exists(self, path: str) -> bool:
            if path.endswith("/run/.") and self.lies:
                self.lies -= 1
                return False
            return super().exists(path)

    files = Stale()
    run = tmp_path / "a" / "run"
    run.mkdir(parents=True)
    await LocalStore(run, files=files).prepare()
    assert files.lies == 0
    assert raw_tree(tmp_path) == {"a/run/": b""}


async def test_many_prepare_at_once(tmp_path: Path) -> None:
    """A run's folders are made by many at once without an error."""
    stores = [LocalStore(tmp_path / "a" / "b" / "c") for _ in range(16)]
    await asyncio.gather(*(store.prepare() for store in stores))
    assert raw_tree(tmp_path) == {"a/b/c/": b""}


async def test_a_removed_run_is_made_again(run: Path) -> None:
    """Somebody may remove the run between two saves; the next one works."""
    store = LocalStore(run)
    await write_step(store, "step-1", {"a": b"1"})
    shutil.rmtree(run)
    await write_step(store, "step-2", {"a": b"2"})
    shutil.rmtree(run)
    await store.put("run.json", b"{}")
    assert raw_tree(run) == {"run.json": b"{}"}


async def test_a_file_in_the_way_of_the_run(tmp_path: Path) -> None:
    """A run cannot be where a file is, and preparing says so."""
    (tmp_path / "run").write_bytes(b"mine")
    for path in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(NotADirectoryError):
            await LocalStore(path).prepare()
    assert (tmp_path / "run").read_bytes() == b"mine"


async def test_only_the_run_need_be_writable(run: Path) -> None:
    """A parent that cannot be flushed is left alone; nothing outside the run is called."""
    files = FaultyFiles()
    refusing = Refusing(("sync_dir", str(run.parent), errno.EACCES))
    await LocalStore(run, files=refusing).prepare()
    assert refusing.refusals == []
    store = LocalStore(run, files=files)
    await store.prepare()
    await write_step(store, "step", {"a": b""})
    await store.retire("step")
    await store.sweep()
    outside = {e.op for e in files.log if not e.path.startswith(str(run))}
    assert outside == {"sync_dir"}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
async def test_an_unwritable_run_is_found_out_at_once(run: Path, code: int) -> None:
    """Preparing a run that cannot be written fails, with errno and path."""
    files = Refusing(("create", ".tmp", code))
    with pytest.raises(OSError) as caught:
        await LocalStore(run, files=files).prepare()
    assert caught.value.errno == code
    assert str(caught.value.filename).startswith(str(run))


async def test_reads_write_nothing(run: Path) -> None:
    """Listing, getting and opening make no change, not even to look for locks."""
    await write_step(LocalStore(run), "step", {"a": b"data"})
    files = FaultyFiles()
    reader = LocalStore(run, files=files)
    await reader.list()
    assert await read_step(reader, "step") == [b"data"]
    assert {event.op for event in files.log} == {"scandir", "read", "open", "close"}


async def test_create_only_put_without_links(run: Path) -> None:
    """Where the file system has no links a create-only put is still exclusive."""
    files = Refusing(*[("link", "/lock", errno.EPERM)] * 2)
    store = LocalStore(run, files=files)
    await store.put("lock", b"first", if_absent=True)
    with pytest.raises(FileExistsError):
        await store.put("lock", b"second", if_absent=True)
    assert files.refusals == []
    assert raw_tree(run) == {"lock": b"first"}


async def test_stale_handles_are_looked_up_again(run: Path) -> None:
    """ESTALE while listing or reading is tried again; for good it means: removed."""
    files = Refusing(("scandir", "/run", errno.ESTALE), ("read", "/a", errno.ESTALE))
    store = LocalStore(run, files=files)
    await store.put("a", b"1")
    assert [entry.name for entry in await store.list()] == ["a"]
    assert await store.get("a") == b"1"
    assert files.refusals == []
    files.refusals = [("scandir", "/run", errno.ESTALE)] * 9
    with pytest.raises(FileNotFoundError):
        await store.list()


async def test_a_failed_flush_is_not_tried_again(run: Path) -> None:
    """After a failed flush a repeated commit does not pretend: the kernel may have lost it."""
    files = Refusing(("sync_dir", "/run", errno.EIO))
    store = LocalStore(run, files=files)
    attempt = await store.begin("step", new_id())
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            await attempt.commit(b"m")
        assert caught.value.errno == errno.EIO
    assert files.refusals == []
    await attempt.abort()
    assert raw_tree(run) == {f"step/{MANIFEST}": b"m"}
