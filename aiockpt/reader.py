"""CheckpointReader: metadata -> plan -> read -> apply, one coroutine each.

The mirror of `CheckpointWriter`, for those who schedule the phases themselves; `Catalog`
and `load` are made of it. Nothing is touched before `read`, and what lives in `into=` is
only ever given verified bytes. A reader writes nothing anywhere.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ._apply import hand_over
from ._decode import decode_saved
from ._devices import Devices, MapLocation
from ._fetch import Fetch, Filling, LoadProgress, Place
from ._listing import Candidate, check_files, read_manifest
from ._loading import LoadPlan, as_paths, plan_load, rebuild_state
from ._manifest import PIECE_BYTES, FileRecord, Manifest, digest
from ._memory import BLOCK_BYTES, MIN_BLOCKS, BlockPool, ByteBudget
from ._reads import Span, plan_span_reads
from ._saved import Saved
from ._threads import offload
from ._verify import VerifyReport, verify_files
from ._wants import gather
from .checkpoint import LoadReport
from .errors import CorruptCheckpointError, StorageError, UsageError
from .storage import Store

__all__ = ["CheckpointReader", "LoadPlan", "LoadProgress", "Loaded", "VerifyReport"]

RING_BLOCKS = 4
"""Blocks of a reader's own ring."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of a load."""

    state: Any
    """The state as saved (or the selected part); None for a load with `into=`."""
    values: dict[Any, Any]
    """With `into=`: restored values by the keys of the target."""
    report: LoadReport


