"""Checkpoints that could not be put to service: why, and when they are tried again.

Tried again, since damage is repaired and disks come back; less and less often, since most
stay as they are. Only what was rolled back is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ._following import identity
from .checkpoint import Checkpoint

__all__ = ["Quarantine"]

LONGEST: Final = 3600.0
"""Seconds between two tries, at most."""
SOON: Final = 5.0
"""Seconds before the second try where the checkpoint itself is not to blame."""
MOST: Final = 100
"""Records that are kept."""


@dataclass(slots=True)
class _Record:
    checkpoint: Checkpoint
    stage: str
    reason: str
    error: str
    tries: int
    since: float
    until: float


class Quarantine:
    """What is not to be tried now.

    Args:
        retry: seconds before the second try; doubled each time.
        clock: monotonic seconds.
    """

    def __init__(self, retry: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry = retry
        self._clock = clock
        self._records: dict[tuple[int, str], _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether it is not to be tried now."""
        record = self._records.get(identity(checkpoint))
        return record is not None and self._clock() < record.until

    def add(self, checkpoint: Checkpoint, stage: str, error: BaseException, *, soon: bool = False) -> None:
        """It failed; `soon`: the checkpoint itself is not to blame."""
        record = self._records.pop(identity(checkpoint), None)
        tries = 1 if record is None else record.tries + 1
        first = min(self._retry, SOON) if soon else self._retry
        until = self._clock() + min(first * 2.0 ** min(tries - 1, 30), LONGEST)
        self._put(checkpoint, stage, str(error) or type(error).__name__, type(error).__name__, tries, until)

    def bar(self, checkpoint: Checkpoint, reason: str) -> None:
        """It is not to be tried again by itself."""
        self._put(checkpoint, "rollback", reason, "", 0, math.inf)

    def _put(
        self, checkpoint: Checkpoint, stage: str, reason: str, error: str, tries: int, until: float
    ) -> None:
        record = _Record(checkpoint, stage, reason, error, tries, time.time(), until)
        self._records[identity(checkpoint)] = record
        while len(self._records) > MOST:
            self._records.pop(next(iter(self._records)))

    def release(self, checkpoint: Checkpoint) -> None:
        """It is good after all."""
        self._records.pop(identity(checkpoint), None)

    def forgive(self) -> None:
        """Whatever failed may be tried at once."""
        for record in self._records.values():
            if record.until < math.inf:
                record.until = -math.inf

    def facts(self) -> list[dict[str, Any]]:
        """What a status tells, oldest first."""
        return [
            {
                "step": record.checkpoint.step,
                "save_id": record.checkpoint.save_id,
                "name": record.checkpoint.name,
                "stage": record.stage,
                "reason": record.reason,
                "error": record.error,
                "tries": record.tries,
                "since": record.since,
                "retry_in": None if record.until == math.inf else max(0.0, record.until - self._clock()),
            }
            for record in self._records.values()
        ]
