"""Public bug reports about files: races, deletions, clocks, descriptors, modes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt import Catalog, PerItem, Saver, StorageError
from aiockpt.storage.local import LocalStore
from tests.crash_child import TOO_LATE
from tests.proof import case, litter, number_in, save, state_of, steps
from tests.refusing import Refusing


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run, of which every invariant is checked afterwards."""
    with case(tmp_path) as folder:
        yield folder / "run"


# ---------------------------------------------------------------- folders that come and go


async def test_many_threads_meet_in_a_folder_that_does_not_exist_yet(run: Path) -> None:
    """Each saves its own run below it, all their steps are there; in a shared one, the first.

    NVIDIA-NeMo/Automodel#3686, mlcommons/storage#699.
    """
    failed: list[BaseException] = []
    meet = threading.Barrier(8)

    def work(number: int) -> None:
        async def both() -> None:
            await save(run / "a" / "b" / str(number), state_of(number), number)
            with contextlib.suppress(*TOO_LATE):
                await save(run / "a" / "shared", state_of(number), number)

        try:
            meet.wait()
            asyncio.run(both())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert failed == []
    for number in range(8):
        assert number_in(await aiockpt.load(run / "a" / "b" / str(number))) == number
    assert await steps(run / "a" / "shared")


async def test_one_spurious_answer_of_a_network_disk_is_no_failure(run: Path) -> None:
    """`mkdir` says the folder exists while looking says it does not: once is no reason to die.

    NVIDIA-NeMo/Automodel#3686: killed at step 297 of 300.
    """

    class Late(Refusing):
        misses = 1

        def exists(self, path: str) -> bool:
            if path.endswith("run/.") and self.misses:
                self.misses -= 1
                return False
            return super().exists(path)

    run.mkdir()
    files = Late(("mkdir", "/run", errno.EEXIST))
    await save(LocalStore(run, files=files), state_of(1), 1)
    assert files.refusals == []
    assert await steps(run) == (1,)


async def test_the_run_is_deleted_between_two_saves(run: Path) -> None:
    """Somebody removes it under a live saver: the next save makes it again, or says so and then works.

    mlcommons/storage#699.
    """
    async with Saver(run, on_failure="log") as saver:
        await saver.save(state_of(1), step=1)
        shutil.rmtree(run)
        try:
            await saver.save(state_of(2), step=2)
        except StorageError:
            run.mkdir()
            await saver.save(state_of(2), step=2)
    async with Saver(run) as saver:
        found = await saver.restore()
        assert found is not None
        assert number_in(found.values) == 2
        await saver.save(state_of(3), step=3)
    assert (await steps(run))[-2:] == (2, 3)


# ---------------------------------------------------------------- others who delete


async def test_a_reader_races_a_writer_that_deletes(run: Path) -> None:
    """Steps written anew and rewound under its eyes: always one whole state, never a bare error.

    facebookresearch/capi#9, PrimeIntellect-ai/prime-rl#1763, ray-project/ray#5549.
    """
    await save(run, state_of(0), 1)
    over = asyncio.Event()
    loads = 0

    async def read() -> None:
        nonlocal loads
        async with Catalog(run) as catalog:
            while not over.is_set():
                found = await catalog.restore()
                assert found is not None
                assert found.skipped == ()
                number_in(found.values)
                loads += 1

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read()) for _ in range(2)]
        async with Saver(run) as saver:
            for number in range(1, 25):
                await saver.save(state_of(number), step=1, overwrite=True)
                if number % 3 == 0:
                    await saver.save(state_of(number), step=2)
                    await saver.save(state_of(number), step=3)
                    await saver.restore(step=1, rewind=True)
        over.set()
    assert all(task.done() for task in readers)
    assert loads > 5
    assert await steps(run) == (1,)


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EBUSY, errno.EACCES])
@pytest.mark.parametrize("often", [1, 50])
async def test_what_cannot_be_deleted_fails_no_save(
    run: Path, code: int, often: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An uploader holds a file of the older generation: the new one is committed, the rest goes later.

    PrimeIntellect-ai/prime-rl#1763: the clean-up crashed the trainer.
    """
    files = Refusing()
    async with Saver(LocalStore(run, files=files)) as saver:
        await saver.save(state_of(1), step=1)
        files.refusals = [("unlink", "model-00000-00000.safetensors", code)] * often
        await saver.save(state_of(2), step=1, overwrite=True)
        await saver.drain()  # the removal is not what the caller waits for
        # Folders that fill up again while they are emptied are tried once more at once.
        assert ("cannot remove" in caplog.text) is (often > 1 or code != errno.ENOTEMPTY)
        assert number_in(await aiockpt.load(run)) == 2
        assert await steps(run) == (1,)
        files.refusals = []
        await saver.save(state_of(3), step=3)
    async with Saver(run):
        assert litter(run) == []


# ---------------------------------------------------------------- clocks, descriptors, modes


async def test_clocks_decide_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modification times and the wall clock say nothing about which step is the newest.

    huggingface/transformers#26961, #28862, #37260; att/tegu#22.
    """
    for step in (1, 2, 3):
        await save(run, state_of(step), step)
    for step, when in ((1, 3e9), (2, 0), (3, 1)):
        for path in (run / f"step-{step:08d}").iterdir():
            os.utime(path, (when, when))
        os.utime(run / f"step-{step:08d}", (when, when))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 86_400)
    await save(run, state_of(4), 4)
    found = await aiockpt.latest(run)
    assert found is not None
    assert found.step == 4
    monkeypatch.undo()
    for path in run.iterdir():
        os.utime(path, (-5, 1 << 33))
    assert await steps(run) == (1, 2, 3, 4)
    assert number_in(await aiockpt.load(run)) == 4


