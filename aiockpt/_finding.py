"""Find the checkpoint that is meant: the newest valid one, or a certain step.

Damaged steps are passed over and logged, once each. A step that vanishes between being
listed and being read was deleted by somebody else: the run is listed again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from ._listing import (
    Candidate,
    RunInfo,
    UnfinishedError,
    VanishedError,
    candidates,
    check_files,
    describe_step,
    read_manifest,
    read_run,
)
from ._log import log
from ._manifest import Manifest
from ._names import RUN_FILE
from .checkpoint import Checkpoint
from .errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepNotFoundError,
    UnsupportedFormatError,
    UsageError,
)
from .storage import Store

__all__ = ["Finder", "Found"]

T = TypeVar("T")
Found = tuple[Checkpoint, Manifest]


TRIES: Final = 500
"""How often in a row the step we are at may be deleted before we give up."""


class Finder:
    """The steps of one run, as a reader sees them.

    Args:
        store: the run.
        step_format: names of the steps' folders; None: what `run.json` says.
    """

    def __init__(self, store: Store, step_format: str | None) -> None:
        self.store = store
        self._step_format = step_format
        self._run: RunInfo | None = None
        self._told: set[str] = set()

    async def candidates(self) -> list[Candidate]:
        """Every folder that is named as a step, oldest first.

        Raises:
            CorruptCheckpointError: `run.json` is damaged and nothing is found without it.
            StorageError: the store failed.
        """
        if self._run is None or not self._run.run_id:
            self._run = await read_run(self.store, self._step_format)
        found = await candidates(self.store, self._run.names)
        if self._run.problem:
            if not found and self._step_format is None:
                # Its steps may be there under names we cannot know: that is not an empty run.
                raise CorruptCheckpointError(self._run.problem, file=RUN_FILE)
            if RUN_FILE not in self._told:
                self._told.add(RUN_FILE)
                log.warning("%s: %s", self.store.url, self._run.problem)
        return found

    async def inspect(self, candidate: Candidate) -> Found:
        """Check a step's manifest and its files' names and sizes.

        Raises:
            VanishedError: it was deleted meanwhile.
            CorruptCheckpointError: it is damaged.
            UnsupportedFormatError: it was written by a newer aiockpt.
            StorageError: the store failed.
        """
        manifest = await read_manifest(self.store, candidate)
        await check_files(self.store, candidate, manifest)
        return await describe_step(self.store, candidate, manifest), manifest

    async def checkpoints(self) -> tuple[Checkpoint, ...]:
        """A record of each valid checkpoint, ascending; the newest generation of each.

        Raises:
            StorageError: the store failed.
        """
        found: dict[int, Checkpoint] = {}
        for candidate in await self.candidates():
            try:
                found[candidate.step] = (await self.inspect(candidate))[0]
            except (VanishedError, CorruptCheckpointError, UnsupportedFormatError) as error:
                self.tell(candidate, error)
        return tuple(found[step] for step in sorted(found))

    def tell(self, candidate: Candidate, error: CheckpointError) -> None:
        """Log why a step is passed over, once."""
        if isinstance(error, VanishedError) or candidate.name in self._told:
            return
        self._told.add(candidate.name)
        facts = {"step": candidate.step, "file": error.file}
        log.warning("%s: %s is passed over: %s", self.store.url, candidate.name, error, extra=facts)

    async def newest(
        self, use: Callable[[Checkpoint, Manifest], Awaitable[T]]
    ) -> tuple[Checkpoint, T, tuple[tuple[int, str], ...]] | None:
        """The newest checkpoint that can be used, what came of using it, and what was passed over.

        Args:
            use: raises CorruptCheckpointError for a checkpoint that turns out to be damaged;
                the next older one is tried then.

        Raises:
            CorruptCheckpointError: there are steps and none of them is valid.
            Exception: whatever else `use` raised.
        """
        passed: dict[str, CorruptCheckpointError] = {}
        for _ in range(TRIES):
            try:
                for candidate in reversed(await self.candidates()):
                    if candidate.name not in passed:
                        try:
                            checkpoint, manifest = await self.inspect(candidate)
                            outcome = await use(checkpoint, manifest)
                        except CorruptCheckpointError as error:
                            self.tell(candidate, error)
                            passed[candidate.name] = error
                        except UnfinishedError:
                            continue
                        else:
                            return checkpoint, outcome, _skipped(passed)
            except VanishedError:
                continue  # deleted under our eyes; whoever did that has a newer one
            if passed:
                raise _none_valid(self.store.url, passed)
            return None
        raise StepNotFoundError(
            f"{self.store.url}: steps are deleted faster than they can be read", file=self.store.url
        )

    async def resolve(self, checkpoint: Checkpoint | int) -> Found:
        """The checkpoint that a caller names, by its record or by its step.

        Raises:
            UsageError: it is neither.
            StepNotFoundError: there is none, or it was written anew since the record was got.
            As `inspect`.
        """
        if isinstance(checkpoint, bool) or not isinstance(checkpoint, (int, Checkpoint)):
            raise UsageError(f"a checkpoint is a Checkpoint or a step, not {checkpoint!r:.80}")
        if isinstance(checkpoint, int):
            return await self.get(checkpoint)
        found = await self.inspect(Candidate(checkpoint.step, checkpoint.generation, checkpoint.name))
        if found[0].save_id != checkpoint.save_id:
            raise StepNotFoundError(
                f"step {checkpoint.step} is not the one you got: it was written anew meanwhile",
                step=checkpoint.step,
                file=checkpoint.name,
            )
        return found

    async def named(self, name: str, save_id: str) -> Checkpoint:
        """The checkpoint in a certain folder.

        Raises:
            CorruptCheckpointError: no step is ever called so.
            StepNotFoundError: there is none, or another save has the name.
            As `inspect`.
        """
        await self.candidates()  # which learns how the run names its steps
        assert self._run is not None
        numbers = self._run.names.parse(name)
        if numbers is None:
            raise CorruptCheckpointError(f"{name!r:.80} is no name of a step", file=name[:255])
        found = (await self.inspect(Candidate(*numbers, name)))[0]
        if found.save_id != save_id:
            message = f"step {found.step} is another save than the one that was meant"
            raise StepNotFoundError(message, step=found.step, file=name)
        return found

    async def get(self, step: int) -> Found:
        """The newest valid generation of a step.

        Raises:
            StepNotFoundError: there is none.
            CorruptCheckpointError: it is damaged.
            UnsupportedFormatError: it was written by a newer aiockpt.
            StorageError: the store failed.
        """
        for _ in range(TRIES):
            present = await self.candidates()
            try:
                return await self._best([c for c in present if c.step == step], step)
            except VanishedError:
                continue  # perhaps written anew, as another generation
        raise StepNotFoundError(f"step {step} is deleted faster than it can be read", step=step)

    async def _best(self, generations: list[Candidate], step: int) -> Found:
        damage: CorruptCheckpointError | None = None
        for candidate in reversed(generations):
            try:
                return await self.inspect(candidate)
            except UnfinishedError:
                continue
            except CorruptCheckpointError as error:
                self.tell(candidate, error)
                damage = damage or error
        if damage is not None:
            raise damage
        raise StepNotFoundError(f"{self.store.url} has no step {step}", step=step, file=self.store.url)


def _skipped(passed: dict[str, CorruptCheckpointError]) -> tuple[tuple[int, str], ...]:
    return tuple((-1 if error.step is None else error.step, str(error)) for error in passed.values())


def _none_valid(url: str, passed: dict[str, CorruptCheckpointError]) -> CorruptCheckpointError:
    newest = next(iter(passed.values()))
    steps = f"none of the {len(passed)} steps of {url} is valid: " if len(passed) > 1 else ""
    error = CorruptCheckpointError(
        f"{steps}{newest.reason}",
        step=newest.step,
        file=newest.file,
        path=newest.path,
        touched=newest.touched,
    )
    error.__cause__ = newest
    return error
