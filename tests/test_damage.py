"""Damage to any file of a checkpoint is found, named, and never loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt._manifest import MANIFEST
from aiockpt.catalog import Catalog
from aiockpt.errors import CorruptCheckpointError
from tests.loading import flip
from tests.make_checkpoint import alike, make_checkpoint

STEP = 8
PIECE = 1 << 20


def state(seed: int) -> dict[str, Any]:
    """A state with several files, several pieces and plain values."""
    noise = torch.Generator().manual_seed(seed)
    w, b, m, x = (torch.rand(n, generator=noise) + 1 for n in (PIECE // 2 + 7, 3, 50_000, 9))
    return {"model": {"w": w, "b": b}, "optim": {"m": m, "lr": 0.1}, "n": seed, "x": x}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a good step 7 and a step 8 to be damaged."""
    for step in (STEP - 1, STEP):
        make_checkpoint(tmp_path, state(step), step, user={"c.json": b"{}" * 3000, "d.txt": b"x" * 6000})
    return tmp_path


def files(run: Path) -> list[Path]:
    """All files of the newest step."""
    return sorted((run / f"step-{STEP:08d}").iterdir())


async def check(run: Path, file: str | None, *, seen_by_load: bool = True) -> None:
    """The damage is found by verifying, by loading and by looking for the newest."""
    async with Catalog(run) as catalog:
        calls: list[Any] = [catalog.verify(STEP), catalog.verify()]
        calls += [catalog.load(STEP), catalog.restore(step=STEP)] if seen_by_load else []
        for call in calls:
            with pytest.raises(CorruptCheckpointError) as caught:
                await call
            assert caught.value.step == STEP
            if file is not None:
                assert caught.value.file == file
            assert str(STEP) in str(caught.value)
        newest = await catalog.latest("full")
        assert newest is not None
        assert newest.step == STEP - 1
        assert newest.skipped[0][0] == STEP
        if seen_by_load:
            assert alike(await catalog.load(), state(STEP - 1))


def is_users(file: Path) -> bool:
    """Whether a load has no reason to read the file."""
    return file.name in ("c.json", "d.txt")


async def test_undamaged(run: Path) -> None:
    """Without damage everything passes, so that the tests below mean something."""
    async with Catalog(run) as catalog:
        report = await catalog.verify()
        assert report.step == STEP
        assert report.files == len(files(run))
        assert report.nbytes == sum(f.stat().st_size for f in files(run) if f.name != MANIFEST)
        assert report.tensors == 4
        assert alike(await catalog.load(), state(STEP))


