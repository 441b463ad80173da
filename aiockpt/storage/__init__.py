"""Where bytes live: the contract every store keeps, and the way to open one.

A store holds one run: a tree of small keys (`run.json`, `leases/...`) and one folder
for each step. A step's folder is filled through an `Attempt`, which nobody sees until
`Attempt.commit`. One rule serves all stores and all readers: **a folder is a checkpoint
if and only if its `manifest.json` is there and valid**.

Each member is one file of this folder, named by the scheme of its URLs and found only
when it is asked for: `storage/tape.py` with a function `open_url(url) -> Store` makes
`tape://...` work, with nothing else touched. `aiockpt.testing.StoreContract` holds the
tests that it must pass.

Names are checked by every store: keys are relative, parts are joined by `/`, no part is
empty, `.` or `..` or holds NUL. Anything else is a `UsageError`. All other errors of a
store are plain `OSError`s with `errno` and `filename` set where there is a file.
"""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from .._keys import check_filename, check_key, check_name, check_save_id
from .._lockfile import LockFile
from ..errors import UsageError

__all__ = [
    "MANIFEST",
    "Attempt",
    "Entry",
    "LockFile",
    "Sink",
    "Source",
    "Store",
    "Wanted",
    "WantedStep",
    "check_filename",
    "check_key",
    "check_name",
    "check_save_id",
    "open_store",
]

MANIFEST = "manifest.json"
"""The file that makes a folder a checkpoint; written last, removed first."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a folder."""

    name: str
    """The last part of its key."""
    size: int | None
    """Bytes of a file; None for a folder."""
    is_folder: bool
    modified: float | None = None
    """Seconds on the store's own clock; only differences within one store mean anything.
    None where the store does not say."""


Wanted = Callable[[], Awaitable[bool]]
"""Asks whether somebody wants a step that is about to be removed."""
WantedStep = Callable[[str], Awaitable[bool]]
"""The same of a step whose removal was cut short, by its folder's name."""


