"""Leases: a reader's word that it needs a checkpoint, which retention keeps.

A lease is a small file, `leases/<folder>.<save id>.<lease id>.json`. The reader writes it
and *then* looks at the manifest again; whoever deletes moves the step aside and *then*
looks at the leases again. So one of the two sees the other, in whatever order they come.

The reader renews his lease three times in its `ttl`, and takes it for lost when that has
failed for so long: counted from before the last write that succeeded, and by a clock that
only goes forward. Whoever judges it counts by the store's clock, from the time of the
file to the time of a probe written just now. So a reader knows first, and a dead one
holds a checkpoint for `ttl` seconds and no longer.

Where a run cannot be written there is no lease. The checkpoint's files are opened then,
all of them and at once: what is open can be read to its end, even when it is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import time
import uuid
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, Unpack, overload

from ._clock import look
from ._finding import Found
from ._holder import Holder
from ._loader import Loader, LoadOptions
from ._log import log
from ._manifest import MANIFEST
from ._pins import Pins
from ._threads import Lane, offload, settle
from ._ttl import DEFAULT_TTL, check_ttl, is_ttl
from .checkpoint import Checkpoint
from .errors import StepNotFoundError, StorageError, UsageError
from .reader import CheckpointReader
from .storage import Entry, Store

__all__ = ["Lease", "leased"]


FOLDER: Final = "leases"
NAME = re.compile(r"(?P<name>.+)\.(?P<save>[0-9a-f]{32})\.(?P<lease>[0-9a-f]{32})\.json", re.DOTALL)
LIMIT = 1 << 16
"""The longest lease that is read."""
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
TRIES = 20
"""How often a step that was moved aside for a moment is looked for."""


class Lease:
    """Keeps one checkpoint from being deleted: `async with catalog.lease(checkpoint) as lease:`.

    The body may load it as often as it likes, by `lease.load` or in any other way.

    Args:
        loader: of the catalog.
        checkpoint: the one to keep, or its step; None for the newest valid one.
        ttl: seconds after which a reader that died no longer keeps it.
        purpose: a word for those who look who reads what.

    Attributes:
        lost: True once the lease could not be renewed in time: the checkpoint may go.
        pinned: True where the run cannot be written: its files are held open instead.
    """

    def __init__(
        self, loader: Loader, checkpoint: Checkpoint | int | None, ttl: float, purpose: str = ""
    ) -> None:
        check_ttl(ttl)
        self._loader = loader
        self._store = loader.store
        self._wanted = checkpoint
        self._ttl = float(ttl)
        self._purpose = str(purpose)
        self._found: Found | None = None
        self._key = ""
        self._body: dict[str, Any] = {}
        self._renewed = 0.0
        self._task: asyncio.Task[None] | None = None
        self._pins: Pins | None = None
        self._lost = False

    @property
    def checkpoint(self) -> Checkpoint:
        """What is leased."""
        return self._leased()[0]

    @property
    def lost(self) -> bool:
        """Whether it could not be renewed in time."""
        overdue = self._task is not None and time.monotonic() - self._renewed > self._ttl
        self._lost = self._lost or overdue
        return self._lost

    @property
    def pinned(self) -> bool:
        """Whether files are held open instead."""
        return self._pins is not None

    async def __aenter__(self) -> Self:
        if self._found is not None:
            raise UsageError("a lease is entered once; ask the catalog for another one")
        try:
            self._found = await self._take()
        except BaseException:
            await settle(self._drop())
            raise
        if self._pins is None:
            self._task = asyncio.get_running_loop().create_task(self._keep(), name="aiockpt lease")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await settle(self._let_go())

    @overload
    async def load(self, *, into: None = None, **options: Unpack[LoadOptions]) -> Any: ...

    @overload
    async def load(self, *, into: object, **options: Unpack[LoadOptions]) -> Checkpoint: ...

    async def load(self, *, into: Any = None, **options: Unpack[LoadOptions]) -> Any:
        """Load the leased checkpoint, as `Catalog.load` does.

        Raises:
            StepNotFoundError: the lease was lost, and the checkpoint deleted.
            As `Catalog.load`.
        """
        found = self._leased()
        for tries in range(TRIES):
            try:
                checkpoint, loaded = await self._through().load_found(found, into, options)
            except StepNotFoundError:
                # Whoever moved it aside sees the lease and brings it back.
                if self._task is None or self.lost or tries == TRIES - 1:
                    raise
                await asyncio.sleep(0.02 * tries)
            else:
                return loaded.state if into is None else checkpoint
        raise AssertionError

    async def read_file(self, name: str) -> bytes:
        """One of the user's own files that were committed with it; see `Catalog.read_file`."""
        return await self.reader().read_file(name)

    async def tell(self, purpose: str) -> None:
        """Say what it is for now, to those who look at the leases. A failure is for the next renewal."""
        self._body["purpose"] = purpose
        if self._key:
            with contextlib.suppress(OSError):
                await self._put()

    def reader(self) -> CheckpointReader:
        """A reader of the leased checkpoint."""
        return self._through().reader(*self._leased())

    def _through(self) -> Loader:
        return self._loader if self._pins is None else replace(self._loader, store=self._pins.view())

    def _leased(self) -> Found:
        if self._found is None:
            raise UsageError("enter the lease first: `async with catalog.lease(...) as lease:`")
        return self._found

    # ------------------------------------------------------------- taking it

    async def _take(self) -> Found:
        for tries in range(TRIES):
            found = await self._find()
            try:
                await self._write(found)
                await self._look_again(found)
            except StepNotFoundError:
                if self._wanted is not None or tries == TRIES - 1:
                    raise
                await self._drop()  # the newest one has changed: that one is meant
            else:
                return found
        raise AssertionError

    async def _find(self) -> Found:
        finder = self._loader.finder
        if self._wanted is not None:
            return await finder.resolve(self._wanted)
        newest = await finder.newest(_take_it)
        if newest is None:
            raise StepNotFoundError(f"{self._store.url} has no checkpoint", file=self._store.url)
        return newest[0], newest[1]

    async def _write(self, found: Found) -> None:
        """Write the lease, or open the files where that is not allowed."""
        checkpoint = found[0]
        lease_id = uuid.uuid4().hex
        who = await offload(Holder.here, self._ttl, lane=Lane.CONTROL)
        self._key = f"{FOLDER}/{checkpoint.name}.{checkpoint.save_id}.{lease_id}.json"
        self._body = {
            "format": 0,
            "name": checkpoint.name,
            "step": checkpoint.step,
            "save_id": checkpoint.save_id,
            "ttl": self._ttl,
            "since": who.since,
            "who": {"host": who.host, "pid": who.pid, "job": who.job},
            "purpose": self._purpose,
        }
        try:
            await self._put()
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise StorageError.wrap(error, "write", file=str(error.filename or FOLDER)) from error
            self._key = ""
            await self._pin(found, error)

    async def _put(self) -> None:
        begun = time.monotonic()
        await self._store.put(self._key, json.dumps(self._body).encode())
        # The old file stood until now: was that too long, somebody may have removed it meanwhile.
        if self._renewed and time.monotonic() - self._renewed > self._ttl:
            self._lost = True
        self._renewed = begun

    async def _pin(self, found: Found, error: OSError) -> None:
        log.warning(
            "%s cannot be written (%s): no lease for %s, its files are held open instead",
            self._store.url,
            error.strerror or error,
            found[0].name,
        )
        self._pins = Pins(self._store, found[0].name)
        await self._pins.open([MANIFEST, *(record.name for record in found[1].files)], found[0].step)

    async def _look_again(self, found: Found) -> None:
        """Only now that the lease is there it counts whether the step is."""
        for again in (True, True, False):
            try:
                await self._loader.finder.resolve(found[0])
                return
            except StepNotFoundError:
                if not again:
                    raise
                await asyncio.sleep(0.02)  # moved aside, it comes back if our lease was seen

    # ------------------------------------------------------------- keeping it

    async def _keep(self) -> None:
        """Renew it until it ends. The end of the loop cancels this too: nobody can renew it after that."""
        try:
            await self._renew()
        except asyncio.CancelledError:
            await settle(self._drop())
            raise

    async def _renew(self) -> None:
        """Renew it until it is lost; a lost one stays lost, since a judge may have removed it."""
        told = False
        while True:
            await asyncio.sleep(self._ttl / 3)
            if self.lost:
                log.error("%s: the lease %s was not renewed in time: it is lost", self._store.url, self._key)
                return
            try:
                await self._put()
                told = False
            except OSError as error:
                if not told:
                    log.warning("%s: the lease %s cannot be renewed: %s", self._store.url, self._key, error)
                told = True

    async def _let_go(self) -> None:
        if self._task is not None:
            self._lost = self.lost
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self._drop()

    async def _drop(self) -> None:
        key, self._key = self._key, ""
        pins, self._pins = self._pins, None
        try:
            if key:
                await self._store.delete(key)
        except OSError as error:
            log.warning("%s: the lease %s stays until it expires: %s", self._store.url, key, error)
        finally:
            if pins is not None:
                await pins.aclose()


