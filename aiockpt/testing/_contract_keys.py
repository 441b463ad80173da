"""What any store promises about keys, folders and data files."""

from __future__ import annotations

import asyncio
import errno
import mmap
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from .._threads import Lane, offload
from ..errors import UsageError
from ..storage import MANIFEST, Store
from ._steps import new_id, read_file, write_file, write_step

BAD_KEYS = ["", "/", "/etc/passwd", "..", "../run.json", "a//b", "a/", "./a", "a/../b", "nul\0"]


class KeyContract:
    """Tests of small files, listings and data files; see `StoreContract`."""

    def make_store(self, tmp_path: Path) -> Store:
        """Make a store object; for the same `tmp_path` each one is of the same run."""
        raise NotImplementedError

    def raw_files(self, store: Store) -> Mapping[str, bytes]:
        """Look around the store: every key and its bytes (blocking is fine).

        Where empty folders can exist they are listed as their key and a slash. Do not
        open what the store keeps locked.
        """
        raise NotImplementedError

    async def ready(self, tmp_path: Path) -> Store:
        """Make a store whose run exists."""
        store = self.make_store(tmp_path)
        await store.prepare()
        return store

    async def raw(self, store: Store) -> dict[str, bytes]:
        """`raw_files`, off the loop's thread."""
        return dict(await offload(self.raw_files, store, lane=Lane.CONTROL))

    async def test_room_is_a_number_or_unknown(self, tmp_path: Path) -> None:
        """What fits is told in bytes, before and after something was written, or not at all."""
        store = await self.ready(tmp_path)
        for _ in range(2):
            room = await store.room()
            assert room is None or room >= 0
            await store.put("some", b"bytes")

    async def test_prepare_makes_an_empty_run(self, tmp_path: Path) -> None:
        """A run is missing until it is prepared, and preparing twice is fine."""
        store = self.make_store(tmp_path)
        with pytest.raises(FileNotFoundError):
            await store.list()
        await store.prepare()
        await store.prepare()
        assert await store.list() == []
        assert await self.raw(store) == {}

    async def test_the_lock_has_one_holder(self, tmp_path: Path) -> None:
        """Others get the holder's record; it is nobody's once it is let go, and no key of the run."""
        store, other = await self.ready(tmp_path), self.make_store(tmp_path)
        lock = await store.lock()
        assert not isinstance(lock, bytes)
        assert await offload(lock.read) == b""
        for record in (b"first record", b"second"):
            await offload(lock.write, record)
            assert await offload(lock.read) == record
            for same in (store, other):
                assert await same.lock() == record
        for _ in range(2):
            await offload(lambda: lock.release(forget=True))
        again = await other.lock()
        assert not isinstance(again, bytes)
        assert await offload(again.read) == b""
        await offload(lambda: again.release(forget=True))
        assert await self.raw(store) == {}

    async def test_the_stores_clock_goes_on(self, tmp_path: Path) -> None:
        """What was written later is not older, in one listing; a store may also not say."""
        store = await self.ready(tmp_path)
        for name in ("b", "a", "b"):
            await store.put(f"leases/{name}", name.encode())
            await asyncio.sleep(0.01)
        times = {entry.name: entry.modified for entry in await store.list("leases")}
        assert times["a"] is None or times["b"] is None or times["a"] <= times["b"]

    async def test_put_then_get(self, tmp_path: Path) -> None:
        """What was put is what any store object gets; a second put replaces it whole."""
        store, other = await self.ready(tmp_path), self.make_store(tmp_path)
        for data in (b"one", b"", bytes(range(256)) * 40):
            await store.put("leases/a.json", data)
            assert await other.get("leases/a.json") == data
            assert await self.raw(store) == {"leases/a.json": data}

    async def test_put_if_absent(self, tmp_path: Path) -> None:
        """A create-only put never replaces anything and leaves nothing else behind."""
        store = await self.ready(tmp_path)
        await store.put("run.json", b"first", if_absent=True)
        for data in (b"second", b"first"):
            with pytest.raises(FileExistsError):
                await store.put("run.json", data, if_absent=True)
        assert await self.raw(store) == {"run.json": b"first"}

    async def test_create_only_put_has_one_winner(self, tmp_path: Path) -> None:
        """Of many who put one key at once exactly one succeeds, and its bytes stand."""
        stores = [await self.ready(tmp_path) for _ in range(4)]
        puts = [store.put("lock", b"%d" % i, if_absent=True) for i, store in enumerate(stores)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        winners = [i for i, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert all(isinstance(r, FileExistsError) for r in results if r is not None)
        assert await self.raw(stores[0]) == {"lock": b"%d" % winners[0]}

    async def test_many_puts_at_once(self, tmp_path: Path) -> None:
        """The last of many concurrent puts stands whole, without any litter."""
        store = await self.ready(tmp_path)
        values = [b"%02d" % i * 5000 for i in range(10)]
        await asyncio.gather(*(store.put("alias", value) for value in values))
        raw = await self.raw(store)
        assert list(raw) == ["alias"]
        assert raw["alias"] in values

    async def test_get_refuses_what_is_missing_or_too_long(self, tmp_path: Path) -> None:
        """A missing file is FileNotFoundError; one byte over the limit is EFBIG."""
        store = await self.ready(tmp_path)
        await store.put("a", b"x" * 100)
        assert await store.get("a", limit=100) == b"x" * 100
        with pytest.raises(OSError) as caught:
            await store.get("a", limit=99)
        assert caught.value.errno == errno.EFBIG
        for key in ("b", "b/c"):
            with pytest.raises(FileNotFoundError):
                await store.get(key)
            with pytest.raises(FileNotFoundError):
                await store.open(key)

    async def test_list(self, tmp_path: Path) -> None:
        """A listing has files with sizes and folders without, sorted; none is FileNotFoundError."""
        store = await self.ready(tmp_path)
        for key in ("b", "step-10/x", "step-1/y/z", ".hidden", "step-1.json"):
            await store.put(key, key.encode())
        found = [(entry.name, entry.size, entry.is_folder) for entry in await store.list()]
        assert found == [
            (".hidden", 7, False),
            ("b", 1, False),
            ("step-1", None, True),
            ("step-1.json", 11, False),
            ("step-10", None, True),
        ]
        assert [entry.name for entry in await store.list("step-1")] == ["y"]
        assert [entry.name for entry in await store.list("step-1/y")] == ["z"]
        for folder in ("step", "step-1/n"):
            with pytest.raises(FileNotFoundError):
                await store.list(folder)

    async def test_deletes_are_exact_and_idempotent(self, tmp_path: Path) -> None:
        """A delete removes just what it names, and again is fine."""
        store = await self.ready(tmp_path)
        for key in ("step-1/manifest.json", "step-1/sub/a", "step-10/a", "step-1.json", "b"):
            await store.put(key, b"")
        for _ in range(2):
            await store.delete("b")
            await store.delete("none/at/all")
            await store.delete_folder("step-1")
            await store.delete_folder("none")
            assert set(await self.raw(store)) == {"step-10/a", "step-1.json"}

    async def test_bad_keys_are_refused(self, tmp_path: Path) -> None:
        """A key that is absolute, empty or leaves the run is a UsageError everywhere."""
        store = await self.ready(tmp_path)
        calls: list[Callable[[str], Awaitable[object]]] = [
            store.get, store.open, store.delete, store.delete_folder, store.retire,
            lambda key: store.put(key, b""),
            lambda key: store.begin(key, new_id()),
            lambda key: store.attach(key, new_id()),
        ]  # fmt: skip
        attempt = await store.begin("step", new_id())
        calls += [lambda key: attempt.create(key, 0), lambda key: attempt.put(key, b"")]
        for call in calls:
            for key in BAD_KEYS:
                with pytest.raises(UsageError):
                    await call(key)
        for bad in ("", "A" * 32, "a" * 31, "g" * 32, "../" * 8):
            with pytest.raises(UsageError):
                await store.begin("step", bad)
        with pytest.raises(UsageError):
            await store.begin(".hidden", new_id())
        await attempt.abort()
        assert await self.raw(store) == {}

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * (1 << 20) + 5])
    async def test_data_files(self, tmp_path: Path, nbytes: int) -> None:
        """A data file has exactly the bytes it was finished with, whatever its length."""
        store = await self.ready(tmp_path)
        data = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
        await write_step(store, "step", {"a": data})
        name = (await store.get(f"step/{MANIFEST}")).decode().split("\n")[1]
        assert await read_file(store, f"step/{name}") == data
        assert (await self.raw(store))[f"step/{name}"] == data

    async def test_big_aligned_writes(self, tmp_path: Path) -> None:
        """Whole blocks of page-aligned memory, reused between writes, arrive in order."""
        store = await self.ready(tmp_path)
        attempt = await store.begin("step", new_id())
        block = memoryview(mmap.mmap(-1, 1 << 22))
        sink = await attempt.create("big", 4 << 22)
        for number in range(4):
            block[:] = bytes([number + 1]) * len(block)
            await sink.write(number << 22, block)
        await sink.finish((3 << 22) + 12345)
        await attempt.commit(b"m")
        source = await store.open(f"step/{attempt.prefix}big")
        assert source.size == (3 << 22) + 12345
        for number in range(4):
            await source.read_into(number << 22, [block[:12345]])
            assert bytes(block[:12345]) == bytes([number + 1]) * 12345
        await source.aclose()

    async def test_reads(self, tmp_path: Path) -> None:
        """Reads fill several buffers from any offset, side by side, and never fall short."""
        store = await self.ready(tmp_path)
        data = bytes(range(256)) * 1000
        await store.put("data", data)
        source = await store.open("data")
        assert source.size == len(data)

        async def read(offset: int) -> None:
            one, two = bytearray(1000), bytearray(5001)
            await source.read_into(offset, [memoryview(one), memoryview(two)])
            assert one + two == data[offset : offset + 6001]

        await asyncio.gather(*(read(offset) for offset in (0, 1, 4096, 99_999, len(data) - 6001)))
        for offset in (len(data), len(data) - 3):
            with pytest.raises(EOFError):
                await source.read_into(offset, [memoryview(bytearray(4))])
        await source.read_into(len(data), [])
        await source.aclose()
        await source.aclose()

    async def test_a_file_name_is_taken_once(self, tmp_path: Path) -> None:
        """A second file of a name is refused, but a discarded one leaves no trace."""
        store = await self.ready(tmp_path)
        attempt = await store.begin("step", new_id())
        sink = await attempt.create("a", 4096)
        await sink.write(0, memoryview(bytes(4096)))
        await sink.discard()
        await sink.discard()
        await write_file(attempt, "a", b"second")
        with pytest.raises(FileExistsError):
            await attempt.create("a", 0)
        await attempt.put("part", b"same")
        await attempt.put("part", b"same")
        with pytest.raises(FileExistsError):
            await attempt.put("part", b"other")
        await attempt.commit(b"m")
        raw = await self.raw(store)
        pre = f"step/{attempt.prefix}"
        assert raw == {f"{pre}a": b"second", f"{pre}part": b"same", f"step/{MANIFEST}": b"m"}
