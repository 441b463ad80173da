"""An alias points at a valid checkpoint, whole, whoever promotes and whatever fails."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import shutil
import uuid
from pathlib import Path

import pytest

from aiockpt import (
    Catalog,
    Checkpoint,
    CheckpointError,
    CorruptCheckpointError,
    Saver,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from aiockpt._aliases import promoted
from aiockpt.policies.keep import KeepLast
from aiockpt.storage import Store
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyStore, Kind
from tests.lock_child import heard, start
from tests.proof import save, state_of, steps
from tests.savers import strike

KINDS: tuple[Kind, ...] = ("error", "after", "tear", "full")


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run with three steps."""
    for step in (1, 2, 3):
        await save(tmp_path / "run", state_of(step), step)
    return tmp_path / "run"


async def test_a_promoted_checkpoint_is_found_by_its_alias(run: Path) -> None:
    """Several aliases at once; each can be moved and removed."""
    async with Catalog(run) as catalog:
        assert await catalog.aliases() == {}
        with pytest.raises(StepNotFoundError, match="no alias 'production'"):
            await catalog.alias("production")
        first = await catalog.promote(1)
        assert isinstance(first, Checkpoint)
        assert await catalog.alias() == first
        second = await catalog.promote(await catalog.get(2), alias="canary-1.b")
        assert await catalog.aliases() == {"canary-1.b": second, "production": first}
        assert await catalog.promote(2) == second == await catalog.alias("production")
        await catalog.demote("production")
        await catalog.demote("production")
        assert await catalog.aliases() == {"canary-1.b": second}


async def test_what_the_file_says(run: Path) -> None:
    """It names step, folder and save, and what was there before: the way back."""
    async with Catalog(run) as catalog:
        first, second = await catalog.promote(1), await catalog.promote(2)
        found = json.loads((run / "aliases" / "production.json").read_text())
        assert found.pop("since") > 1e9
        assert found == {
            "format": 0,
            "alias": "production",
            "name": "step-00000002",
            "step": 2,
            "save_id": second.save_id,
            "previous": {"name": "step-00000001", "step": 1, "save_id": first.save_id},
        }
        await catalog.promote(found["previous"]["step"])
        assert await catalog.alias() == first


async def test_retention_keeps_what_is_promoted(run: Path) -> None:
    """For as long as it is."""
    async with Catalog(run) as catalog, Saver(run, keep=KeepLast(1), keep_grace=0) as saver:
        first = await catalog.promote(1)
        assert await promoted(catalog.store) == {(first.name, first.save_id)}
        await saver.save(state_of(4), step=4)
        await saver._housekeeping.drain()
        assert await steps(run) == (1, 4)
        await catalog.demote()
        await saver.save(state_of(5), step=5)
        await saver._housekeeping.drain()
        assert await steps(run) == (5,)


@pytest.mark.parametrize(
    "alias", ["", ".", "..", "../x", "a/b", "/etc/x", ".hidden", "a\0", "a b", "ü", "x" * 65, "a\n", None, 7]
)
async def test_names_are_checked(run: Path, alias: str) -> None:
    """Before anything is touched."""
    async with Catalog(run) as catalog:
        for call in (catalog.promote(1, alias), catalog.alias(alias), catalog.demote(alias)):
            with pytest.raises(UsageError, match="an alias is"):
                await call
    assert not (run / "aliases").exists()


async def test_only_a_valid_checkpoint_is_promoted(run: Path) -> None:
    """A missing or damaged one is refused, and the alias stays as it was."""
    async with Catalog(run) as catalog:
        first = await catalog.promote(1)
        with pytest.raises(StepNotFoundError):
            await catalog.promote(9)
        next((run / "step-00000002").glob("model*")).unlink()
        with pytest.raises(CorruptCheckpointError):
            await catalog.promote(2)
        with pytest.raises(UsageError):
            await catalog.promote("latest")  # type: ignore[arg-type]
        assert await catalog.alias() == first


async def test_an_alias_whose_step_is_gone(run: Path) -> None:
    """Or is another save by now: it is not found, and never another step in its place."""
    async with Catalog(run) as catalog:
        await catalog.promote(1)
        await catalog.promote(2, "b")
        shutil.rmtree(run / "step-00000001")
        with pytest.raises(StepNotFoundError):
            await catalog.alias()
        assert list(await catalog.aliases()) == ["b"]
        await save(run.parent / "other", state_of(2), 2)
        shutil.rmtree(run / "step-00000002")
        shutil.copytree(run.parent / "other" / "step-00000002", run / "step-00000002")
        with pytest.raises(StepNotFoundError, match="another save"):
            await catalog.alias("b")


