"""A local store keeps the contract, and the promises only a folder can make."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from aiockpt._files import FileSystem
from aiockpt.errors import UsageError
from aiockpt.storage import MANIFEST, Store, open_store
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles, StoreContract
from aiockpt.testing._steps import exists, new_id, raw_tree, read_step, write_file, write_step
from tests.store_child import NAME, start


class TestLocalStore(StoreContract):
    """A folder passes the contract."""

    def make_store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "a" / "run")

    def raw_files(self, store: Store) -> Mapping[str, bytes]:
        return raw_tree(Path(store.url))


class Refusing(FileSystem):
    """A disk that answers chosen calls with an error, each as often as it is listed."""

    def __init__(self, *refusals: tuple[str, str, int]) -> None:
        self.refusals = list(refusals)

    def _check(self, call: str, path: str) -> None:
        for refusal in self.refusals:
            if refusal[0] == call and path.endswith(refusal[1]):
                self.refusals.remove(refusal)
                raise OSError(refusal[2], os.strerror(refusal[2]), path)

    def mkdir(self, path: str) -> None:
        self._check("mkdir", path)
        super().mkdir(path)

    def create(self, path: str, data: bytes) -> None:
        self._check("create", path)
        super().create(path, data)

    def link(self, src: str, dst: str) -> None:
        self._check("link", dst)
        super().link(src, dst)

    def unlink(self, path: str) -> None:
        self._check("unlink", path)
        super().unlink(path)

    def scandir(self, path: str) -> list[tuple[str, bool, int]]:
        self._check("scandir", path)
        return super().scandir(path)

    def read(self, path: str, limit: int) -> bytes:
        self._check("read", path)
        return super().read(path, limit)

    def sync_dir(self, path: str) -> None:
        self._check("sync_dir", path)
        super().sync_dir(path)


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


LOOK_ALIKES = [
    "step-5.bak", ".tmp_user", ".step-5.0123", f".step-5.{'G' * 32}", f".step-5.{'0' * 31}",
    f".step-5.{'0' * 33}", f".step-5.{'0' * 32}.bak", f"step-5.{'0' * 32}", f"..{'0' * 31}.lock",
    f"{'0' * 32}.lock",
    f".{'0' * 32}.retired", f".put.{'0' * 32}.tmp.swp",
]  # fmt: skip


async def test_look_alikes_are_never_swept(run: Path) -> None:
    """Only exact names of our own litter go, and only if they are files or folders as ours."""
    for number, name in enumerate(LOOK_ALIKES):
        (run / "x").mkdir(exist_ok=True)
        if number % 2:
            (run / name).mkdir()
            (run / name / MANIFEST).write_bytes(b"mine")
        else:
            (run / name).write_bytes(b"mine")
    (run / f".step.{'0' * 32}").write_bytes(b"a file where an attempt is a folder")
    (run / f".step.{'1' * 32}.lock").mkdir()
    (run / f".step.{'2' * 32}.retired").write_bytes(b"a file")
    (run / f".step.{'3' * 32}.tmp").mkdir()
    (run / "x" / f".step.{'4' * 32}").mkdir()
    before = raw_tree(run)
    assert await LocalStore(run).sweep() == []
    assert raw_tree(run) == before


async def test_litter_is_swept(run: Path) -> None:
    """Dead attempts, lone locks, retired steps and half-made files go."""
    store = LocalStore(run)
    await store.put("leases/a", b"kept")
    hexes = [new_id() for _ in range(5)]
    (run / f".step-1.{hexes[0]}" / "deeper").mkdir(parents=True)
    (run / f".step-1.{hexes[0]}" / "deeper" / "a").write_bytes(b"x")
    (run / f".step-1.{hexes[1]}.lock").touch()
    (run / f".step-2.{hexes[2]}.retired").mkdir()
    (run / f".put.{hexes[3]}.tmp").touch()
    (run / "leases" / f".put.{hexes[4]}.tmp").touch()
    assert await store.sweep() == ["step-1"]
    assert raw_tree(run) == {"leases/a": b"kept"}


async def test_links_in_an_attempt_are_not_followed(run: Path, tmp_path: Path) -> None:
    """Removing an attempt removes a link, never what it points at."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").write_bytes(b"mine")
    store = LocalStore(run)
    attempt = await store.begin("step", new_id())
    hidden = run / f".step.{attempt.save_id}"
    (hidden / "folder").symlink_to(mine)
    (hidden / "file").symlink_to(mine / "notes")
    await attempt.abort()
    assert raw_tree(tmp_path) == {"mine/notes": b"mine", "run/": b""}


