"""Publishers: after the commit, in its order, never backwards, and never in the way."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiockpt.sync
from aiockpt import (
    Catalog,
    Checkpoint,
    CorruptCheckpointError,
    Failure,
    PublishError,
    Saver,
    StorageError,
    Store,
    UsageError,
    _publishing,
)
from aiockpt._publishing import PAUSES, Publishing
from aiockpt.publish import Publisher
from aiockpt.publish.latest_link import LatestLink
from aiockpt.publish.stable_marker import StableMarker
from aiockpt.publish.tracker_file import TrackerFile
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyFiles
from tests.proof import litter, number_in, save, state_of, steps
from tests.savers import small_blocks
from tests.stalling import Disk, before_commit, store_on

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small poisoned blocks, and no pauses between tries."""
    monkeypatch.setattr(_publishing, "PAUSES", (0.0, 0.0, 0.0))
    with small_blocks():
        yield


class Recorder(Publisher):
    """Writes down what is visible when it is called; fails as often as it was told to."""

    def __init__(self, failures: int = 0, error: Callable[[], BaseException] = OSError) -> None:
        self.failures = failures
        self.error = error
        self.told: list[int] = []

    async def publish(self, store: Store, checkpoint: Checkpoint) -> None:
        assert checkpoint.step in await steps(store)
        if self.failures:
            self.failures -= 1
            raise self.error()
        self.told.append(checkpoint.step)


class Pointer(Recorder):
    """Names the newest step only."""

    pointer = True


async def test_members_publish_a_commit(tmp_path: Path) -> None:
    """The link leads to the newest step, the marker lies in each, the file holds the number."""
    async with Saver(tmp_path, publish=[LatestLink(), StableMarker(), TrackerFile()]) as saver:
        for step in (5, 10):
            await saver.save(state_of(step), step=step)
            await saver.drain()
            assert os.readlink(tmp_path / "latest") == f"step-{step:08d}"
            assert (tmp_path / TRACKER).read_text() == str(step)
            assert (tmp_path / "latest" / "STABLE").read_bytes() == b""
    assert await steps(tmp_path) == (5, 10)
    async with Catalog(tmp_path) as catalog:
        await catalog.verify(5)
        found = await catalog.latest("full")
        assert found is not None
        assert found.skipped == ()
        assert number_in(await catalog.load()) == 10
    assert litter(tmp_path) == []


async def test_nothing_is_published_before_the_commit(tmp_path: Path) -> None:
    """While a save stands just before its commit, link, marker and file are the old ones."""
    disk = Disk(before_commit)
    publishers = [LatestLink(), StableMarker(), TrackerFile()]
    async with Saver(store_on(disk, tmp_path), publish=publishers) as saver:
        await saver.save(state_of(1), step=1)
        await saver.drain()
        disk.arm()
        pending = await saver.stage(state_of(2), step=2)
        await pending.written()
        assert os.readlink(tmp_path / "latest") == "step-00000001"
        assert (tmp_path / TRACKER).read_text() == "1"
        assert [p.parent.name for p in tmp_path.rglob("STABLE")] == ["step-00000001"]
        disk.release.set()
    assert os.readlink(tmp_path / "latest") == "step-00000002"


async def test_failed_save_is_not_published(tmp_path: Path) -> None:
    """What did not commit is told to nobody."""
    disk, recorder = Disk(before_commit, "error"), Recorder()
    async with Saver(store_on(disk, tmp_path), publish=[recorder]) as saver:
        disk.arm()
        with pytest.raises(StorageError):
            await saver.save(state_of(1), step=1)
        await saver.save(state_of(2), step=2)
    assert recorder.told == [2]