class CheckpointReader:
    """Reads one committed checkpoint.

    Args:
        store: the run.
        name: the checkpoint's folder in the run.
        step: the step the folder's name stands for.
        budget: bytes of host memory for blocks, or a `ByteBudget` shared with others; by
            default four blocks of 16 MiB, whatever the state's size.
        allow_pickle: whether pickled values may be unpickled. Only for files you trust.
        manifest: the decoded manifest, where it is known already.

    Raises:
        UsageError: the budget is too small.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        step: int,
        budget: int | ByteBudget | None = None,
        allow_pickle: bool = False,
        manifest: Manifest | None = None,
    ) -> None:
        self.step = step
        self.place = Place(store, name, step)
        self._candidate = Candidate(step, 0, name)
        self._budget = as_budget(budget)
        self._allow_pickle = allow_pickle
        self._manifest = manifest
        self._saved: Saved | None = None

    async def metadata(self) -> Saved:
        """Read and check the manifest and the parts; the second call costs nothing.

        Raises:
            StepNotFoundError: the checkpoint was deleted meanwhile.
            CorruptCheckpointError: a manifest or part is damaged, a file missing or too many.
            UnsupportedFormatError: it was written by a newer aiockpt.
            StorageError: the store failed.
        """
        if self._saved is None:
            manifest = await self.manifest()
            parts = [(r, await self._get(r)) for r in manifest.files if r.kind == "part"]
            self._saved = await offload(decode_saved, manifest, parts)
        return self._saved

    async def manifest(self) -> Manifest:
        """Read the manifest, and check that its files are there, alone and of the right size.

        Raises:
            As `metadata`.
        """
        if self._manifest is None:
            found = await read_manifest(self.place.store, self._candidate)
            await check_files(self.place.store, self._candidate, found)
            self._manifest = found
        return self._manifest

    async def _get(self, record: FileRecord) -> bytes:
        key = f"{self.place.folder}/{record.name}"
        try:
            return await self.place.store.get(key, limit=max(record.size, 1))
        except FileNotFoundError as error:
            raise await self._gone(error) from None
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise self.place.corrupt(
                    f"the file has more than {record.size} bytes", record.name
                ) from error
            raise StorageError.wrap(error, "read", file=key, step=self.step) from error

    async def _gone(self, error: FileNotFoundError) -> CorruptCheckpointError:
        """Why a file that was there is not: the error to raise.

        Raises:
            StepNotFoundError: the whole step was deleted.
        """
        await read_manifest(self.place.store, self._candidate)
        file = str(error.filename or self.place.folder).rpartition("/")[2]
        return self.place.corrupt("the file is missing", file)

    async def plan(
        self,
        into: Any = None,
        *,
        paths: Iterable[str] | None = None,
        map_location: MapLocation = None,
        strict: bool = True,
        cast: bool = False,
    ) -> LoadPlan:
        """Decide what to read and where it goes; allocates what is new, touches nothing.

        Args:
            into: objects to fill; None restores everything as new values.
            paths: restore only what lies at or under these paths; not with `into`.
            map_location: device of new tensors: None for host memory, a device, or a function
                from path to device. What lives keeps its device.
            strict: whether any difference between `into` and the checkpoint is an error.
            cast: whether dtypes may differ; values are then converted.

        Raises:
            StateMismatchError: listing every difference between checkpoint and `into`.
            UsageError: a path selects nothing, a device cannot be used, options contradict.
            PickleRefusedError: a needed value is pickled and that was not allowed.
        """
        if into is not None and paths is not None:
            raise UsageError("paths= and into= do not go together: leave out of into= what is not wanted")
        devices = Devices(map_location)
        await offload(devices.check)
        saved = await self.metadata()
        want = None if into is None else gather(into)
        chosen = None if paths is None else as_paths(paths)
        call = partial(
            plan_load,
            strict=strict,
            cast=cast,
            allow_pickle=self._allow_pickle,
            block_bytes=block_bytes(self._budget),
        )
        return await offload(call, saved, want, chosen, devices)

    async def read(
        self,
        plan: LoadPlan,
        *,
        verify: bool = True,
        atomic: bool = False,
        progress: Callable[[LoadProgress], object] | None = None,
    ) -> None:
        """Read what was planned into new and living tensors.

        Args:
            plan: from `plan`.
            verify: whether bytes are checked; never turn it off for files from elsewhere.
            atomic: verify everything before the first living tensor is touched.
            progress: called after each read, on the loop's thread.

        Raises:
            CorruptCheckpointError: bytes are not what was written. `.touched` names the living
                tensors that hold bytes of the checkpoint by now; none with `atomic`.
            StepNotFoundError: the checkpoint was deleted meanwhile.
            StorageError: the store failed.
        """
        if atomic and not verify:
            raise UsageError("atomic=True means to verify first: it does not go with verify=False")
        saved = await self.metadata()
        pool = BlockPool(self._budget, block_bytes=block_bytes(self._budget))
        fetch = Fetch(self.place, saved.stored, saved.shards, pool, verify, progress)
        living = plan.living() if atomic else []
        later = {id(run) for run in living}
        first = [run for run in plan.runs if id(run) not in later]
        fetch.total = plan.nbytes + sum(run.nbytes for run in living)
        try:
            await fetch.fill(first, plan.targets)
            if living:
                await fetch.fill(living)
                await fetch.fill(living, plan.targets)
        except FileNotFoundError as error:
            raise await self._gone(error) from error
        except CorruptCheckpointError as error:
            error.touched = tuple(sorted(fetch.touched))
            raise
        finally:
            pool.close()

    async def read_spans(self, spans: Iterable[Span], into: Filling, *, verify: bool = True) -> None:
        """Read some bytes of stored rows; what is read goes to `into`, verified, in threads.

        Args:
            spans: (row of `metadata().stored`, first byte, bytes); none is wanted twice.
            into: takes the blocks.
            verify: whether bytes are checked.

        Raises:
            As `read`.
        """
        saved = await self.metadata()
        size = block_bytes(self._budget)
        runs = await offload(plan_span_reads, saved.stored, saved.shards, list(spans), (), size)
        pool = BlockPool(self._budget, block_bytes=size)
        try:
            await Fetch(self.place, saved.stored, saved.shards, pool, verify).fill(runs, into)
        except FileNotFoundError as error:
            raise await self._gone(error) from error
        finally:
            pool.close()

    async def apply(self, plan: LoadPlan) -> Loaded:
        """Put the state together, and hand it to the objects of `into` if there are any.

        Raises:
            CorruptCheckpointError: the state cannot be put together.
            CheckpointError: an object of `into` refused its state.
        """
        saved = await self.metadata()
        state = await offload(rebuild_state, saved, plan, self._allow_pickle)
        if plan.fit is None:
            return Loaded(state, {}, plan.report)
        values = hand_over(plan.fit, state, strict=plan.strict, step=self.step)
        return Loaded(None, values, plan.report)

    async def verify(self) -> VerifyReport:
        """Read every byte of every file and check it, data files' own headers included.

        Raises:
            CorruptCheckpointError: naming file, and path where it is known.
            StepNotFoundError: the checkpoint was deleted meanwhile.
            StorageError: the store failed.
        """
        saved = await self.metadata()
        size = block_bytes(self._budget)
        pool = BlockPool(self._budget, block_bytes=size)
        try:
            return await verify_files(Fetch(self.place, saved.stored, saved.shards, pool), saved, size)
        except FileNotFoundError as error:
            raise await self._gone(error) from error
        finally:
            pool.close()

    async def read_file(self, name: str) -> bytes:
        """One of the user's own files, verified.

        Args:
            name: as it was given to `files=` of the save.

        Raises:
            UsageError: the checkpoint has no such file.
            CorruptCheckpointError: it is not what was written.
            StepNotFoundError: the checkpoint was deleted meanwhile.
            StorageError: the store failed.
        """
        manifest = await self.manifest()
        prefix = f"{manifest.save_id[:8]}-"
        users = {r.name.removeprefix(prefix): r for r in manifest.files if r.kind == "user"}
        if name not in users:
            known = ", ".join(users) or "none"
            raise UsageError(f"step {self.step} has no file {name!r}; there are: {known}", step=self.step)
        data = await self._get(users[name])
        if await offload(digest, data) != users[name].digest:
            raise self.place.corrupt("the file does not match its checksum", users[name].name)
        return data


def as_budget(budget: int | ByteBudget | None) -> ByteBudget:
    """A budget for blocks, or the default one.

    Raises:
        UsageError: it is too small for two blocks of a piece each.
    """
    if not isinstance(budget, ByteBudget):
        budget = ByteBudget(RING_BLOCKS * BLOCK_BYTES if budget is None else budget)
    block_bytes(budget)
    return budget


def block_bytes(budget: ByteBudget) -> int:
    """The size of a reader's blocks under a budget: whole pieces, two blocks at least."""
    fitting = budget.total // MIN_BLOCKS // PIECE_BYTES * PIECE_BYTES
    if fitting < PIECE_BYTES:
        raise UsageError(
            f"a budget of {budget.total} bytes is too small: a load takes at least {MIN_BLOCKS} MiB"
        )
    return min(BLOCK_BYTES, fitting)