@contextlib.contextmanager
def descriptors(extra: int) -> Iterator[Callable[[], int]]:
    """Allow so many more descriptors than are open; yields a count of the open ones."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd")) - 1

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + extra, limits[1]))
    try:
        yield count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_few_files_are_open_at_once(run: Path) -> None:
    """Dozens of shards need few descriptors, and saves in a row keep none.

    google-research/t5x#447, InternLM/xtuner#1859, sgl-project/sglang#7684, keras-team/keras#16964.
    """
    state = {"m": {f"k{i}": torch.full((100,), float(i)) for i in range(5000)}}
    layout = PerItem(shard_bytes=64 << 10)
    await save(
        run,
        state,
        1,
    )
    async with Saver(run, layout=layout) as saver:
        await saver.save(state, step=2)  # what torch and the loop open once is open now
        with descriptors(28) as count:
            before = count()
            await saver.save(state, step=3)
            found = await aiockpt.load(run)
            assert len(list((run / "step-00000003").glob("*.safetensors"))) > 30
            assert torch.equal(found["m"]["k4999"], state["m"]["k4999"])
            for step in range(4, 44):
                await saver.save({"w": torch.ones(1)}, step=step)
            assert count() <= before


async def test_too_many_open_files_is_an_error_like_any_other(run: Path) -> None:
    """EMFILE is typed, nothing is committed, and the next try works."""
    async with Saver(run, on_failure="log") as saver:
        await saver.save(state_of(1), step=1)
        held = [os.open("/dev/null", os.O_RDONLY)]
        with descriptors(0):
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(StorageError) as caught:
                await saver.save(state_of(2), step=2)
        for fd in held:
            os.close(fd)
        assert caught.value.errno == errno.EMFILE
        assert await steps(run) == (1,)
        await saver.save(state_of(2), step=2)
    assert await steps(run) == (1, 2)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
async def test_modes_follow_the_umask(run: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are 0666 and folders 0777 less the umask, which is not touched even for a moment.

    safetensors/safetensors#782, pytorch/ignite#1876, Project-MONAI/MONAI#1862: served by another
    user, a model of mode 0600 could not be read.
    """
    before = os.umask(umask)
    setumask = os.umask
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    try:
        run.mkdir(mode=0o777)
        run.chmod(stat.S_IMODE(run.stat().st_mode) | stat.S_ISGID)
        group = run.stat().st_mode & stat.S_ISGID
        await save(run, state_of(1), 1, files={"config.json": b"{}"})
        (run / "step-00000001" / "config.json").chmod(0o640)
        await save(run, state_of(2), 1, files={"config.json": b"{}"}, overwrite=True)
    finally:
        setumask(before)
    found = list(run.rglob("*"))
    assert len(found) > 5
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (group | 0o777 & ~umask if path.is_dir() else 0o666 & ~umask), path
