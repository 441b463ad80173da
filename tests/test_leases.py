"""A leased checkpoint stays, whoever deletes, whatever clocks and listings say; a dead reader frees it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aiockpt import (
    Catalog,
    CheckpointError,
    Lease,
    StepNotFoundError,
    StorageError,
    UsageError,
    _clock,
    _leases,
)
from aiockpt._leases import leased
from aiockpt._retention import Retention
from aiockpt.policies.keep import KeepLast
from aiockpt.storage import Entry, Store
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyStore, Kind
from tests.lock_child import heard, start
from tests.proof import litter, number_in, save, state_of, steps
from tests.savers import strike, until

KINDS: tuple[Kind, ...] = ("error", "after", "tear", "full")


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run with two steps."""
    for step in (1, 2):
        await save(tmp_path / "run", state_of(step), step)
    return tmp_path / "run"


def files(run: Path) -> list[str]:
    """The leases that are there."""
    folder = run / "leases"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def is_lost(lease: Lease) -> bool:
    """Asked anew each time."""
    return lease.lost


def is_pinned(lease: Lease) -> bool:
    """Asked anew each time."""
    return lease.pinned


async def prune(store: Store) -> list[int]:
    """Delete all but the newest step, as a saver does after a commit; returns what went."""
    async with Catalog(store) as catalog:

        async def pinned() -> set[tuple[str, str]]:
            return await leased(store)

        found = await catalog.checkpoints()
        return await Retention(store, catalog.checkpoints, pinned).apply(KeepLast(1), found[0].run_id)


class Late(FaultyStore):
    """A store whose listings show new files only at the k-th look, as those of NFS may."""

    def __init__(self, inner: Store, looks: int) -> None:
        super().__init__(inner)
        self._looks = looks
        self._unseen: dict[str, int] = {}

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        await super().put(key, data, if_absent=if_absent)
        self._unseen.setdefault(key, self._looks)

    async def list(self, folder: str = "") -> list[Entry]:
        found = []
        for entry in await super().list(folder):
            key = f"{folder}/{entry.name}" if folder else entry.name
            self._unseen[key] = left = self._unseen.get(key, self._looks) - 1
            if left < 0 or not key.startswith("leases/"):
                found.append(entry)
        return found


class NotWritable(FaultyStore):
    """A store that one may only read."""

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), key)


# ---------------------------------------------------------------- the plain course


@pytest.mark.parametrize("which", ["record", "step"])
async def test_a_leased_step_stays_until_it_is_let_go(run: Path, which: str) -> None:
    """Retention passes it over; the lease is one small file that goes with the body."""
    async with Catalog(run) as catalog:
        checkpoint = await catalog.get(1)
        async with catalog.lease(checkpoint if which == "record" else 1, ttl=60) as lease:
            assert lease.checkpoint == checkpoint
            assert not lease.lost
            assert not lease.pinned
            assert len(files(run)) == 1
            assert await leased(LocalStore(run)) == {(checkpoint.name, checkpoint.save_id)}
            assert await prune(LocalStore(run)) == []
            assert number_in(await lease.load()) == 1
        assert files(run) == []
        assert await leased(LocalStore(run)) == set()
        assert await prune(LocalStore(run)) == [1]


async def test_the_newest_is_leased_when_none_is_named(run: Path) -> None:
    """And loads go into living objects as with a catalog."""
    async with Catalog(run) as catalog, catalog.lease() as lease:
        assert lease.checkpoint.step == 2
        target = state_of(0)
        found = await lease.load(into=target)
        assert found.step == 2
        assert found.report is not None
        assert number_in({**target, **found.values}) == 2


async def test_a_saver_asks_for_leases(run: Path) -> None:
    """What a reader of any process has leased outlives the commits of the writer."""
    from aiockpt import Saver

    with start("lease", run, 60) as reader:
        assert heard(reader) == "2"
        async with Saver(run, keep=KeepLast(1), keep_grace=0) as saver:
            for step in (3, 4):
                await saver.save(state_of(step), step=step)
            await saver._housekeeping.drain()
            assert await steps(run) == (2, 4)
            reader.communicate("\n")
            await saver.save(state_of(5), step=5)
            await saver._housekeeping.drain()
        assert await steps(run) == (5,)


