"""A store is found by its scheme, and the contract tells good stores from bad ones."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from aiockpt.errors import UsageError
from aiockpt.storage import MANIFEST, Attempt, Entry, Sink, Store, Wanted, WantedStep, open_store
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import StoreContract
from aiockpt.testing._steps import exists, write_step


class Bad(MemoryStore):
    """A store to be spoiled."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(str(tmp_path))


class ReplacesOnPut(Bad):
    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        await super().put(key, data)


class HidesFiles(Bad):
    async def list(self, folder: str = "") -> list[Entry]:
        return [entry for entry in await super().list(folder) if not entry.name.startswith(".")]


class DeletesByPrefix(Bad):
    async def delete_folder(self, folder: str) -> None:
        for key in list(self._bucket.files):
            if key.startswith(folder):
                del self._bucket.files[key]


class ForgetsLimits(Bad):
    async def get(self, key: str, *, limit: int = 1 << 30) -> bytes:
        return await super().get(key)


class SweepsTheLiving(Bad):
    async def sweep(self, *, unless: WantedStep | None = None) -> builtins.list[str]:
        for attempt, upload in self._bucket.attempts.items():
            for key in upload.keys:
                del self._bucket.files[key]
            del attempt
        return []


class RetiresAttempts(Bad):
    async def retire(self, name: str, *, unless: Wanted | None = None) -> bool:
        await self.delete_folder(name)
        return True


class _Wrapped(Bad):
    """Spoils its attempts by the methods of `spoil`."""

    spoil: Mapping[str, Callable[..., Awaitable[object]]] = {}

    async def begin(self, name: str, save_id: str) -> Attempt:
        attempt = await super().begin(name, save_id)
        for method, how in self.spoil.items():
            setattr(attempt, method, how.__get__(attempt))
        return attempt


async def _replace(attempt: Attempt, manifest: bytes) -> None:
    attempt.store._bucket.files[f"{attempt.name}/{MANIFEST}"] = manifest  # type: ignore[attr-defined]


async def _nothing(attempt: Attempt) -> None:
    pass


async def _early(attempt: Attempt, filename: str, data: bytes) -> None:
    attempt.store._bucket.files[f"{attempt.name}/{MANIFEST}"] = data  # type: ignore[attr-defined]


class CommitsOverOthers(_Wrapped):
    spoil = {"commit": _replace}


class AbortsNothing(_Wrapped):
    spoil = {"abort": _nothing}


class ShowsTooEarly(_Wrapped):
    spoil = {"put": _early}


class PadsFiles(Bad):
    async def begin(self, name: str, save_id: str) -> Attempt:
        attempt = await super().begin(name, save_id)
        create = attempt.create

        async def padded(filename: str, nbytes: int) -> Sink:
            sink = await create(filename, nbytes)
            finish = sink.finish

            async def whole(nbytes: int) -> None:
                await finish(-(-nbytes // 4096) * 4096)

            sink.finish = whole  # type: ignore[method-assign]
            return sink

        attempt.create = padded  # type: ignore[method-assign]
        return attempt


FAULTS: list[tuple[type[Bad], str]] = [
    (ReplacesOnPut, "test_put_if_absent"),
    (ReplacesOnPut, "test_create_only_put_has_one_winner"),
    (HidesFiles, "test_list"),
    (DeletesByPrefix, "test_deletes_are_exact_and_idempotent"),
    (ForgetsLimits, "test_get_refuses_what_is_missing_or_too_long"),
    (SweepsTheLiving, "test_sweep_removes_only_what_is_dead"),
    (RetiresAttempts, "test_retire_spares_attempts"),
    (CommitsOverOthers, "test_a_commit_never_replaces"),
    (CommitsOverOthers, "test_one_of_many_commits_wins"),
    (AbortsNothing, "test_an_abort_leaves_nothing"),
    (ShowsTooEarly, "test_nothing_shows_before_the_commit"),
    (PadsFiles, "test_big_aligned_writes"),
]


@pytest.mark.parametrize(("store", "test"), FAULTS, ids=lambda v: v if isinstance(v, str) else v.__name__)
async def test_the_contract_finds(tmp_path: Path, store: type[Bad], test: str) -> None:
    """A store with a fault fails the test that is about it, and a good one passes it."""

    class Contract(StoreContract):
        make: type[MemoryStore]

        def make_store(self, tmp_path: Path) -> Store:
            return store(tmp_path) if self.make is Bad else MemoryStore(f"{tmp_path}/good")

        def raw_files(self, store: Store) -> Mapping[str, bytes]:
            assert isinstance(store, MemoryStore)
            return {key: bytes(data) for key, data in store._bucket.files.items()}

    contract = Contract()
    Contract.make = MemoryStore
    await getattr(contract, test)(tmp_path)
    Contract.make = Bad
    with pytest.raises((AssertionError, OSError, KeyError, pytest.fail.Exception)):
        await getattr(contract, test)(tmp_path)


TAPE = """
from aiockpt.storage.memory import MemoryStore
def open_url(url):
    return MemoryStore(url)
"""


def test_a_store_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in `storage/` makes its scheme work with nothing else touched."""
    import aiockpt.storage

    with pytest.raises(UsageError, match="tape://"):
        open_store("tape://drive/1")
    (tmp_path / "tape.py").write_text(TAPE)
    (tmp_path / "disc.py").write_text("import no_such_package_at_all")
    monkeypatch.setattr(aiockpt.storage, "__path__", [*aiockpt.storage.__path__, str(tmp_path)])
    try:
        assert open_store("tape://drive/1").url == "memory://tape://drive/1"
        assert open_store("TAPE://x").url == "memory://TAPE://x"
        with pytest.raises(UsageError, match="no_such_package_at_all"):
            open_store("disc://x")
        with pytest.raises(UsageError, match=r"known are disc://, file://, memory://, tape://"):
            open_store("drum://x")
    finally:
        sys.modules.pop("aiockpt.storage.tape", None)
        vars(aiockpt.storage).pop("tape", None)


def test_open_store(tmp_path: Path) -> None:
    """Stores pass through, paths and URLs find their members, all else is refused."""
    store = MemoryStore("x")
    assert open_store(store) is store
    assert open_store("memory://x").url == "memory://x"
    assert isinstance(open_store(tmp_path), LocalStore)
    assert isinstance(open_store("relative/run"), LocalStore)
    assert isinstance(open_store(Path("tape://x")), LocalStore)
    for bad in ("", "memory://", "local://x", "a.b://x", "_folder://x", "nul\0", "s3://bucket/run"):
        if bad == "_folder://x":  # no scheme begins like that: it is an odd path
            assert isinstance(open_store(bad), LocalStore)
            continue
        with pytest.raises(UsageError):
            open_store(bad)
    for wrong in (3, None, b"path", object()):
        with pytest.raises(UsageError):
            open_store(wrong)  # type: ignore[arg-type]


async def test_urls(tmp_path: Path) -> None:
    """Paths and file:// URLs open the same run; other hosts and relative URLs do not."""
    odd = tmp_path / "a b%20#c"
    await write_step(LocalStore(odd), "step", {"a": b"1"})
    for spelled in (
        str(odd),
        odd,
        f"file://{tmp_path}/a%20b%2520%23c",
        f"FILE://localhost{tmp_path}/a%20b%2520%23c",
    ):
        store = open_store(spelled)
        assert store.url == str(odd)
        assert await exists(store, "step")
    for bad in ("file://", "file://host/run", "file://run"):
        with pytest.raises(UsageError):
            open_store(bad)
