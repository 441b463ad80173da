"""What DCP raises, as errors of aiockpt.

DCP's `CheckpointException` is a `BaseException`: `except Exception` does not see it, and
task groups turn it into a `BaseExceptionGroup`. It never leaves this package.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from aiockpt.errors import CheckpointError, RanksFailedError, StorageError

__all__ = ["ours"]


def ours(error: BaseException, doing: str, where: str | None) -> BaseException:
    """The error to raise `from` what a DCP call raised; interrupts and our own errors stay as they are.

    Args:
        error: what the call raised.
        doing: what was being done, for the message.
        where: the checkpoint's id, or None.
    """
    if isinstance(error, CheckpointException):
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        return RanksFailedError(doing, failures, file=where)
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        return error
    if isinstance(error, OSError):
        return StorageError.wrap(error, doing, file=str(error.filename or where))
    return RanksFailedError(doing, {_rank(): error}, file=where)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
