"""aiockpt's files come out right however the disk behaves, and errors say which file and why."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiockpt import _direct, _files, _ranges
from aiockpt._files import BlockFile, FileSystem, Io
from aiockpt._threads import Lane, abandon_busy, offload
from aiockpt.errors import DrainTimeoutError

PAGE = 4096
MIB = 1 << 20
FS = FileSystem()


def aligned(nbytes: int, seed: int = 1) -> memoryview:
    """Page-aligned memory with a pattern that shows any shift."""
    memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    memory[:] = pattern(nbytes, seed)
    return memory


def pattern(nbytes: int, seed: int = 1) -> bytes:
    """Bytes that do not repeat with any power of two."""
    unit = bytes((n * seed + n // 251) % 256 for n in range(251 * 7))
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on the disk and one in memory, which differ in what they refuse."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    path = Path(f"/dev/shm/aiockpt-{os.getpid()}-{tmp_path.name}")
    path.mkdir()
    yield path
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()


async def write_file(path: Path, parts: list[memoryview], size: int, io: Io = "auto") -> BlockFile:
    """Write the parts one after another, cut to `size`."""
    file = await FS.open_writer(str(path), size, io)
    try:
        for part in parts:
            await file.write(file.position, part)
        await file.finish(size)
    except BaseException:
        await file.discard()
        raise
    return file


class Raw:
    """The raw file below aiofiles, with some methods replaced."""

    def __init__(self, file: BlockFile, **replaced: Callable[..., Any]) -> None:
        inner: Any = file._file
        self._real = inner._file
        self.__dict__.update(replaced)
        inner._file = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class TestSmallCalls:
    """The blocking calls of a FileSystem."""

    def test_make_look_move_remove(self, folder: Path) -> None:
        """The plain calls do what their names say."""
        run = str(folder / "run")
        FS.mkdir(run)
        FS.create(f"{run}/a", b"hello")
        FS.link(f"{run}/a", f"{run}/b")
        FS.create(f"{run}/c", b"in the way")
        FS.replace(f"{run}/b", f"{run}/c")
        FS.rename(f"{run}/a", f"{run}/d")
        os.symlink("nowhere", f"{run}/dangling")
        FS.mkdir(f"{run}/sub")
        FS.sync_dir(run)
        found = {name: (is_dir, size) for name, is_dir, size, _ in FS.scandir(run)}
        assert set(found) == {"c", "d", "dangling", "sub"}
        assert found["d"] == found["c"] == (False, 5)
        assert found["sub"][0] is True
        assert FS.read(f"{run}/d", 5) == b"hello"
        assert FS.stat_size(f"{run}/d") == 5
        assert [FS.exists(f"{run}/{name}") for name in ("d", "dangling", "no")] == [True, True, False]
        for name in ("c", "d", "dangling"):
            FS.unlink(f"{run}/{name}")
        FS.rmdir(f"{run}/sub")
        FS.rmdir(run)
        assert not FS.exists(run)

    @pytest.mark.parametrize("target", ["file", "empty", "full"])
    @pytest.mark.parametrize("way", ["renameat2", "refused", "missing"])
    def test_rename_never_replaces(
        self, folder: Path, target: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not even an empty folder, which a plain rename silently replaces; also without renameat2."""
        if way != "renameat2":
            libc = types.SimpleNamespace()
            if way == "refused":
                libc.renameat2 = lambda *_: -1
                monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINVAL)
            monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)
        source, there = folder / "src", folder / "dst"
        source.write_bytes(b"new")
        there.write_bytes(b"old") if target == "file" else there.mkdir()
        if target == "full":
            (there / "x").touch()
        with pytest.raises(FileExistsError) as caught:
            FS.rename(str(source), str(there))
        assert (caught.value.filename, caught.value.filename2) == (str(source), str(there))
        FS.rename(str(source), str(folder / "free"))
        assert (folder / "free").read_bytes() == b"new"
        with pytest.raises(FileNotFoundError):
            FS.rename(str(source), str(folder / "other"))
        if target != "file":
            for entry in there.iterdir():
                entry.unlink()
            there.rmdir()

    def test_scandir_passes_by_what_vanishes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An entry removed by another process between two calls is just not listed."""

        class Vanishing:
            name = "gone"

            def is_dir(self, *, follow_symlinks: bool) -> bool:
                return follow_symlinks

            def stat(self, *, follow_symlinks: bool) -> os.stat_result:
                raise FileNotFoundError(errno.ENOENT, "gone", "gone")

        monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext([Vanishing()]))
        assert FS.scandir(str(tmp_path)) == []

    def test_read_refuses_more_than_its_limit(self, tmp_path: Path) -> None:
        """A file larger than expected is an error before it fills the memory; short reads go on."""
        path = tmp_path / "f"
        path.write_bytes(b"x" * 1000)
        assert FS.read(str(path), 1000) == b"x" * 1000
        with pytest.raises(OSError, match="more than 999 bytes") as caught:
            FS.read(str(path), 999)
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
        with pytest.raises(FileNotFoundError):
            FS.read(str(tmp_path / "no"), 1)

    def test_create_survives_short_writes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every byte arrives, however few the kernel takes at once."""
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:100]))
        FS.create(str(tmp_path / "f"), pattern(12_345))
        assert (tmp_path / "f").read_bytes() == pattern(12_345)

    def test_create_never_overwrites(self, tmp_path: Path) -> None:
        """An existing file, or a link to nowhere, is left alone."""
        (tmp_path / "f").write_bytes(b"old")
        with pytest.raises(FileExistsError):
            FS.create(str(tmp_path / "f"), b"new")
        assert (tmp_path / "f").read_bytes() == b"old"

    @pytest.mark.parametrize("call", ["write", "fsync", "close"])
    def test_create_leaves_nothing_after_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        """Whatever fails, errno and name are told, the descriptor is closed, the file is gone."""
        real_close = os.close

        def fail(fd: int, *_: object) -> int:
            if call == "close":
                real_close(fd)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError, match="quota") as caught:
                FS.create(str(tmp_path / "f"), b"data")
        assert (caught.value.errno, caught.value.filename) == (errno.EDQUOT, str(tmp_path / "f"))
        assert list(tmp_path.iterdir()) == []

    def test_a_write_that_takes_nothing_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Zero bytes written for no reason must not become an endless loop."""
        monkeypatch.setattr(os, "write", lambda *_: 0)
        with pytest.raises(OSError, match="no more bytes"):
            FS.create(str(tmp_path / "f"), b"data")

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
    def test_sync_dir_knows_file_systems_without_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        """EINVAL means there is nothing to flush; anything else is an error with the name."""

        def fail(fd: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fail)
        if code == errno.EINVAL:
            FS.sync_dir(str(tmp_path))
        else:
            with pytest.raises(OSError, match="Input/output") as caught:
                FS.sync_dir(str(tmp_path))
            assert caught.value.filename == str(tmp_path)

    @pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
    def test_modes_follow_the_umask_which_is_not_touched(self, tmp_path: Path, mask: int) -> None:
        """Files are 0666 and folders 0777 less the umask, set in a process where os.umask is forbidden."""
        code = f"""