@pytest.mark.parametrize("index", range(7))
async def test_one_flipped_bit(run: Path, index: int) -> None:
    """One bit anywhere in any file: begin, header, borders of pieces, middle, end."""
    file = files(run)[index]
    assert len(files(run)) == 7
    size = file.stat().st_size
    edges = [4096, 4096 + PIECE, size // 3, size // 2, size - 1]
    places = {0, 7, 8, 60, *edges, *(edge - 1 for edge in edges)}
    for at in sorted(place for place in places if place < size):
        flip(file.parent, file.name, at)
        await check(run, file.name, seen_by_load=not is_users(file))
        flip(file.parent, file.name, at)


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("cut", ["empty", "half", "last", "longer"])
async def test_wrong_length(run: Path, index: int, cut: str) -> None:
    """A file that is too short or too long, at once and without being read."""
    file = files(run)[index]
    size = file.stat().st_size
    os.truncate(file, {"empty": 0, "half": size // 2, "last": size - 1, "longer": size + 1}[cut])
    await check(run, file.name)


@pytest.mark.parametrize("index", range(7))
async def test_a_zeroed_page(run: Path, index: int) -> None:
    """A page that a crash left empty, in any file."""
    file = files(run)[index]
    size = file.stat().st_size
    for at in sorted({0, size // 2 // 4096 * 4096}):
        data = bytearray(file.read_bytes())
        kept = bytes(data)
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        file.write_bytes(data)
        assert bytes(data) != kept
        await check(run, file.name, seen_by_load=not is_users(file))
        file.write_bytes(kept)


@pytest.mark.parametrize("index", range(7))
async def test_a_missing_file(run: Path, index: int) -> None:
    """A file that is gone, whether a load needs it or not."""
    file = files(run)[index]
    file.unlink()
    await check(run, file.name)


@pytest.mark.parametrize("name", ["stranger", "part-00001.json", ".hidden", "model-00000-00001.safetensors"])
async def test_an_extra_file(run: Path, name: str) -> None:
    """A file or folder that nobody wrote with the step."""
    extra = files(run)[0].parent / name
    extra.write_bytes(b"")
    await check(run, name)
    extra.unlink()
    extra.mkdir()
    await check(run, name)


async def test_names_of_deleted_files_are_tolerated(run: Path) -> None:
    """What NFS keeps of a deleted file that somebody has open is no damage."""
    (files(run)[0].parent / ".nfs000000000123").write_bytes(b"old")
    async with Catalog(run) as catalog:
        assert (await catalog.verify()).step == STEP
        assert (await catalog.load())["n"] == STEP


@pytest.mark.parametrize("index", range(7))
async def test_swapped_between_steps(run: Path, index: int) -> None:
    """A file of another step in place of the right one, of the same length and sound in itself."""
    file = files(run)[index]
    other = run / f"step-{STEP - 1:08d}" / file.name
    if file.read_bytes() == other.read_bytes():
        return  # a user's own file that is the same in both
    shutil.copy(other, file)
    async with Catalog(run) as catalog:
        for call in (catalog.verify(STEP), catalog.load(STEP)):
            with pytest.raises(CorruptCheckpointError) as caught:
                await call
            assert caught.value.step == STEP
        assert (await catalog.load())["n"] == STEP - 1


async def test_swapped_within_a_step(tmp_path: Path) -> None:
    """Two data files of one length that changed places."""
    parts = {"a": {"w": torch.zeros(9)}, "b": {"w": torch.ones(9)}}
    made = make_checkpoint(tmp_path, parts, STEP)
    one, two = (made.folder / name for name in made.shards)
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    async with Catalog(tmp_path) as catalog:
        for call in (catalog.verify(STEP), catalog.load(STEP)):
            with pytest.raises(CorruptCheckpointError) as caught:
                await call
            assert caught.value.file in made.shards


async def test_a_step_under_another_name(run: Path) -> None:
    """A whole step's folder copied to another step's name is not that step."""
    shutil.copytree(run / f"step-{STEP:08d}", run / "step-00000009")
    async with Catalog(run) as catalog:
        with pytest.raises(CorruptCheckpointError, match="of step 8"):
            await catalog.load(9)
        assert await catalog.steps() == (STEP - 1, STEP)
        assert (await catalog.load())["n"] == STEP


async def test_the_path_is_named(run: Path) -> None:
    """Damage to data names the tensor it is in."""
    folder = files(run)[0].parent
    for pattern, path in (("model*", "model/w"), ("optim*", "optim/m"), ("tensors*", "x")):
        name = next(folder.glob(pattern)).name
        flip(folder, name, 4096)
        async with Catalog(run) as catalog:
            with pytest.raises(CorruptCheckpointError) as caught:
                await catalog.load(STEP)
        assert caught.value.path == path
        flip(folder, name, 4096)


async def test_only_what_is_read_counts(run: Path) -> None:
    """A load of one part does not read, and does not mind, damage in another."""
    folder = files(run)[0].parent
    flip(folder, next(folder.glob("model*")).name, -1)
    async with Catalog(run) as catalog:
        assert alike((await catalog.load(STEP, paths=["optim"]))["optim"], state(STEP)["optim"])
        with pytest.raises(CorruptCheckpointError):
            await catalog.load(STEP, paths=["model/w"])


@pytest.mark.parametrize("text", ["", "null", "[]", "{", "3", '"x"', "[" * 100_000, '{"a":' * 50_000])
async def test_rubbish_for_a_manifest(run: Path, text: str) -> None:
    """A manifest that is other JSON, or none."""
    (files(run)[0].parent / MANIFEST).write_text(text)
    await check(run, MANIFEST)
