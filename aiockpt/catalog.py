"""Catalog: which checkpoints a run has, and loading them. Needs no writer.

Any process may look, also on a read-only file system, while another one saves and
deletes. A damaged step is passed over where the newest is asked for, and logged once;
where it is asked for by number it is an error. Damage is never repaired or removed.
Nothing is written but leases and aliases, on demand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from ._aliases import Aliases, check_alias
from ._door import translate
from ._finding import Finder
from ._leases import Lease
from ._listing import VanishedError, read_manifest
from ._loader import Loader, LoadOptions
from ._manifest import Manifest
from ._memory import ByteBudget
from ._pinned import pinned, pinned_if_any
from ._retention import Retention
from .checkpoint import Checkpoint
from .errors import CorruptCheckpointError, StepNotFoundError, UnsupportedFormatError, UsageError
from .policies import Keep, KeepFunction, as_keep
from .reader import VerifyReport, as_budget
from .storage import Store, open_store

__all__ = ["Catalog", "LoadOptions", "Valid", "latest", "load"]

Valid = Literal["manifest", "full"]
"""How well a step is looked at: its manifest and its files' sizes, or every byte."""


class Catalog:
    """The checkpoints of one run.

    An async context manager; what it opened itself is closed when it is left.

    Args:
        run: the run's folder or URL, or a store.
        budget: bytes of host memory for loads, or a `ByteBudget` shared with others; by
            default four blocks of 16 MiB.
        allow_pickle: whether pickled values may be unpickled. Only for files you trust:
            unpickling runs code from the file.
        step_format: names of the steps' folders; by default what the run says of itself.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Store,
        *,
        budget: int | ByteBudget | None = None,
        allow_pickle: bool = False,
        step_format: str | None = None,
    ) -> None:
        self.store = open_store(run)
        self._owned = self.store is not run
        self._finder = Finder(self.store, step_format)
        self._aliases = Aliases(self._finder)
        self._loader = Loader(self._finder, self.store, as_budget(budget), allow_pickle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of the store, if it was opened here; any number of times."""
        if self._owned:
            await self.store.aclose()

    async def steps(self) -> tuple[int, ...]:
        """The committed steps, ascending: those whose manifest is sound.

        Whether their data is, too, only `verify` can tell. Steps in a newer format count.

        Raises:
            StorageError: the store failed.
        """
        found: set[int] = set()
        for candidate in await self._finder.candidates():
            try:
                await read_manifest(self.store, candidate)
            except UnsupportedFormatError:
                pass
            except (VanishedError, CorruptCheckpointError) as error:
                self._finder.tell(candidate, error)
                continue
            found.add(candidate.step)
        return tuple(sorted(found))

    async def checkpoints(self) -> tuple[Checkpoint, ...]:
        """A record of each valid checkpoint this aiockpt can read, ascending; the newest generation of each.

        Raises:
            StorageError: the store failed.
        """
        found: dict[int, Checkpoint] = {}
        for candidate in await self._finder.candidates():
            try:
                found[candidate.step] = (await self._finder.inspect(candidate))[0]
            except (VanishedError, CorruptCheckpointError, UnsupportedFormatError) as error:
                self._finder.tell(candidate, error)
        return tuple(found[step] for step in sorted(found))

    async def latest(self, valid: Valid = "manifest") -> Checkpoint | None:
        """The newest valid checkpoint, or None for a run without any.

        Damaged steps are passed over; each is logged once, and all are in `.skipped`.

        Args:
            valid: `manifest` looks at the manifest and the files' names and sizes; `full`
                reads and checks every byte.

        Raises:
            CorruptCheckpointError: there are steps and none of them is valid.
            UnsupportedFormatError: the newest valid one was written by a newer aiockpt.
            StorageError: the store failed.
        """
        if valid not in ("manifest", "full"):
            raise UsageError(f"valid is 'manifest' or 'full', not {valid!r}")

        async def look(checkpoint: Checkpoint, manifest: Manifest) -> None:
            if valid == "full":
                await self._loader.reader(checkpoint, manifest).verify()

        found = await self._finder.newest(look)
        return None if found is None else replace(found[0], skipped=found[2])

    async def get(self, step: int) -> Checkpoint:
        """The checkpoint of a step; of several generations the newest valid one.

        Raises:
            StepNotFoundError: there is none.
            CorruptCheckpointError: there is, and it is damaged.
            UnsupportedFormatError: it was written by a newer aiockpt.
            StorageError: the store failed.
        """
        return (await self._finder.get(step))[0]

    @overload
    async def load(
        self, checkpoint: Checkpoint | int | None = None, *, into: None = None, **options: Unpack[LoadOptions]
    ) -> Any: ...

    @overload
    async def load(
        self, checkpoint: Checkpoint | int | None = None, *, into: object, **options: Unpack[LoadOptions]
    ) -> Checkpoint: ...

    async def load(
        self, checkpoint: Checkpoint | int | None = None, *, into: Any = None, **options: Unpack[LoadOptions]
    ) -> Any:
        """Load a checkpoint, or fill living objects with it.

        Without `into` the whole state comes back as it was saved: types, order, ties.
        With it, everything is compared first; then bytes are read in pieces, verified,
        and only then copied into what lives. At most four reads and four blocks are in
        flight, whatever the size.

        Args:
            checkpoint: from this catalog, or a step; None for the newest valid one.
            into: a dict of what to fill, by top-level entry of the state (entries that are
                not in it are not asked for), or one object for the whole state. Modules,
                tensors, arrays and containers are filled in place, what has a
                `load_state_dict` gets its part. Values that cannot be filled in place come
                back in `.values`.
            **options: `paths`: only what lies at or under these paths, without reading the
                rest. `map_location`: device of new tensors (None: host memory; a device;
                a function from path to device). `strict=False`: fill what fits and report
                the rest. `cast=True`: convert dtypes. `verify=False`: no checksums of data.
                `atomic=True`: verify everything before touching anything. `progress`: a
                function, told after each read.

        Returns:
            The state; with `into`, the `Checkpoint` with `.values`, `.report` and `.skipped`.

        Raises:
            StepNotFoundError: there is no such checkpoint.
            StateMismatchError: it does not fit `into`; nothing was touched.
            CorruptCheckpointError: it is damaged; `.touched` names what in `into` was filled
                by then. For the newest: there are steps and none is valid.
            UnsupportedFormatError: it was written by a newer aiockpt.
            PickleRefusedError: it holds pickled values and `allow_pickle` was not said.
            CheckpointError: an object of `into` refused its state.
            StorageError: the store failed.
        """
        found = await self._loader.load(checkpoint, into, options)
        if found is None:
            raise StepNotFoundError(f"{self.store.url} has no checkpoint", file=self.store.url)
        return found[1].state if into is None else found[0]

    async def restore(
        self, into: Any = None, *, step: int | None = None, **options: Unpack[LoadOptions]
    ) -> Checkpoint | None:
        """As `load`, for a run that may be new: None if there is no checkpoint at all.

        Without `into`, `.values` of the returned checkpoint is the state (a state that is no
        dict is its only value, under the empty name).

        Raises:
            As `load`.
        """
        found = await self._loader.load(step, into, options)
        if found is None or into is not None:
            return None if found is None else found[0]
        state = found[1].state
        return replace(found[0], values=state if isinstance(state, Mapping) else {"": state})

    async def verify(self, checkpoint: Checkpoint | int | None = None) -> VerifyReport:
        """Read every byte of a checkpoint and compare it with what was written.

        Args:
            checkpoint: from this catalog, or a step; None for the newest, be it damaged or not.

        Raises:
            CorruptCheckpointError: naming the file, and the path where it is known.
            StepNotFoundError: there is no such checkpoint.
            StorageError: the store failed.
        """
        if checkpoint is None:
            present = await self._finder.candidates()
            if not present:
                raise StepNotFoundError(f"{self.store.url} has no checkpoint", file=self.store.url)
            checkpoint = present[-1].step
        return await self._loader.reader(*await self._finder.resolve(checkpoint)).verify()

    async def read_file(self, checkpoint: Checkpoint | int, name: str) -> bytes:
        """One of the user's own files that were committed with a checkpoint, verified.

        Raises:
            UsageError: the checkpoint has no such file.
            CorruptCheckpointError: the file is not what was written.
            StepNotFoundError: there is no such checkpoint.
            StorageError: the store failed.
        """
        return await self._loader.reader(*await self._finder.resolve(checkpoint)).read_file(name)

    # -------------------------------------------------------------- sharing a run

    def lease(self, checkpoint: Checkpoint | int | None = None, *, ttl: float = 60.0) -> Lease:
        """Keep a checkpoint from being deleted: `async with catalog.lease() as lease:`.

        A task of this loop renews it; a reader that died keeps the checkpoint for `ttl` seconds
        more. Where a run cannot be written there is one warning, and the files are held open.

        Args:
            checkpoint: from this catalog, or a step; None for the newest valid one.
            ttl: seconds; more than three times what the loop may ever be blocked.

        Raises:
            StepNotFoundError: on entering: there is no such checkpoint, or it is gone.
            As `get`.
        """
        return Lease(self._loader, checkpoint, ttl)

    async def promote(self, checkpoint: Checkpoint | int, alias: str = "production") -> Checkpoint:
        """Let an alias point at a valid checkpoint, in one step; retention keeps it then.

        Of two who promote at once the last one wins.

        Args:
            checkpoint: from this catalog, or a step.
            alias: letters, digits, `.`, `_` and `-`.

        Raises:
            UsageError: it is no name for an alias.
            As `get`; the alias is as it was then.
        """
        check_alias(alias)
        # Leased until the alias is there: had it to be taken back, what it pointed at before
        # would have been unprotected meanwhile.
        async with self.lease(checkpoint) as lease:
            return await self._aliases.promote(lease.checkpoint, alias)

    async def alias(self, alias: str = "production") -> Checkpoint:
        """The checkpoint that an alias points at.

        Raises:
            StepNotFoundError: there is no such alias, or its checkpoint is gone.
            CorruptCheckpointError: the alias or the checkpoint is damaged.
            StorageError: the store failed.
        """
        return await self._aliases.alias(alias)

    async def aliases(self) -> dict[str, Checkpoint]:
        """Every alias that points at a checkpoint; others are logged. Raises StorageError."""
        return await self._aliases.aliases()

    async def prune(self, keep: Keep | KeepFunction, *, dry_run: bool = True) -> tuple[int, ...]:
        """Delete what a policy lets go, as a saver does after a commit.

        Only valid checkpoints of the newest one's run are candidates. The newest stays in any
        case, and so does what is leased or promoted. A saver may be at work meanwhile.

        Args:
            keep: which steps stay, as for `Saver(keep=...)`.
            dry_run: only say what would go; say `dry_run=False` to delete it.

        Returns:
            The steps that went, or would go, oldest first. What could not be deleted is logged.

        Raises:
            UsageError: the policy returned something else than steps.
            StorageError: the store failed.
        """
        newest = await self.latest()
        if newest is None:
            return ()
        # Where nobody ever leased or promoted anything, a dry run leaves no trace.
        look = pinned_if_any if dry_run else pinned
        retention = Retention(self.store, self.checkpoints, partial(look, self.store))
        policy = as_keep(keep)
        try:
            doomed = await retention.plan(policy, newest.run_id)
        except OSError as error:
            raise translate(error, "cannot look for what may go in", step=None) from error
        if dry_run:
            return tuple(checkpoint.step for checkpoint in doomed)
        return tuple(await retention.apply(policy, newest.run_id))

    async def demote(self, alias: str = "production") -> None:
        """Remove an alias; the checkpoint stays until retention takes it. A missing one is no error.

        Raises:
            StorageError: the store failed.
        """
        await self._aliases.demote(alias)