async def test_functions_in_the_order_of_commits(tmp_path: Path) -> None:
    """Sync and async ones, each waiting for its own last call; leaving waits for all."""
    told: list[int] = []
    slow: list[int] = []

    async def later(checkpoint: Checkpoint) -> None:
        await asyncio.sleep(0.05 if checkpoint.step == 1 else 0)
        slow.append(checkpoint.step)

    async with Saver(
        tmp_path, publish=[lambda checkpoint: told.append(checkpoint.step), later], max_pending=3
    ) as saver:
        for step in (1, 2, 3):
            await saver.stage(state_of(step), step=step)
    assert told == slow == [1, 2, 3]


async def test_overwriting_an_older_step_moves_no_pointer_back(tmp_path: Path) -> None:
    """An older step that is published late never replaces a newer one."""
    recorder = Recorder()
    async with Saver(tmp_path, publish=[LatestLink(), TrackerFile(), StableMarker(), recorder]) as saver:
        await saver.save(state_of(5), step=5)
        await saver.save(state_of(10), step=10)
        await saver.save(state_of(6), step=5, overwrite=True)
    assert os.readlink(tmp_path / "latest") == "step-00000010"
    assert (tmp_path / TRACKER).read_text() == "10"
    assert (tmp_path / "step-00000005.1" / "STABLE").exists()
    assert recorder.told == [5, 10, 5]


async def test_retried_pointer_gives_way_to_a_newer_commit(tmp_path: Path) -> None:
    """Asked before every try, so a try that comes late cannot go back."""
    newest = [1]
    store = MemoryStore()
    told = Pointer(failures=1)

    async def sleep(_: float) -> None:
        newest[0] = 2

    first, second = [await save(store, state_of(step), step) for step in (1, 2)]
    publishing = Publishing(store, [told], lambda: newest[0], lambda *_: None, sleep=sleep)
    publishing.committed(first)
    publishing.committed(second)
    await publishing.idle()
    assert told.told == [2]


async def test_after_a_rewind_pointers_go_back(tmp_path: Path) -> None:
    """The steps above are gone: the link must not dangle, and the next save moves on from there."""
    recorder = Recorder()
    async with Saver(tmp_path, publish=[LatestLink(), TrackerFile(), recorder]) as saver:
        for step in (1, 2, 3):
            await saver.save(state_of(step), step=step)
        await saver.restore(step=1, rewind=True)
        await saver.drain()
        assert os.readlink(tmp_path / "latest") == "step-00000001"
        assert (tmp_path / TRACKER).read_text() == "1"
        await saver.save(state_of(2), step=2)
    assert os.readlink(tmp_path / "latest") == "step-00000002"
    assert recorder.told == [1, 2, 3, 2]


async def test_next_saver_publishes_what_the_last_one_could_not(tmp_path: Path) -> None:
    """A process that died between commit and publication leaves no step unpublished for ever."""
    marker = StableMarker()
    async with Saver(tmp_path, publish=[marker]) as saver:
        await saver.save(state_of(1), step=1)
    (tmp_path / "step-00000001" / "STABLE").unlink()
    recorder = Recorder()
    async with Saver(tmp_path, publish=[marker, LatestLink(), recorder]):
        pass
    assert (tmp_path / "step-00000001" / "STABLE").exists()
    assert os.readlink(tmp_path / "latest") == "step-00000001"
    assert recorder.told == []  # whoever might not bear it twice is not asked


# -------------------------------------------------------------- failures


