"""A run has one writer, whatever dies, stalls, is copied, or lies about who it is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aiockpt import (
    Catalog,
    CheckpointError,
    RunLockedError,
    Saver,
    StorageError,
    _holder,
    _lockfile,
    _runlock,
)
from aiockpt._files import FileSystem, Lock
from aiockpt._holder import RECORD_BYTES, Holder
from aiockpt._runlock import RunLock
from aiockpt._threads import offload
from aiockpt.storage import Store
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyFiles, FaultyStore, Kind
from tests.lock_child import heard, start, tell
from tests.proof import litter, state_of, steps
from tests.savers import strike, until

KINDS: tuple[Kind, ...] = ("error", "after", "tear", "full")


class Unreached(FileSystem):
    """A disk whose locks keep nobody out, as on some shared file systems."""

    def lock(self, path: str) -> Lock | None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        stat = os.fstat(fd)
        return Lock(path, fd, (stat.st_dev, stat.st_ino))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that exists."""
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Who takes locks from now on."""
    monkeypatch.setattr(_runlock, "TORN_SECONDS", 0.05)
    return Host(monkeypatch)


class Host:
    """Makes this process look like one on another host, with this one's name and process id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    async def takes(self, run: Path, boot: str, *, ttl: float = 0.6, **env: str) -> RunLock:
        """A lock that a process on that host has taken, where locks do not reach."""
        lock = RunLock(LocalStore(run, files=Unreached()), ttl=ttl)
        self._patch.setattr(_holder, "_boot_id", lambda: boot)
        for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
            self._patch.delenv(name, raising=False)
        for name, value in env.items():
            self._patch.setenv(name, value)
        await lock.acquire()
        return lock


def die(lock: RunLock) -> None:
    """From now on its holder shows no sign of life."""
    assert lock._beat is not None
    lock._beat.stop()


def record(run: Path) -> Holder:
    """What the lock file says; only for tests in which nobody relies on the lock itself."""
    found = Holder.decode((run / "lock").read_bytes())
    assert found is not None
    return found


# ---------------------------------------------------------------- one kernel


@pytest.mark.parametrize("where", ["local", "memory"])
async def test_a_second_saver_of_the_process_is_refused(where: str, tmp_path: Path) -> None:
    """It is told so, touches nothing, and may come once the first has left."""

    def store() -> Store:
        return LocalStore(tmp_path / "run") if where == "local" else MemoryStore(str(tmp_path))

    async with Saver(store()) as saver:
        with pytest.raises(RunLockedError, match="another saver of this process") as caught:
            await Saver(store()).__aenter__()
        assert isinstance(caught.value, BlockingIOError)
        assert caught.value.holder is not None
        assert caught.value.holder["pid"] == os.getpid()
        await saver.save(state_of(1), step=1)
    async with Saver(store()) as saver:
        await saver.save(state_of(2), step=2)
    assert await steps(store()) == (1, 2)
    if where == "local":
        assert not (tmp_path / "run" / "lock").exists()


async def test_other_runs_are_free(tmp_path: Path) -> None:
    """The lock is the run's, not the library's."""
    async with Saver(tmp_path / "a"), Saver(tmp_path / "b"), Saver(MemoryStore()), Saver(MemoryStore()):
        pass


async def test_a_second_process_is_refused_and_enters_when_the_first_was_killed(tmp_path: Path) -> None:
    """At once, though a forked child of the killed one lives; Lightning's DataLoader workers do."""
    run = tmp_path / "run"
    with start("hold", run) as first:
        grandchild = int(heard(first))
        try:
            assert tell(first, 1) == "committed"
            with start("enter", run) as second:
                assert heard(second) == f"locked by {first.pid}"
            with pytest.raises(RunLockedError, match=f"process {first.pid} on .*, since 20"):
                await Saver(run).__aenter__()
            assert tell(first, 2) == "committed"
            first.kill()
            first.wait()
            os.kill(grandchild, 0)
            with start("enter", run) as third:
                assert heard(third) == "entered"
        finally:
            os.kill(grandchild, 9)
    assert await steps(run) == (1, 2)


async def test_readers_need_no_lock(tmp_path: Path) -> None:
    """A catalog works while a saver holds the run, and never opens the lock file."""
    async with Saver(tmp_path) as saver:
        await saver.save(state_of(1), step=1)
        files = FaultyFiles()
        async with Catalog(LocalStore(tmp_path, files=files)) as catalog:
            assert await catalog.steps() == (1,)
            await catalog.verify(1)
        assert not [op for op in files.operations if op.endswith("/lock")]
        await saver.save(state_of(2), step=2)


