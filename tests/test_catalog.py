"""Catalog: which steps there are, which is the newest valid one, and what each is."""

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt._manifest import MANIFEST, digest
from aiockpt._names import RUN_FILE
from aiockpt._short import latest, load
from aiockpt._tree import encode_value
from aiockpt.catalog import Catalog
from aiockpt.checkpoint import Checkpoint
from aiockpt.errors import (
    CorruptCheckpointError,
    StepNotFoundError,
    UnsupportedFormatError,
    UsageError,
)
from tests.make_checkpoint import RUN_ID, alike, make_checkpoint, write_run


def state(number: int) -> dict[str, Any]:
    """A state all of whose tensors hold one number."""
    return {"m": {"a": torch.full((50,), float(number)), "b": torch.full((3,), number)}, "n": number}


def make_steps(run: Path, *steps: int) -> None:
    """Write those steps."""
    for step in steps:
        make_checkpoint(run, state(step), step)


async def test_an_empty_run(tmp_path: Path) -> None:
    """Nothing, a missing folder, or only other people's things: no steps, and None is the newest."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").mkdir()
    (tmp_path / "mine" / "step-00000004").write_text("a file")
    (tmp_path / "mine" / ".step-00000005.0123").mkdir()
    (tmp_path / "mine" / "step-6").mkdir()
    for run in (tmp_path / "empty", tmp_path / "no" / "such", tmp_path / "mine"):
        async with Catalog(run) as catalog:
            assert await catalog.steps() == ()
            assert await catalog.checkpoints() == ()
            assert await catalog.latest() is None
            assert await catalog.latest(valid="full") is None
            assert await catalog.restore() is None
            with pytest.raises(StepNotFoundError):
                await catalog.get(4)
            with pytest.raises(StepNotFoundError):
                await catalog.verify()
    assert not (tmp_path / "empty").exists()


async def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    """Neither the text, nor the time of a folder, nor the clock decides what is newest."""
    steps = (9, 10, 100000000, 2)
    make_steps(tmp_path, *steps)
    for name, when in (("step-00000009", 3e9), ("step-100000000", 0.0), ("step-00000010", -5.0)):
        os.utime(tmp_path / name, (when, when))
    async with Catalog(tmp_path) as catalog:
        assert await catalog.steps() == (2, 9, 10, 100000000)
        assert [c.step for c in await catalog.checkpoints()] == [2, 9, 10, 100000000]
        newest = await catalog.latest()
    assert newest is not None
    assert newest.step == 100000000


async def test_what_a_checkpoint_says(tmp_path: Path) -> None:
    """The record holds what the manifest says; metrics and meta come back with their types."""
    made = make_checkpoint(
        tmp_path,
        state(1),
        7,
        user={"c.json": b"{}"},
        metrics={"loss": encode_value(math.inf)},
        meta={"a": 1},
    )
    found = await latest(tmp_path)
    assert isinstance(found, Checkpoint)
    assert (found.step, found.save_id, found.run_id) == (7, made.save_id, RUN_ID)
    assert (found.name, found.url) == ("step-00000007", f"{found.run}/step-00000007")
    assert found.files == ("c.json",)
    assert found.nbytes == sum(f.stat().st_size for f in made.folder.iterdir() if f.name != MANIFEST)
    assert found.metrics == {"loss": math.inf}
    assert found.meta == {"a": 1}
    assert pickle.loads(pickle.dumps(found)) == found


async def test_step_format(tmp_path: Path) -> None:
    """The run says how its steps are called; what the caller says comes first."""
    write_run(tmp_path, "ckpt_{}_x")
    make_checkpoint(tmp_path, state(1), 12, name="ckpt_12_x")
    make_checkpoint(tmp_path, state(2), 13)
    async with Catalog(tmp_path) as catalog:
        assert await catalog.steps() == (12,)
    async with Catalog(tmp_path, step_format="step-{:08d}") as catalog:
        assert await catalog.steps() == (13,)
    assert (await load(tmp_path))["n"] == 1
    with pytest.raises(UsageError):
        await latest(tmp_path, step_format="no field")


async def test_a_damaged_run_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged `run.json` is told; without any step found it is an error, never an empty run."""
    write_run(tmp_path, "ckpt_{}")
    make_checkpoint(tmp_path, state(1), 12, name="ckpt_12")
    for text in ("", "null", "[]", "{", '{"step_format": 3}', '{"run_id": "x"}', "\x00\x80", "[" * 100000):
        (tmp_path / RUN_FILE).write_bytes(text.encode("latin-1"))
        with pytest.raises(CorruptCheckpointError) as caught:
            await latest(tmp_path)
        assert caught.value.file == RUN_FILE
    make_steps(tmp_path, 3)
    with caplog.at_level(logging.WARNING, logger="aiockpt"):
        async with Catalog(tmp_path) as catalog:
            assert await catalog.steps() == (3,)
            assert await catalog.steps() == (3,)
    assert [record.message for record in caplog.records if RUN_FILE in record.message] != []
    assert len(caplog.records) == 1


