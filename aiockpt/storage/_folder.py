"""The blocking half of `LocalStore`: one run's folder, and what makes changes in it durable.

Everything this library leaves in a run beside steps and keys has one form of name,
`.<name>.<32 hex digits><ending>`, so that litter is told from users' files for sure:

    .<name>.<save id>           an attempt's folder
    .<name>.<save id>.lock      its lock file; held as long as its writer lives
    .<name>.<hex>.retired       a step that was moved aside in order to be removed
    .put.<hex>.tmp              a small file on its way to its name, with a lock as well
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from .._files import FileSystem, Lock
from . import MANIFEST

__all__ = ["RunFolder", "failure", "logger"]

T = TypeVar("T")
logger = logging.getLogger("aiockpt.storage")

LITTER = re.compile(r"\.(?P<name>.+)\.(?P<id>[0-9a-f]{32})(?P<ending>|\.lock|\.retired|\.tmp)", re.DOTALL)
SHARED = ("aliases", "cursors", "files", "leases")
"""Folders of a run that small files are put into, by whichever process."""
TRIES = 5
LOCK_TRIES = 50
LOCK_PAUSE = 0.02
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


def failure(code: int, path: str) -> OSError:
    """Make the OSError that the system would raise for `path`."""
    return OSError(code, os.strerror(code), path)


def patiently(call: Callable[[str], T], path: str) -> T:
    """Look again when a network file system answers with a handle that is out of date."""
    for _ in range(TRIES):
        try:
            return call(path)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    raise failure(errno.ENOENT, path)  # stale for good: it was removed on the server


class RunFolder:
    """Blocking calls on one run's folder; any number of threads may be inside."""

    def __init__(self, files: FileSystem, path: str) -> None:
        self.files = files
        self.path = path
        self._put_into: set[str] = {path}

    def at(self, key: str) -> str:
        """The path of a key; "" is the run itself."""
        return f"{self.path}/{key}" if key else self.path

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there (through links too)."""
        return self.files.exists(f"{path}/.")

    def prepare(self) -> None:
        """Make the run's folder, durable in its parent, and try to write in it."""
        self.make_folder(self.path)
        # Even when it was there already: whoever made it may have died before this line.
        # Where only the run itself is ours, its parent's flush is not for us to do.
        with contextlib.suppress(PermissionError):
            self.files.sync_dir(os.path.dirname(self.path))
        probe = f"{self.path}/.probe.{uuid.uuid4().hex}.tmp"
        self.files.create(probe, b"")
        self.unlink(probe)

    def make_folder(self, path: str) -> None:
        """Make a folder and what is missing above it, each durable in its parent."""
        for tries in range(TRIES):
            if self.is_folder(path):
                return
            try:
                self.files.mkdir(path)
            except FileExistsError:
                # Made by another process just now; on network file systems `is_folder`
                # may go on saying no for a moment.
                time.sleep(0.02 * tries)
            except FileNotFoundError:
                if path == os.path.dirname(path):
                    raise
                self.make_folder(os.path.dirname(path))
            else:
                self.files.sync_dir(os.path.dirname(path))
                return
        if not self.is_folder(path):
            raise failure(errno.ENOTDIR, path)

    def scan(self, path: str) -> list[tuple[str, bool, int, float]]:
        """List a folder that others may be changing."""
        return patiently(self.files.scandir, path)

    def read(self, path: str, limit: int) -> bytes:
        """Read a small file that others may be replacing."""
        return patiently(lambda name: self.files.read(name, limit), path)

    def hold(self, path: str, *, unless: str) -> Lock:
        """Take a new lock file; FileExistsError where `unless` is there already."""
        for _ in range(LOCK_TRIES):
            lock = self.files.lock(path)
            if lock is not None:
                return lock
            if self.files.exists(unless):
                raise failure(errno.EEXIST, unless)
            time.sleep(LOCK_PAUSE)  # a sweep just found the new file and is looking at it
        raise failure(errno.EAGAIN, path)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> None:
        """Write a small file under its name in one step."""
        if if_absent and not data:
            self._put_empty(path)
            return
        place = self._place_new if if_absent else self._place
        self._put(path, partial(self.files.create, data=data), partial(place, path=path, data=data))

    def put_link(self, path: str, target: str) -> None:
        """Make a symbolic link, or change where one leads, in one step."""
        if self.files.exists(path) and self.files.read_link(path) is None:
            raise failure(errno.EEXIST, path)  # a user's own
        make = partial(self.files.symlink, target)
        self._put(path, make, partial(self._place_link, path=path, target=target))

    def _put_empty(self, path: str) -> None:
        # It cannot be seen half written. So no other file shows up, however short: in a step's
        # folder that would look like damage.
        try:
            self.files.create(path, b"")
        except FileNotFoundError:
            self.make_folder(os.path.dirname(path))
            self.files.create(path, b"")
        self.files.sync_dir(os.path.dirname(path))

    def _put(self, path: str, make: Callable[[str], object], place: Callable[[str], object]) -> None:
        folder = os.path.dirname(path)
        self._put_into.add(folder)
        base = f"{folder}/.put.{uuid.uuid4().hex}"
        temporary, lock_path = f"{base}.tmp", f"{base}.lock"
        try:
            lock = self.hold(lock_path, unless=temporary)
        except FileNotFoundError:
            self.make_folder(folder)
            lock = self.hold(lock_path, unless=temporary)
        try:
            make(temporary)
            place(temporary)
        finally:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
                self.unlink(lock_path)
            lock.release()
        self.files.sync_dir(folder)

    def _place_link(self, temporary: str, path: str, target: str) -> None:
        try:
            self.files.replace(temporary, path)
        except OSError:
            if self.files.read_link(path) != target or self.files.exists(temporary):
                raise  # else it was done, and only the reply got lost

    def _place(self, temporary: str, path: str, data: bytes) -> None:
        try:
            self.files.replace(temporary, path)
        except OSError:
            if self.files.exists(temporary) or not self.holds(path, data):
                raise  # else it was done, and only the reply got lost

    def _place_new(self, temporary: str, path: str, data: bytes) -> None:
        try:
            self.files.link(temporary, path)
        except FileExistsError:
            raise failure(errno.EEXIST, path) from None
        except OSError as error:
            if error.errno in NO_LINKS:
                # No links here: a reader may see this file half written, a rival never replaces it.
                self.files.create(path, data)
            elif not self.holds(path, data):
                raise

    def holds(self, path: str, data: bytes) -> bool:
        """Whether a file is there and has just these bytes."""
        try:
            return self.read(path, len(data)) == data
        except OSError:
            return False

    def unlink(self, path: str) -> None:
        """Remove a file unless it is gone."""
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(path)

    def remove(self, path: str) -> None:
        """Remove a file unless it is gone, for good."""
        try:
            self.files.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        self.files.sync_dir(os.path.dirname(path))

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it, manifest first; links are removed, not followed.

        Others may be removing it too. What they add meanwhile is removed once more.
        """
        for again in (True, False):
            try:
                self._empty(path)
                self.files.rmdir(path)
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or not again:
                    raise

    def _empty(self, path: str) -> None:
        entries = self.scan(path)
        for name, is_folder, *_ in sorted(entries, key=lambda entry: entry[0] != MANIFEST):
            if is_folder:
                self.remove_tree(f"{path}/{name}")
                continue
            self.unlink(f"{path}/{name}")
            if name == MANIFEST and not os.path.basename(path).startswith("."):
                # Before any data goes: after a power loss a half-removed step must be none. Hidden folders
                # never are one, and an attempt is to go even where a full disk refuses to flush.
                self.files.sync_dir(path)

    def set_aside(self, name: str) -> str | None:
        """Make a step invisible, durably; returns where it is now, None when there was none."""
        path, aside = f"{self.path}/{name}", f"{self.path}/.{name}.{uuid.uuid4().hex}.retired"
        if not self.is_folder(path):
            if self.files.exists(path):
                raise failure(errno.ENOTDIR, path)
            return None
        try:
            self.files.rename(path, aside)
        except OSError:
            if self.files.exists(path):
                raise  # else it was done, by us with the reply lost, or by another process
        self.files.sync_dir(self.path)
        return aside

    def bring_back(self, aside: str, name: str) -> None:
        """Make a step visible again that was set aside."""
        path = f"{self.path}/{name}"
        try:
            self.files.rename(aside, path)
        except OSError:
            if self.files.exists(aside):
                raise  # else it was done, and only the reply got lost
        self.files.sync_dir(self.path)

    def remove_aside(self, aside: str) -> None:
        """Remove a step that was set aside; what cannot be removed is left to a sweep."""
        self._attempt_to(self.remove_tree, aside)

    def retired(self) -> dict[str, str]:
        """Steps that were set aside and are whole: where each is now, and its name, which is free."""
        found: dict[str, str] = {}
        for entry, is_folder, *_ in self.scan(self.path) if self.is_folder(self.path) else ():
            match = LITTER.fullmatch(entry)
            if match is not None and is_folder and match["ending"] == ".retired":
                path, aside = f"{self.path}/{match['name']}", f"{self.path}/{entry}"
                if self.files.exists(f"{aside}/{MANIFEST}") and not self.files.exists(path):
                    found[aside] = match["name"]
        return found

    def sweep(self, spared: Collection[str] = ()) -> list[str]:
        """Remove litter, except for `spared` steps; returns the names of removed attempts."""
        swept = set()
        shared = {f"{self.path}/{name}" for name in SHARED}
        for folder in sorted(self._put_into | shared):
            with contextlib.suppress(FileNotFoundError):
                swept.update(self._sweep(folder, spared))
        return sorted(swept)

    def _sweep(self, folder: str, spared: Collection[str]) -> set[str]:
        locked: dict[str, str] = {}
        for entry, is_folder, *_ in self.scan(folder):
            match = LITTER.fullmatch(entry)
            if match is None or is_folder != (match["ending"] in ("", ".retired")):
                continue
            if folder != self.path and match["name"] != "put":
                continue  # a user's: attempts and retired steps are only in the run itself
            if match["ending"] == ".retired":
                if f"{folder}/{entry}" not in spared:
                    self._attempt_to(self.remove_tree, f"{folder}/{entry}")
            else:
                locked[entry[: match.end("id")]] = match["name"]
        return {n for base, n in locked.items() if self._attempt_to(self._sweep_locked, f"{folder}/{base}")}

    def _sweep_locked(self, base: str) -> bool:
        """Remove an attempt or a put unless its lock is held; whether there was an attempt."""
        lock = self.files.lock(f"{base}.lock")
        if lock is None:
            return False
        try:
            is_attempt = os.path.dirname(base) == self.path and self.is_folder(base)
            if is_attempt:
                self.remove_tree(base)
            self.unlink(f"{base}.tmp")
            self.unlink(lock.path)
        finally:
            lock.release()
        return is_attempt

    def _attempt_to(self, act: Callable[[str], T], path: str) -> T | None:
        """Do something to litter; a failure is for the log, and for the next sweep."""
        try:
            return act(path)
        except OSError as error:
            logger.warning("cannot remove %s, the next sweep will try again: %s", path, error)
            return None
