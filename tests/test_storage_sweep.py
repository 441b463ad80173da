"""A sweep of a folder removes our own litter, all of it, and never anything else."""

from __future__ import annotations

import asyncio
import errno
import gc
from pathlib import Path

import pytest

from aiockpt._threads import Lane, offload
from aiockpt.storage import MANIFEST
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles
from aiockpt.testing._steps import exists, new_id, raw_tree, write_step
from tests.refusing import Refusing
from tests.store_child import start


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that exists."""
    path = tmp_path / "run"
    path.mkdir()
    return path


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
    (run / f".put.{hexes[3]}.lock").touch()
    (run / f".probe.{hexes[3]}.tmp").touch()
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


async def test_a_put_under_way_is_not_swept(run: Path) -> None:
    """A small file that is just being put is not litter, here or in another process."""
    files = FaultyFiles(2, "stall")
    store = LocalStore(run, files=files)
    putting = asyncio.create_task(store.put("a", b"1"))
    await offload(files.stalled.wait, lane=Lane.BULK)
    try:
        assert files.operations[-1].startswith("replace")
        before = raw_tree(run)
        assert await LocalStore(run).sweep() == []
        with start("sweep", run) as child:
            assert child.communicate()[0] == "[]\n"
        assert raw_tree(run) == before
    finally:
        files.release.set()
    await putting
    assert raw_tree(run) == {"a": b"1"}


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
