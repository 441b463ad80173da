"""FileSaver: errors, cancellation and the end, as of any saver; what is left on disk after each."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import (
    DrainTimeoutError,
    FileSaver,
    PendingFile,
    PreviousSaveError,
    SaveCancelledError,
    SaveError,
    SaveErrors,
    StorageError,
    UsageError,
    _placing,
)
from aiockpt._gate import _Gate
from tests.filesavers import Gate, fail, names, number_in, read, target, write_folder
from tests.savers import until


@pytest.fixture(autouse=True)
def open_gate() -> Iterator[None]:
    """No save holds optimizers back when it is over."""
    yield
    assert _Gate.holds() == []


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("worker", ["inline", "thread"])
@pytest.mark.parametrize(("how", "kind"), [("value", SaveError), ("os", StorageError)])
async def test_an_error_of_the_savefun(
    worker: Any, how: str, kind: type[SaveError | StorageError], tmp_path: Path
) -> None:
    """It names the file, its cause is the savefun's own; the older file stays; the next save works."""
    (tmp_path / "a").write_text("older")
    async with FileSaver(fail, worker=worker) as saver:
        with pytest.raises(kind, match=str(tmp_path / "a")) as caught:
            await saver.save(target(1), tmp_path / "a", how=how)
        assert caught.value.file == str(tmp_path / "a")
        assert isinstance(caught.value.__cause__, ValueError if how == "value" else PermissionError)
        assert caught.value.step is None
        assert names(tmp_path) == ["a"]
        assert (tmp_path / "a").read_text() == "older"
        await saver.save(target(1), tmp_path / "a", how="not at all")
    assert (tmp_path / "a").read_text() == "half of it"


async def test_an_unseen_error_is_told_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged at once; raised once, by the next save, which goes on."""
    saver = await FileSaver(fail).__aenter__()
    pending = await saver.stage(1, tmp_path / "a")
    await until(pending.done)
    assert "a failed" in caplog.text
    with pytest.raises(PreviousSaveError, match=r"nobody had awaited it \(.*a: saving .*a failed") as caught:
        await saver.stage(2, tmp_path / "b", how="not at all")
    assert isinstance(caught.value.pending, PendingFile)
    assert (await caught.value.pending).path == tmp_path / "b"
    await saver.aclose()
    assert len(saver.failures) == 1
    assert names(tmp_path) == ["b"]


async def test_several_unseen_errors_come_as_a_group(tmp_path: Path) -> None:
    """At the end, each once; `on_failure="log"` leaves the next save alone."""
    saver = await FileSaver(fail, on_failure="log").__aenter__()
    for name in ("a", "b"):
        await until((await saver.stage(1, tmp_path / name)).done)
    with pytest.raises(SaveErrors) as group:
        await saver.aclose()
    assert [getattr(e, "file", None) for e in group.value.exceptions] == [str(tmp_path / n) for n in "ab"]
    await saver.aclose()
    assert names(tmp_path) == []


async def test_leaving_drains_and_the_bodys_error_goes_first(tmp_path: Path) -> None:
    """What is staged is written; a failed save becomes a note on the body's own exception."""
    with pytest.raises(KeyError) as caught:
        async with FileSaver(fail, max_pending=2) as saver:
            await saver.stage(1, tmp_path / "a", how="not at all")
            await saver.stage(2, tmp_path / "b")
            raise KeyError("mine")
    assert names(tmp_path) == ["a"]
    assert "the savefun says no" in "".join(caught.value.__notes__)
    with pytest.raises(UsageError, match="closed"):
        await saver.save(1, tmp_path / "c")
    await saver.finalize()
    await saver.aclose()


# ---------------------------------------------------------------- cancellation and time limits


async def test_a_cancelled_save_leaves_nothing(tmp_path: Path) -> None:
    """Before `staged` by its caller, after it by the handle; the thread has left when it is over."""
    gate = Gate()
    async with FileSaver(gate) as saver:
        pending = await saver.stage(target(1), tmp_path / "a")
        await until(gate.inside.is_set)
        second = asyncio.create_task(saver.save(target(2), tmp_path / "b"))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert pending.cancel() is True
        gate.go.set()
        await pending.cancel_and_wait()
        with pytest.raises(SaveCancelledError, match=r"save of .*a was cancelled"):
            await pending
        assert names(tmp_path) == []
        assert number_in(read((await saver.save(target(3), tmp_path / "c")).path)) == 3