async def test_generations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of several generations of a step the highest valid one counts."""
    make_checkpoint(tmp_path, state(1), 5)
    second = make_checkpoint(tmp_path, state(2), 5, name="step-00000005.1")
    third = make_checkpoint(tmp_path, state(3), 5, name="step-00000005.10")
    async with Catalog(tmp_path) as catalog:
        assert await catalog.steps() == (5,)
        assert (await catalog.get(5)).save_id == third.save_id
        assert (await catalog.get(5)).generation == 10
        assert (await catalog.load(5))["n"] == 3
        (third.folder / MANIFEST).write_bytes(b"{}")
        assert (await catalog.get(5)).save_id == second.save_id
        assert [c.save_id for c in await catalog.checkpoints()] == [second.save_id]
    assert "step-00000005.10" in caplog.text


async def test_damaged_steps_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest valid step is found; each damaged one is logged once, with step, file and reason."""
    make_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-00000004" / MANIFEST).unlink()
    (tmp_path / "step-00000003" / MANIFEST).write_bytes(b"\xff\xfe{")
    (tmp_path / "step-00000009").mkdir()
    async with Catalog(tmp_path) as catalog:
        for _ in range(3):
            found = await catalog.latest()
            assert found is not None
            assert found.step == 2
            assert [step for step, _ in found.skipped] == [9, 4, 3]
        assert await catalog.steps() == (1, 2)
        assert (await catalog.load())["n"] == 2
        for step in (3, 4, 9):
            with pytest.raises(CorruptCheckpointError) as caught:
                await catalog.load(step)
            assert (caught.value.step, caught.value.file) == (step, MANIFEST)
    assert len(caplog.records) == 3
    assert {getattr(record, "step", None) for record in caplog.records} == {3, 4, 9}
    assert all(record.levelno == logging.WARNING and MANIFEST in record.message for record in caplog.records)