import asyncio, os
os.umask({mask}); os.umask = None
from aiockpt._files import FileSystem
fs = FileSystem()
fs.mkdir("folder"); fs.create("small", b""); fs.lock("lock").release()
async def main():
    for io in ("direct", "buffered"):
        await (await fs.open_writer(io, 10, io)).finish(0)
asyncio.run(main())
"""
        output_of(code, cwd=tmp_path)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert modes.pop("folder") == 0o777 & ~mask
        assert modes == dict.fromkeys(["small", "lock", "direct", "buffered"], 0o666 & ~mask)


PREAMBLE = f"""
import sys, types
package = sys.modules["aiockpt"] = types.ModuleType("aiockpt")  # without its front door, which loads torch
package.__path__ = [{str(Path(_files.__file__).parent)!r}]
"""


def python(code: str, **options: Any) -> subprocess.Popen[str]:
    """Start a process that runs `code` with the package's lower floors at hand."""
    command = [sys.executable, "-c", PREAMBLE + code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)


def output_of(code: str, **options: Any) -> str:
    """What a process prints, which must be all it has to say."""
    process = python(code, **options)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    return out


class TestLock:
    """A lock file is held by one process, and in it by one owner, until released or dead."""

    def test_is_taken_once(self, folder: Path) -> None:
        """A second request in the process is refused without freeing the first."""
        path = str(folder / "lock")
        lock = FS.lock(path)
        assert lock is not None
        assert FS.lock(path) is None
        assert _other_process_gets(path) == "NoneType"
        lock.release()
        lock.release()
        assert _other_process_gets(path) == "Lock"
        with FS.lock(path) or pytest.fail("not free") as again:
            assert again.path == path
            assert FS.lock(path) is None
        assert _other_process_gets(path) == "Lock"

    def test_is_respected_between_processes_and_dies_with_its_holder(self, folder: Path) -> None:
        """While another process holds it: None; once that was killed: free."""
        path = str(folder / "lock")
        code = f"from aiockpt._files import FileSystem as F; k = F().lock({path!r}); print('has', flush=True)"
        holder = python(code + "; input()")
        with holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "has\n"
            assert FS.lock(path) is None
            holder.kill()
        lock = FS.lock(path)
        assert lock is not None
        lock.release()

    def test_is_not_taken_on_a_file_that_was_just_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unlinked by its last holder between open and lock: the new file of that name is locked instead."""
        path = str(tmp_path / "lock")
        real = fcntl.lockf
        removed: list[int] = []

        def lockf(fd: int, command: int) -> None:
            real(fd, command)
            if not removed:
                removed.append(fd)
                os.unlink(path)

        monkeypatch.setattr(fcntl, "lockf", lockf)
        lock = FS.lock(path)
        assert lock is not None
        assert removed
        assert os.fstat(lock._fd).st_ino == os.stat(path).st_ino
        lock.release()

    def test_an_error_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file system without locks does not look like a lock that somebody holds."""

        def refuse(fd: int, command: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "lockf", refuse)
        with pytest.raises(OSError, match="No locks") as caught:
            FS.lock(str(tmp_path / "lock"))
        assert caught.value.filename == str(tmp_path / "lock")


