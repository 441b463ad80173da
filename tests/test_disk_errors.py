"""Public bug reports about disks that are full, fail late or take their time."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import Saver, StorageError
from aiockpt._direct import BlockFile
from aiockpt._threads import Lane, offload
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles
from tests.proof import assert_sound, case, litter, state_of, steps

BIG = 20 << 20


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run, of which every invariant is checked afterwards."""
    with case(tmp_path) as folder:
        yield folder / "run"


def big_state() -> dict[str, Any]:
    """More than the small disk takes."""
    return {"w": torch.ones(BIG, dtype=torch.uint8), "v": {"x": torch.zeros(1 << 20)}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of twelve megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system, and not in every container")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def used(disk: Path) -> int:
    """Bytes in use."""
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.mark.parametrize("reserved", [True, False], ids=["found when reserving", "found when writing"])
async def test_a_full_disk(small_disk: Path, reserved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC with its errno and path; the partial files go, older steps stay, the next save works.

    h2oai/h2o-llmstudio#214, pytorch/pytorch#10577, awslabs/awsome-distributed-ai#1225.
    """
    if not reserved:
        monkeypatch.setattr("aiockpt._direct.preallocate", lambda fd, nbytes: None)
    run = small_disk / "run"
    async with Saver(run, on_failure="log") as saver:
        await saver.save(state_of(1), step=1)
        before = used(small_disk)
        for _ in range(2):
            with pytest.raises(StorageError) as caught:
                await saver.save(big_state(), step=2)
            assert isinstance(caught.value, OSError)
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.step == 2
            assert caught.value.filename
            assert used(small_disk) - before < 1 << 20
            assert litter(run) == []
        await saver.save(state_of(3), step=3)
    assert await assert_sound(run) == (1, 3)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "close"])
async def test_a_disk_that_fails_late(
    run: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that comes only at the flush or at close fails the save; a flush is never tried twice.

    pytorch/pytorch#10577; and the kernel drops what it could not write: a second fsync succeeds.
    """
    flushed: list[int] = []
    failing = True
    fsync, close = os.fsync, BlockFile._close

    def bad_fsync(fd: int) -> None:
        flushed.append(os.fstat(fd).st_ino)
        if failing and call == "fsync" and len(flushed) == 1:
            raise OSError(code, os.strerror(code))
        fsync(fd)

    async def bad_close(self: BlockFile) -> None:
        first = not self._closed
        await close(self)
        if failing and call == "close" and first:
            raise OSError(code, os.strerror(code))

    async with Saver(run, on_failure="log") as saver:
        await saver.save(state_of(1), step=1)
        monkeypatch.setattr(os, "fsync", bad_fsync)
        monkeypatch.setattr(BlockFile, "_close", bad_close)
        with pytest.raises(StorageError) as caught:
            await saver.save(state_of(2), step=2)
        assert caught.value.errno == code
        assert caught.value.filename is not None
        assert caught.value.filename.endswith(".safetensors")
        assert litter(run) == []
        if call == "fsync":
            assert flushed.count(flushed[0]) == 1
        assert await steps(run) == (1,)
        failing = False
        await saver.save(state_of(3), step=3)
    assert await steps(run) == (1, 3)


async def test_a_disk_that_takes_its_time_to_close(run: Path) -> None:
    """A file that will not close holds up its own save, not the loop, and then all is well."""
    files = FaultyFiles(None, "stall")
    async with Saver(LocalStore(run, files=files)) as saver:
        await saver.save(state_of(1), step=1)
        files.faults.fail_at = len(files.operations) + 7
        pending = await saver.stage(state_of(2), step=2)
        await offload(files.stalled.wait, lane=Lane.CONTROL)
        assert not pending.done()
        assert await steps(run) == (1,)
        files.heal()
        await pending
    assert await steps(run) == (1, 2)