async def _take_it(_: object, manifest: Any) -> Any:
    return manifest


async def leased(store: Store) -> set[tuple[str, str]]:
    """(folder, save id) of the checkpoints that readers need now; removes expired leases.

    What is no lease is left alone, what looks like one and cannot be read counts as one.
    Only for the run's writer: it writes a probe.

    Raises:
        OSError: the store failed, and nobody can tell what is leased.
    """
    view = await look(store, FOLDER)
    found: set[tuple[str, str]] = set()
    for entry in view.entries:
        match = NAME.fullmatch(entry.name)
        if match is None:
            continue
        ttl = await _ttl_of(store, entry)
        age = view.age(entry)
        if ttl is None:
            continue
        if age is None or age <= ttl:
            found.add((match["name"], match["save"]))
            continue
        log.info("%s: the lease %s has expired", store.url, entry.name)
        with contextlib.suppress(OSError):  # the next one who looks tries again
            await store.delete(f"{FOLDER}/{entry.name}")
    return found


async def _ttl_of(store: Store, entry: Entry) -> float | None:
    """How long the lease holds without renewal; None when it is gone."""
    try:
        data = await store.get(f"{FOLDER}/{entry.name}", limit=LIMIT)
        ttl = json.loads(data)["ttl"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return DEFAULT_TTL
    return float(ttl) if is_ttl(ttl) else DEFAULT_TTL