async def test_a_cancelled_async_savefun_ends(tmp_path: Path) -> None:
    """It is cancelled where it waits, and what it wrote is removed."""
    ended: list[bool] = []

    async def savefun(path: str, given: Any) -> None:
        Path(path).write_text("half of it")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with FileSaver(savefun) as saver:
        pending = await saver.stage(1, tmp_path / "a")
        await until(lambda: any(path.is_file() for path in tmp_path.rglob("*")))
        await pending.cancel_and_wait()
    assert ended == [True]
    assert names(tmp_path) == []


async def test_abort_cancels_what_is_under_way(tmp_path: Path) -> None:
    """No error comes of it."""
    gate = Gate()
    saver = await FileSaver(gate, max_pending=3).__aenter__()
    for n in range(3):
        await saver.stage(n, tmp_path / f"{n}")
    await until(gate.inside.is_set)
    abort = asyncio.create_task(saver.abort())
    await asyncio.sleep(0.01)
    gate.go.set()
    await abort
    assert names(tmp_path) == []


@pytest.mark.leaks("the thread inside the savefun is written off")
async def test_a_stuck_savefun_is_written_off(tmp_path: Path) -> None:
    """After `drain_timeout` the saver lets go of it; the file under way is named."""
    gate = Gate()
    saver = await FileSaver(gate, drain_timeout=0.05).__aenter__()
    await saver.stage(target(1), tmp_path / "a.pt")
    await until(gate.inside.is_set)
    with pytest.raises(DrainTimeoutError, match=r"a\.pt did not end within 0\.05 s.*aiockpt-user"):
        await saver.aclose()
    assert saver.pending == ()
    gate.go.set()
    assert not (tmp_path / "a.pt").exists()


# ---------------------------------------------------------------- files


async def test_files_folders_and_what_is_replaced(tmp_path: Path) -> None:
    """A file replaces a file, a folder one that this saver wrote; folders above are made; nothing is left."""
    first, last = tmp_path / "new" / "deep" / "first", tmp_path / "new" / "last"
    async with FileSaver(write_folder) as folders, FileSaver() as files:
        for n in range(3):
            saved = await folders.save(target(n), first)
            await files.save(target(n), last)
            assert number_in(read(last)) == n
            assert float(torch.load(first / "deep" / "model.pt")["w"][0]) == n
            assert saved.nbytes == sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
            assert sorted(path.name for path in first.rglob("*.pt")) == ["half.pt", "model.pt", "steps.pt"]
    assert names(first.parent) == ["first"]
    assert names(tmp_path / "new") == ["deep", "last"]


@pytest.mark.parametrize("savefun", [torch.save, write_folder])
async def test_a_folder_of_somebody_elses_is_never_replaced(savefun: Any, tmp_path: Path) -> None:
    """Whatever the path was meant to say; links to folders, and folders that appear meanwhile, too."""
    mine = tmp_path / "mine"
    (mine / "precious").mkdir(parents=True)
    (tmp_path / "link").symlink_to(mine)

    def late(path: str, given: Any) -> None:
        savefun(given, path) if savefun is torch.save else savefun(path, given)
        (tmp_path / "late").mkdir()

    async with FileSaver(savefun) as saver:
        for path in (mine, tmp_path / "link"):
            with pytest.raises(UsageError, match="is a folder that this saver did not write"):
                await saver.save(target(1), path)
        await saver.save(target(1), tmp_path / "own")
        (tmp_path / "own").rename(tmp_path / "gone")
        (tmp_path / "own").symlink_to(mine)
        if savefun is write_folder:
            await saver.save(target(1), tmp_path / "own")  # in place of the link
    async with FileSaver(late) as saver:
        with pytest.raises((UsageError, StorageError)):
            await saver.save(target(1), tmp_path / "late")
    assert (mine / "precious").is_dir()
    assert names(tmp_path) == ["gone", "late", "link", "mine", "own"]


