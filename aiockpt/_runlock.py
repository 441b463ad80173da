"""One writer a run: who enters a saver holds the run's lock until he leaves it.

Two things keep a second writer out. The lock itself, which the kernel frees when its
process dies, whatever children live on. And the record beside it, which the holder renews
from a thread of its own, for those whom the lock does not reach: other hosts on a shared
file system, other mounts, stores without locks.

So whoever gets the lock and finds a record looks whether its holder is provably gone. If
nothing proves it, he watches: a renewal means that the holder lives, and none for the
record's `ttl` that he does not. Nobody's clock and no file's time is asked. Two who took
over at the same moment find out by reading the record again a moment later: it names one.

A holder that was taken for dead (stopped, or cut off from the disk, for longer than
`ttl`) finds another's record, or his lock gone, when he looks right before a commit. His
save fails then, and nothing of it is visible. Between that look and the commit another
writer could still come in; what he would find is a whole step, never a mixture.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ._holder import Holder
from ._log import log
from ._pulse import Beat
from ._threads import Lane, offload, settle
from .errors import RunLockedError
from .storage import LockFile, Store

__all__ = ["RunLock"]


TTL = 30.0
"""Seconds without renewal after which others, who cannot know better, take a holder for dead."""
TORN_SECONDS = 1.0
"""How long a record that says nothing is watched: a living holder's next write would mend it."""
LOOKS = 10
"""How often at least a record is looked at while it is watched."""
TRIES = 100
"""How often a lock file may vanish between being taken and being read."""


class RunLock:
    """The lock of one run, for one saver.

    Args:
        store: of the run.
        ttl: seconds without renewal after which others may take over; `TTL` by default.
    """

    def __init__(self, store: Store, *, ttl: float | None = None) -> None:
        self._store = store
        self._ttl = ttl or TTL
        self._file: LockFile | None = None
        self._me: Holder | None = None
        self._beat: Beat | None = None
        self._using = threading.Lock()
        self._claimed = False
        self._told = False
        self._lost_to: bytes | None = None
        """The record of who has the run now, once it is known to be lost."""

    async def acquire(self) -> None:
        """Take the lock.

        Raises:
            RunLockedError: somebody else writes the run.
            OSError: the store failed.
        """
        try:
            for _ in range(TRIES):
                me = self._me = await offload(Holder.here, self._ttl, lane=Lane.CONTROL)
                found = await self._store.lock()
                if isinstance(found, bytes):
                    raise self._refusal(found)
                self._file = found
                if await self._claim(found, me):
                    break
            else:
                raise self._refusal(b"")
        except BaseException:
            await settle(self.release())
            raise
        self._beat = Beat(self._ttl / 3, self.renew)
        weakref.finalize(self, self._beat.stop).atexit = False

    async def check(self) -> None:
        """Make sure that the run is still ours.

        Raises:
            RunLockedError: it is somebody else's now.
            OSError: the store failed, and nobody can tell.
        """
        await offload(self._check, lane=Lane.CONTROL)

    async def release(self) -> None:
        """Let the run go; any number of times."""
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.stop()
        if self._file is not None:
            await offload(self._release, lane=Lane.CONTROL)

    def renew(self) -> None:
        """Show that we are alive; blocking. What goes wrong is logged, and told by the next `check`."""
        try:
            with self._using:
                if self._file is not None and self._lost_to is None:
                    self._verify(self._file)
                    self._write(self._file)
            self._told = False
        except RunLockedError as error:
            log.error("%s", error)
        except OSError as error:
            if not self._told:
                log.warning("%s: the run's lock cannot be renewed: %s", self._store.url, error)
            self._told = True

    # ------------------------------------------------------------- taking it

    async def _claim(self, file: LockFile, me: Holder) -> bool:
        """Make the lock file ours; False when it vanished meanwhile."""
        try:
            record = await offload(file.read, lane=Lane.CONTROL)
            me = self._me = replace(me, place=file.place)
            doubtful = bool(record) and await self._watch(file, record, me)
            self._claimed = True
            await offload(self._write, file, lane=Lane.CONTROL)
            if doubtful:  # others may have watched and come to the same end
                await asyncio.sleep(min(1.0, self._ttl / LOOKS))
            await offload(self._verify, file, lane=Lane.CONTROL)
        except FileNotFoundError:
            return False
        except RunLockedError:  # a BlockingIOError as well, which knows more
            raise
        except BlockingIOError as error:
            raise self._refusal(b"") from error
        return True

    async def _watch(self, file: LockFile, record: bytes, me: Holder) -> bool:
        """Wait until the record's holder has proved to be dead; returns whether that took a wait.

        Raises:
            RunLockedError: he has renewed it.
        """
        holder = Holder.decode(record)
        if holder is not None and await offload(holder.is_gone, me, lane=Lane.CONTROL):
            return False
        seconds = TORN_SECONDS if holder is None else holder.ttl
        log.warning(
            "%s may be written by %s: watching for %g s whether its lock is renewed",
            self._store.url,
            holder or "somebody whose record is damaged",
            seconds,
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(min(1.0, seconds / LOOKS))
            now = await offload(file.read, lane=Lane.CONTROL)
            if not now:
                return True  # he has let go
            if now != record:
                raise self._refusal(now)
        return True

    def _refusal(self, record: bytes) -> RunLockedError:
        who, holder = self._who(record)
        message = (
            f"{self._store.url} is being written by {who}; a run has one writer at a time: end that one "
            "first, or use another run folder"
        )
        return RunLockedError(message, file=self._store.url, holder=holder)

    def _loss(self, record: bytes) -> RunLockedError:
        who, holder = self._who(record)
        message = f"{self._store.url} was taken over by {who}, who took this saver for dead; it cannot commit"
        return RunLockedError(message, file=self._store.url, holder=holder)

    def _who(self, record: bytes) -> tuple[str, Mapping[str, Any] | None]:
        holder = Holder.decode(record)
        if holder is None:
            return "another process", None
        here = self._me is not None and holder.is_process(self._me)
        return ("another saver of this process" if here else str(holder)), holder.facts()

    # ------------------------------------------------------------- keeping it; blocking

    def _check(self) -> None:
        with self._using:
            if self._lost_to is None and self._file is not None:
                self._verify(self._file)
            if self._lost_to is not None:
                raise self._loss(self._lost_to)

    def _verify(self, file: LockFile) -> None:
        """Look whether the record is ours; one that somebody removed is written anew."""
        try:
            record = file.read()
            if not record:
                self._write(file)
                record = file.read()
        except BlockingIOError:
            record = b""
        if not self._is_ours(record):
            self._lost_to = record
            raise self._loss(record)

    def _is_ours(self, record: bytes) -> bool:
        holder = Holder.decode(record)
        return holder is not None and self._me is not None and holder.id == self._me.id

    def _write(self, file: LockFile) -> None:
        assert self._me is not None
        self._me = self._me.renewed()
        file.write(self._me.encode())

    def _release(self) -> None:
        with self._using:
            file, self._file = self._file, None
            if file is None:
                return
            forget = False
            try:
                record = file.read()
                # What we wrote may be torn; then it tells others nothing and only makes them wait.
                torn = self._claimed and Holder.decode(record) is None
                forget = not record or torn or self._is_ours(record)
            except BlockingIOError:
                pass  # it is somebody else's
            except OSError as error:
                log.warning("%s: the run's lock file stays behind: %s", self._store.url, error)
            finally:
                file.release(forget=forget)
