"""The tests that any store must pass."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from ..storage import MANIFEST, Attempt, Store
from ._contract_keys import KeyContract
from ._steps import exists, new_id, read_file, read_step, write_file, write_step

__all__ = ["StoreContract"]


class StoreContract(KeyContract):
    """Everything a store promises, as tests for pytest with pytest-asyncio.

    Subclass it in a test file, in a class whose name begins with `Test`, and override

    * `make_store(self, tmp_path)`: a store object. Each call with the same `tmp_path`
      gives another object of the same run, as another process would have;
    * `raw_files(self, store)`: what is there, seen around the store's own methods;
    * `abandon(self, store, attempt)`: make the attempt's writer look dead, if closing
      its store is not enough.
    """

    pytestmark = pytest.mark.asyncio

    async def abandon(self, store: Store, attempt: Attempt) -> None:
        """Let the writer of `attempt`, begun by `store`, be dead for `sweep`."""
        del attempt
        await store.aclose()

    async def test_nothing_shows_before_the_commit(self, tmp_path: Path) -> None:
        """A step is none until its commit, and wholly there after it."""
        store, reader = await self.ready(tmp_path), self.make_store(tmp_path)
        attempt = await store.begin("step-1", new_id())
        assert not await exists(reader, "step-1")
        sink = await attempt.create("a", 5000)
        await sink.write(0, memoryview(bytes(8192)))
        assert not await exists(reader, "step-1")
        await sink.finish(5000)
        await attempt.put("part", b"part")
        assert not await exists(reader, "step-1")
        await attempt.commit(b"manifest")
        assert await reader.get(f"step-1/{MANIFEST}") == b"manifest"
        assert await reader.get(f"step-1/{attempt.prefix}part") == b"part"
        assert await read_file(reader, f"step-1/{attempt.prefix}a") == bytes(5000)
        assert len(await self.raw(store)) == 3

    async def test_a_commit_never_replaces(self, tmp_path: Path) -> None:
        """A taken name is FileExistsError, the step that has it stays, the loser leaves nothing."""
        store, other = await self.ready(tmp_path), self.make_store(tmp_path)
        await write_step(store, "step", {"a": b"first"})
        before = await self.raw(store)
        attempt = await other.begin("step", new_id())
        await write_file(attempt, "a", b"second")
        with pytest.raises(FileExistsError):
            await attempt.commit(b"second")
        assert await read_step(store, "step") == [b"first"]
        await attempt.abort()
        assert await self.raw(store) == before

    async def test_a_commit_can_be_repeated(self, tmp_path: Path) -> None:
        """A commit whose reply was lost is recognised, and aborting afterwards is harmless."""
        store = await self.ready(tmp_path)
        attempt = await store.begin("step", new_id())
        await write_file(attempt, "a", b"data")
        for _ in range(3):
            await attempt.commit(b"manifest")
        before = await self.raw(store)
        await attempt.abort()
        assert await self.raw(store) == before
        assert await exists(store, "step")
        for late in (attempt.put("b", b""), attempt.create("b", 0), attempt.commit(b"other")):
            with pytest.raises((FileNotFoundError, FileExistsError)):
                await late

    async def test_an_abort_leaves_nothing(self, tmp_path: Path) -> None:
        """Whatever an attempt had written is gone, and the attempt is over."""
        store = await self.ready(tmp_path)
        await store.put("run.json", b"{}")
        before = await self.raw(store)
        attempt = await store.begin("step", new_id())
        await write_file(attempt, "a", bytes(10_000))
        await attempt.put("part", b"part")
        sink = await attempt.create("unfinished", 8192)
        await sink.write(0, memoryview(bytes(4096)))
        await sink.discard()
        await attempt.abort()
        await attempt.abort()
        assert await self.raw(store) == before
        assert [entry.name for entry in await store.list()] == ["run.json"]
        for late in (attempt.put("b", b""), attempt.create("b", 0), attempt.commit(b"m")):
            with pytest.raises(FileNotFoundError):
                await late
        assert await self.raw(store) == before

    async def test_attached_attempts_are_the_same_attempt(self, tmp_path: Path) -> None:
        """Others may add files to an attempt, and even commit it."""
        store, other = await self.ready(tmp_path), self.make_store(tmp_path)
        save_id = new_id()
        with pytest.raises(FileNotFoundError):
            await other.attach("step", save_id)
        attempt = await store.begin("step", save_id)
        attached = await other.attach("step", save_id)
        assert (attached.name, attached.save_id) == ("step", save_id)
        assert attached.prefix == attempt.prefix
        await write_file(attempt, "a", b"a")
        await write_file(attached, "b", b"b")
        with pytest.raises(FileExistsError):
            await attached.create("a", 0)
        await attached.commit(b"m")
        await attempt.commit(b"m")
        pre = f"step/{attempt.prefix}"
        assert await self.raw(store) == {f"{pre}a": b"a", f"{pre}b": b"b", f"step/{MANIFEST}": b"m"}

    async def test_the_same_attempt_begins_once(self, tmp_path: Path) -> None:
        """A second begin with one name and save id is refused; the first goes on."""
        store, other = await self.ready(tmp_path), self.make_store(tmp_path)
        attempt = await store.begin("step", new_id())
        for again in (store, other):
            with pytest.raises(FileExistsError):
                await again.begin("step", attempt.save_id)
        assert await other.sweep() == []
        await attempt.commit(b"m")
        assert await self.raw(store) == {f"step/{MANIFEST}": b"m"}

    async def test_one_of_many_commits_wins(self, tmp_path: Path) -> None:
        """Several attempts for one name: one is the step, whole; the others leave nothing."""
        stores = [await self.ready(tmp_path) for _ in range(5)]

        async def save(number: int) -> None:
            data = bytes([number]) * 9000
            await write_step(stores[number], "step", {"a": data, "b": data})

        results = await asyncio.gather(*(save(n) for n in range(5)), return_exceptions=True)
        winners = [n for n, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert all(isinstance(r, FileExistsError) for r in results if r is not None)
        assert await read_step(stores[0], "step") == [bytes(winners) * 9000] * 2
        assert len(await self.raw(stores[0])) == 3

    async def test_steps_side_by_side(self, tmp_path: Path) -> None:
        """Attempts of different steps do not see each other."""
        store = await self.ready(tmp_path)
        await asyncio.gather(*(write_step(store, f"step-{n}", {"a": b"%d" % n}) for n in range(6)))
        assert [await read_step(store, f"step-{n}") for n in range(6)] == [[b"%d" % n] for n in range(6)]

    async def test_sweep_removes_only_what_is_dead(self, tmp_path: Path) -> None:
        """Attempts of dead writers go; living ones, steps and other files stay."""
        store, dead = await self.ready(tmp_path), self.make_store(tmp_path)
        await store.put("notes.txt", b"mine")
        await store.put(".step-9.tmp", b"mine")
        await store.put(".step-7.0123/manifest.json", b"mine")
        await write_step(store, "step-1", {"a": b"1"})
        alive = await store.begin("step-3", new_id())
        await write_file(alive, "a", b"3")
        before = await self.raw(store)
        lost = await dead.begin("step-2", new_id())
        await write_file(lost, "a", b"2")
        await lost.put("part", b"2")
        assert await store.sweep() == []
        assert await self.make_store(tmp_path).sweep() == []
        await self.abandon(dead, lost)
        assert await store.sweep() == ["step-2"]
        assert await self.raw(store) == before
        assert await self.make_store(tmp_path).sweep() == []
        await alive.commit(b"m")
        assert await exists(store, "step-3")

    async def test_sweep_of_an_attempt_for_a_taken_name(self, tmp_path: Path) -> None:
        """A dead rival of a committed step goes, the step stays."""
        store, dead = await self.ready(tmp_path), self.make_store(tmp_path)
        lost = await dead.begin("step", new_id())
        await write_file(lost, "a", b"lost")
        await write_step(store, "step", {"a": b"won"})
        await self.abandon(dead, lost)
        assert await store.sweep() == ["step"]
        assert await read_step(store, "step") == [b"won"]
        assert len(await self.raw(store)) == 2

    async def test_retire(self, tmp_path: Path) -> None:
        """A retired step is gone with all its files; its name is free again."""
        store, reader = await self.ready(tmp_path), self.make_store(tmp_path)
        await write_step(store, "step-1", {"a": b"old"})
        await write_step(store, "step-10", {"a": b"ten"})
        other = await self.raw(store)
        await store.retire("step-1")
        await store.retire("step-1")
        await store.retire("never-was")
        assert not await exists(reader, "step-1")
        assert await self.raw(store) == {k: v for k, v in other.items() if k.startswith("step-10/")}
        await write_step(store, "step-1", {"a": b"new"})
        assert await read_step(reader, "step-1") == [b"new"]

    async def test_retire_asks_again(self, tmp_path: Path) -> None:
        """A step is asked for while it is invisible; wanted, or not to be known, it comes back whole."""
        store, reader = await self.ready(tmp_path), self.make_store(tmp_path)
        await write_step(store, "step", {"a": b"old"})
        before = await self.raw(store)
        seen = []

        async def wanted() -> bool:
            seen.append(await exists(reader, "step"))
            return True

        async def broken() -> bool:
            raise OSError(errno.EIO, "cannot tell")

        assert not await store.retire("step", unless=wanted)
        assert seen == [False]
        with pytest.raises(OSError, match="cannot tell"):
            await store.retire("step", unless=broken)
        assert await self.raw(store) == before
        assert await read_step(reader, "step") == [b"old"]

        async def unwanted() -> bool:
            return False

        assert await store.retire("step", unless=unwanted)
        assert await self.raw(store) == {}

    async def test_retire_spares_attempts(self, tmp_path: Path) -> None:
        """An attempt for the name of a retired step goes on and may take its place."""
        store = await self.ready(tmp_path)
        await write_step(store, "step", {"a": b"old"})
        attempt = await store.begin("step", new_id())
        name = await write_file(attempt, "a", b"new")
        await store.retire("step")
        await attempt.commit(b"m")
        assert await self.raw(store) == {f"step/{name}": b"new", f"step/{MANIFEST}": b"m"}

    async def test_a_source_outlives_its_step(self, tmp_path: Path) -> None:
        """A file that is open stays readable while its step is retired."""
        store = await self.ready(tmp_path)
        await write_step(store, "step", {"a": bytes(range(200))})
        name = (await store.get(f"step/{MANIFEST}")).decode().split("\n")[1]
        source = await store.open(f"step/{name}")
        await store.retire("step")
        data = bytearray(200)
        await source.read_into(0, [memoryview(data)])
        await source.aclose()
        assert data == bytes(range(200))
