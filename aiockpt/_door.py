"""The front door: no foreign error passes it, and neither does a group of one."""

from __future__ import annotations

import asyncio
import traceback

from .errors import CheckpointError, DrainTimeoutError, SaveError, StepExistsError, StorageError


def translate(
    error: BaseException, doing: str, *, step: int | None, save_id: str | None = None
) -> CheckpointError:
    """The error of our own that says what `error` says.

    Args:
        error: anything that came out of a save or a load. Of a group, what failed first
            counts: the others are its consequences or say the same.
        doing: what was being done, for the message.
        step: filled in where the error does not know it.
        save_id: the save's.

    Returns:
        An error to raise `from` the original (or the original, when it is ours).
    """
    while isinstance(error, BaseExceptionGroup):
        error = first(error)
    if isinstance(error, CheckpointError):
        return error.at(step)
    ours: CheckpointError
    if isinstance(error, FileExistsError):
        ours = StepExistsError(f"step {step} is committed already", step=step, file=error.filename)
    elif isinstance(error, OSError):
        ours = StorageError.wrap(error, doing, file=str(error.filename or "the store"), step=step)
    else:
        message = f"{doing} step {step} failed: {type(error).__name__}: {error}"
        ours = SaveError(message, step=step, save_id=save_id)
    ours.__cause__ = error
    return ours


def is_stuck(error: BaseException | None) -> bool:
    """Whether a thread was written off: it may still be inside its call."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_stuck(e) for e in error.exceptions)
    return isinstance(error, DrainTimeoutError)


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that is not merely a cancellation by it."""
    real = [e for e in group.exceptions if not isinstance(e, asyncio.CancelledError)]
    return (real or list(group.exceptions))[0]


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables that an error's tracebacks hold: blocks, tensors, whole savers.

    Errors of saves are kept, in handles and lists of failures; where they happened stays visible.
    """
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]
            todo += one.exceptions if isinstance(one, BaseExceptionGroup) else []


def told(error: BaseException) -> str:
    """An error of somebody else's code in words: its type and its text, if that can be made."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {text}"