class Source(Protocol):
    """An open data file. Several reads may run at once; close it when none does."""

    size: int

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes from `offset` on.

        When cancelled it returns only after nothing touches the buffers any more.

        Raises:
            EOFError: the file ends before the buffers are full.
            OSError: the store failed; the buffers' content is undefined.
        """

    async def aclose(self) -> None:
        """Let go of the file; any number of times."""


class Sink(Protocol):
    """A data file in the making. One call at a time; invisible until `finish`."""

    async def write(self, offset: int, data: memoryview) -> None:
        """Append `data` at `offset`, which is where the last write ended.

        Each write but the last is a multiple of 4096 bytes long. When cancelled it
        returns only after nothing reads from `data` any more.

        Raises:
            OSError: the store failed; the sink can only be discarded now.
        """

    async def finish(self, nbytes: int) -> None:
        """Cut the file to `nbytes`, make it durable and close it.

        Raises:
            OSError: the store failed; a failed flush is final, discard the sink.
        """

    async def discard(self) -> None:
        """Close and forget the file; any number of times, never after `finish`'s success.

        Never an OSError: what could not be removed goes when the attempt is aborted.
        """


class Attempt(Protocol):
    """One save on its way into the store; nothing of it is a checkpoint yet.

    File names are single names; `create` and `put` store them as `prefix + filename`,
    and that is the name for the manifest. Ending an attempt (commit or abort) is for
    its owner once no sink is open; ending it from an attached attempt ends it for all.
    """

    name: str
    save_id: str
    prefix: str
    """Put in front of every file name; "" where an attempt has a folder of its own."""

    async def create(self, filename: str, nbytes: int) -> Sink:
        """Begin a data file of about `nbytes` (a hint for reserving space).

        Raises:
            FileExistsError: this attempt has that file already.
            FileNotFoundError: the attempt has ended.
            OSError: the store failed; there is no such file.
        """

    async def put(self, filename: str, data: bytes) -> None:
        """Write a small file, whole and durable. The same bytes again: fine.

        Raises:
            FileExistsError: this attempt has that file already, with other bytes.
            FileNotFoundError: the attempt has ended.
            OSError: the store failed; the file is absent, or torn until `abort`.
        """

    async def commit(self, manifest: bytes) -> None:
        """Make all of it visible under `name` at one instant, durably.

        Calling it again with the same bytes is fine: a commit whose reply was lost is
        recognised by its manifest.

        Raises:
            FileExistsError: `name` is taken; nothing of this attempt is visible.
            FileNotFoundError: the attempt has ended, and not by this commit.
            OSError: the store failed. The step is either wholly there or absent;
                looking for its manifest tells which. `abort` is right in both cases.
        """

    async def abort(self) -> None:
        """Remove everything of this attempt; after its commit it removes nothing.

        What is already gone is no error. Calling it again is fine.

        Raises:
            OSError: something could not be removed; `sweep` can do it later.
        """


@runtime_checkable
class Store(Protocol):
    """One run. Every method may be called from several tasks at once."""

    url: str
    """What `open_store` would take to open it again."""

    async def list(self, folder: str = "") -> list[Entry]:
        """List what `folder` ("" is the run itself) holds, by name, hiding nothing.

        Raises:
            FileNotFoundError: there is no such folder.
        """

    async def get(self, key: str, *, limit: int = 1 << 30) -> bytes:
        """Read a small file whole.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: with errno EFBIG when it is longer than `limit` bytes.
        """

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write a small file: durable, and readers see the old or the new one whole.

        Raises:
            FileExistsError: only with `if_absent`: there is one already.
            OSError: the store failed; the old file is there, or the new one.
        """

    async def delete(self, key: str) -> None:
        """Remove a file; one that is not there is no error."""

    async def delete_folder(self, folder: str) -> None:
        """Remove a folder and all in it, its manifest first; a missing one is no error."""

    async def open(self, key: str) -> Source:
        """Open a data file for reading.

        Raises:
            FileNotFoundError: there is no such file.
        """

    async def prepare(self) -> None:
        """Make the run exist, and find out at once whether it can be written.

        Raises:
            OSError: it cannot be made or written (EACCES, EROFS, ENOTDIR, ...).
        """

    async def room(self) -> int | None:
        """How many more bytes seem to fit; None where nobody can tell.

        A guess that spares a save which cannot succeed: `Attempt.create` is what reserves.

        Raises:
            OSError: the store failed.
        """

    async def begin(self, name: str, save_id: str) -> Attempt:
        """Begin a save that is to become `name`; it is alive as long as its writer is.

        Args:
            name: one name, not beginning with a dot.
            save_id: 32 lowercase hexadecimal digits, never used before.

        Raises:
            FileExistsError: this very attempt exists.
        """

    async def attach(self, name: str, save_id: str) -> Attempt:
        """Join an attempt that another process or store object has begun.

        It stays alive through the one that began it.

        Raises:
            FileNotFoundError: there is no such attempt.
        """

    async def sweep(self, *, unless: WantedStep | None = None) -> builtins.list[str]:
        """Remove attempts whose writer is gone, and other litter of crashed writers.

        Args:
            unless: asked of each step whose retirement was cut short; it becomes visible
                again where it says True, and stays as it is where it fails. For stores
                that retire a step in one go there is nothing to ask.

        Never touched: attempts of living writers (here or in any other process) and
        anything this library did not make. What cannot be removed now is logged and
        left for the next sweep.

        Returns:
            The names of the removed attempts, sorted.
        """

    async def retire(self, name: str, *, unless: Wanted | None = None) -> bool:
        """Make a committed step invisible at once, durably, then remove its files.

        Args:
            name: the step's folder.
            unless: asked while the step is invisible already and its files are all there;
                if it says True, or fails, the step becomes visible again.

        Returns:
            Whether it went.

        A missing one is no error; unfinished attempts of that name are not touched.
        Once it is invisible nothing is an error any more: files that cannot be removed
        now are logged and left to `sweep`.

        Raises:
            OSError: the step may still be visible.
        """

    async def lock(self) -> LockFile | bytes:
        """Take the run's lock, once the run is prepared; never waits for it.

        Returns:
            The lock; or what its holder's record says, when somebody is known to hold it,
            be it in this process.

        Raises:
            OSError: the store failed.
        """

    async def aclose(self) -> None:
        """Let go of the store; unfinished attempts it began count as abandoned."""


def open_store(run: str | os.PathLike[str] | Store) -> Store:
    """Open the store that holds a run; touches no file of it.

    Args:
        run: a path, `file://` URL, `memory://name`, another member's URL, or a store.

    Raises:
        UsageError: no member knows the scheme, or `run` is none of these.
    """
    if not isinstance(run, str | os.PathLike):
        if isinstance(run, Store):
            return run
        raise UsageError(f"a run is a path, a URL or a Store, not {type(run).__name__}")
    url = os.fspath(run)
    if not url or "\0" in url:
        raise UsageError(f"a run is a path, a URL or a Store, not {url!r}")
    # A pathlib path is always a path: Path("tape://x") means the folder "tape:".
    match = _SCHEME.match(url) if isinstance(run, str) else None
    scheme = match[1].lower() if match else "file"
    module = f"{__name__}.{'local' if scheme == 'file' else scheme.replace('-', '_')}"
    try:
        member = None if scheme == "local" or "." in scheme else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # the member is there, a package it needs is not
            raise UsageError(f"{scheme}:// needs the package {error.name}, which is not installed") from error
        member = None
    if member is None:
        raise UsageError(f"no store for {scheme}:// (of {url!r}); known are {', '.join(_schemes())}")
    return cast(Store, member.open_url(url))


def _schemes() -> list[str]:
    found = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    return sorted(f"{'file' if name == 'local' else name}://" for name in found)
