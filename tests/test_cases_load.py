"""Public bug reports about resuming from damaged, old, odd or newer checkpoints, through a saver."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt import Catalog, CorruptCheckpointError, Saver, StepExistsError, UnsupportedFormatError
from aiockpt._manifest import _TAIL, _TAIL_END, _TAIL_HEAD, digest
from tests.proof import case, litter, number_in, save, state_of, steps


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run, of which every invariant is checked afterwards."""
    with case(tmp_path) as folder:
        yield folder / "run"


def folder_of(run: Path, step: int) -> Path:
    """The folder of a step."""
    return run / f"step-{step:08d}"


def biggest(folder: Path) -> Path:
    """The largest file of a step."""
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def text_for_manifest(text: bytes) -> Callable[[Path], object]:
    """A damage: other content."""
    return lambda folder: (folder / "manifest.json").write_bytes(text)


def cut_manifest(folder: Path) -> None:
    """A damage: half a manifest."""
    path = folder / "manifest.json"
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "zero length": lambda folder: os.truncate(biggest(folder), 0),
    "half": lambda folder: os.truncate(biggest(folder), biggest(folder).stat().st_size // 2),
    "last byte": lambda folder: os.truncate(biggest(folder), biggest(folder).stat().st_size - 1),
    "file removed": lambda folder: biggest(folder).unlink(),
    "manifest removed": lambda folder: (folder / "manifest.json").unlink(),
    "manifest half": cut_manifest,
    "manifest empty": text_for_manifest(b""),
    "manifest null": text_for_manifest(b"null"),
    "manifest list": text_for_manifest(b"[]"),
    "manifest no text": text_for_manifest(b"\xff\xfe{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_torn_newest_step_is_passed_over_and_kept(
    run: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest whole step is restored, the damage is told once and stays; the run goes on.

    vllm-project/speculators#739, facebookresearch/metaseq#53, Lightning-AI/pytorch-lightning#688,
    allenai/allennlp#2129: one broken folder, and the job restarted on it for ever.
    """
    for step in (1, 2):
        await save(run, state_of(step), step)
    (run / "step-00000003").mkdir()
    (run / "step-00000004").write_text("a file")
    (run / "7").mkdir()
    DAMAGES[damage](folder_of(run, 2))
    evidence = {path: path.read_bytes() for path in folder_of(run, 2).iterdir()}
    async with Saver(run) as saver:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "aiockpt"):
            found = await saver.restore()
            await saver.restore()
        assert found is not None
        assert number_in(found.values) == 1
        assert 2 in [step for step, _ in found.skipped]
        assert sum("step-00000002" in record.message for record in caplog.records) <= 1
        with pytest.raises(CorruptCheckpointError) as caught:
            await saver.restore(step=2)
        assert caught.value.step == 2
        for step in (3, 4, 5):  # names that something else has are no obstacle
            await saver.save(state_of(step), step=step)
    assert {path: path.read_bytes() for path in folder_of(run, 2).iterdir()} == evidence
    assert set(await steps(run)) >= {1, 3, 4, 5}
    assert number_in(await aiockpt.load(run)) == 5
    assert (run / "step-00000004").read_text() == "a file"
    assert litter(run) == []
    for path in evidence:  # the invariants are for whole steps
        path.unlink()
    folder_of(run, 2).rmdir()


async def test_a_damaged_step_can_be_written_anew_by_its_number(run: Path) -> None:
    """The run restores to the step before and comes to the damaged one again: no collision."""
    for step in (1, 2):
        await save(run, state_of(step), step)
    DAMAGES["manifest half"](folder_of(run, 2))
    async with Saver(run) as saver:
        found = await saver.restore()
        assert found is not None
        assert found.step == 1
        again = await saver.save(state_of(9), step=2)
        assert again.generation == 1
    assert number_in(await aiockpt.load(run)) == 9
    assert folder_of(run, 2).exists()


async def test_an_old_torn_step_is_in_nobodys_way(run: Path) -> None:
    """Only whoever asks for it hears of it.

    UKGovernmentBEIS/inspect_ai#4132, #4181: listing died on an old broken one.
    """
    for step in (1, 2, 3):
        await save(run, state_of(step), step)
    DAMAGES["manifest no text"](folder_of(run, 2))
    async with Saver(run) as saver:
        found = await saver.restore()
        assert found is not None
        assert number_in(found.values) == 3
        assert found.skipped == ()
        await saver.save(state_of(4), step=4)
    assert await steps(run) == (1, 3, 4)
    async with Catalog(run) as catalog:
        with pytest.raises(CorruptCheckpointError):
            await catalog.verify(2)
        for step in (1, 3, 4):
            await catalog.verify(step)


async def test_numbers_decide_never_text(run: Path) -> None:
    """Steps beyond the zero padding sort where they belong.

    huggingface/transformers#27138: 9900 was kept, 10000 deleted.
    """
    numbers = (9, 10, 99, 100, 999, 1000, 99_999_999, 100_000_000, 10**12)
    async with Saver(run) as saver:
        for step in numbers:
            await saver.save({"step": step, "w": torch.ones(1)}, step=step)
            found = await saver.restore()
            assert found is not None
            assert found.values["step"] == step
        with pytest.raises(StepExistsError):
            await saver.save({}, step=100)
    assert await steps(run) == numbers


def rewrite(manifest: Path, edit: Callable[[dict[str, object]], object]) -> None:
    """Change a manifest as a newer aiockpt might write it, sealed."""
    body = json.loads(manifest.read_bytes()[:-_TAIL] + b"\n}")
    edit(body)
    text = json.dumps(body, indent=2).encode()[: -len(b"\n}")]
    manifest.write_bytes(text + _TAIL_HEAD + digest(text).encode() + _TAIL_END)


async def test_a_newer_format_is_neither_damage_nor_deleted(run: Path) -> None:
    """The newest was written by a newer aiockpt: said by name, not passed over, not collided with.

    entireio/cli#1528, Jij-Inc/ommx#835, onflow/flow-go#3335.
    """
    for step in (1, 2):
        await save(run, state_of(step), step)
    rewrite(folder_of(run, 1) / "manifest.json", lambda body: body.update(extra_field={"x": 1}))
    rewrite(folder_of(run, 2) / "manifest.json", lambda body: body.update(format=999))
    async with Saver(run) as saver:
        with pytest.raises(UnsupportedFormatError, match="999"):
            await saver.restore()
        found = await saver.restore(step=1)
        assert found is not None
        assert number_in(found.values) == 1
        with pytest.raises(StepExistsError):
            await saver.save(state_of(9), step=2)
        await saver.save(state_of(3), step=3)
        newest = await saver.restore()
        assert newest is not None
        assert number_in(newest.values) == 3
    assert await steps(run) == (1, 2, 3)
    assert (folder_of(run, 2) / "manifest.json").exists()
