"""A file or folder that is seen only when it is whole: written aside, flushed, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from aiockpt._files import FileSystem

__all__ = ["make_folders", "move_folder", "new_file", "remove", "replaced"]

_files = FileSystem()


@contextmanager
def new_file(path: str) -> Iterator[str]:
    """Write to the yielded name; leaving makes it `path`, durably, in place of what was there.

    If the body or the disk fails, nothing is left and what was at `path` stays.
    """
    folder = os.path.dirname(os.path.abspath(path))
    make_folders(folder)
    aside = os.path.join(folder, f".{os.path.basename(path)}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield aside
        _flush(aside)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    _files.sync_dir(folder)


def move_folder(source: str, path: str) -> None:
    """Flush a finished folder and make it `path`, in place of a folder that was there.

    Both are in the same file system. A crash at any moment leaves the old one, the new one, or (for
    the instant between two renames) the old one as `replaced(path)`.
    """
    for folder, _, names in os.walk(source, topdown=False):
        for name in names:
            _flush(os.path.join(folder, name))
        _files.sync_dir(folder)
    old = replaced(path)
    if os.path.isdir(path):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(source, path)
    _files.sync_dir(os.path.dirname(os.path.abspath(path)))
    shutil.rmtree(old, ignore_errors=True)


def replaced(path: str) -> str:
    """Where a folder is while another one takes its place: hidden, beside it."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.replaced")


def make_folders(path: str) -> None:
    """As `os.makedirs`, and durable: each new name is flushed into the folder above it."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # somebody else made it just now
            os.mkdir(folder)
        _files.sync_dir(os.path.dirname(folder))


def remove(path: str) -> None:
    """Remove a file, a link, or a folder with all that is in it; one that is not there is removed."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _flush(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