async def test_two_leases_of_one_step(run: Path) -> None:
    """It stays as long as one of them does."""
    async with Catalog(run) as catalog:
        async with catalog.lease(1):
            async with catalog.lease(1):
                assert len(files(run)) == 2
            assert await prune(LocalStore(run)) == []
        assert await prune(LocalStore(run)) == [1]


async def test_what_cannot_be_leased(run: Path) -> None:
    """A wrong ttl is refused at the call, a missing step on entering; neither leaves a file."""
    async with Catalog(run) as catalog:
        for ttl in (0, -1, float("nan"), float("inf"), True, "60"):
            with pytest.raises(UsageError, match="ttl"):
                catalog.lease(1, ttl=ttl)  # type: ignore[arg-type]
        with pytest.raises(StepNotFoundError):
            await catalog.lease(7).__aenter__()
        lease = catalog.lease(1)
        with pytest.raises(UsageError, match="enter the lease"):
            _ = lease.checkpoint
        async with lease:
            with pytest.raises(UsageError, match="entered once"):
                await lease.__aenter__()
        async with Catalog(MemoryStore()) as empty:
            with pytest.raises(StepNotFoundError, match="no checkpoint"):
                await empty.lease().__aenter__()
    assert files(run) == []


# ---------------------------------------------------------------- races with a deleter


async def test_a_step_that_goes_while_it_is_leased(run: Path) -> None:
    """Deleted between the listing and the lease: the lease is taken back, and that is said."""

    class Deleting(FaultyStore):
        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            await self.inner.retire("step-00000001")
            await super().put(key, data, if_absent=if_absent)

    async with Catalog(Deleting(LocalStore(run))) as catalog:
        with pytest.raises(StepNotFoundError):
            await catalog.lease(1).__aenter__()
        assert files(run) == []
        async with catalog.lease() as lease:
            assert lease.checkpoint.step == 2


async def test_a_step_that_is_written_anew_while_it_is_leased(run: Path) -> None:
    """Another save of the same step is another checkpoint."""

    class Anew(FaultyStore):
        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key.startswith("leases"):
                shutil.rmtree(run / "step-00000002")
                shutil.copytree(run.parent / "other" / "step-00000002", run / "step-00000002")
            await super().put(key, data, if_absent=if_absent)

    await save(run.parent / "other", state_of(2), 2)
    async with Catalog(Anew(LocalStore(run))) as catalog:
        with pytest.raises(StepNotFoundError, match="written anew"):
            await catalog.lease(2).__aenter__()
    assert files(run) == []


async def test_the_newest_is_followed_when_it_goes(run: Path) -> None:
    """Without a name the newest one is meant, whichever that is by now."""
    gone: list[bool] = []

    class Deleting(FaultyStore):
        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if not gone:
                gone.append(await self.inner.retire("step-00000002"))
            await super().put(key, data, if_absent=if_absent)

    async with Catalog(Deleting(LocalStore(run))) as catalog, catalog.lease() as lease:
        assert lease.checkpoint.step == 1
        assert len(files(run)) == 1


async def test_a_deleter_that_comes_first_brings_the_step_back(run: Path) -> None:
    """It has moved the step aside when the lease is written: it looks again, and the reader too."""
    store = LocalStore(run)
    async with Catalog(run) as catalog:
        checkpoint = await catalog.get(1)
        lease = catalog.lease(checkpoint)
        entered: list[asyncio.Task[Any]] = []

        async def wanted() -> bool:
            entered.append(asyncio.ensure_future(lease.__aenter__()))
            await until(lambda: bool(files(run)))
            return (checkpoint.name, checkpoint.save_id) in await leased(store)

        # The reader has resolved the step before it goes out of sight.
        resolve = catalog._finder.resolve
        catalog._finder.resolve = _first(checkpoint, resolve)  # type: ignore[method-assign]
        assert not await store.retire(checkpoint.name, unless=wanted)
        await entered[0]
        assert number_in(await lease.load()) == 1
        await lease.__aexit__(None, None, None)


