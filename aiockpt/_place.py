"""Which folder a save goes to: the order of steps, generations, the run's own record."""

from __future__ import annotations

import json
import operator
import time
import uuid
from typing import Any

from ._door import translate
from ._names import RESERVED, RUN_FILE, StepNames
from ._pinned import pinned_if_any
from ._runfiles import RunFiles
from ._runlock import RunLock
from .catalog import Catalog
from .checkpoint import Checkpoint
from .errors import CorruptCheckpointError, StepError, StepExistsError, UnsupportedFormatError, UsageError
from .storage import Store

RUN_FORMAT = 0
RUN_LIMIT = 1 << 20
"""Bytes of `run.json` at the most."""


def as_step(step: Any) -> int:
    """`step` as an int.

    Raises:
        StepError: it is no whole number >= 0 (bool counts as a mistake).
    """
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise StepError(f"step must be an int >= 0, not {step!r:.80}") from None
    if not 0 <= number < 1 << 63:
        raise StepError(f"step must be an int from 0 to 2**63 - 1, not {number}", step=number)
    return number


def as_json(value: Any, what: str) -> Any:
    """A copy of plain JSON.

    Raises:
        UsageError: it is none.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} must be plain JSON: {error}") from error


async def open_run(store: Store, names: StepNames, meta: Any, files: RunFiles) -> str:
    """The run's id: read from `run.json`, or made now and kept from then on.

    Raises:
        UsageError: the run was begun with another `step_format` or another content of one of
            its files, or `meta` cannot be kept.
        CorruptCheckpointError: `run.json` is there and is not one.
    """
    fresh = {
        "format": RUN_FORMAT,
        "run_id": uuid.uuid4().hex,
        "created": time.time(),
        "step_format": names.step_format,
        "meta": meta,
        "files": files.record,
    }
    try:
        await store.put(RUN_FILE, _encode_run(fresh), if_absent=True)
        return str(fresh["run_id"])
    except FileExistsError:
        record = read_run(await store.get(RUN_FILE, limit=RUN_LIMIT))
    if record["step_format"] != names.step_format:
        raise UsageError(
            f"the run names its steps {record['step_format']!r}, this saver {names.step_format!r}: "
            "pass the run's own step_format=, or use a new run folder",
            file=RUN_FILE,
        )
    merged = files.merge(record.get("files"))
    if files.record and merged != record.get("files"):
        await store.put(RUN_FILE, _encode_run({**record, "files": merged}))
    return str(record["run_id"])


def _encode_run(record: dict[str, Any]) -> bytes:
    data = (json.dumps(record, indent=2) + "\n").encode()
    if len(data) > RUN_LIMIT:  # else no saver could be entered again
        raise UsageError(f"meta of the run has {len(data)} bytes, the limit is {RUN_LIMIT}", file=RUN_FILE)
    return data


def read_run(data: bytes) -> dict[str, Any]:
    """Check and decode `run.json`.

    Raises:
        CorruptCheckpointError: it is not one.
    """
    try:
        record = json.loads(data)
        sound = isinstance(record["run_id"], str) and isinstance(record["step_format"], str)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"not a run's record: {error}", file=RUN_FILE) from error
    if not sound:
        raise CorruptCheckpointError("not a run's record", file=RUN_FILE)
    return dict(record)


class Places:
    """Where each step of a run goes, and which steps may still come."""

    def __init__(self, store: Store, names: StepNames, catalog: Catalog) -> None:
        self._store = store
        self._names = names
        self._catalog = catalog
        self.lock = RunLock(store)
        """Keeps other writers out."""
        self.newest = -1
        """The highest step that is committed, as far as this saver knows."""
        self.passed_over: set[str] = set()
        """Folders whose manifest is sound and whose data is not, as a restore found out."""

    async def refresh(self) -> None:
        """Learn the newest committed step from the store."""
        self.newest = max(await self._catalog.steps(), default=-1)

    async def find(self, step: int, *, overwrite: bool) -> tuple[str, int, list[str]]:
        """The folder for a save of `step`.

        Returns:
            (folder name, generation, folders of the same step to retire after the commit).

        Raises:
            StepExistsError: the step is committed and `overwrite` was not said.
            StepError: the step is not above the newest committed one.
        """
        generations, folders = await self._generations(step)
        if step <= self.newest or generations:
            exists = await self._exists(step)
            if exists and not overwrite:
                raise StepExistsError(
                    f"step {step} is committed already; overwrite=True writes it anew",
                    step=step,
                    file=self._names.folder(step, max(generations)),
                )
            if not exists and step < self.newest:
                raise StepError(
                    f"step {step} is not above the newest committed step {self.newest}; to go back, "
                    "restore(step=..., rewind=True) retires the later ones first",
                    step=step,
                )
        generation = max(generations, default=-1) + 1
        name = self._names.folder(step, generation)
        if name in RESERVED:
            raise StepError(f"step {step} would be called {name!r}, which the run needs itself", step=step)
        # Without `overwrite` they are damaged ones: evidence, which nobody asked us to remove.
        return name, generation, folders if overwrite else []

    async def pass_over(self, restored: Checkpoint) -> None:
        """A restore went back over damaged steps: the run goes on from there, and may reach them again.

        Raises:
            StorageError: the store failed.
        """
        steps = {step for step, _ in restored.skipped}
        if steps:
            found = await self._catalog.checkpoints()
            self.passed_over |= {c.name for c in found if c.step in steps and c.step > restored.step}
            self.newest = max((c.step for c in found if c.name not in self.passed_over), default=-1)

    async def is_wanted(self, name: str) -> bool:
        """Whether a step whose deletion was cut short is to come back: leased or promoted meanwhile.

        One above the newest stays away: a rewind has retired it.

        Raises:
            OSError: it cannot be known now.
        """
        parsed = self._names.parse(name)
        if parsed is None or parsed[0] >= self.newest:
            return False
        return name in {folder for folder, _ in await pinned_if_any(self._store)}

    async def rewind(self, checkpoint: Checkpoint) -> None:
        """Retire every committed step above the checkpoint's, newest first.

        Of several generations the oldest goes first: cut short, none of them shows up again.

        Raises:
            StepNotFoundError: another process has deleted the checkpoint meanwhile; the rest is there.
            StorageError: the store failed; the steps it had come to are still there.
        """
        later = [step for step in await self._catalog.steps() if step > checkpoint.step]
        if later:
            # Leased: somebody who prunes may have found it old before, and must not delete it after.
            async with self._catalog.lease(checkpoint):
                for step in reversed(later):
                    await self._retire(step)
        self.newest = checkpoint.step

    async def _retire(self, step: int) -> None:
        try:
            for folder in (await self._generations(step))[1]:
                await self._store.retire(folder)
        except OSError as error:
            raise translate(error, "cannot retire", step=step) from error

    async def _generations(self, step: int) -> tuple[list[int], list[str]]:
        """Generations of the step whose name is taken, valid or not; their folders, oldest first."""
        found: list[int] = []
        folders: list[tuple[int, str]] = []
        for entry in await self._store.list():
            parsed = self._names.parse(entry.name)
            if parsed is None:
                continue
            if parsed[0] == step:
                found.append(parsed[1])
                folders += [(parsed[1], entry.name)] if entry.is_folder else []
            elif entry.is_folder and parsed[0] > self.newest and await self._exists(parsed[0]):
                self.newest = parsed[0]
        return sorted(found), [name for _, name in sorted(folders)]

    async def _exists(self, step: int) -> bool:
        try:
            found = await self._catalog.get(step)
        except UnsupportedFormatError:
            return True
        except (FileNotFoundError, CorruptCheckpointError):
            return False
        return found.name not in self.passed_over
