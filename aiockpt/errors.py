"""Every error of aiockpt, as one tree.

```
CheckpointError(Exception)
├── UsageError(RuntimeError)                mend the call
│   ├── UnsupportedStateError(TypeError)      a leaf that cannot be stored; lists every path
│   ├── StepError(ValueError)                 not a step, or not above the newest
│   ├── BusyError                             not admissible now (overlap, memory)
│   ├── StateMutatedError                     the state changed while it was being copied
│   └── PickleRefusedError                    the checkpoint holds pickled values; say allow_pickle=True
├── StepExistsError(FileExistsError)        choose another step, or overwrite=True
├── StepNotFoundError(FileNotFoundError)    choose another step
├── RunLockedError(BlockingIOError)         somebody else writes the run; says who and since when
├── CorruptCheckpointError(ValueError)      choose another checkpoint; the evidence stays on disk
├── UnsupportedFormatError(ValueError)      written by a newer aiockpt; upgrade
├── StateMismatchError(ValueError)          checkpoint and target differ; nothing was touched
├── StorageError(OSError)                   the store said no: errno and filename as in OSError
├── SaveError(RuntimeError)                 a save failed for another reason, in __cause__
│   ├── SaveCancelledError                    somebody cancelled this save
│   ├── PreviousSaveError                     an earlier save failed unseen; the new one goes on
│   ├── DrainTimeoutError(TimeoutError)       a save did not end within drain_timeout
│   └── CommitUnknownError                    the commit may or may not have happened
├── RanksFailedError(RuntimeError)          some ranks failed, so the collective save or load did
├── ForeignFormatError(ValueError)          a file of another format is damaged, or none that is read
├── UnsafeFileError(ValueError)             a foreign file would run code or reach outside; refused
├── ReloadError(RuntimeError)               a checkpoint was not put to service; the version before serves on
│   └── MemoryShortError(MemoryError)         there is no room for two versions now
├── RequestAbortedError(RuntimeError)       its model is being updated in place: send the request again
├── PublishError(RuntimeError)              the step is committed; telling others of it failed
└── SaveErrors(ExceptionGroup)              several saves failed
```

Each error is also the built-in it resembles, carries its facts as attributes and
survives pickling. `step`, `file` and `path` are on every one of them (None when
they do not apply): the step, the file or key, and where in the state it happened.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Self

__all__ = [
    "BusyError",
    "CheckpointError",
    "CommitUnknownError",
    "CorruptCheckpointError",
    "DrainTimeoutError",
    "ForeignFormatError",
    "MemoryShortError",
    "PickleRefusedError",
    "PreviousSaveError",
    "PublishError",
    "RanksFailedError",
    "ReloadError",
    "RequestAbortedError",
    "RunLockedError",
    "SaveCancelledError",
    "SaveError",
    "SaveErrors",
    "StateMismatchError",
    "StateMutatedError",
    "StepError",
    "StepExistsError",
    "StepNotFoundError",
    "StorageError",
    "UnsafeFileError",
    "UnsupportedFormatError",
    "UnsupportedStateError",
    "UsageError",
]

SHOWN = 20
"""How many offending paths a message spells out; the attributes hold all of them."""

CONVERT = "Convert them, add aiockpt.register_leaf(type, encode, decode), or pass allow_pickle=True."


def _rebuild(cls: type[CheckpointError], args: tuple[Any, ...], facts: dict[str, Any]) -> Any:
    """Unpickle without calling the constructor: facts are keyword-only there."""
    # OSError's memory layout differs: only its own __new__ may make such an object.
    new = OSError.__new__ if issubclass(cls, OSError) else cls.__new__
    error: Any = new(cls, *args)
    error.args = args
    for name, value in facts.items():
        setattr(error, name, value)
    return error


class CheckpointError(Exception):
    """The root: catches everything aiockpt raises on purpose.

    Attributes:
        step: the step concerned, or None.
        file: the file, folder or key concerned, or None.
        path: where in the state, as `model/layers.0.weight`, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        file: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.file = file
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self._facts())

    def _facts(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def at(self, step: int | None) -> Self:
        """Fill in the step where it is still unknown; returns the error itself."""
        if self.step is None:
            self.step = step
        return self


class UsageError(CheckpointError, RuntimeError):
    """The call itself is wrong; nothing was written."""


class UnsupportedStateError(UsageError, TypeError):
    """The state holds something that cannot be stored; no file was made.

    Attributes:
        problems: every offence as (path, reason), in the order of the state.
    """

    def __init__(
        self,
        problems: Sequence[tuple[str, str]],
        *,
        step: int | None = None,
        file: str | None = None,
        remedy: str = CONVERT,
    ) -> None:
        self.problems = tuple(problems)
        shown = [f"  {path or '(the state itself)'}: {why}" for path, why in self.problems[:SHOWN]]
        more = len(self.problems) - len(shown)
        if more:
            shown.append(f"  ... and {more} more")
        message = (
            f"{len(self.problems)} value(s) of the state cannot be stored:\n"
            + "\n".join(shown)
            + f"\n{remedy}"
        )
        path = self.problems[0][0] if self.problems else None
        super().__init__(message, step=step, file=file, path=path)


class StepError(UsageError, ValueError):
    """`step` is not a step (an int >= 0), or not above the run's newest one."""


class BusyError(UsageError):
    """The save cannot be admitted now: too many are pending, or memory is out."""


class StateMutatedError(UsageError):
    """A tensor changed between the call and `staged`; the save was dropped."""


class PickleRefusedError(UsageError):
    """The checkpoint holds pickled values and `allow_pickle=True` was not said."""


class StepExistsError(CheckpointError, FileExistsError):
    """The step is committed already; `overwrite=True` writes a new generation."""


class StepNotFoundError(CheckpointError, FileNotFoundError):
    """The run has no such checkpoint."""


class RunLockedError(CheckpointError, BlockingIOError):
    """Somebody else writes the run: a run has one writer at a time.

    Attributes:
        holder: what is known of him: `host`, `pid`, `job` and the like; None for nothing.
        since: seconds since 1970 on his clock; None when unknown.
    """

    def __init__(self, message: str, *, file: str | None = None, holder: Mapping[str, Any] | None = None):
        super().__init__(message, file=file)
        self.holder = dict(holder) if holder is not None else None
        self.since: float | None = self.holder.get("since") if self.holder is not None else None


class CorruptCheckpointError(CheckpointError, ValueError):
    """The checkpoint is damaged; nothing on disk was changed by finding out.

    Attributes:
        reason: what is wrong, without the location.
        touched: paths of live targets that had already been filled, in order.
    """

    def __init__(
        self,
        reason: str,
        *,
        step: int | None = None,
        file: str | None = None,
        path: str | None = None,
        touched: Sequence[str] = (),
    ) -> None:
        where = [f"step {step}"] if step is not None else []
        where += [f"file {file}"] if file is not None else []
        where += [f"at {path}"] if path is not None else []
        message = f"{', '.join(where) or 'checkpoint'}: {reason}"
        super().__init__(message, step=step, file=file, path=path)
        self.reason = reason
        self.touched = tuple(touched)


class UnsupportedFormatError(CheckpointError, ValueError):
    """The checkpoint has a format version that this aiockpt does not read.

    Attributes:
        found: the version in the manifest, as it stands there.
        supported: the newest version this aiockpt reads.
    """

    def __init__(
        self, found: object, supported: int, *, step: int | None = None, file: str | None = None
    ) -> None:
        message = (
            f"{file or 'manifest'} has format version {str(found)[:40]!r}, this aiockpt reads "
            f"up to {supported}: upgrade aiockpt to read it. Nothing was changed."
        )
        super().__init__(message, step=step, file=file)
        self.found = found
        self.supported = supported


class StateMismatchError(CheckpointError, ValueError):
    """Checkpoint and `into=` do not fit; no target was touched.

    Attributes:
        missing: paths the target has and the checkpoint lacks.
        unexpected: paths the checkpoint has and the target lacks.
        mismatched: (path, what differs) for shapes, dtypes and kinds.
    """

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[tuple[str, str]] = (),
        hint: str = "",
        step: int | None = None,
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)
        lines = [f"  missing in the checkpoint: {p}" for p in self.missing]
        lines += [f"  not in the target: {p}" for p in self.unexpected]
        lines += [f"  {p}: {why}" for p, why in self.mismatched]
        shown = lines[:SHOWN]
        if len(lines) > SHOWN:
            shown.append(f"  ... and {len(lines) - SHOWN} more")
        message = f"the checkpoint does not fit the target ({len(lines)} differences):\n" + "\n".join(shown)
        if hint:
            message += f"\n{hint}"
        first = next(iter(self.missing or self.unexpected or [p for p, _ in self.mismatched]), None)
        super().__init__(message, step=step, path=first)