def _first(checkpoint: Any, then: Any) -> Any:
    calls = itertools.count()

    async def resolve(wanted: Any) -> Any:
        return (checkpoint, None) if next(calls) == 0 else await then(wanted)

    return resolve


@pytest.mark.parametrize("looks", [1, 3, 10])
async def test_late_listings_hide_no_lease(run: Path, looks: int) -> None:
    """A listing that does not show what was written just now is no ground to delete anything."""
    store = Late(LocalStore(run), looks)
    async with Catalog(store) as catalog:
        checkpoint = await catalog.get(1)
        async with catalog.lease(checkpoint):
            assert await leased(store) == {(checkpoint.name, checkpoint.save_id)}
            assert await prune(store) == []
    assert await leased(store) == set()
    assert files(run) == []


async def test_listings_that_are_too_late_delete_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell then: an error for who asks, a warning of retention."""
    monkeypatch.setattr(_clock, "TRIES", 5)
    store = Late(LocalStore(run), 50)
    with pytest.raises(OSError, match="out of date"):
        await leased(store)
    assert await prune(store) == []
    assert files(run) == []


# ---------------------------------------------------------------- time


async def test_a_killed_reader_frees_it_by_its_ttl(run: Path) -> None:
    """Its lease stays behind, holds for so long, and is removed by the writer."""
    store = LocalStore(run)
    with start("lease", run, 1.5) as reader:
        assert heard(reader) == "2"
        await asyncio.sleep(2)  # longer than its ttl: it is renewed
        assert len(await leased(store)) == 1
        reader.kill()
        reader.wait()
        assert len(await leased(store)) == 1
        while await leased(store):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await store.sweep()  # it may have been killed in the middle of a renewal
    assert files(run) == []


async def test_clocks_and_times_of_other_files_are_not_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface/transformers#26961: file systems that fake times. Only lease and probe are compared."""
    async with Catalog(run) as catalog:
        async with catalog.lease(1, ttl=30):
            for wall, stamp in ((0.0, 4e9), (4e9, 0.0)):
                monkeypatch.setattr(time, "time", lambda wall=wall: wall)
                for path in (run, *run.rglob("*")):
                    if path.parent.name != "leases":
                        os.utime(path, (stamp, stamp))
                assert await prune(LocalStore(run)) == []
        assert await prune(LocalStore(run)) == [1]


async def test_an_old_lease_is_expired_and_a_young_one_is_not(run: Path) -> None:
    """By the time of the file; one from the future holds."""
    store = LocalStore(run)
    keys = [f"leases/step-00000001.{n:032x}.{uuid.uuid4().hex}.json" for n in range(4)]
    ages = (90, 30, -1000, 3600)
    for key, age in zip(keys, ages, strict=True):
        await store.put(key, b'{"ttl": 60}')
        os.utime(run / key, (time.time() - age,) * 2)
    assert {save_id[-1] for _, save_id in await leased(store)} == {"1", "2"}
    assert files(run) == sorted(key.partition("/")[2] for key in keys[1:3])


async def test_old_probes_go(run: Path) -> None:
    """A judge that died leaves a probe; it is removed in time, a fresh one of another judge is not."""
    store = LocalStore(run)
    for name, age in (("a", 3600), ("b", 1)):
        await store.put(f"leases/probe-{name * 32}", b"")
        os.utime(run / "leases" / f"probe-{name * 32}", (time.time() - age,) * 2)
    assert await leased(store) == set()
    assert files(run) == ["probe-" + "b" * 32]


