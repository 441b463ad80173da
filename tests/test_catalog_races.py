"""Catalog on a run that others change, may not be written to, or fails."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt._manifest import MANIFEST
from aiockpt._short import load
from aiockpt.catalog import Catalog
from aiockpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepNotFoundError,
    StorageError,
)
from aiockpt.saver import Saver
from aiockpt.storage import Entry, open_store
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyStore
from tests.make_checkpoint import alike, make_checkpoint


def state(number: int) -> dict[str, Any]:
    """A state all of whose tensors hold one number."""
    return {"m": {"a": torch.full((50,), float(number)), "b": torch.full((3,), number)}, "n": number}


def make_steps(run: Path, *steps: int) -> None:
    """Write those steps."""
    for step in steps:
        make_checkpoint(run, state(step), step)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A run whose folders and files nobody may write to."""
    run = tmp_path / "run"
    make_steps(run, 1, 2)
    everything = [run, *run.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield run
    for path in everything:
        path.chmod(path.stat().st_mode | stat.S_IRWXU)


async def test_reading_writes_nothing(read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All read paths work on a read-only run, and open nothing for writing."""
    wrong: list[str] = []
    real = os.open

    def watch(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            wrong.append(str(path))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", watch)
    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "link", "truncate", "utime"):
        monkeypatch.setattr(os, name, lambda *args, name=name: wrong.append(name))
    before = {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}
    async with Catalog(read_only) as catalog:
        assert await catalog.steps() == (1, 2)
        assert (await catalog.latest("full")) is not None
        assert alike(await catalog.load(1), state(1))
        await catalog.verify()
    assert not wrong
    assert {path: path.stat().st_mtime_ns for path in read_only.rglob("*")} == before


async def test_a_reader_races_retention(tmp_path: Path) -> None:
    """While another thread saves and keeps one step only, every load gives one whole newer step."""
    run = tmp_path / "run"
    make_steps(run, 1)
    stop = threading.Event()

    def churn() -> None:
        step = 1
        while not stop.is_set():
            made = make_checkpoint(tmp_path / "aside", state(step + 1), step + 1)
            made.folder.rename(run / made.folder.name)
            gone = tmp_path / "gone"
            (run / f"step-{step:08d}").rename(gone)
            shutil.rmtree(gone)
            step += 1
            stop.wait(0.002)

    writer = asyncio.create_task(asyncio.to_thread(churn))
    try:
        last = 0
        async with Catalog(run) as catalog:
            while last < 60:
                loaded = await catalog.load()
                assert alike(loaded, state(loaded["n"]))
                assert loaded["n"] >= last
                last = loaded["n"]
    finally:
        stop.set()
        await writer


class Blind(FaultyStore):
    """A store whose first listings show no step: each was renamed away before it was met."""

    blind = 2

    async def list(self, folder: str = "") -> list[Entry]:
        found = await super().list(folder)
        if folder or not self.blind:
            return found
        self.blind -= 1
        return [entry for entry in found if not entry.name.startswith("step-")]


async def test_one_look_does_not_make_a_run_empty(tmp_path: Path) -> None:
    """Believed, it would let a training run begin anew."""
    make_steps(tmp_path, 3)
    for ask in (Catalog.latest, Catalog.restore, Catalog.load, Catalog.steps):
        async with Catalog(Blind(LocalStore(tmp_path))) as catalog:
            assert await ask(catalog)


class Vanishing(FaultyStore):
    """A store in which a step is deleted by somebody else when the n-th operation begins."""

    async def call(self, operation: str, *args: Any, **options: Any) -> Any:
        if len(self.operations) == self.at:
            shutil.rmtree(self.victim, ignore_errors=True)
        return await super().call(operation, *args, **options)

    at = 0
    victim = Path()


async def test_a_step_vanishes_at_any_moment(tmp_path: Path) -> None:
    """Deleted before whichever operation: the newest load falls to the older, a load by number is told."""
    for n in range(40):
        run = tmp_path / str(n)
        make_steps(run, 1, 2)
        store = Vanishing(open_store(run))
        store.at, store.victim = n, run / "step-00000002"
        loaded = await load(store)
        assert alike(loaded, state(loaded["n"]))
        make_steps(run, 2)
        again = Vanishing(open_store(run))
        again.at, again.victim = n, run / "step-00000002"
        try:
            assert (await load(again, 2))["n"] == 2
        except StepNotFoundError as error:
            assert error.step == 2  # noqa: PT017 (both outcomes are right)
        if n >= len(store.operations):
            break
    else:
        pytest.fail("a load takes more operations than were tried")


async def test_typed_errors_of_a_failing_store(tmp_path: Path) -> None:
    """Each failing store call of the listing calls is a StorageError with errno and file."""
    make_steps(tmp_path, 1, 2)
    for method in ("steps", "checkpoints", "latest", "verify"):
        probe = FaultyStore(open_store(tmp_path))
        await getattr(Catalog(probe), method)()
        for n in range(len(probe.operations)):
            store = FaultyStore(open_store(tmp_path), n)
            try:
                await getattr(Catalog(store), method)()
            except CheckpointError as error:
                assert isinstance(error, StorageError), error  # noqa: PT017 (or it went well: closing)
                assert error.errno == 5  # noqa: PT017
                assert error.filename  # noqa: PT017
            else:
                assert "aclose" in store.operations[n]


async def put_step(store: MemoryStore, folder: Path) -> None:
    """Copy a step's files into a store."""
    for file in folder.iterdir():
        await store.put(f"{folder.name}/{file.name}", file.read_bytes())


async def test_attempts_without_a_manifest_are_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where attempts lie under the step's own name, one under way is neither a step nor damage."""
    store = MemoryStore()
    await store.prepare()
    await store.put("step-00000007/0123abcd-part-00000.json", b"{}")
    async with Catalog(store) as catalog:
        assert await catalog.latest() is None
        assert await catalog.steps() == ()
        made = make_checkpoint(tmp_path, state(3), 3)
        await put_step(store, made.folder)
        found = await catalog.latest()
        assert found is not None
        assert (found.step, found.skipped) == (3, ())
        assert (await catalog.load())["n"] == 3
        with pytest.raises(StepNotFoundError):
            await catalog.get(7)
    assert not caplog.records


async def test_other_attempts_beside_a_step(tmp_path: Path) -> None:
    """Files of a crashed attempt beside a committed step are tolerated there, other files are not."""
    store = MemoryStore()
    await store.prepare()
    made = make_checkpoint(tmp_path, state(3), 3, prefix=True)
    await put_step(store, made.folder)
    await store.put(f"{made.folder.name}/fedcba98-part-00000.json", b"old")
    async with Catalog(store) as catalog:
        assert (await catalog.load())["n"] == 3
        await store.put(f"{made.folder.name}/stranger", b"old")
        with pytest.raises(CorruptCheckpointError, match="does not belong"):
            await catalog.load(3)
    (made.folder / "fedcba98-part-00000.json").write_bytes(b"old")
    async with Catalog(tmp_path) as catalog:
        assert (await catalog.load())["n"] == 3


class Deleting(MemoryStore):
    """A store on which somebody deletes a step, manifest first, when its folder is listed."""

    victim = ""

    async def list(self, folder: str = "") -> list[Entry]:
        if folder and folder == self.victim:
            await self.delete(f"{folder}/{MANIFEST}")
            names = [entry.name for entry in await super().list(folder)]
            await self.delete(f"{folder}/{names[0]}")
        return await super().list(folder)


async def test_a_half_deleted_step_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step whose deletion has begun when we look is gone, not damaged."""
    store = Deleting()
    for step in (1, 2):
        await put_step(store, make_checkpoint(tmp_path, state(step), step, prefix=True).folder)
    store.victim = "step-00000002"
    async with Catalog(store) as catalog:
        found = await catalog.latest()
        assert found is not None
        assert (found.step, found.skipped) == (1, ())
    assert not caplog.records


@pytest.mark.parametrize("where", ["folder", "memory"])
async def test_what_a_saver_writes(tmp_path: Path, where: str) -> None:
    """What the real writer makes is what the reader takes, on either kind of store."""
    store = open_store(tmp_path / "run") if where == "folder" else MemoryStore()
    big = {"m": {"a": torch.randn(3 << 20), "b": torch.randn(1000, 7).t(), "c": torch.arange(3)}, "n": "x"}
    async with Saver(store) as saver:
        await saver.save(big, step=1, files={"c.json": b"{}"}, metrics={"loss": 2.5}, meta={"k": (1, 2)})
        await saver.save(state(2), step=2)
    async with Catalog(store) as catalog:
        assert await catalog.steps() == (1, 2)
        first = await catalog.get(1)
        assert (first.metrics, first.meta, first.files) == ({"loss": 2.5}, {"k": (1, 2)}, ("c.json",))
        assert await catalog.read_file(first, "c.json") == b"{}"
        assert (await catalog.verify(1)).tensors == 3
        assert alike(await catalog.load(first), big)
        assert alike(await catalog.load(), state(2))