async def test_a_saver_that_could_not_enter_holds_nothing(run: Path) -> None:
    """Whatever kept it out, the next one enters."""
    (run / "run.json").write_text("junk")
    with pytest.raises(CheckpointError):
        await Saver(run).__aenter__()
    (run / "run.json").unlink()
    async with Saver(run):
        pass


async def test_a_cancelled_entry_holds_nothing(run: Path) -> None:
    """At whatever wait it was cancelled."""
    for n in itertools.count():
        struck, outcome = await strike(n, Saver(run).__aenter__, "native")
        if not struck:
            assert isinstance(outcome, Saver)
            await outcome.aclose()
            assert n > 8
            return
        if isinstance(outcome, Saver):
            await outcome.aclose()
        lock = RunLock(LocalStore(run))
        await lock.acquire()
        await lock.release()
        assert not (run / "lock").exists()


async def test_a_saver_nobody_closed_holds_the_run_as_long_as_it_lives(run: Path) -> None:
    """Collected, it lets go, and no thread of its stays."""
    saver = await Saver(run).__aenter__()
    with pytest.warns(ResourceWarning, match="never closed"):  # noqa: PT031
        del saver
        gc.collect()
    async with Saver(run):
        pass


async def test_a_stray_close_is_mended(run: Path) -> None:
    """Code of the process that opens and closes the lock file frees it; the next look takes it back."""
    async with Saver(run) as saver:
        copy = run.parent / "copy"
        shutil.copytree(run, copy)
        await saver.save(state_of(1), step=1)
        with start("enter", run) as other:
            assert heard(other) == f"locked by {os.getpid()}"
        # The copy holds our record, of a file that nobody ever held.
        with start("enter", copy) as other:
            assert heard(other) == "entered"
        await saver.save(state_of(2), step=2)


async def test_between_a_stray_close_and_the_next_look_the_record_counts(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock can be taken, but the process that wrote the record lives: then it is watched first."""
    (run / "lock").touch()
    stat = (run / "lock").stat()
    with subprocess.Popen(["sleep", "60"]) as other, contextlib.ExitStack() as stack:  # noqa: ASYNC220
        stack.callback(other.kill)
        started = await offload(_holder._started, other.pid)
        assert started
        here = await offload(Holder.here, 0.3, (stat.st_dev, stat.st_ino))
        (run / "lock").write_bytes(replace(here, pid=other.pid, started=started).encode())
        lock = RunLock(LocalStore(run))
        await lock.acquire()
        await lock.release()
        assert "watching for 0.3 s" in caplog.text
        caplog.clear()
        other.kill()
        other.wait()
        (run / "lock").touch()
        stat = (run / "lock").stat()
        dead = replace(here, pid=other.pid, started=started, place=(stat.st_dev, stat.st_ino))
        (run / "lock").write_bytes(dead.encode())
        await lock.acquire()
        await lock.release()
        assert "watching" not in caplog.text


async def test_a_lock_file_that_was_removed_is_made_again(run: Path) -> None:
    """`rm lock` under a living saver costs nothing; others are still kept out."""
    async with Saver(run) as saver:
        (run / "lock").unlink()
        await saver.save(state_of(1), step=1)
        assert (run / "lock").exists()
        with start("enter", run) as other:
            assert heard(other) == f"locked by {os.getpid()}"


async def test_who_removed_it_and_was_faster_has_the_run(run: Path) -> None:
    """Then the first saver's save fails, and nothing of it is visible."""
    async with Saver(run, on_failure="log") as saver:
        (run / "lock").unlink()
        with start("hold", run) as other:
            grandchild = int(heard(other))
            with pytest.raises(RunLockedError, match="taken over"):
                await saver.save(state_of(1), step=1)
            assert await steps(run) == ()
            assert tell(other, 2) == "committed"
            assert [p for p in litter(run) if "step" in p] == []
            other.kill()
            os.kill(grandchild, 9)
    assert (run / "lock").exists(), "it is not ours to remove"


# ---------------------------------------------------------------- where locks do not reach


async def test_a_living_holder_elsewhere_is_noticed(run: Path, host: Host) -> None:
    """He renews his record; whoever watches it is refused, be the names and numbers all the same."""
    first = await host.takes(run, "a")
    before = record(run)
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} on") as caught:
        await host.takes(run, "b")
    assert caught.value.holder is not None
    assert caught.value.holder["id"] == before.id
    await first.check()
    await first.release()
    assert not (run / "lock").exists()


