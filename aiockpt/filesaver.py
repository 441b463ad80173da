"""FileSaver: any `savefun(path, target)`, in line, in a thread or in a process."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import torch

from . import _threads
from ._ending import Ending
from ._files import FileSystem
from ._filing import FileEntry, Filing, SavedFile
from ._ledger import Ledger
from ._names import new_save_id
from ._parcel import pack
from ._placing import Place
from ._workers import Call, Job, Worker
from ._workers.process import ProcessWorker
from ._workers.thread import InlineWorker, ThreadWorker
from .errors import CheckpointError, SaveError, UsageError
from .pending import PendingSave
from .policies import Keep, KeepFunction, as_keep
from .policies.keep import KeepLast

__all__ = ["FileSaver", "Job", "PendingFile", "SavedFile", "Worker"]

H = TypeVar("H", bound=Callable[[Path], object])

WORKERS: dict[str, type[Worker]] = {
    "inline": InlineWorker,
    "thread": ThreadWorker,
    "process": ProcessWorker,
}


class PendingFile(PendingSave):
    """The save of one file, from its call on; a `PendingSave` whose result is a `SavedFile`."""

    def __init__(self, number: int, path: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(number, new_save_id(), loop)
        self.path = Path(path)
        """Where it goes."""
        self._label = path
        self._facts = {"file": path}
        self._arguments = f"..., {path!r}"

    async def committed(self) -> SavedFile:
        """Wait until it is durable under its name.

        Raises:
            CheckpointError: the save failed; what was at the path is untouched.
        """
        saved = await super().committed()
        assert isinstance(saved, SavedFile)
        return saved

    def __await__(self) -> Generator[Any, Any, SavedFile]:
        return self.committed().__await__()


class FileSaver(Ending[FileEntry]):
    """Saves with a function of your own, each save into one file or folder.

    An async context manager; it must be entered. It belongs to the loop and thread that
    entered it. Overlap, errors, cancellation and the end are those of `Saver`. Nothing is
    seen under a path before it is whole and flushed; a file that was there is replaced at
    that instant, and so is a folder that this saver wrote. Other folders are not replaced.

    The target is captured at the call: tensors as by `Saver`, everything else by pickle;
    objects with a `state_dict()` are asked for it. What the savefun gets is put together
    from that: tensors are on the host (`worker="inline"`: where they were), and valid
    until it returns.

    Args:
        savefun: called as `savefun(path, target, **kwds)`, `path` being a `str`. Functions
            known to take the object first (`torch.save`, `safetensors.torch.save_file`,
            also inside a `functools.partial` that fixes keywords) are called so. May be
            async: it then runs on the loop. May be another `FileSaver`, which then
            saves a copied target by its own means (and is entered and closed with this one,
            unless it is open).
        worker: where it runs. `inline`: nothing is copied, and `stage` returns only when
            all is flushed. `thread`: beside the caller. `process`: in a process of its
            own. Or a `Worker`.
        max_pending: saves under way at the same time; each has its copy in host memory.
        on_overlap: what a save does when `max_pending` are: `wait`, or raise `BusyError`.
        keep: of what this saver wrote, how many of the newest stay, or a policy
            (`aiockpt.policies.keep`). A policy sees `SavedFile`s; the newest always stays.
        on_failure: whether a failure nobody awaited is raised by the next save.
        drain_timeout: seconds that leaving may take; None waits for ever.
        tmp_dir: where files are written first; by default beside their final place. On
            another file system they are copied from there.
        **kwds: for every call of the savefun.

    Raises:
        UsageError: an option is wrong, or the worker cannot run the savefun.
        SaveError: on entering: the worker cannot be started.
    """

    def __init__(
        self,
        /,
        savefun: Callable[..., Any] | FileSaver = torch.save,  # noqa: TID251  # the user's own format
        *,
        worker: Literal["inline", "thread", "process"] | Worker = "thread",
        max_pending: int = 1,
        on_overlap: Literal["wait", "error"] = "wait",
        keep: int | Keep | KeepFunction | None = None,
        on_failure: Literal["raise", "log"] = "raise",
        drain_timeout: float | None = 600.0,
        tmp_dir: str | os.PathLike[str] | None = None,
        **kwds: Any,
    ) -> None:
        super().__init__(on_overlap=on_overlap, on_failure=on_failure)
        self._savefun = cast("Callable[..., Any]", savefun)
        self._kwds = kwds
        self._drain_timeout = drain_timeout
        self._tmp_dir = None if tmp_dir is None else os.path.abspath(tmp_dir)
        self._files = FileSystem()
        self._numbers = itertools.count(1)
        self._inner = savefun if isinstance(savefun, FileSaver) else None
        self._inner_owned = False
        runs = _worker(worker)
        if self._inner is not None:
            if runs.remote:
                raise UsageError("a FileSaver as savefun runs on the loop: give worker='process' to that one")
        elif not callable(savefun):
            raise UsageError(f"savefun must be callable, or a FileSaver, not {savefun!r:.80}")
        runs.check(Call(self._savefun, kwds))
        policy = None if keep is None else KeepLast(keep) if isinstance(keep, int) else as_keep(keep)
        delegate = None if self._inner is None else _delegate(self._inner)
        self._saving: Filing = Filing(Ledger(max_pending), runs, policy, delegate)

    async def __aenter__(self) -> Self:
        self._owner.enter()
        try:
            if self._inner is not None and self._inner._owner.loop is None:
                await self._inner.__aenter__()
                self._inner_owned = True
            await self._saving.worker.start(Call(self._savefun, self._kwds))
        except BaseException as error:
            self._owner.closed = True
            await self._dispose()
            if not isinstance(error, OSError) or isinstance(error, CheckpointError):
                raise
            raise SaveError(f"cannot start the worker: {error}") from error
        return self

    # Saving

    def save(
        self, target: Any, path: str | os.PathLike[str], /, **more: Any
    ) -> Coroutine[Any, Any, SavedFile]:
        """Save; the await returns when it is durable under its name and the hooks have run.

        Args:
            target: anything that can be pickled; captured at the call.
            path: a file or folder to make, or to replace. Folders above it are made.
            **more: for the savefun, before the saver's own.

        Raises:
            UnsupportedStateError: at the call; lists every path that cannot be pickled.
            BusyError: `on_overlap="error"` and too many saves are pending.
            PreviousSaveError: an earlier save failed unseen; this one goes on in `.pending`.
            StorageError: the disk failed, or the savefun with an OSError.
            SaveError: the savefun failed otherwise: `__cause__` says how.
            UsageError: the path names no file, or a folder of somebody else's.
        """
        entry = self._entry(target, path, more)
        return self._call("save", entry, partial(self._save, entry))

    def stage(
        self, target: Any, path: str | os.PathLike[str], /, **more: Any
    ) -> Coroutine[Any, Any, PendingFile]:
        """Save; the await returns when the target may change. The rest goes on by itself.

        Arguments and errors as `save`; errors after `staged` are the handle's.

        Returns:
            The handle: await it, or one of its phases, to know what became of the save.
        """
        entry = self._entry(target, path, more)
        return self._call("stage", entry, partial(self._stage, entry))

    def add_after_save(self, hook: H) -> H:
        """Have `hook(path)` called after each save that is moved into place from now on; returns it.

        Hooks run in this process, in the order in which they were added, one save after the
        other, before `keep=` removes anything: sync ones in a thread, async ones on the loop.
        One that fails does not fail the save: its `PublishError` is logged, stands in
        `failures`, and is raised at the end.
        """
        self._saving.hooks.append(hook)
        return hook

    async def finalize(self) -> None:
        """As `aclose`: drain and close; any number of times."""
        await self.aclose()

    # Behind the verbs

    def _entry(self, target: Any, path: str | os.PathLike[str], more: dict[str, Any]) -> FileEntry:
        loop = self._owner.check()
        if os.path.basename(os.fspath(path)) in ("", ".", ".."):
            raise UsageError(f"{os.fspath(path)!r} names no file", file=os.fspath(path))
        final = os.path.abspath(path)
        pending = PendingFile(next(self._numbers), final, loop)
        place = Place(final, pending.save_id, self._tmp_dir, self._saving.folders, self._files)
        with pending._blocking():
            parcel = pack(target, file=final)
        job = Job(place.file, Call(self._savefun, self._kwds | more), parcel)
        try:
            self._saving.worker.prepare(job)
        except BaseException:
            parcel.release()
            raise
        return FileEntry(pending, job, place)

    async def _stage(self, entry: FileEntry) -> PendingFile:
        with entry.pending._blocking():
            self._begin(entry)
            await self._staged(entry)
        assert isinstance(entry.pending, PendingFile)
        return entry.pending

    async def _save(self, entry: FileEntry) -> SavedFile:
        pending = await self._stage(entry)
        saved = await pending.committed()
        await entry.told.wait()
        return saved

    # Leaving

    def _name(self) -> str:
        return "files"

    async def _idle_beside(self) -> None:
        await self._saving.after.idle()

    async def _dispose(self) -> None:
        if self._inner is not None and self._inner_owned:
            await self._inner.aclose()


def _worker(worker: object) -> Worker:
    if isinstance(worker, Worker):
        return worker
    kind = WORKERS.get(worker) if isinstance(worker, str) else None
    if kind is None:
        known = ", ".join(map(repr, WORKERS))
        raise UsageError(f"worker is {known} or a Worker, not {worker!r:.80}")
    return kind()


def _delegate(inner: FileSaver) -> Callable[[object, str, FileEntry], Coroutine[Any, Any, int]]:
    async def save(target: object, path: str, entry: FileEntry) -> int:
        pending = await inner.stage(target, path, **entry.job.call.options)
        try:
            saved = await pending.committed()
        except asyncio.CancelledError:
            # It may have got its name by then: then the outer save has, too.
            await _threads.settle(pending.cancel_and_wait())
            if pending.exception() is not None:
                raise
            saved = await pending.committed()
        return saved.nbytes

    return save