class StorageError(CheckpointError, OSError):
    """The store failed; `errno` and `filename` are those of the cause.

    After a failed save no part of it is visible and its temporary files are gone
    (or are swept by the next save, where the store refused even that).
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        step: int | None = None,
        file: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(message, step=step, file=file, path=path)
        self.errno = errno
        self.filename = file
        self.strerror = message

    def __str__(self) -> str:
        return str(self.args[0])

    def _facts(self) -> dict[str, Any]:
        named = {"errno": self.errno, "filename": self.filename, "strerror": self.strerror}
        return self.__dict__ | named

    @classmethod
    def wrap(cls, error: OSError, doing: str, *, file: str, step: int | None = None) -> StorageError:
        """Turn a foreign OSError into ours, keeping errno; use as `raise ... from error`."""
        cause = error.strerror or str(error) or type(error).__name__
        return cls(f"{doing} {file}: {cause}", errno=error.errno, file=file, step=step)


class SaveError(CheckpointError, RuntimeError):
    """A save failed for a reason that is in `__cause__`.

    Attributes:
        save_id: the save's name for ever, or None where it had none yet.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        file: str | None = None,
        path: str | None = None,
        save_id: str | None = None,
    ) -> None:
        super().__init__(message, step=step, file=file, path=path)
        self.save_id = save_id


