"""Keep a run in a folder: a plain path, or `file://`.

A step becomes visible by the rename of its folder. The order of a commit, and what each
flush is for:

1. data files are flushed by `Sink.finish`, small files by `Attempt.put`: their bytes;
2. the manifest is written under its final name in the hidden folder and flushed;
3. the hidden folder is flushed: the names in it;
4. it is renamed to its final name. This is the commit. Nothing is ever replaced: a name
   that is taken, be it by an empty folder, is FileExistsError;
5. the run's folder is flushed: the name just given;
6. the lock file is removed.

A crash before 4 leaves a hidden folder whose lock is free, which `sweep` removes. When
4 reports an error, the target's manifest is looked at: if it is ours, 4 has happened.
When 5 fails the step stays, since readers may be using it already, but the commit is an
error: nobody can tell whether it outlives a power loss.

Only the run's folder need be writable. Missing parents are made and each new folder is
flushed into its parent; where the parent of the run may not be opened, that flush is
left out, since then somebody else made the run's folder and is to see to it. Modes
follow the umask.

A lock is a POSIX record lock: the kernel frees it when its process dies, even while
forked children live on, and an inherited `Attempt` is inert in a forked child. It is
freed, too, when any code of its process opens and closes the lock file: whoever copies
a run out of the process that writes it must leave out `lock` and names that begin with
a dot. (The run's own lock, `RUN/lock`, is taken back by its saver before each commit;
until then another process would take the saver for dead only after watching its record.)
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import weakref
from collections.abc import Sequence
from functools import partial
from urllib.parse import unquote

from .._files import FileSystem, Io, Lock, RangeFile
from .._threads import Lane, offload, settle
from ..errors import UsageError
from . import (
    MANIFEST,
    Attempt,
    Entry,
    LockFile,
    Sink,
    Source,
    Wanted,
    WantedStep,
    check_filename,
    check_key,
    check_name,
    check_save_id,
)
from ._folder import RunFolder, failure, logger
from ._lock import LocalLock

__all__ = ["LocalStore", "open_url"]

LOCK = "lock"
"""The run's lock file. It is no checkpoint and no litter: its saver makes it and removes it."""
TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
"""What a rename says when something has the name."""


def open_url(url: str) -> LocalStore:
    """Open a path or `file:///path`, percent-encoded."""
    if not url.lower().startswith("file://"):
        return LocalStore(url)
    host, slash, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(
            f"a file:// URL names no host and an absolute path, as in file:///runs/a, not {url!r}"
        )
    return LocalStore(unquote(f"/{path}"))


def _give_back(lock: LockFile | bytes) -> None:
    """Whoever asked for the lock was cancelled: nobody else can let it go."""
    if not isinstance(lock, bytes):
        lock.release(forget=not lock.read())


