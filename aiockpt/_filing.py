"""What a `FileSaver` does behind its verbs: copy, call the savefun, flush, move, tell.

One savefun runs at a time, in the order of the saves, whatever the number of saves under
way: functions of users are seldom made to run beside themselves.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import _placing
from ._arena import Arenas
from ._door import first, forget_frames, is_stuck, told
from ._entry import Entry
from ._ledger import Ledger
from ._log import log
from ._placing import Place
from ._running import Running
from ._threads import Lane, offload, settle
from ._turns import Turns
from ._workers import Job, Worker
from .checkpoint import Checkpoint
from .errors import CheckpointError, DrainTimeoutError, PublishError, SaveError, StorageError
from .pending import Phase
from .policies import Keep

__all__ = ["FileEntry", "Filing", "Hook", "SavedFile"]

Hook = Callable[[Path], object]
"""Gets the path; an awaitable that it returns is awaited."""

Delegate = Callable[[object, str, "FileEntry"], Awaitable[int]]
"""Saves a target under a final path by other means; returns the bytes."""


class SavedFile(Checkpoint):
    """A file (or folder) that is durable under its name.

    As a `Checkpoint`, which is what `keep=` policies look at: `step` is the number of the
    save, counted from 1 by its saver; `run` is the folder and `name` the name in it.
    """

    __slots__ = ()

    @property
    def path(self) -> Path:
        """Where it is."""
        return Path(self.run, self.name)


@dataclass(eq=False, slots=True)
class FileEntry(Entry):
    """What was captured at the call, and how far it got."""

    job: Job
    place: Place
    saved: SavedFile | None = None
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its hooks have run."""
    stuck: bool = False
    """A thread that was written off may be inside for ever."""
    arenas: Arenas | None = None

    @property
    def committed(self) -> bool:
        """Whether it has its name."""
        return self.saved is not None

    def drop(self) -> None:
        """Let go of the target."""
        self.job.parcel.release()

    def forget(self) -> None:
        """Nothing was begun."""
        self.drop()

    async def abort(self) -> None:
        """Remove what lies aside, and give the memory back."""
        arena, self.job.arena = self.job.arena, None
        if arena is not None and self.arenas is not None:
            self.arenas.put(arena, lost=self.stuck or self.job.kept)
        if self.place.dirty and not self.stuck:
            await offload(self.place.clean_up)

    def open_files(self) -> list[str]:
        """What the savefun writes."""
        return [self.place.file]