def _other_process_gets(path: str) -> str:
    code = f"from aiockpt._files import FileSystem; print(type(FileSystem().lock({path!r})).__name__)"
    return output_of(code).strip()


class TestWriting:
    """A block file holds exactly the bytes it was given."""

    @pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
    @pytest.mark.parametrize("size", [0, 1, PAGE, 2 * MIB, 2 * MIB + 1, 2 * MIB + PAGE - 1])
    async def test_writes_blocks_and_cuts_the_pad(self, folder: Path, io: Io, size: int) -> None:
        """Whole blocks and a padded last one, cut to any size."""
        padded = -(-size // PAGE) * PAGE
        block = aligned(padded)
        parts = [block[at : at + MIB] for at in range(0, padded, MIB)]
        file = await write_file(folder / "f", parts, size, io)
        assert (folder / "f").read_bytes() == pattern(padded)[:size]
        if io == "buffered":
            assert not file.direct

    @pytest.mark.parametrize("skew", [1, 512])
    async def test_takes_memory_and_lengths_that_are_not_aligned(self, folder: Path, skew: int) -> None:
        """Direct I/O is given up for them, at any place in the file; readonly and typed views are fine."""
        whole = aligned(3 * MIB)
        memory = aligned(3 * MIB + skew)
        memory[skew:] = whole
        parts = [memory[skew : skew + MIB], whole[MIB : MIB + skew], memory[MIB + 2 * skew :]]
        await write_file(folder / "a", [whole[:MIB], *parts[1:]], 3 * MIB, "direct")
        await write_file(folder / "b", parts, 3 * MIB, "direct")
        await write_file(folder / "c", [memoryview(bytes(whole)).cast("I")], 3 * MIB, "direct")
        for name in "abc":
            assert (folder / name).read_bytes() == whole

    @pytest.mark.parametrize("most", [1, 1000, PAGE, PAGE + 1, 100_000])
    async def test_survives_short_writes(self, folder: Path, most: int) -> None:
        """The rest of a short direct write starts at a page boundary again, or goes through the cache."""
        size = 300_000 if most > 1 else 20
        data = aligned(-(-size // PAGE) * PAGE)
        for io in ("direct", "buffered"):
            file = await FS.open_writer(str(folder / io), size, io)
            raw: Any = Raw(file)
            raw.write = lambda view, real=raw._real: real.write(view[:most])
            if io == "direct" and file.direct:
                # Asked for such a length the kernel would refuse: pretend that it stopped there.
                raw.write = lambda view, real=raw._real: _short_direct(real, view, most)
            await file.write(0, data)
            await file.finish(size)
            assert (folder / io).read_bytes() == data[:size]
            assert file.direct is (io == "direct" and most >= PAGE)

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
    async def test_goes_on_buffered_when_direct_io_is_refused_at_open(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        """The refusal may come after the file was created, as Linux does it."""
        real = os.open

        def refuse(path: str, flags: int, mode: int = 0o777, **options: Any) -> int:
            if flags & _direct.O_DIRECT:
                os.close(real(path, flags & ~_direct.O_DIRECT, mode))
                raise OSError(code, os.strerror(code), path)
            return real(path, flags, mode, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            file = await write_file(folder / "f", [aligned(2 * MIB)], 2 * MIB)
        assert not file.direct
        assert (folder / "f").read_bytes() == pattern(2 * MIB)

    async def test_a_real_error_at_open_is_not_taken_for_a_refusal(self, folder: Path) -> None:
        """An existing file stays as it is; a missing folder is told by name."""
        (folder / "f").write_bytes(b"old")
        with pytest.raises(FileExistsError):
            await FS.open_writer(str(folder / "f"), 2 * MIB)
        assert (folder / "f").read_bytes() == b"old"
        with pytest.raises(FileNotFoundError) as caught:
            await FS.open_writer(str(folder / "no" / "f"), 2 * MIB)
        assert caught.value.filename == str(folder / "no" / "f")

    @pytest.mark.parametrize("nth", [0, 1])
    async def test_goes_on_buffered_when_direct_io_is_refused_at_write(
        self, tmp_path: Path, nth: int
    ) -> None:
        """Some file systems accept the flag and refuse the write, the first or a later one."""
        file = await FS.open_writer(str(tmp_path / "f"), 2 * MIB)
        if not file.direct:
            await file.discard()
            pytest.skip("no direct I/O here")
        raw: Any = Raw(file)
        calls: list[bool] = []

        def write(view: memoryview) -> int:
            calls.append(file.direct)
            if file.direct and len(calls) == nth + 1:
                raise OSError(errno.EINVAL, "Invalid argument")
            return int(raw._real.write(view))

        raw.write = write
        data = aligned(2 * MIB)
        await file.write(0, data[:MIB])
        await file.write(MIB, data[MIB:])
        await file.finish(2 * MIB)
        assert calls == [True] * (nth + 1) + [False] * (2 - nth)
        assert (tmp_path / "f").read_bytes() == data

    async def test_refuses_a_gap(self, tmp_path: Path) -> None:
        """Offsets must follow one another."""
        file = await FS.open_writer(str(tmp_path / "f"), 10)
        with pytest.raises(ValueError, match="write at 5, but the file ends at 0"):
            await file.write(5, memoryview(b"x"))
        await file.discard()
        await file.discard()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("answer", [0, None])
    async def test_a_write_that_takes_nothing_is_an_error(self, tmp_path: Path, answer: int | None) -> None:
        """No endless loop."""
        file = await FS.open_writer(str(tmp_path / "f"), 10)
        Raw(file, write=lambda _: answer)
        with pytest.raises(OSError, match="no more bytes") as caught:
            await file.write(0, memoryview(b"x"))
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "f"))
        await file.discard()

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE])
    @pytest.mark.parametrize("call", ["write", "truncate", "fsync", "close"])
    async def test_errors_keep_errno_and_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
    ) -> None:
        """Whichever call fails; afterwards nothing is open, and discard removes the file."""
        path = tmp_path / "f"
        file = await FS.open_writer(str(path), 10)
        asked = []

        def fail(*_: object) -> None:
            asked.append(call)
            if call == "close":
                raw._real.close()
            raise OSError(code, os.strerror(code))

        raw: Any = Raw(file)
        if call == "fsync":
            monkeypatch.setattr(os, "fsync", fail)
        else:
            raw.__dict__[call] = fail
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            await file.write(0, memoryview(b"x" * 10))
            await file.finish(10)
        assert (caught.value.errno, caught.value.filename) == (code, str(path))
        if call != "write":
            with pytest.raises(OSError, match="finished or discarded") as again:
                await file.finish(10)  # a failed flush is never tried again
            assert again.value.errno == errno.EBADF
        assert asked == [call]
        await file.discard()
        assert not path.exists()