class SaveCancelledError(SaveError):
    """The save was cancelled before it committed; its files are gone.

    Not a CancelledError on purpose: a task group would swallow that.
    """


class PreviousSaveError(SaveError):
    """An earlier save failed and nobody had awaited it.

    The save that raised this was accepted all the same and goes on.

    Attributes:
        pending: the handle of the accepted save (not kept when pickled).
    """

    def __init__(self, message: str, *, step: int | None = None, pending: object = None) -> None:
        super().__init__(message, step=step)
        self.pending = pending

    def _facts(self) -> dict[str, Any]:
        return self.__dict__ | {"pending": None}


class DrainTimeoutError(SaveError, TimeoutError):
    """A save did not end in time; its memory and descriptor are leaked on purpose."""


class CommitUnknownError(SaveError):
    """The commit may or may not have happened; the manifest on disk is the truth."""


class RanksFailedError(CheckpointError, RuntimeError):
    """A save or load of several ranks failed as a whole; every rank gets this error.

    Attributes:
        failures: what each rank that failed raised. A failure that cannot be pickled travels as
            a RuntimeError with its text.
    """

    def __init__(self, doing: str, failures: Mapping[int, BaseException], *, file: str | None = None) -> None:
        self.failures = dict(failures)
        causes = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, e in self.failures.items())
        super().__init__(f"{doing} failed: {causes}", file=file)

    def _facts(self) -> dict[str, Any]:
        return self.__dict__ | {"failures": {rank: _portable(e) for rank, e in self.failures.items()}}


def _portable(error: BaseException) -> BaseException:
    """The error, or its text where the error itself cannot go to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class ForeignFormatError(CheckpointError, ValueError):
    """A file of another format is damaged, incomplete, or of a kind that is not read."""


class UnsafeFileError(CheckpointError, ValueError):
    """A foreign file asks for code to be run, or reaches out of its folder: nothing of it was used."""


class ReloadError(CheckpointError, RuntimeError):
    """A checkpoint was not put to service; the version before it serves on.

    Attributes:
        stage: what was being done: `memory`, `build`, `load`, `cover`, `finite`, `validate`, ...
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        file: str | None = None,
        path: str | None = None,
        stage: str = "",
    ) -> None:
        super().__init__(message, step=step, file=file, path=path)
        self.stage = stage


class MemoryShortError(ReloadError, MemoryError):
    """There is no room for another version beside the one that serves; tried again later."""


class RequestAbortedError(CheckpointError, RuntimeError):
    """A request was ended so that its model could be updated in place; it may be sent again."""


class PublishError(CheckpointError, RuntimeError):
    """The step is committed, and a publisher failed for good; only ever in `saver.failures`.

    With a `FileSaver`: the file is in place, and an after-save hook failed.

    Attributes:
        publisher: its name.
    """

    def __init__(
        self, message: str, *, step: int | None = None, file: str | None = None, publisher: str = ""
    ) -> None:
        super().__init__(message, step=step, file=file)
        self.publisher = publisher


class SaveErrors(ExceptionGroup[Exception], CheckpointError):
    """Several saves failed; `exceptions` holds each one's error."""

    step: int | None = None
    file: str | None = None
    path: str | None = None

    def __new__(cls, message: str, errors: Sequence[Exception]) -> SaveErrors:
        """A group needs its errors when it is made."""
        return super().__new__(cls, message, errors)

    def __init__(self, message: str, errors: Sequence[Exception]) -> None:
        ExceptionGroup.__init__(self, message, errors)

    def derive(self, excs: Sequence[Exception]) -> SaveErrors:  # type: ignore[override]
        """The same kind of group around others, for `split` and `except*`."""
        return SaveErrors(self.message, excs)
