"""Which checkpoints a run holds, and whether each looks whole without reading its data.

A step is a checkpoint if and only if its manifest is there and valid. Here valid means:
the manifest decodes, every file it names is there with its size, and nothing else is.
That costs two small calls a step; `_verify` reads everything.

Other processes delete steps while we look. What is gone when it was there a moment ago
is `VanishedError`, never damage: whoever asked for the newest looks again.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ._manifest import MANIFEST, MANIFEST_LIMIT, Manifest, decode_manifest
from ._names import RUN_FILE, STEP_FORMAT, StepNames
from ._records import describe
from ._threads import Lane, offload
from .checkpoint import Checkpoint
from .errors import CheckpointError, CorruptCheckpointError, StepNotFoundError, StorageError, UsageError
from .storage import Entry, Store

__all__ = [
    "Candidate",
    "RunInfo",
    "UnfinishedError",
    "VanishedError",
    "candidates",
    "check_files",
    "describe_step",
    "files_problem",
    "read_manifest",
    "read_run",
]

_RUN_LIMIT = 64 << 20
_FOREIGN_ATTEMPT = re.compile(r"[0-9a-f]{8,32}-.")

LOOKS: Final = 3
"""How often a run is listed before it counts as empty."""


class VanishedError(StepNotFoundError):
    """The step was deleted between being listed and being read."""


class UnfinishedError(VanishedError):
    """Not a checkpoint yet: an attempt that lies under the step's name, without a manifest."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A folder whose name says that it is a step."""

    step: int
    generation: int
    name: str


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What `run.json` says."""

    names: StepNames
    run_id: str = ""
    meta: Any = None
    problem: str | None = None
    """Why the file could not be used although it is there."""


async def read_run(store: Store, step_format: str | None = None) -> RunInfo:
    """Read `run.json`; a missing one means the defaults.

    Args:
        store: the run.
        step_format: used in place of what the file says.

    Raises:
        UsageError: `step_format` is none.
        StorageError: the store failed.
    """
    names = StepNames(step_format or STEP_FORMAT)
    try:
        data = await store.get(RUN_FILE, limit=_RUN_LIMIT)
    except FileNotFoundError:
        return RunInfo(names)
    except OSError as error:
        raise StorageError.wrap(error, "read", file=RUN_FILE) from error
    try:
        found: Any = await offload(msgspec.json.decode, data, lane=Lane.CONTROL)
        text = found["step_format"]
        if step_format is None:
            names = StepNames(text) if isinstance(text, str) else names
        return RunInfo(names, str(found["run_id"]), found.get("meta"))
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        TypeError,
        KeyError,
        UsageError,
    ) as error:
        return RunInfo(
            names, problem=f"{RUN_FILE} is damaged ({error}); step_format {names.step_format!r} is assumed"
        )


async def candidates(store: Store, names: StepNames) -> list[Candidate]:
    """Every folder that is named as a step, oldest first; numbers decide, never the text.

    A run that does not exist has none. Of a run that seems to have none, a second and a third
    look must say so: a folder that is read while its only step is renamed away and the next
    one comes may show neither of the two, and no step at all means to begin anew.

    Raises:
        StorageError: the store failed.
    """
    for _ in range(LOOKS):
        try:
            entries = await store.list()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError.wrap(error, "list", file=store.url) from error
        parsed = ((names.parse(entry.name), entry.name) for entry in entries if entry.is_folder)
        found = sorted(Candidate(*numbers, name) for numbers, name in parsed if numbers)
        if found:
            return found
    return []


async def read_manifest(store: Store, candidate: Candidate) -> Manifest:
    """Read and decode a step's manifest.

    Raises:
        VanishedError: the step was deleted meanwhile, or is an attempt nobody committed.
        CorruptCheckpointError: the manifest is damaged or missing.
        UnsupportedFormatError: it is sound and of a newer format.
        StorageError: the store failed.
    """
    try:
        data = await store.get(f"{candidate.name}/{MANIFEST}", limit=MANIFEST_LIMIT)
    except FileNotFoundError:
        entries = await _entries(store, candidate)
        # On stores without rename, attempts lie under the step's own name, each file with its save id.
        if entries and all(_FOREIGN_ATTEMPT.match(entry.name) for entry in entries):
            message = f"step {candidate.step} is not committed"
            raise UnfinishedError(message, step=candidate.step, file=candidate.name) from None
        raise _corrupt(candidate, "the manifest is missing", MANIFEST) from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            message = f"the manifest has more than {MANIFEST_LIMIT} bytes"
            raise _corrupt(candidate, message, MANIFEST) from error
        raise StorageError.wrap(
            error, "read", file=f"{candidate.name}/{MANIFEST}", step=candidate.step
        ) from error
    return await offload(_decode, data, candidate, lane=Lane.CONTROL)


def _decode(data: bytes, candidate: Candidate) -> Manifest:
    return decode_manifest(data, step=candidate.step)


async def check_files(store: Store, candidate: Candidate, manifest: Manifest) -> None:
    """Compare the files that are there with those the manifest names.

    Raises:
        VanishedError: the step was deleted meanwhile.
        CorruptCheckpointError: a file is missing, too many, or of another size.
        StorageError: the store failed.
    """
    problem = files_problem(manifest, await _entries(store, candidate))
    if problem is None:
        return
    # Being deleted, manifest first? Then it is no damage.
    await read_manifest(store, candidate)
    raise _corrupt(candidate, problem[1], problem[0])


def files_problem(manifest: Manifest, entries: Sequence[Entry]) -> tuple[str, str] | None:
    """(file, what is wrong) with a step's folder, or None. Pure.

    Tolerated are the empty markers that the manifest allows, names of deleted files that NFS
    keeps for others (`.nfs...`), and on stores where attempts share the step's folder, files of
    other attempts.
    """
    there = {entry.name: entry for entry in entries}
    for record in manifest.files:
        entry = there.pop(record.name, None)
        if entry is None or entry.is_folder:
            return record.name, "the file is missing"
        if entry.size != record.size:
            return record.name, f"the file has {entry.size} bytes instead of {record.size}"
    there.pop(MANIFEST, None)
    for name in manifest.markers:
        if name in there and there[name].size == 0:
            del there[name]
    own = f"{manifest.save_id[:8]}"
    shared = all(record.name.startswith(own) for record in manifest.files) and bool(manifest.files)
    for name in there:
        tolerated = name.startswith(".nfs") or (shared and _FOREIGN_ATTEMPT.match(name))
        if not tolerated:
            return name[:255], "the file does not belong to the checkpoint"
    return None


async def _entries(store: Store, candidate: Candidate) -> list[Entry]:
    try:
        return await store.list(candidate.name)
    except FileNotFoundError:
        raise _vanished(candidate) from None
    except OSError as error:
        raise StorageError.wrap(error, "list", file=candidate.name, step=candidate.step) from error


async def describe_step(store: Store, candidate: Candidate, manifest: Manifest) -> Checkpoint:
    """The public record of a step.

    Raises:
        CorruptCheckpointError: metrics or meta cannot be decoded.
    """
    return await offload(_describe, manifest, store.url, candidate, lane=Lane.CONTROL)


def _describe(manifest: Manifest, url: str, candidate: Candidate) -> Checkpoint:
    try:
        found = describe(manifest, url, candidate.name, candidate.generation)
        if not isinstance(found.metrics, dict):
            raise TypeError("its metrics are no dict")
    except CheckpointError as error:
        error.file = error.file or MANIFEST
        raise error.at(candidate.step) from error.__cause__
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise _corrupt(candidate, f"not a manifest: {error}", MANIFEST) from error
    return found


def _vanished(candidate: Candidate) -> VanishedError:
    return VanishedError(
        f"step {candidate.step} was deleted while it was being read", step=candidate.step, file=candidate.name
    )


def _corrupt(candidate: Candidate, reason: str, file: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(reason, step=candidate.step, file=file)