async def test_names_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two names cannot be swapped the older folder goes aside first, and comes back on error."""
    monkeypatch.setattr(_placing, "_exchange", lambda one, other: False)
    async with FileSaver(write_folder) as saver:
        for n in range(2):
            await saver.save(target(n), tmp_path / "a")
        assert float(torch.load(tmp_path / "a" / "deep" / "model.pt")["w"][0]) == 1
        rename = saver._files.rename

        def fails(src: str, dst: str) -> None:
            if dst == str(tmp_path / "a") and not src.endswith(".older"):
                raise OSError(errno.EIO, "no", dst)
            rename(src, dst)

        monkeypatch.setattr(saver._files, "rename", fails)
        with pytest.raises(StorageError):
            await saver.save(target(2), tmp_path / "a")
        assert float(torch.load(tmp_path / "a" / "deep" / "model.pt")["w"][0]) == 1
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("savefun", [torch.save, write_folder])
async def test_across_file_systems(savefun: Any, tmp_path: Path) -> None:
    """`tmp_dir=` on another one: copied, flushed, moved; nothing is left there."""
    elsewhere = Path("/dev/shm") / f"aiockpt-test-{os.getpid()}"
    elsewhere.mkdir()
    try:
        assert elsewhere.stat().st_dev != tmp_path.stat().st_dev
        async with FileSaver(savefun, tmp_dir=elsewhere) as saver:
            saved = await saver.save(target(1), tmp_path / "a")
            await saver.save(target(2), tmp_path / "a")
        assert saved.path == tmp_path / "a"
        loaded = read(tmp_path / "a") if savefun is torch.save else {}
        assert not loaded or number_in(loaded) == 2
        assert names(tmp_path) == ["a"]
        assert names(elsewhere) == []
    finally:
        elsewhere.rmdir()


async def test_everything_is_flushed_before_it_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file, each folder, then the move, then the folder it went to."""
    log: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        log.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    async with FileSaver(write_folder) as saver:
        (tmp_path / "run").mkdir()
        monkeypatch.setattr(os, "fsync", noted)
        place = saver._files.rename

        def move(src: str, dst: str) -> None:
            log.append("MOVE")
            place(src, dst)

        monkeypatch.setattr(saver._files, "rename", move)
        await saver.save(target(1), tmp_path / "run" / "a")
        monkeypatch.undo()
    at = log.index("MOVE")
    assert {"model.pt", "half.pt", "steps.pt", "deep", "a"} == set(log[:at])
    assert log[at + 1 :] == ["run"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
async def test_a_failing_disk_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the flush or of the move is the save's, and what was written is removed."""
    (tmp_path / "a").write_text("older")

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with FileSaver() as saver:
        with monkeypatch.context() as patch:
            if call == "fsync":
                patch.setattr(os, "fsync", fails)
            else:
                patch.setattr(saver._files, "replace", fails)
            with pytest.raises(StorageError) as caught:
                await saver.save(target(1), tmp_path / "a")
        assert caught.value.errno == errno.EIO
        assert names(tmp_path) == ["a"]
        assert (tmp_path / "a").read_text() == "older"
        await saver.save(target(2), tmp_path / "a")
    assert number_in(read(tmp_path / "a")) == 2


async def test_a_savefun_that_writes_something_else(tmp_path: Path) -> None:
    """Another name, a second file, nothing at all: told with what was found, and removed."""

    def savefun(path: str, given: list[str]) -> None:
        for name in given:
            Path(path).with_name(name).touch()

    async with FileSaver(savefun) as saver:
        for given, told in ((["a.npz"], "a.npz"), (["a", "b"], "b beside it"), ([], "nothing")):
            with pytest.raises(SaveError, match=rf"wrote {told}\. Only 'a'"):
                await saver.save(given, tmp_path / "a")
    assert names(tmp_path) == []


# ---------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    "options",
    [
        {"worker": "fork"},
        {"worker": None},
        {"max_pending": 0},
        {"on_overlap": "skip"},
        {"on_failure": "ignore"},
        {"keep": 0},
        {"savefun": "torch.save"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """Where they are given."""
    with pytest.raises(UsageError):
        FileSaver(**options)


async def test_misuse_is_told(tmp_path: Path) -> None:
    """Not entered, entered twice, no file named."""
    saver = FileSaver()
    with pytest.raises(UsageError, match="enter the saver first"):
        await saver.save(1, tmp_path / "a")
    async with saver:
        for path in ("/", f"{tmp_path}/folder/", "", ".", f"{tmp_path}/folder/.."):
            with pytest.raises(UsageError, match="names no file"):
                await saver.save(1, path)
        with pytest.raises(UsageError, match="entered once"):
            await saver.__aenter__()
    assert names(tmp_path) == []