async def test_an_old_damaged_step_is_in_nobodys_way(tmp_path: Path) -> None:
    """Damage in the middle does not keep anybody from a good newer step."""
    make_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000002" / MANIFEST).write_bytes(b"\xff\xfe{")
    found = await latest(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (3, ())
    assert (await load(tmp_path))["n"] == 3


async def test_no_valid_step_is_an_error(tmp_path: Path) -> None:
    """A run of damaged steps is never taken for a new run, and nothing of it is removed."""
    make_steps(tmp_path, 1, 2)
    for step in (1, 2):
        os.truncate(tmp_path / f"step-0000000{step}" / MANIFEST, 10)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    async with Catalog(tmp_path) as catalog:
        for call in (catalog.latest(), catalog.load(), catalog.restore()):
            with pytest.raises(CorruptCheckpointError, match="none of the 2 steps") as caught:
                await call
            assert caught.value.step == 2
        assert await catalog.steps() == ()
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


async def test_full_validity_reads_all(tmp_path: Path) -> None:
    """`valid="full"` passes over a step with one flipped bit, `manifest` does not look that far."""
    make_steps(tmp_path, 1, 2)
    shard = next((tmp_path / "step-00000002").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    shallow, full = await latest(tmp_path), await latest(tmp_path, "full")
    assert shallow is not None
    assert full is not None
    assert (shallow.step, full.step) == (2, 1)
    with pytest.raises(UsageError):
        await latest(tmp_path, "wrong")  # type: ignore[arg-type]


async def test_the_newest_falls_back_over_damaged_data(tmp_path: Path) -> None:
    """Loading the newest goes on to the next older one when data turn out damaged; by number it does not."""
    make_steps(tmp_path, 1, 2)
    shard = next((tmp_path / "step-00000002").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    into = {"m": {"a": torch.zeros(50), "b": torch.zeros(3, dtype=torch.int64)}, "n": 0}
    assert (await load(tmp_path))["n"] == 1
    checkpoint = await load(tmp_path, into=into)
    assert (checkpoint.step, [step for step, _ in checkpoint.skipped]) == (1, [2])
    assert alike(into, state(1))
    with pytest.raises(CorruptCheckpointError):
        await load(tmp_path, 2)


@pytest.mark.parametrize("version", [999, "1", 1.5, None, -1, 10**30, True, [], {}])
async def test_newer_formats(tmp_path: Path, version: Any) -> None:
    """A sound manifest of another format is told as such, and never silently passed over."""
    make_steps(tmp_path, 1)
    made = make_checkpoint(tmp_path, state(2), 2)
    made.format = version
    made.write()
    async with Catalog(tmp_path) as catalog:
        for call in (catalog.latest(), catalog.load(), catalog.get(2), catalog.load(2), catalog.verify(2)):
            with pytest.raises(UnsupportedFormatError) as caught:
                await call
            assert caught.value.step == 2
            assert str(version)[:40] in str(caught.value)
        assert await catalog.steps() == (1, 2)
        assert [c.step for c in await catalog.checkpoints()] == [1]
        assert (await catalog.load(1))["n"] == 1
    (made.folder / MANIFEST).write_bytes(made.manifest()[:-2])
    assert (await load(tmp_path))["n"] == 1


async def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    """A manifest with more fields than we know is fine."""
    made = make_checkpoint(tmp_path, state(2), 2)
    text = made.manifest()
    body = text[: text.index(b',\n  "checksum"')] + b',\n  "extra_field": {"x": 1}'
    (made.folder / MANIFEST).write_bytes(body + b',\n  "checksum": "' + digest(body).encode() + b'"\n}\n')
    assert (await load(tmp_path))["n"] == 2


@pytest.mark.parametrize(
    "facts", [{"metrics": [1]}, {"metrics": {"~": 3}}, {"meta": {"~": "nosuch", "v": 3}}]
)
async def test_hostile_metrics(tmp_path: Path, facts: dict[str, Any]) -> None:
    """Metrics and meta that nobody wrote are damage."""
    make_checkpoint(tmp_path, state(2), 2, **facts)
    with pytest.raises(CorruptCheckpointError) as caught:
        await latest(tmp_path)
    assert caught.value.step == 2


async def test_a_checkpoint_is_a_save_not_a_step(tmp_path: Path) -> None:
    """A record of a step that was written anew or deleted meanwhile no longer loads."""
    make_checkpoint(tmp_path, state(1), 5)
    async with Catalog(tmp_path) as catalog:
        old = await catalog.get(5)
        assert (await catalog.load(old))["n"] == 1
        shutil.rmtree(tmp_path / old.name)
        with pytest.raises(StepNotFoundError):
            await catalog.load(old)
        make_checkpoint(tmp_path, state(2), 5)
        for call in (catalog.load(old), catalog.verify(old), catalog.read_file(old, "x")):
            with pytest.raises(StepNotFoundError):
                await call
        assert (await catalog.load(5))["n"] == 2


async def test_the_users_files(tmp_path: Path) -> None:
    """Files committed with a step come back verified; others are named."""
    made = make_checkpoint(tmp_path, state(1), 5, user={"c.json": b"{}", "empty": b""})
    async with Catalog(tmp_path) as catalog:
        checkpoint = await catalog.get(5)
        assert await catalog.read_file(checkpoint, "c.json") == b"{}"
        assert await catalog.read_file(5, "empty") == b""
        for name in ("nope", "../c.json", MANIFEST, "part-00000.json"):
            with pytest.raises(UsageError, match="there are: c"):
                await catalog.read_file(checkpoint, name)
        (made.folder / "c.json").write_bytes(b"[]")
        with pytest.raises(CorruptCheckpointError) as caught:
            await catalog.read_file(checkpoint, "c.json")
        assert (caught.value.step, caught.value.file) == (5, "c.json")


async def test_restore_gives_the_state_in_values(tmp_path: Path) -> None:
    """`restore` returns the checkpoint, with the state in `.values` if there is no target."""
    make_checkpoint(tmp_path, state(1), 1)
    make_checkpoint(tmp_path, [torch.ones(2), 3], 2)
    async with Catalog(tmp_path) as catalog:
        first, second = await catalog.restore(step=1), await catalog.restore()
        assert first is not None
        assert second is not None
        assert alike(dict(first.values), state(1))
        assert alike(second.values[""], [torch.ones(2), 3])
        into = {"n": 0}
        third = await catalog.restore(into, step=1)
        assert third is not None
        assert (third.values, into) == ({"n": 1}, {"n": 1})