async def test_a_lease_that_cannot_be_renewed_is_lost(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning while there is hope, then `lost`; it never comes back, though the disk does."""
    store = FaultyStore(LocalStore(run), None, "full")
    async with Catalog(store) as catalog, catalog.lease(1, ttl=0.3) as lease:
        await asyncio.sleep(0.5)
        assert not is_lost(lease)
        store.faults.fail_at = len(store.operations)
        await until(lambda: lease.lost)
        await until(lambda: "it is lost" in caplog.text)
        assert caplog.text.count("cannot be renewed") == 1
        store.heal()
        await asyncio.sleep(0.2)
        assert lease.lost
        assert number_in(await lease.load()) == 1
    assert lease.lost
    assert files(run) == []


async def test_a_renewal_that_took_too_long_does_not_count(run: Path) -> None:
    """The old file stood meanwhile; whoever looked may have removed it and the checkpoint."""
    store = FaultyStore(LocalStore(run), None, "stall")
    async with Catalog(store) as catalog, catalog.lease(1, ttl=0.3) as lease:
        store.faults.fail_at = len(store.operations)
        await store.stalled.wait()
        await asyncio.sleep(0.3)
        store.release.set()
        await asyncio.sleep(0.1)
        assert lease.lost


# ---------------------------------------------------------------- what lies around


async def test_junk_among_the_leases(run: Path) -> None:
    """What is none is left alone; what looks like one and cannot be read counts as one."""
    store = LocalStore(run)
    one, two, three = (uuid.uuid4().hex for _ in range(3))
    junk = {
        "notes.txt": b"mine",
        f"step-00000001.{one}.json": b"{}",
        ".hidden": b"",
        f"step-00000001.{'z' * 32}.{one}.json": b"{}",
    }
    odd = {
        f"step-00000001.{one}.{one}.json": b"not json",
        f"step.with.dots.1.{two}.{one}.json": b'{"ttl": -5}',
        f"step-00000002.{three}.{one}.json": b"[" * 5000,
    }
    for name, data in {**junk, **odd}.items():
        await store.put(f"leases/{name}", data)
    (run / "leases" / "folder").mkdir()
    (run / "leases" / f"step-00000002.{one}.{two}.json").mkdir()
    assert await leased(store) == {
        ("step-00000001", one),
        ("step.with.dots.1", two),
        ("step-00000002", three),
    }
    for name in odd:
        os.utime(run / "leases" / name, (1, 1))
    assert await leased(store) == set()
    left = {name for name in files(run) if not (run / "leases" / name).is_dir()}
    assert left == set(junk)


async def test_a_run_without_leases_asks_nothing_of_its_readers(run: Path) -> None:
    """Looking and loading make no folder."""
    async with Catalog(run) as catalog:
        await catalog.load()
    assert not (run / "leases").exists()


# ---------------------------------------------------------------- read-only runs


@pytest.mark.parametrize("where", ["local", "memory"])
async def test_a_run_that_cannot_be_written(where: str, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No lease and one warning; the files are open, so that a deletion cannot take them away."""
    inner: Store = LocalStore(run)
    if where == "memory":
        inner = MemoryStore()
        await save(inner, state_of(1), 1)
    async with Catalog(NotWritable(inner)) as catalog:
        async with catalog.lease(1) as lease:
            assert caplog.text.count("held open instead") == 1
            assert is_pinned(lease)
            assert not lease.lost
            await inner.delete_folder(lease.checkpoint.name)
            for _ in range(2):
                assert number_in(await lease.load()) == 1
            assert lease.checkpoint.step == 1
        assert not is_pinned(lease)
        with pytest.raises(StepNotFoundError):
            await lease.load()


async def test_files_of_a_pinned_checkpoint(run: Path) -> None:
    """The user's own files can be read through it too, and damage is still found."""
    store = NotWritable(LocalStore(run))
    await save(run, state_of(3), 3, files={"notes": b"hello", "empty": b""})
    async with Catalog(store) as catalog, catalog.lease(3) as lease:
        shard = next((run / "step-00000003").glob("model*.safetensors"))
        with shard.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")
        shutil.rmtree(run / "step-00000003")
        assert await lease.read_file("notes") == b"hello"
        assert await lease.read_file("empty") == b""
        with pytest.raises(CheckpointError, match=r"checksum|digest|damaged|differs"):
            await lease.load()


async def test_a_pinned_step_that_goes_while_it_is_opened(run: Path) -> None:
    """Half of it was open: all is closed again, and the step is not found."""

    class Going(NotWritable):
        async def open(self, key: str) -> Any:
            if "manifest" not in key:
                await self.inner.delete_folder("step-00000001")
            return await super().open(key)

    async with Catalog(Going(LocalStore(run))) as catalog:
        with pytest.raises(StepNotFoundError):
            await catalog.lease(1).__aenter__()


# ---------------------------------------------------------------- faults and cancellation


@contextlib.asynccontextmanager
async def copies(run: Path, where: str, kind: Kind) -> AsyncIterator[FaultyStore]:
    """A fresh copy of the run on a store that will fail."""
    if where == "memory":
        inner: Store = MemoryStore()
        await save(inner, state_of(1), 1)
    else:
        path = run.parent / uuid.uuid4().hex
        shutil.copytree(run, path)
        inner = LocalStore(path)
    yield FaultyStore(inner, None, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["local", "memory"])
async def test_every_operation_of_a_lease_may_fail(run: Path, where: str, kind: Kind) -> None:
    """It is there or not; an error is ours; what stays behind is at most a lease that expires."""
    for n in itertools.count():
        async with copies(run, where, kind) as store, Catalog(store) as catalog:
            store.faults.fail_at = n
            error: BaseException | None = None
            try:
                async with catalog.lease(1) as lease:
                    assert number_in(await lease.load()) == 1
                    assert len(await leased(store.inner)) == 1
            except CheckpointError as caught:
                error = caught
            fired = store.fired
            store.heal()
            left = await leased(store.inner)
            # A lease that could not be removed stays until it expires, and nothing else does.
            deletes = [op for op in store.operations if op.startswith("store.delete")]
            assert not left or (fired and deletes and store.operations[n] == deletes[0]), store.operations
            if not fired:
                assert error is None
                assert n >= 6
                return
            assert error is None or isinstance(error, StorageError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["local", "memory"])
async def test_every_operation_of_the_judge_may_fail(run: Path, where: str, kind: Kind) -> None:
    """It knows all leases or says that it does not; never fewer."""
    for n in itertools.count():
        async with copies(run, where, kind) as store, Catalog(store.inner) as catalog:
            async with catalog.lease(1) as lease:
                store.faults.fail_at = n
                with contextlib.suppress(OSError):
                    want = (lease.checkpoint.name, lease.checkpoint.save_id)
                    assert await leased(store) == {want}
                fired = store.fired
                store.heal()
            assert await leased(store.inner) == set()
            if not fired:
                assert n >= 4
                return


@pytest.mark.parametrize("how", ["native", "twice", "scope", "timeout"])
async def test_cancelled_at_any_wait_no_lease_stays(run: Path, how: str) -> None:
    """On entering, in the body, while it is left: no file, no task, no descriptor."""

    async def body() -> str:
        async with Catalog(run) as catalog, catalog.lease(1) as lease:
            await catalog.load(lease.checkpoint)
        return "done"

    for n in itertools.count(0, 3):
        struck, outcome = await strike(n, body, how)
        assert files(run) == []
        assert [t for t in asyncio.all_tasks() if t.get_name() == "aiockpt lease"] == []
        if not struck:
            assert outcome == "done"
            assert n > 12
            break
    assert litter(run) == []


def test_the_longest_names_fit() -> None:
    """A lease's name is a file name everywhere: under 255 bytes."""
    longest = "x" * 120 + ".999999"
    assert len(f"{longest}.{'0' * 32}.{'0' * 32}.json") < 255
    assert _leases.NAME.fullmatch(f"{longest}.{'0' * 32}.{'0' * 32}.json")