class LocalStore:
    """A run in a folder.

    Args:
        path: the run's folder; relative paths are taken from the current folder now.
        files: makes all calls to the disk.
        io: how data files are read and written: "direct" past the page cache, "buffered"
            through it, "auto" as fits the size.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, files: FileSystem | None = None, io: Io = "auto"
    ) -> None:
        self.path = os.path.abspath(path)
        self.url = self.path
        self._run = RunFolder(files or FileSystem(), self.path)
        self._io: Io = io
        self._begun: weakref.WeakSet[_LocalAttempt] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    async def list(self, folder: str = "") -> list[Entry]:
        path = self._run.at(check_key(folder, root=True))
        found = await offload(self._run.scan, path, lane=Lane.CONTROL)
        return [
            Entry(name, None if is_folder else size, is_folder, modified)
            for name, is_folder, size, modified in sorted(found)
        ]

    async def get(self, key: str, *, limit: int = 1 << 30) -> bytes:
        path = self._run.at(check_key(key))
        try:
            return await offload(self._run.read, path, limit, lane=Lane.CONTROL)
        except NotADirectoryError as error:
            raise failure(errno.ENOENT, path) from error

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path = self._run.at(check_key(key))
        await offload(lambda: self._run.put(path, data, if_absent=if_absent), lane=Lane.CONTROL)

    async def symlink(self, name: str, target: str) -> None:
        """Make `name` in the run a link to `target`, in one step and durably.

        Raises:
            FileExistsError: `name` is there and no link.
            OSError: the disk failed; the old link is there, or the new one.
        """
        path = self._run.at(check_name(name))
        await offload(self._run.put_link, path, target, lane=Lane.CONTROL)

    async def delete(self, key: str) -> None:
        await offload(self._run.remove, self._run.at(check_key(key)), lane=Lane.CONTROL)

    async def delete_folder(self, folder: str) -> None:
        await offload(self._run.remove_tree, self._run.at(check_key(folder)), lane=Lane.CONTROL)

    async def open(self, key: str) -> Source:
        path = self._run.at(check_key(key))
        try:
            return _LocalSource(await self._run.files.open_reader(path, self._io))
        except NotADirectoryError as error:
            raise failure(errno.ENOENT, path) from error

    async def prepare(self) -> None:
        await offload(self._run.prepare, lane=Lane.CONTROL)

    async def room(self) -> int | None:
        return await offload(self._run.files.free, self._run.path, lane=Lane.CONTROL)

    async def begin(self, name: str, save_id: str) -> Attempt:
        attempt = _LocalAttempt(self._run, check_name(name), check_save_id(save_id), self._io)
        await offload(attempt.start, lane=Lane.CONTROL, undo=lambda _: attempt.remove())
        self._begun.add(attempt)
        return attempt

    async def attach(self, name: str, save_id: str) -> Attempt:
        attempt = _LocalAttempt(self._run, check_name(name), check_save_id(save_id), self._io)
        if not await offload(self._run.is_folder, attempt.folder, lane=Lane.CONTROL):
            raise failure(errno.ENOENT, attempt.folder)
        return attempt

    async def sweep(self, *, unless: WantedStep | None = None) -> builtins.list[str]:
        retired = await offload(self._run.retired, lane=Lane.CONTROL) if unless is not None else {}
        spared = set()
        for aside, name in retired.items():
            assert unless is not None
            try:
                if await unless(name):
                    await offload(self._run.bring_back, aside, name, lane=Lane.CONTROL)
                    logger.warning("%s: %s was wanted when its deletion was cut short", self.url, name)
            except OSError as error:
                logger.warning("%s: it is unknown whether %s is wanted: %s", self.url, name, error)
                spared.add(aside)
        return await offload(self._run.sweep, spared, lane=Lane.CONTROL)

    async def retire(self, name: str, *, unless: Wanted | None = None) -> bool:
        aside = await offload(self._run.set_aside, check_name(name), lane=Lane.CONTROL)
        if aside is None:
            return True
        try:
            wanted = unless is not None and await unless()
        except BaseException:
            await settle(offload(self._run.bring_back, aside, name, lane=Lane.CONTROL))
            raise
        act = partial(self._run.bring_back, aside, name) if wanted else partial(self._run.remove_aside, aside)
        await offload(act, lane=Lane.CONTROL)
        return not wanted

    async def lock(self) -> LockFile | bytes:
        return await offload(self._take_lock, lane=Lane.CONTROL, undo=_give_back)

    def _take_lock(self) -> LockFile | bytes:
        files, path = self._run.files, self._run.at(LOCK)
        lock = files.lock(path)
        return files.peek_lock(path) if lock is None else LocalLock(files, lock)

    async def aclose(self) -> None:
        for attempt in list(self._begun):
            await offload(attempt.release, lane=Lane.CONTROL)


class _LocalAttempt:
    """A hidden folder beside its lock file."""

    prefix = ""

    def __init__(self, run: RunFolder, name: str, save_id: str, io: Io) -> None:
        self.name = name
        self.save_id = save_id
        self.folder = f"{run.path}/.{name}.{save_id}"
        self._lock_path = f"{self.folder}.lock"
        self._target = f"{run.path}/{name}"
        self._run = run
        self._io: Io = io
        self._pid = os.getpid()
        self._lock: Lock | None = None
        self._unflushed: OSError | None = None

    async def create(self, filename: str, nbytes: int) -> Sink:
        path = self._inside(filename)
        return await self._run.files.open_writer(path, nbytes, self._io)

    async def put(self, filename: str, data: bytes) -> None:
        await offload(self._put, self._inside(filename), data, lane=Lane.CONTROL)

    async def commit(self, manifest: bytes) -> None:
        self._check_process()
        await offload(self._commit, manifest, lane=Lane.CONTROL)

    async def abort(self) -> None:
        await offload(self.remove, lane=Lane.CONTROL)

    def start(self) -> None:
        """Take the lock, then make the folder: a folder without a held lock is litter."""
        try:
            lock = self._run.hold(self._lock_path, unless=self.folder)
        except FileNotFoundError:
            self._run.prepare()  # somebody removed the whole run since
            lock = self._run.hold(self._lock_path, unless=self.folder)
        self._lock = lock
        try:
            self._run.files.mkdir(self.folder)
        except FileExistsError:
            lock.release()  # the lock file belongs to the folder that is there: both stay for `sweep`
            raise
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove()
            raise
        # An attempt that its owner lost counts as given up: its lock goes with the object.
        weakref.finalize(self, lock.release).atexit = False

    def _put(self, path: str, data: bytes) -> None:
        try:
            self._run.files.create(path, data)
        except FileExistsError:
            if not self._run.holds(path, data):
                raise

    def _commit(self, manifest: bytes) -> None:
        if self._unflushed is not None:
            # The kernel may have dropped what it could not write: a second flush proves nothing.
            raise OSError(*self._unflushed.args) from self._unflushed
        try:
            self._write_manifest(manifest)
            self._flush(self.folder)
            self._rename()
        except OSError:
            if not self._run.holds(f"{self._target}/{MANIFEST}", manifest):
                raise
        self._flush(self._run.path)
        self._end()

    def _write_manifest(self, manifest: bytes) -> None:
        path = f"{self.folder}/{MANIFEST}"
        try:
            self._run.files.create(path, manifest)
        except FileExistsError:  # of an earlier try
            self._run.unlink(path)
            self._run.files.create(path, manifest)

    def _rename(self) -> None:
        try:
            self._run.files.rename(self.folder, self._target)
        except OSError as error:
            if error.errno in TAKEN:
                raise failure(errno.EEXIST, self._target) from error
            raise

    def _flush(self, folder: str) -> None:
        try:
            self._run.files.sync_dir(folder)
        except OSError as error:
            self._unflushed = error
            raise

    def _end(self) -> None:
        """Give the lock up; the step is there, so a lock file that stays is only litter."""
        try:
            with contextlib.suppress(OSError):
                self._run.files.unlink(self._lock_path)
        finally:
            self.release()

    def remove(self) -> None:
        """Remove the folder, then the lock; after a commit only the lock is left to remove."""
        if os.getpid() != self._pid:
            return  # a forked child: the attempt goes on in the parent
        try:
            self._run.remove_tree(self.folder)
            self._run.unlink(self._lock_path)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the lock, if it is ours."""
        if self._lock is not None:
            self._lock.release()

    def _inside(self, filename: str) -> str:
        self._check_process()
        return f"{self.folder}/{check_filename(filename)}"

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this attempt was begun by the parent process: attach() to it in a forked child")


class _LocalSource:
    """An open file, by the contract's names."""

    def __init__(self, file: RangeFile) -> None:
        self.size = file.size
        self._file = file

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        await self._file.read_into(offset, buffers)

    async def aclose(self) -> None:
        await self._file.close()
