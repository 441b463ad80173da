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
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from ._finding import Finder
from ._listing import VanishedError, read_manifest
from ._loader import Loader, LoadOptions
from ._manifest import Manifest
from ._memory import ByteBudget
from ._sharing import Sharing
from .checkpoint import Checkpoint
from .errors import CorruptCheckpointError, StepNotFoundError, UnsupportedFormatError, UsageError
from .reader import VerifyReport, as_budget
from .storage import Store, open_store

__all__ = ["Catalog", "LoadOptions", "Valid"]

Valid = Literal["manifest", "full"]
"""How well a step is looked at: its manifest and its files' sizes, or every byte."""


class Catalog(Sharing):
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
        self.loader = Loader(self._finder, self.store, as_budget(budget), allow_pickle)

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
        return await self._finder.checkpoints()

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
                await self.loader.reader(checkpoint, manifest).verify()

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
                function, told after each read, or True for a bar on a terminal.

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
        found = await self.loader.load(checkpoint, into, options)
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
        found = await self.loader.load(step, into, options)
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
        return await self.loader.reader(*await self._finder.resolve(checkpoint)).verify()

    async def read_file(self, checkpoint: Checkpoint | int, name: str) -> bytes:
        """One of the user's own files that were committed with a checkpoint, verified.

        Raises:
            UsageError: the checkpoint has no such file.
            CorruptCheckpointError: the file is not what was written.
            StepNotFoundError: there is no such checkpoint.
            StorageError: the store failed.
        """
        return await self.loader.reader(*await self._finder.resolve(checkpoint)).read_file(name)