async def test_a_failed_removal_is_left_to_the_next_sweep(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Retiring succeeds once the step is invisible; what stays is logged and swept later."""
    files = Refusing(("unlink", "/a", errno.EBUSY))
    store = LocalStore(run, files=files)
    await write_step(store, "step-1", {"a": b"1"})
    await store.retire("step-1")
    assert not await exists(store, "step-1")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(raw_tree(run)) == 1
    assert await store.sweep() == []
    assert raw_tree(run) == {}
    attempt = await store.begin("step-2", new_id())
    await attempt.put("part", b"")
    files.refusals = [("unlink", "/part", errno.EACCES)] * 2
    with pytest.raises(PermissionError):
        await attempt.abort()
    assert await store.sweep() == []
    assert await store.sweep() == ["step-2"]
    assert raw_tree(run) == {}


async def test_a_put_survives_a_sweep_of_its_temporary_file(run: Path) -> None:
    """A sweep elsewhere may take a file that is just being put for litter."""

    class Swept(FileSystem):
        left = 2

        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            if self.left and path.endswith(".tmp"):
                self.left -= 1
                os.unlink(path)

    store = LocalStore(run, files=Swept())
    await store.put("a", b"1")
    files = Swept()
    await LocalStore(run, files=files).put("b", b"2", if_absent=True)
    assert files.left == 0
    assert raw_tree(run) == {"a": b"1", "b": b"2"}


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


async def test_a_lost_attempt_can_be_swept(run: Path) -> None:
    """An attempt whose object is gone is dead, even in the process that began it."""
    store = LocalStore(run)
    attempt = await store.begin("step", new_id())
    assert await store.sweep() == []
    del attempt
    gc.collect()
    assert await store.sweep() == ["step"]
    assert raw_tree(run) == {}


async def test_another_spelling_of_the_path_is_the_same_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep through a link to the run frees no lock of ours, and a later chdir moves nothing."""
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    store = LocalStore("run")
    monkeypatch.chdir("/")
    attempt = await store.begin("step", new_id())
    assert await LocalStore(tmp_path / "link").sweep() == []
    with start("sweep", run) as child:
        assert child.stdout is not None
        assert child.stdout.read() == "[]\n"
    await attempt.commit(b"m")
    assert raw_tree(run) == {f"step/{MANIFEST}": b"m"}


async def test_urls(run: Path) -> None:
    """Paths and file:// URLs open the same run; other hosts and relative URLs do not."""
    odd = run / "a b%20#c"
    await write_step(LocalStore(odd), "step", {"a": b"1"})
    for spelled in (str(odd), odd, f"file://{run}/a%20b%2520%23c", f"FILE://localhost{run}/a%20b%2520%23c"):
        store = open_store(spelled)
        assert store.url == str(odd)
        assert await exists(store, "step")
    for bad in ("file://", "file://host/run", "file://run"):
        with pytest.raises(UsageError):
            open_store(bad)


async def test_four_processes_and_one_name(tmp_path: Path) -> None:
    """Of several processes that save one step exactly one wins, whole; no litter stays."""
    run = tmp_path / "not" / "there"
    children = [start("race", run, number) for number in range(4)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate()[0].strip() for child in children]
    assert sorted(answers) == ["lost", "lost", "lost", "won"]
    winner = str(answers.index("won")).encode() * 500_000
    assert await read_step(LocalStore(run), NAME) == [winner] * 2
    assert sorted(p.name for p in run.iterdir()) == ["done-0", "done-1", "done-2", "done-3", NAME]


async def test_attempts_of_other_processes(run: Path) -> None:
    """A living process keeps its attempt; a killed one does not, though its forked child lives."""
    store = LocalStore(run)
    with start("hold", run) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            before = raw_tree(run)
            assert await store.sweep() == []
            assert raw_tree(run) == before
            child.kill()
            child.wait()
            os.kill(grandchild, 0)
            assert await store.sweep() == [NAME]
        finally:
            os.kill(grandchild, 9)
    assert raw_tree(run) == {}


async def test_a_forked_child_cannot_end_an_attempt(run: Path) -> None:
    """An inherited attempt is inert in a forked child, and lives on in its parent."""
    with start("fork", run) as child:
        assert child.stdout is not None
        assert child.stdout.read() == "committed\n"
    assert child.returncode == 0
    assert sorted(raw_tree(run)) == [f"{NAME}/{MANIFEST}", f"{NAME}/part"]