def _short_direct(real: Any, view: memoryview, most: int) -> int:
    """Write `most` bytes and no more, as a kernel with a full disk or a signal may."""
    if len(view) <= most:
        return int(real.write(view))
    fd = real.fileno()
    at = os.lseek(fd, 0, os.SEEK_CUR)
    real.write(view)
    os.ftruncate(fd, at + most)
    os.lseek(fd, at + most, os.SEEK_SET)
    return most


class TestSpace:
    """A full disk is found out early, says so, and stays usable."""

    async def test_space_is_reserved_at_open(self, folder: Path) -> None:
        """The blocks are there before the first write."""
        file = await FS.open_writer(str(folder / "f"), 3 * MIB + 5)
        assert (folder / "f").stat().st_blocks * 512 >= 3 * MIB
        await file.finish(0)
        assert (folder / "f").stat().st_size == 0

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.ENOSPC, errno.EFBIG])
    async def test_reserving_fails_only_for_want_of_space(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        """A file system that cannot is fine, an interruption is retried, a full disk is an error at once."""
        answers = [-1, 0]
        monkeypatch.setattr(
            ctypes,
            "CDLL",
            lambda *_, **__: types.SimpleNamespace(fallocate=lambda *_: answers.pop(0)),
        )
        monkeypatch.setattr(ctypes, "get_errno", lambda: code)
        if code in (errno.ENOSPC, errno.EFBIG):
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                await FS.open_writer(str(tmp_path / "f"), 2 * MIB)
            assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "f"))
            assert list(tmp_path.iterdir()) == []
        else:
            await (await FS.open_writer(str(tmp_path / "f"), 2 * MIB)).discard()
            assert answers == ([] if code == errno.EINTR else [0])

    async def test_works_where_there_is_no_fallocate(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another libc."""
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
        await write_file(tmp_path / "f", [aligned(PAGE)], 7)
        assert (tmp_path / "f").read_bytes() == pattern(7)

    @pytest.mark.parametrize("reserve", [True, False])
    async def test_a_full_disk(
        self, small_disk: Path, monkeypatch: pytest.MonkeyPatch, reserve: bool
    ) -> None:
        """ENOSPC with the name, the space is free again afterwards, the next file fits."""
        if not reserve:
            monkeypatch.setattr(_direct, "preallocate", lambda *_: None)
        before = os.statvfs(small_disk).f_bfree
        with pytest.raises(OSError, match="No space") as caught:
            await write_file(small_disk / "big", [aligned(4 * MIB)] * 3, 12 * MIB)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk / "big"))
        assert list(small_disk.iterdir()) == []
        assert os.statvfs(small_disk).f_bfree == before
        await write_file(small_disk / "small", [aligned(MIB)], MIB)
        assert (small_disk / "small").stat().st_size == MIB

    @pytest.mark.parametrize("io", ["direct", "buffered"])
    def test_a_file_size_limit(self, tmp_path: Path, io: str) -> None:
        """RLIMIT_FSIZE cuts a write short and then refuses: EFBIG with the name, the file is gone."""
        code = f"""
import asyncio, errno, mmap, resource
from aiockpt import _direct
from aiockpt._files import FileSystem
_direct.preallocate = lambda *_: None
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
async def main():
    file = await FileSystem().open_writer("big", 1 << 22, {io!r})
    try:
        await file.write(0, memoryview(mmap.mmap(-1, 1 << 22)))
    except OSError as error:
        await file.discard()
        assert (error.errno, error.filename) == (errno.EFBIG, "big"), error
        print("refused")
asyncio.run(main())
"""
        assert output_of(code, cwd=tmp_path) == "refused\n"
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Eight MiB of tmpfs, where mounting is allowed."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


class TestReading:
    """A range file fills the given memory with exactly its bytes, or says that it cannot."""

    SIZE = 3 * MIB + 777

    @pytest.fixture
    def path(self, folder: Path) -> Path:
        """A file larger than any threshold, of no even size."""
        path = folder / "data"
        path.write_bytes(pattern(self.SIZE))
        return path

    @pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
    @pytest.mark.parametrize("cached", [True, False])
    async def test_reads_any_range_into_any_buffers(self, path: Path, io: Io, cached: bool) -> None:
        """Aligned or not, one buffer or many, warm or cold, several at once."""
        if not cached:
            drop_cache(path)
        whole = pattern(self.SIZE)
        file = await FS.open_reader(str(path), io)
        assert file.size == self.SIZE

        async def check(offset: int, buffers: list[memoryview]) -> None:
            await file.read_into(offset, buffers)
            assert b"".join(buffers) == whole[offset : offset + sum(map(len, buffers))]

        unaligned = memoryview(bytearray(2 * MIB + 3))
        await asyncio.gather(
            check(0, [aligned(self.SIZE)]),
            check(0, [aligned(2 * MIB), aligned(MIB), memoryview(bytearray(777))]),
            check(PAGE, [aligned(2 * MIB)[: 2 * MIB - 5]]),
            check(1, [aligned(2 * MIB)]),
            check(PAGE, [unaligned[1:], unaligned[:1]]),
            check(0, [aligned(PAGE * 300), memoryview(bytearray(100)), aligned(PAGE * 300)]),
            check(self.SIZE - 1, [memoryview(bytearray(1))]),
        )
        await check(5, [memoryview(bytearray(7)) for _ in range(3000)])  # more than one call may take
        await file.read_into(self.SIZE, [])
        await file.read_into(0, [memoryview(bytearray(0))])
        await file.close()
        await file.close()

    async def test_fills_memory_of_other_formats(self, path: Path) -> None:
        """A target's memory need not be bytes."""
        file = await FS.open_reader(str(path))
        target: Any = memoryview(bytearray(4000)).cast("f", (10, 100))
        await file.read_into(8, [target])
        await file.close()
        assert target.tobytes() == pattern(4008)[8:]

    @pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
    async def test_a_file_that_ends_too_early(self, path: Path, io: Io) -> None:
        """EOFError with the place; also when it was cut after it was opened."""
        file = await FS.open_reader(str(path), io)
        with pytest.raises(EOFError, match=f"ends at byte {self.SIZE}, 1 more"):
            await file.read_into(self.SIZE - 5, [memoryview(bytearray(6))])
        os.truncate(path, 2 * MIB)
        with pytest.raises(EOFError, match=f"ends at byte {2 * MIB}"):
            await file.read_into(0, [aligned(3 * MIB)])
        await file.close()

    @pytest.mark.parametrize("most", [1000, PAGE, 100_000])
    async def test_survives_short_reads(self, path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        """A read may return less than it was asked for at any time, direct or not."""
        real = os.preadv

        def short(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            first = buffers[0]
            return real(fd, [first[: min(most, len(first))]], offset, flags)

        monkeypatch.setattr(os, "preadv", short)
        for io in ("auto", "buffered"):
            file = await FS.open_reader(str(path), io)
            target = [aligned(MIB), memoryview(bytearray(MIB))]
            await file.read_into(PAGE, target)
            await file.close()
            assert b"".join(target) == pattern(self.SIZE)[PAGE : PAGE + 2 * MIB]

    async def test_a_cold_aligned_range_is_read_directly_and_a_cached_one_is_not(
        self, tmp_path: Path
    ) -> None:
        """The page cache is asked first; what is not in it does not enter it."""
        path = tmp_path / "f"
        path.write_bytes(pattern(4 * MIB))
        file = await FS.open_reader(str(path))
        await file.read_into(0, [aligned(2 * MIB)])
        assert file._direct_fd is None
        drop_cache(path)
        target = aligned(4 * MIB, seed=3)
        await file.read_into(0, [target])
        direct = file._direct_fd
        await file.close()
        assert target == pattern(4 * MIB)
        if direct is None:
            pytest.skip("no direct I/O here, or the cache could not be emptied")

    @pytest.mark.parametrize("refused", [_ranges.RWF_NOWAIT, _direct.O_DIRECT])
    async def test_goes_on_when_a_way_of_reading_is_refused(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
    ) -> None:
        """No RWF_NOWAIT, or no O_DIRECT at open: the same bytes."""
        drop_cache(path)
        real_open, real_read = os.open, os.preadv

        def opened(name: str, flags: int, *args: int, **options: Any) -> int:
            if flags & refused & _direct.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument", name)
            return real_open(name, flags, *args, **options)

        def read(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if flags & refused:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            return real_read(fd, buffers, offset, flags)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "preadv", read)
        file = await FS.open_reader(str(path))
        target = aligned(3 * MIB)
        await file.read_into(0, [target])
        assert file._direct_fd is None
        await file.close()
        assert target == pattern(3 * MIB)

    @pytest.mark.parametrize("flag", [0, _ranges.RWF_NOWAIT])
    async def test_errors_keep_errno_and_name(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, flag: int
    ) -> None:
        """EIO from the disk is not taken for a refusal."""
        real = os.preadv

        def fail(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if flags == flag:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", fail)
        file = await FS.open_reader(str(path), "auto" if flag else "buffered")
        with pytest.raises(OSError, match="Input/output") as caught:
            await file.read_into(0, [aligned(2 * MIB)])
        await file.close()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))

    async def test_reads_a_file_that_was_renamed_and_removed(self, path: Path) -> None:
        """A step that is retired while it is read stays readable to its reader, directly as well."""
        file = await FS.open_reader(str(path), "direct")
        path.rename(path.with_name("other"))
        path.with_name("other").unlink()
        target = aligned(2 * MIB)
        await file.read_into(0, [target])
        await file.close()
        assert target == pattern(2 * MIB)


def drop_cache(path: Path) -> None:
    """Put the file out of the page cache, as far as the kernel likes to."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class CancelAt(Awaitable[None]):
    """Runs a coroutine and cancels its task at the nth time it suspends."""

    def __init__(self, coro: Coroutine[Any, Any, None], nth: int, times: int) -> None:
        self.coro = coro
        self.nth = nth
        self.times = times
        self.suspensions = 0

    def __await__(self) -> Generator[Any, None, None]:
        steps = self.coro.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                waited = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration:
                return
            self.suspensions += 1
            if self.suspensions == self.nth:
                task = asyncio.current_task()
                assert task is not None
                for _ in range(self.times):
                    asyncio.get_running_loop().call_soon(task.cancel)
            try:
                thrown = None
                yield waited
            except asyncio.CancelledError as error:
                thrown = error


class TestCancellation:
    """Cancelled at any await: no descriptor, thread or half file stays."""

    @staticmethod
    async def _every_await(make: Callable[[], Coroutine[Any, Any, None]], check: Callable[[], None]) -> None:
        for times in (1, 2):
            nth, suspensions = 1, 1
            while nth <= suspensions:
                driver = CancelAt(make(), nth, times)

                async def run(driver: CancelAt = driver) -> None:
                    await driver

                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.create_task(run())
                await offload(int, lane=Lane.CONTROL)
                check()
                suspensions = max(suspensions, driver.suspensions)
                nth += 1
            assert suspensions >= 3

    async def test_of_writing(self, tmp_path: Path) -> None:
        """Either the whole file is there, or nothing."""
        path = tmp_path / "f"
        data = aligned(2 * MIB)
        before = len(os.listdir("/proc/self/fd"))

        async def write() -> None:
            file = await FS.open_writer(str(path), 2 * MIB)
            try:
                await file.write(0, data[:MIB])
                await file.write(MIB, data[MIB:])
                await file.finish(2 * MIB)
            except BaseException:
                await file.discard()
                raise

        def check() -> None:
            assert len(os.listdir("/proc/self/fd")) == before
            if path.exists():
                assert path.read_bytes() == data
                path.unlink()

        await self._every_await(write, check)

    async def test_of_reading(self, tmp_path: Path) -> None:
        """Both descriptors are closed."""
        path = tmp_path / "f"
        path.write_bytes(pattern(2 * MIB))
        before = len(os.listdir("/proc/self/fd"))

        async def read() -> None:
            file = await FS.open_reader(str(path), "direct")
            try:
                await file.read_into(0, [aligned(2 * MIB)])
            finally:
                await file.close()

        def check() -> None:
            assert len(os.listdir("/proc/self/fd")) == before

        await self._every_await(read, check)


async def give_up() -> None:
    """Write the stuck thread off once it is inside its call."""
    for _ in range(2000):
        if abandon_busy(busy_for=0.05):
            return
        await asyncio.sleep(0.01)
    pytest.fail("no thread was stuck")


class TestStuckThread:
    """A call that hangs in the kernel keeps its descriptor when everybody else has given up."""

    @pytest.mark.parametrize("call", ["write", "finish"])
    async def test_a_lost_file_is_neither_closed_nor_touched(self, tmp_path: Path, call: str) -> None:
        """After `abandon_busy` the writer gets the typed error, and `discard` leaves the descriptor alone."""
        path = tmp_path / "f"
        file = await FS.open_writer(str(path), 10)
        readable, writable = os.pipe()
        fd = file._file.fileno()
        raw: Any = Raw(file)
        method = "write" if call == "write" else "truncate"
        raw.__dict__[method] = lambda *_: os.read(readable, 1)
        task = asyncio.ensure_future(file.write(0, memoryview(b"x")) if call == "write" else file.finish(0))
        await give_up()
        with pytest.raises(DrainTimeoutError):
            await task
        await file.discard()
        os.fstat(fd)
        assert path.exists()
        os.write(writable, b"x")  # the kernel lets go at last; end the test without leaks
        raw._real.close()
        for end in (readable, writable):
            os.close(end)

    async def test_a_lost_reader_is_not_closed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same for reading."""
        (tmp_path / "f").write_bytes(b"data")
        file = await FS.open_reader(str(tmp_path / "f"), "buffered")
        readable, writable = os.pipe()
        monkeypatch.setattr(os, "preadv", lambda *_: len(os.read(readable, 1)) + 3)
        task = asyncio.ensure_future(file.read_into(0, [memoryview(bytearray(4))]))
        await give_up()
        with pytest.raises(DrainTimeoutError):
            await task
        await file.close()
        os.fstat(file._fd)
        os.write(writable, b"x")
        raw: Any = file._file
        raw._file.close()
        for end in (readable, writable):
            os.close(end)