async def latest(
    run: str | os.PathLike[str] | Store, valid: Valid = "manifest", *, step_format: str | None = None
) -> Checkpoint | None:
    """The newest valid checkpoint of a run, or None; see `Catalog.latest`."""
    async with Catalog(run, step_format=step_format) as catalog:
        return await catalog.latest(valid)


@overload
async def load(
    run: str | os.PathLike[str] | Store,
    checkpoint: Checkpoint | int | None = None,
    *,
    into: None = None,
    budget: int | ByteBudget | None = None,
    allow_pickle: bool = False,
    step_format: str | None = None,
    **options: Unpack[LoadOptions],
) -> Any: ...


@overload
async def load(
    run: str | os.PathLike[str] | Store,
    checkpoint: Checkpoint | int | None = None,
    *,
    into: object,
    budget: int | ByteBudget | None = None,
    allow_pickle: bool = False,
    step_format: str | None = None,
    **options: Unpack[LoadOptions],
) -> Checkpoint: ...


async def load(
    run: str | os.PathLike[str] | Store,
    checkpoint: Checkpoint | int | None = None,
    *,
    into: Any = None,
    budget: int | ByteBudget | None = None,
    allow_pickle: bool = False,
    step_format: str | None = None,
    **options: Unpack[LoadOptions],
) -> Any:
    """Load a checkpoint of a run, the newest valid one by default; see `Catalog.load`."""
    async with Catalog(run, budget=budget, allow_pickle=allow_pickle, step_format=step_format) as catalog:
        found: Any = await catalog.load(checkpoint, into=into, **options)
        return found