async def test_a_step_that_goes_while_it_is_promoted(run: Path) -> None:
    """The alias is as it was before; one that somebody else has moved meanwhile is left to him."""
    rival = Catalog(run)

    class Going(FaultyStore):
        moves = False

        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            await super().put(key, data, if_absent=if_absent)
            await self.inner.retire("step-00000003")
            if self.moves:
                await rival.promote(1)

    store = Going(LocalStore(run))
    async with rival, Catalog(store) as catalog:
        with pytest.raises(StepNotFoundError):
            await catalog.promote(3)
        assert await catalog.aliases() == {}
        second = await catalog.promote(2)
        await save(run.parent / "other", state_of(3), 3)
        for store.moves in (False, True):
            shutil.copytree(run.parent / "other" / "step-00000003", run / "step-00000003")
            with pytest.raises(StepNotFoundError):
                await catalog.promote(3)
            found = await catalog.alias()
            assert found.step == (1 if store.moves else second.step)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"junk",
        b"[]",
        b"{}",
        b"[" * 5000,
        b'{"name": "../../etc", "step": 1, "save_id": "' + b"0" * 32 + b'"}',
        b'{"name": "step-00000001", "step": true, "save_id": "' + b"0" * 32 + b'"}',
        b'{"name": "step-00000001", "step": 1, "save_id": "x"}',
        b'{"name": 5, "step": 1, "save_id": "' + b"0" * 32 + b'"}',
    ],
)
async def test_a_damaged_alias(run: Path, junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """An error for who asks for it, passed over in a list, and no step goes while nobody knows."""
    async with Catalog(run) as catalog:
        await catalog.promote(2, "good")
        (run / "aliases" / "production.json").write_bytes(junk)
        with pytest.raises(CorruptCheckpointError) as caught:
            await catalog.alias()
        assert caught.value.file
        assert list(await catalog.aliases()) == ["good"]
        if b"etc" not in junk:  # that one is well formed, and points at nothing that could be deleted
            with pytest.raises(StorageError, match="damaged"):
                await promoted(catalog.store)
            async with Saver(run, keep=KeepLast(1), keep_grace=0) as saver:
                await saver.save(state_of(4), step=4)
                await saver._housekeeping.drain()
            assert await steps(run) == (1, 2, 3, 4)
            assert "production.json is damaged" in caplog.text
        await catalog.promote(1)
        assert len(await promoted(catalog.store)) == 2


async def test_what_else_lies_there(run: Path) -> None:
    """Files that are no aliases are nobody's business."""
    async with Catalog(run) as catalog:
        found = await catalog.promote(1)
        for name in ("notes.txt", ".x.json", "a b.json", "sub/x.json", "json"):
            (run / "aliases" / name).parent.mkdir(exist_ok=True)
            (run / "aliases" / name).write_text("mine")
        assert await catalog.aliases() == {"production": found}
        assert await promoted(catalog.store) == {(found.name, found.save_id)}


async def test_a_run_that_cannot_be_written(run: Path) -> None:
    """Promoting says so, with the errno; looking works."""

    class NotWritable(FaultyStore):
        async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            raise OSError(errno.EROFS, "read-only", key)

        async def delete(self, key: str) -> None:
            raise OSError(errno.EROFS, "read-only", key)

    async with Catalog(run) as catalog:
        found = await catalog.promote(1)
    async with Catalog(NotWritable(LocalStore(run))) as catalog:
        for call in (catalog.promote(2), catalog.demote()):
            with pytest.raises(StorageError) as caught:
                await call
            assert caught.value.errno == errno.EROFS
        assert await catalog.alias() == found


async def test_two_processes_promote_at_once(run: Path) -> None:
    """The last one wins; whoever looks meanwhile sees one of the two, whole."""
    with start("promote", run, 1) as one, start("promote", run, 2) as other:
        for child in (one, other):
            assert heard(child) == "ready"
        for child in (one, other):
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        seen = set()
        async with Catalog(run) as catalog:
            while one.poll() is None or other.poll() is None:
                for checkpoint in (await catalog.aliases()).values():
                    seen.add(checkpoint.step)
                assert len(await promoted(catalog.store)) <= 1
                await asyncio.sleep(0.01)
            assert (await catalog.alias()).step in (1, 2)
        assert seen <= {1, 2}
        assert seen
        assert [heard(child) for child in (one, other)] == ["done", "done"]
    assert [p.name for p in (run / "aliases").iterdir()] == ["production.json"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["local", "memory"])
async def test_every_operation_may_fail(run: Path, where: str, kind: Kind) -> None:
    """The alias is the old one or the new one, whole; what is promoted is known or an error."""
    for n in itertools.count():
        if where == "memory":
            inner: Store = MemoryStore()
            for step in (1, 2):
                await save(inner, state_of(step), step)
        else:
            path = run.parent / uuid.uuid4().hex
            shutil.copytree(run, path)
            inner = LocalStore(path)
        store = FaultyStore(inner, None, kind)
        async with Catalog(inner) as sound, Catalog(store) as catalog:
            first = await sound.promote(1)
            second = await sound.get(2)
            store.faults.fail_at = n
            error = None
            try:
                assert await catalog.promote(2) == second
                assert await promoted(store) == {(second.name, second.save_id)}
                assert await catalog.aliases() == {"production": second}
                await catalog.demote()
            except (CheckpointError, OSError) as caught:
                error = caught
            fired = store.fired
            store.heal()
            found = await sound.aliases()
            assert found in ({}, {"production": first}, {"production": second})
            assert {(c.name, c.save_id) for c in found.values()} == await promoted(inner)
            if not fired:
                assert error is None
                assert found == {}
                assert n >= 12
                return


async def test_cancelled_at_any_wait(run: Path) -> None:
    """The alias is the old one or the new one."""
    async with Catalog(run) as catalog:
        for n in itertools.count():
            first = await catalog.promote(1)
            struck, outcome = await strike(n, lambda: catalog.promote(2), "native")
            found = await catalog.alias()
            assert found.step in (1, 2)
            if not struck:
                assert isinstance(outcome, Checkpoint)
                assert found.step == 2
                assert n > 6
                return
            assert found == first or found.step == 2