async def test_he_is_noticed_whatever_files_and_clocks_say(
    run: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of files and the wall clock are never asked."""
    first = await host.takes(run, "a")
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for stamp in (0, 4e9):
        os.utime(run / "lock", (stamp, stamp))
        with pytest.raises(RunLockedError):
            await host.takes(run, "b")
    await first.release()


async def test_a_dead_holder_elsewhere_is_followed(run: Path, host: Host) -> None:
    """After his time without a renewal; should he wake up, he finds out before he commits."""
    first = await host.takes(run, "a")
    die(first)
    second = await host.takes(run, "b")
    with pytest.raises(RunLockedError, match="taken over"):
        await first.check()
    now = record(run)
    first.renew()
    with pytest.raises(RunLockedError):
        await first.check()
    await first.release()
    assert record(run) == now
    await second.check()
    await second.release()
    assert not (run / "lock").exists()


async def test_a_saver_that_was_taken_for_dead_commits_nothing(
    run: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its save fails with the reason; what it wrote is removed; the follower goes on."""
    monkeypatch.setattr(_runlock, "TTL", 0.3)
    async with Saver(LocalStore(run, files=Unreached()), on_failure="log") as saver:
        await saver.save(state_of(1), step=1)
        die(saver._places.lock)
        second = await host.takes(run, "b", ttl=30)
        with pytest.raises(RunLockedError, match="taken over") as caught:
            await saver.save(state_of(2), step=2)
        assert caught.value.holder is not None
        assert await steps(run) == (1,)
    await second.check()
    await second.release()
    assert litter(run) == []


async def test_of_two_who_follow_one_enters(run: Path, host: Host) -> None:
    """Both have watched; the record names one of them, and the other reads that."""
    die(await host.takes(run, "a", ttl=0.3))
    host._patch.setattr(_holder, "_boot_id", lambda: "b")
    locks = [RunLock(LocalStore(run, files=Unreached()), ttl=30) for _ in range(3)]
    found = await asyncio.gather(*(lock.acquire() for lock in locks), return_exceptions=True)
    assert sum(error is None for error in found) == 1
    assert all(isinstance(error, RunLockedError) for error in found if error is not None)
    await locks[found.index(None)].check()
    for lock in locks:
        await lock.release()


async def test_a_requeued_job_follows_at_once(
    run: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler has ended what ran before it; another task of the same job proves nothing."""
    first = await host.takes(run, "a", SLURM_JOB_ID="77")
    with pytest.raises(RunLockedError, match="job SLURM_JOB_ID=77"):
        await host.takes(run, "b", SLURM_JOB_ID="77")
    with pytest.raises(RunLockedError):
        await host.takes(run, "b", SLURM_JOB_ID="78", SLURM_RESTART_COUNT="1")
    caplog.clear()
    second = await host.takes(run, "b", SLURM_JOB_ID="77", SLURM_RESTART_COUNT="1")
    assert "watching" not in caplog.text
    die(first)
    await second.check()
    await second.release()


async def test_a_rebooted_machine_is_another_one(run: Path, host: Host) -> None:
    """Host name and process id are the same after a boot: that proves neither life nor death."""
    die(await host.takes(run, "a", ttl=0.2))
    lock = await host.takes(run, "b")
    await lock.release()


@pytest.mark.parametrize(
    "junk", [b"x" * 50, b"{}", bytes(RECORD_BYTES), b'{"place": [1, 2]}', b"\xff\xfe", b"[" * 4000]
)
async def test_a_damaged_record_keeps_nobody_out(run: Path, host: Host, junk: bytes) -> None:
    """A living holder would mend it within a moment."""
    (run / "lock").write_bytes(junk)
    lock = await host.takes(run, "b")
    assert (run / "lock").stat().st_size == RECORD_BYTES
    await lock.release()


async def test_a_holder_who_lets_go_while_he_is_watched(run: Path, host: Host) -> None:
    """His file is gone: the watcher begins anew and enters."""
    first = await host.takes(run, "a", ttl=5)
    die(first)
    task = asyncio.ensure_future(host.takes(run, "b"))
    await asyncio.sleep(0.1)
    assert not task.done()
    await first.release()
    second = await task
    await second.check()
    await second.release()


async def test_it_is_renewed_while_the_loop_is_busy(run: Path, host: Host) -> None:
    """A training loop may keep its thread for minutes: the signs of life come from another one."""
    lock = await host.takes(run, "a", ttl=0.3)
    seen = record(run).beat
    deadline = time.monotonic() + 30
    while record(run).beat < seen + 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    await lock.release()


async def test_a_renewal_that_fails_is_told_once_and_tried_again(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that says no for a while is no reason to give the run up."""
    files = FaultyFiles()
    lock = RunLock(LocalStore(run, files=files))
    await lock.acquire()
    loop = asyncio.get_running_loop()
    for _ in range(2):
        files.faults.fail_at = len(files.operations) + 1
        await loop.run_in_executor(None, lock.renew)
    assert caplog.text.count("cannot be renewed") == 1
    await loop.run_in_executor(None, lock.renew)
    await lock.check()
    await lock.release()


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floor", ["files", "local", "memory"])
async def test_every_operation_may_fail(
    floor: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking, renewing, checking, leaving: an error is the store's, and the next one enters."""
    monkeypatch.setattr(_runlock, "TORN_SECONDS", 0.02)
    loop = asyncio.get_running_loop()
    for n in itertools.count():
        run = tmp_path / str(n)
        files = FaultyFiles(None, kind)
        inner = MemoryStore(str(run)) if floor == "memory" else LocalStore(run, files=files)
        await inner.prepare()
        store: Store = inner if floor == "files" else FaultyStore(inner, None, kind)
        faults = files.faults if floor == "files" else store.faults  # type: ignore[attr-defined]
        faults.fail_at = len(faults.operations) + n
        lock = RunLock(store)
        with contextlib.suppress(OSError):
            await lock.acquire()
            await loop.run_in_executor(None, lock.renew)
            await lock.check()
        assert lock._lost_to is None
        await lock.release()
        fired = faults.fired
        faults.heal()
        again = RunLock(store)
        await again.acquire()
        await again.check()
        await again.release()
        if floor != "memory":
            assert [p.name for p in run.iterdir()] == []
        if not fired:
            assert n >= 6
            return


async def test_a_saver_says_what_the_store_said(run: Path) -> None:
    """A disk that cannot lock at all is a StorageError that names the file."""
    (run / "lock").mkdir()
    with pytest.raises(StorageError) as caught:
        await Saver(run).__aenter__()
    assert caught.value.filename == str(run / "lock")


async def test_the_collector_may_let_go_of_a_lock_anywhere(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a thread that is just taking another one: nobody waits for himself."""
    abandoned = await LocalStore(run).lock()
    other = run.parent / "other"
    other.mkdir()
    real = _lockfile._lock_now

    def lock_now(fd: int, path: str) -> None:
        nonlocal abandoned
        abandoned = b""
        gc.collect()
        real(fd, path)

    monkeypatch.setattr(_lockfile, "_lock_now", lock_now)
    async with asyncio.timeout(20):
        lock = await LocalStore(other).lock()
    assert not isinstance(lock, bytes)
    lock.release(forget=False)
    monkeypatch.undo()
    async with Saver(run):
        assert abandoned == b""


# ---------------------------------------------------------------- records


def test_a_record_comes_back_as_it_was() -> None:
    """Every field, in one size, whatever the names are."""
    for holder in (
        Holder.here(60.0, (3, 4)),
        Holder(id="1", host="h" * 128, job="j" * 128, since=1e9, place=(2**63, 2**64)),
    ):
        data = holder.encode()
        assert len(data) == RECORD_BYTES
        assert Holder.decode(data) == holder
        assert str(holder.pid) in str(holder)


def test_remains_of_a_process_do_not_live() -> None:
    """A killed process that nobody waited for still has its entry; its number and start prove nothing."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        assert _holder._started(child) is None
        assert _holder._started(os.getpid()) == Holder.here(1.0).started
    finally:
        os.waitpid(child, 0)


async def test_the_pulse_ends_with_its_last_beat(run: Path) -> None:
    """No thread stays when nobody holds a lock."""
    from aiockpt import _pulse

    lock = RunLock(LocalStore(run))
    await lock.acquire()
    assert _pulse._pulse._thread is not None
    await lock.release()
    await until(lambda: _pulse._pulse._thread is None)
