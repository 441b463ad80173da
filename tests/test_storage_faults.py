"""A save that fails or is killed at any operation leaves a whole step or none."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from aiockpt._threads import Lane, offload
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyFiles, FaultyStore, Kind
from aiockpt.testing._steps import raw_tree
from tests.store_child import DATA, FILES, NAME, scripted, start

KINDS: tuple[Kind, ...] = ("error", "after", "tear", "full")


def judge(raw: Mapping[str, bytes], *, prefixed: bool) -> bool:
    """Check that the step is whole or absent beside the user's file; returns which."""
    assert raw["notes.txt"] == b"mine"
    step = {key.rpartition("-" if prefixed else "/")[2]: data for key, data in raw.items() if NAME in key}
    if not step:
        assert list(raw) == ["notes.txt"]
        return False
    step = {key.rpartition("/")[2]: data for key, data in step.items()}
    assert sorted(step) == sorted(FILES)
    assert len(raw) == 4
    assert step["model"] == DATA
    assert step["part"] == DATA[:100]
    return True


async def operations_of(store: FaultyStore | LocalStore, log: list[str]) -> int:
    """Count the operations of the scripted save on a store that works."""
    await store.prepare()
    before = len(log)
    await scripted(store)
    return len(log) - before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["local", "memory"])
async def test_a_save_may_fail_at_any_store_operation(tmp_path: Path, where: str, kind: Kind) -> None:
    """Afterwards the step is there or not, wholly, and a sweep leaves no trace of the rest."""

    def make(path: Path) -> LocalStore | MemoryStore:
        return LocalStore(path) if where == "local" else MemoryStore(str(path))

    async def raw(store: LocalStore | MemoryStore) -> Mapping[str, bytes]:
        if isinstance(store, LocalStore):
            return await offload(raw_tree, Path(store.path), lane=Lane.CONTROL)
        return {key: bytes(data) for key, data in store._bucket.files.items()}

    healthy = FaultyStore(make(tmp_path / "healthy"))
    count = await operations_of(healthy, healthy.operations)
    assert count == 8
    outcomes = []
    for n in range(count):
        inner = make(tmp_path / str(n))
        await inner.prepare()
        await inner.put("notes.txt", b"mine")
        store = FaultyStore(inner, n, kind)
        with contextlib.suppress(OSError):
            await scripted(store)
        assert store.fired
        store.heal()
        await store.aclose()
        again = make(tmp_path / str(n))
        await again.sweep()
        outcomes.append(judge(await raw(again), prefixed=where == "memory"))
        await again.delete_folder(NAME)
        await scripted(again)
        assert judge(await raw(again), prefixed=where == "memory")
    # Only a lost reply of the commit itself leaves a step behind a failed save.
    assert outcomes == [kind == "after" and n == count - 1 for n in range(count)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_save_may_fail_at_any_call_to_the_disk(tmp_path: Path, kind: Kind) -> None:
    """The same one floor below, down to the single flush and rename."""
    files = FaultyFiles()
    store = LocalStore(tmp_path / "healthy", files=files)
    await store.prepare()
    before = len(files.operations)
    await scripted(store)
    names = [text.split()[0] for text in files.operations[before:]]
    outcomes = []
    for n in range(len(names)):
        path = tmp_path / str(n)
        path.mkdir()
        (path / "notes.txt").write_bytes(b"mine")
        files = FaultyFiles(n, kind)
        store = LocalStore(path, files=files)
        with contextlib.suppress(OSError):
            await scripted(store)
        assert files.fired
        files.heal()
        await LocalStore(path).sweep()
        outcomes.append(judge(raw_tree(path), prefixed=False))
        await store.delete_folder(NAME)
        await scripted(store)
        assert judge(raw_tree(path), prefixed=False)
    # A rename needs no space; one whose reply got lost has happened all the same.
    commit = names.index("rename") + (kind not in ("after", "full"))
    expected = [n >= commit for n in range(len(names))]
    assert outcomes == expected


KILLS = ("mkdir", "open_writer", "write", "finish", "create", "sync_dir", "rename", "unlink")


async def test_a_save_may_be_killed(tmp_path: Path) -> None:
    """After SIGKILL the step is whole or absent; another process sweeps what is left."""
    files = FaultyFiles()
    store = LocalStore(tmp_path / "healthy", files=files)
    await store.prepare()
    before = len(files.operations)
    await scripted(store)
    names = [text.split()[0] for text in files.operations[before:]]
    # The last of a kind: the flush after the rename, the manifest rather than the part.
    kills = [(kind, len(names) - 1 - names[::-1].index(kind)) for kind in KILLS]
    for kind in (*KILLS, "store"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "notes.txt").write_bytes(b"mine")
    with start("die", tmp_path, *(f"{kind}={n}" for kind, n in kills), "store=7!") as child:
        assert child.communicate()[0] == "-9\n" * 9
    rename = dict(kills)["rename"]
    for kind, n in [*kills, ("store", 0)]:
        path = tmp_path / kind
        swept = await LocalStore(path).sweep()
        assert judge(raw_tree(path), prefixed=False) == (n > rename)
        assert swept == ([] if n > rename or kind == "mkdir" else [NAME])