async def test_failure_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A few times, with a warning each; then all is well."""
    recorder = Recorder(failures=len(PAUSES))
    async with Saver(tmp_path, publish=[recorder]) as saver:
        await saver.save(state_of(1), step=1)
    assert recorder.told == [1]
    assert saver.failures == ()
    assert caplog.text.count("is tried again") == len(PAUSES)


async def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits between tries are those of the table."""
    monkeypatch.setattr(_publishing, "PAUSES", PAUSES)
    store, slept, failed = MemoryStore(), [], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    checkpoint = await save(store, state_of(1), 1)
    recorder = Recorder(failures=9)
    publishing = Publishing(store, [recorder], lambda: 1, lambda *told: failed.append(told), sleep=sleep)
    publishing.committed(checkpoint)
    await publishing.idle()
    assert tuple(slept) == PAUSES
    assert sorted(PAUSES) == list(PAUSES)
    assert failed[0][:2] == ("Recorder", checkpoint)
    assert recorder.failures == 9 - len(PAUSES) - 1


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError])
async def test_failure_for_good_is_reported_and_the_commit_stands(
    error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged, told to listeners, kept in `failures`; the save and the saver succeed."""
    failures: list[Failure] = []

    class Listening:
        def after_failure(self, failure: Failure) -> None:
            failures.append(failure)

    broken, fine = Recorder(failures=99, error=error), Recorder()
    async with Saver(tmp_path, publish=[broken, fine], listeners=[Listening()]) as saver:
        checkpoint = await saver.save(state_of(1), step=1)
        await saver.drain()
        (failure,) = saver.failures
        assert isinstance(failure, PublishError)
        assert (failure.publisher, failure.step) == ("Recorder", 1)
        assert isinstance(failure.__cause__, error)
        await saver.save(state_of(2), step=2)
    assert fine.told == [1, 2]
    assert failures[0] == Failure(step=1, save_id=checkpoint.save_id, error=failure, publisher="Recorder")
    assert [f.step for f in failures] == [1, 2]
    assert "step 1 is committed, but publisher Recorder failed" in caplog.text
    assert await steps(tmp_path) == (1, 2)


async def test_hanging_publisher_is_left_behind_in_time(tmp_path: Path) -> None:
    """Leaving takes no longer than `drain_timeout`; what was not published is named, all of it."""

    async def hang(checkpoint: Checkpoint) -> None:
        await asyncio.Event().wait()

    async with Saver(tmp_path, publish=[hang], drain_timeout=0.2) as saver:
        await saver.save(state_of(1), step=1)
        await saver.save(state_of(2), step=2)
    assert [failure.step for failure in saver.failures] == [1, 2]
    assert all("did not end in time" in str(failure) for failure in saver.failures)


async def test_body_that_raises_still_publishes(tmp_path: Path) -> None:
    """What is committed is told, whatever became of the training."""
    with pytest.raises(ValueError, match="boom"):
        async with Saver(tmp_path, publish=[LatestLink()]) as saver:
            await saver.stage(state_of(1), step=1)
            raise ValueError("boom")
    assert os.readlink(tmp_path / "latest") == "step-00000001"


@pytest.mark.parametrize(
    "make", [LatestLink, TrackerFile, StableMarker], ids=["LatestLink", "TrackerFile", "StableMarker"]
)
async def test_any_call_of_a_member_may_fail(make: Callable[[], Publisher], tmp_path: Path) -> None:
    """For every n: whatever fails once, the next try publishes, and no litter or damage is left."""

    def failed(*told: object) -> None:
        raise AssertionError(told)

    checkpoint = None
    for step in (1, 2):
        async with Saver(tmp_path / "template", publish=[StableMarker()]) as saver:
            checkpoint = await saver.save(state_of(step), step=step)
    assert checkpoint is not None
    for n in range(1000):
        run = tmp_path / str(n)
        shutil.copytree(tmp_path / "template", run, symlinks=True)
        (run / "step-00000002" / "STABLE").unlink()
        files = FaultyFiles(n)
        store = LocalStore(run, files=files)
        publishing = Publishing(store, [make()], lambda: 2, failed)
        publishing.committed(checkpoint)
        await publishing.idle()
        found = {
            "LatestLink": lambda run=run: os.readlink(run / "latest"),
            "TrackerFile": lambda run=run: (run / TRACKER).read_text(),
            "StableMarker": lambda run=run: (run / "step-00000002" / "STABLE").read_text(),
        }[make.__name__]()
        assert found in ("step-00000002", "2", "")
        files.heal()
        await store.sweep()
        assert litter(run) == []
        assert await steps(run) == (1, 2)
        if not files.faults.fired:
            assert n > 2
            return
    raise AssertionError("it never comes to an end")


# -------------------------------------------------------------- the members' limits


async def test_link_needs_a_folder() -> None:
    """Other stores have no links: said at once, before anything is written."""
    with pytest.raises(UsageError, match="TrackerFile"):
        Saver(MemoryStore(), publish=[LatestLink()])
    store = MemoryStore()
    async with Saver(store, publish=[TrackerFile("newest"), StableMarker()]) as saver:
        await saver.save(state_of(3), step=3)
    assert await store.get("newest") == b"3"
    assert await store.get("step-00000003/STABLE") == b""
    assert await steps(store) == (3,)


async def test_link_replaces_no_file_of_the_user(tmp_path: Path) -> None:
    """A folder or file that has the name stays, and the publisher fails."""
    for name, make in (("folder", Path.mkdir), ("file", Path.touch)):
        make(tmp_path / name)
        async with Saver(tmp_path, publish=[LatestLink(name)]) as saver:
            await saver.save(state_of(1), step=1, overwrite=True)
        assert {type(failure.__cause__) for failure in saver.failures} == {FileExistsError}
        assert not (tmp_path / name).is_symlink()


@pytest.mark.parametrize("make", [LatestLink, StableMarker, TrackerFile])
@pytest.mark.parametrize(
    "name", ["", "a/b", ".hidden", "run.json", "files", "manifest.json", "part-00000.json", "m.safetensors"]
)
def test_names_that_the_run_needs(make: Callable[[str], Publisher], name: str) -> None:
    """A publisher cannot be told to overwrite what is ours."""
    with pytest.raises(UsageError):
        make(name)


def test_what_is_no_publisher_is_refused(tmp_path: Path) -> None:
    """A value that cannot be called, and a class instead of an object."""
    wrong: Any
    for wrong in (3, "latest", LatestLink):
        with pytest.raises(UsageError, match="publish="):
            Saver(tmp_path, publish=[wrong])


async def test_marker_and_file_of_one_name(tmp_path: Path) -> None:
    """The user's own file cannot have the marker's name."""
    async with Saver(tmp_path, publish=[StableMarker()]) as saver:
        with pytest.raises(UsageError, match="STABLE"):
            await saver.save(state_of(1), step=1, files={"STABLE": "x"})


async def test_marker_is_tolerated_only_where_it_was_announced(tmp_path: Path) -> None:
    """A step saved without it is not marked; a marker with content is damage as ever."""
    await save(tmp_path, state_of(1), 1)
    async with Saver(tmp_path, publish=[StableMarker()]) as saver:
        assert [p.name for p in tmp_path.rglob("STABLE")] == []
        await saver.save(state_of(2), step=2)
        await saver.drain()
        marker = tmp_path / "step-00000002" / "STABLE"
        assert marker.exists()
        marker.write_text("x")
        async with Catalog(tmp_path) as catalog:
            with pytest.raises(CorruptCheckpointError, match="STABLE"):
                await catalog.get(2)
    (tmp_path / "step-00000001" / "STABLE").touch()
    async with Catalog(tmp_path) as catalog:
        with pytest.raises(CorruptCheckpointError, match="STABLE"):
            await catalog.get(1)


async def test_marker_does_not_bring_a_deleted_step_back(tmp_path: Path) -> None:
    """Deleted before, or just then: no folder appears that is no checkpoint."""

    class Deleting(LocalStore):
        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            await self.retire(key.partition("/")[0])
            await super().put(key, data, if_absent=if_absent)

    async with Saver(tmp_path, publish=[StableMarker()]) as saver:
        checkpoint = await saver.save(state_of(1), step=1)
        await saver.drain()
        await saver.store.delete("step-00000001/STABLE")
        await StableMarker().publish(Deleting(tmp_path), checkpoint)
        assert not (tmp_path / "step-00000001").exists()
        await StableMarker().publish(saver.store, checkpoint)
        assert not (tmp_path / "step-00000001").exists()


def test_publishers_under_sync(tmp_path: Path) -> None:
    """The same option for loops that are not async; closing waits for them."""
    with aiockpt.sync.Saver(tmp_path, publish=[LatestLink()]) as saver:
        saver.stage(state_of(1), step=1)
    assert os.readlink(tmp_path / "latest") == "step-00000001"


# -------------------------------------------------------------- files of the run


async def test_run_files_are_written_once(tmp_path: Path) -> None:
    """Content and copies, with digests in `run.json`; equal ones are left alone on resume."""
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    run = tmp_path / "run"
    given: Any = {"config.json": '{"lr": 1}', "tokenizer.json": source}
    async with Saver(run, run_files=given) as saver:
        await saver.drain()
        assert (run / "files" / "config.json").read_text() == '{"lr": 1}'
    assert (run / "files" / "tokenizer.json").read_text() == "{}"
    record = json.loads((run / "run.json").read_text())
    assert record["files"]["tokenizer.json"] == {
        "size": 2,
        "digest": record["files"]["tokenizer.json"]["digest"],
    }
    before = {p.name: p.stat().st_ino for p in (run / "files").iterdir()}
    async with Saver(run, run_files=given) as saver:
        assert saver.run_id == record["run_id"]
        await saver.save(state_of(1), step=1)
    assert {p.name: p.stat().st_ino for p in (run / "files").iterdir()} == before
    assert await steps(run) == (1,)


async def test_run_files_that_differ_are_refused(tmp_path: Path) -> None:
    """Nothing is changed; a further file may be added later; a lost or torn one is written anew."""
    async with Saver(tmp_path, run_files={"a": "1"}):
        pass
    with pytest.raises(UsageError, match="a is not what this run began with"):
        async with Saver(tmp_path, run_files={"a": "2"}):
            pass
    assert (tmp_path / "files" / "a").read_text() == "1"
    async with Saver(tmp_path, run_files={"b": "2"}):
        pass
    (tmp_path / "files" / "a").write_text("torn")
    async with Saver(tmp_path, run_files={"a": "1", "b": "2"}):
        pass
    assert (tmp_path / "files" / "a").read_text() == "1"
    assert sorted(json.loads((tmp_path / "run.json").read_text())["files"]) == ["a", "b"]
    with pytest.raises(UsageError, match="b is not"):
        async with Saver(tmp_path, run_files={"b": "1"}):
            pass


async def test_run_files_are_written_in_the_background(tmp_path: Path) -> None:
    """Entering does not wait for them, leaving does."""
    disk = Disk(lambda operation: operation.startswith("create") and "/files/" in operation)
    disk.arm()
    async with Saver(store_on(disk, tmp_path), run_files={"a": "1"}) as saver:
        await saver.save(state_of(1), step=1)
        assert not (tmp_path / "files" / "a").exists()
        disk.release.set()
    assert (tmp_path / "files" / "a").read_text() == "1"


async def test_run_files_that_cannot_be_written(tmp_path: Path) -> None:
    """The error is kept and raised at the end, once; the saves stand; the next saver writes them."""
    disk = Disk(lambda operation: operation.startswith("create") and "/files/" in operation, "error")
    disk.arm()
    with pytest.raises(StorageError) as caught:
        async with Saver(store_on(disk, tmp_path), run_files={"a": "1"}) as saver:
            await saver.save(state_of(1), step=1)
    assert caught.value.errno == errno.EIO
    assert saver.failures == (caught.value,)
    assert await steps(tmp_path) == (1,)
    async with Saver(tmp_path, run_files={"a": "1"}):
        pass
    assert (tmp_path / "files" / "a").read_text() == "1"


async def test_run_file_to_copy_that_is_not_there(tmp_path: Path) -> None:
    """Said on entering."""
    with pytest.raises(StorageError, match="nowhere"):
        async with Saver(tmp_path / "run", run_files={"a": tmp_path / "nowhere"}):
            pass
    with pytest.raises(UsageError, match="plain file name"):
        Saver(tmp_path / "run", run_files={"../a": "1"})
