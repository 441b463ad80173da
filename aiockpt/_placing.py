"""A file of the user's on its way to its name: written aside, flushed, moved, seen whole or not at all.

It is written inside a hidden folder of its own, under its own name: functions that add an
ending, or a second file, are found out, and what they leave goes with the folder. A folder
that the saver did not write itself is never replaced: whatever a path was meant to say, it
did not mean to delete a tree. All of it is blocking, for a lane.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator

from ._direct import named
from ._files import FileSystem
from ._log import log
from ._names import stem
from .errors import SaveError, UsageError

__all__ = ["Place", "remove"]

RENAME_EXCHANGE = 2
AT_FDCWD = -100


class Place:
    """Where one save writes, and where it goes.

    Args:
        path: absolute; a file there is replaced.
        save_id: makes the temporary's name one of its own.
        tmp_dir: where the temporary lies instead of beside `path`; another file system is fine.
        own_folders: paths of folders that may be replaced.
        files: the disk.
    """

    def __init__(
        self, path: str, save_id: str, tmp_dir: str | None, own_folders: Collection[str], files: FileSystem
    ) -> None:
        self.path = path
        self.folder, self.name = os.path.split(path)
        self.is_folder = False
        """Whether a folder was written; known once it is flushed."""
        self._hidden = f".{stem(self.name)}.{save_id}.tmp"
        self._aside = os.path.join(tmp_dir or self.folder, self._hidden)
        self._made: list[str] = []
        self._own = own_folders
        self._files = files
        self.file = os.path.join(self._aside, self.name)
        """What is to be written."""

    @property
    def dirty(self) -> bool:
        """Whether something lies aside."""
        return bool(self._made)

    def prepare(self) -> None:
        """Make the folders.

        Raises:
            UsageError: the path is a folder of somebody else's.
        """
        self._refuse_folder()
        self._make_folder(self.folder)
        self._mkdir(self._aside)

    def sync(self) -> int:
        """Flush what was written to stable storage; returns its bytes.

        Raises:
            SaveError: nothing was written under the name, more than that, or no file and no folder.
        """
        found = sorted(os.listdir(self._aside))
        if found != [self.name]:
            others = ", ".join(name for name in found if name != self.name) or "nothing"
            beside = " beside it" if self.name in found else ""
            message = (
                f"the savefun was to write {self.file} and wrote {others}{beside}. Only {self.name!r}, "
                f"a file or a folder, is moved to {self.folder}; nothing was"
            )
            raise SaveError(message, file=self.path)
        mode = os.lstat(self.file).st_mode
        self.is_folder = stat.S_ISDIR(mode)
        if not self.is_folder and not stat.S_ISREG(mode):
            # A pipe would be waited for, and what a link means may be neither flushed nor there to stay.
            message = (
                f"the savefun made {self.file} a {stat.filemode(mode)[0]!r} as ls says, no file or folder"
            )
            raise SaveError(message, file=self.path)
        return sum(self._sync(path, is_folder) for path, is_folder in _tree(self.file))

    def move(self) -> None:
        """Give it its name, durably; across file systems by a flushed copy."""
        try:
            self._put(self.file)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            near = os.path.join(self.folder, self._hidden)
            self._mkdir(near)
            self._copy(self.file, os.path.join(near, self.name))
            self._put(os.path.join(near, self.name))
        self._files.sync_dir(self.folder)

    def clean_up(self) -> None:
        """Remove what is left aside, an older folder that was replaced included; never raises."""
        while self._made:
            remove(self._made.pop(), folder=True)

    def _refuse_folder(self) -> None:
        if os.path.isdir(self.path) and self.path not in self._own:
            message = f"{self.path} is a folder that this saver did not write: it is not replaced"
            raise UsageError(message, file=self.path)

    def _put(self, source: str) -> None:
        if not os.path.isdir(self.path):
            # Neither call replaces a folder that appears just now.
            place = self._files.rename if self.is_folder else self._files.replace
            place(source, self.path)
            return
        self._refuse_folder()
        if _exchange(source, self.path):
            return
        # Where two names cannot be swapped there is an instant with nothing at the name; the older
        # folder is in the hidden one then.
        older = f"{source}.older"
        self._files.rename(self.path, older)
        try:
            self._files.rename(source, self.path)
        except BaseException:
            self._files.rename(older, self.path)
            raise

    def _mkdir(self, path: str) -> None:
        self._files.mkdir(path)
        self._made.append(path)

    def _make_folder(self, path: str) -> None:
        """Make a folder and what is missing above it, each durable in its parent."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self._make_folder(parent)
        try:
            self._files.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        self._files.sync_dir(parent)

    def _sync(self, path: str, is_folder: bool) -> int:
        if is_folder:
            self._files.sync_dir(path)
            return 0
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with named(path):
                os.fsync(fd)
                return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def _copy(self, source: str, target: str) -> None:
        if self.is_folder:
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
        for path, is_folder in _tree(target):
            self._sync(path, is_folder)


def remove(path: str, *, folder: bool) -> None:
    """Remove a file, or a folder and all in it; what is the other kind stays. A failure is for the log."""
    try:
        if folder and not os.path.islink(path):
            shutil.rmtree(path)
        elif not folder:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)


def _tree(path: str) -> Iterator[tuple[str, bool]]:
    """(path, whether a folder) of a file or of a folder and its files, what is inside first."""
    if not os.path.isdir(path):
        yield path, False
        return
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            inside = os.path.join(folder, name)
            if os.path.isfile(inside) and not os.path.islink(inside):
                yield inside, False
        yield folder, True


def _exchange(one: str, other: str) -> bool:
    """Swap what two names mean, in one step; False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), one, None, other)