class Filing(Running[FileEntry]):
    """The saves of one `FileSaver`.

    Args:
        ledger: its books.
        worker: runs the savefun.
        keep: which of the files stay; None for all.
        delegate: saves in place of the worker.
    """

    fate = "It is there only if its path is."

    def __init__(
        self, ledger: Ledger, worker: Worker, keep: Keep | None, delegate: Delegate | None = None
    ) -> None:
        super().__init__(ledger)
        self.worker = worker
        self.hooks: list[Hook] = []
        self.folders: set[str] = set()
        """Paths of the folders written so far."""
        self.after = Turns("after-save hooks")
        self._keep = keep
        self._delegate = delegate
        self._written: dict[str, SavedFile] = {}
        self._untold: set[FileEntry] = set()
        self._arenas = Arenas(shared=worker.remote)
        self._one_at_a_time = asyncio.Lock()

    def _about(self, entry: FileEntry) -> tuple[str | None, int | None]:
        return entry.place.folder, None

    async def _carry_out(self, entry: FileEntry) -> None:
        pending, job = entry.pending, entry.job
        await self.ledger.admit(entry)
        pending.progress.total = job.parcel.nbytes
        if self._delegate is None:
            await offload(entry.place.prepare)
        pending._reach(Phase.PLANNED)
        if self.worker.copies:
            await self._copy(entry)
        async with self._one_at_a_time:
            nbytes = await self._write(entry)
        if not self.worker.copies:
            job.parcel.check_unchanged(pending._label)
            self._let_go(entry)
        pending.progress.add(written=job.parcel.nbytes)
        pending._reach(Phase.WRITTEN)
        await self.ledger.turn(entry)
        entry.committing = True
        await settle(self._commit(entry, nbytes))

    async def _copy(self, entry: FileEntry) -> None:
        job = entry.job
        entry.arenas = self._arenas
        job.arena = self._arenas.take(job.parcel.nbytes)
        if job.arena is None:
            job.arena = await offload(self._arenas.make, job.parcel.nbytes, undo=self._arenas.put)
        await offload(job.parcel.copy_into, job.arena.bytes, lane=Lane.STAGE)
        job.parcel.check_unchanged(entry.pending._label)
        self._let_go(entry)

    def _let_go(self, entry: FileEntry) -> None:
        """The target is no longer read."""
        entry.job.parcel.release()
        entry.pending.progress.add(staged=entry.job.parcel.nbytes)
        entry.pending._reach(Phase.STAGED)

    async def _write(self, entry: FileEntry) -> int:
        """Have it written and flushed; returns its bytes."""
        job = entry.job
        if self._delegate is not None:
            await self.ledger.turn(entry)
            return await self._delegate(await offload(job.target, lane=Lane.USER), entry.place.path, entry)
        if job.call.is_async and not self.worker.remote:
            await job.call(job.path, await offload(job.target, lane=Lane.USER))
        else:
            self.worker.forget(self._arenas.dropped)
            outcome = await self.worker.run(job)
            if inspect.isawaitable(outcome):
                await outcome
        return await offload(entry.place.sync)

    async def _commit(self, entry: FileEntry, nbytes: int) -> None:
        pending, place = entry.pending, entry.place
        if self._delegate is None:
            await offload(place.move)
            if place.is_folder:
                self.folders.add(place.path)
            else:
                self.folders.discard(place.path)
        # Before anybody is told: whoever waits for this save may then begin the next one.
        await entry.abort()
        entry.saved = SavedFile(
            run=place.folder,
            name=place.name,
            step=pending.step,
            save_id=pending.save_id,
            run_id="",
            time=time.time(),
            nbytes=nbytes,
        )
        pending._commit(entry.saved)
        self._untold.add(entry)
        self.after.put(partial(self._tell, entry, entry.saved, tuple(self.hooks)))

    def _translate(self, cause: Exception, entry: FileEntry) -> CheckpointError:
        entry.stuck = entry.stuck or is_stuck(cause)
        forget_frames(cause)  # they hold the target, and with it memory that is to be used again
        root: BaseException = cause
        while isinstance(root, BaseExceptionGroup):
            root = first(root)
        path = entry.pending._label
        ours: CheckpointError
        if isinstance(root, CheckpointError):
            root.file = root.file or path
            return root
        if isinstance(root, OSError):
            ours = StorageError.wrap(root, "saving", file=path)
        else:
            message = f"saving {path} failed: {told(root)}"
            ours = SaveError(message, file=path, save_id=entry.pending.save_id)
        ours.__cause__ = root
        return ours

    # After the commit

    async def _tell(self, entry: FileEntry, saved: SavedFile, hooks: tuple[Hook, ...]) -> None:
        try:
            for hook in hooks:
                await self._call_hook(hook, saved)
            if self._keep is not None:
                await self._retain(saved, self._keep)
        finally:
            self._untold.discard(entry)
            entry.told.set()

    async def _call_hook(self, hook: Hook, saved: SavedFile) -> None:
        try:
            if inspect.iscoroutinefunction(hook):
                await hook(saved.path)
                return
            outcome: Any = await offload(hook, saved.path, lane=Lane.USER)
            if inspect.isawaitable(outcome):
                await outcome
        except Exception as cause:
            name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
            message = f"{saved.path} is in place, but the after-save hook {name} failed: {told(cause)}"
            error = PublishError(message, file=str(saved.path), publisher=name)
            error.__cause__ = cause
            self._report(error)

    def _report(self, error: CheckpointError) -> None:
        log.error("%s", error)
        self.ledger.failures.append(error)
        self.ledger.other_errors.append(error)

    async def _retain(self, saved: SavedFile, keep: Keep) -> None:
        """Remove what the policy lets go of what this saver wrote; the newest stays in any case."""
        self._written.pop(saved.url, None)
        self._written[saved.url] = saved
        files = sorted(self._written.values(), key=lambda file: file.step)
        try:
            kept = {*keep(files), files[-1].step}
        except Exception as error:
            self._report(SaveError(f"keep= raised {told(error)}", file=saved.url))
            return
        for file in files:
            if file.step not in kept:
                del self._written[file.url]
                folder = file.url in self.folders
                await offload(partial(_placing.remove, file.url, folder=folder))

    # The end

    async def _close(self, deadline: float | None, seconds: float | None) -> CheckpointError | None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if await self.after.close(left):
            self._report(DrainTimeoutError("after-save hooks did not end in time; they were cancelled"))
        for entry in self._untold:  # their turn never came
            entry.told.set()
        await self.worker.stop()
        self._arenas.close()
        return None
