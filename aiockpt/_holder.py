"""Who holds something in a run: the record that says it, and what proves that he is gone.

Names and numbers that repeat prove nothing: in containers every host may be called the
same and every trainer be process 1. What counts:

* a boot id names one run of one kernel. On that kernel, and on the same mounted device, a
  POSIX record lock that can be taken is held by nobody;
* a process id together with the time the process started names one process of a kernel;
* a scheduler that has started a job again has ended what ran of it before.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

__all__ = ["RECORD_BYTES", "Holder"]

RECORD_BYTES = 1024
"""Every record is padded to this: renewing it is one write in place, never a change of size."""
_FORMAT = 0
_TEXT = 128
"""The longest text in a record."""
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "FLUX_JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who, since when, and until when nobody needs to ask."""

    id: str
    """Of this hold: never used twice."""
    host: str = ""
    pid: int = 0
    started: int = 0
    """When the process started, in the kernel's ticks since its boot; 0 when unknown."""
    boot: str = ""
    """The kernel's boot id; "" when unknown."""
    place: tuple[int, int] = (0, 0)
    """Device and inode of the lock file, as that kernel numbers them."""
    job: str = ""
    """The scheduler's name of the job, as SLURM_JOB_ID=77."""
    restarts: int = 0
    """How often the scheduler has started the job again."""
    since: float = 0.0
    """Seconds since 1970 on the holder's clock; information only."""
    ttl: float = 60.0
    """Seconds after the last renewal during which he counts as alive."""
    beat: int = 0
    """How often it was renewed."""

    @classmethod
    def here(cls, ttl: float, place: tuple[int, int] = (0, 0)) -> Self:
        """This process, from now on. Blocking (it reads /proc)."""
        name, job = next(((n, os.environ[n]) for n in _JOBS if os.environ.get(n)), ("", ""))
        restarts = os.environ.get("SLURM_RESTART_COUNT", "") if name == "SLURM_JOB_ID" else ""
        return cls(
            id=uuid.uuid4().hex,
            host=_plain(socket.gethostname()),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
            boot=_boot_id(),
            place=place,
            job=_plain(f"{name}={job}") if job else "",
            restarts=int(restarts) if restarts.isdecimal() else 0,
            since=time.time(),
            ttl=ttl,
        )

    @classmethod
    def decode(cls, data: bytes) -> Self | None:
        """The record that `encode` made; None for anything else."""
        try:
            found: Any = json.loads(data)
            place = tuple(int(number) for number in found["place"])
            record = cls(**{name: found[name] for name in cls.__slots__} | {"place": place})
            sound = all(
                isinstance(getattr(record, name), str if kind == "str" else (int, float))
                for name, kind in cls.__annotations__.items()
                if name != "place"
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return record if sound and len(place) == 2 and record.id and record.ttl > 0 else None

    def encode(self) -> bytes:
        """JSON, padded."""
        return json.dumps({"format": _FORMAT, **asdict(self)}).encode().ljust(RECORD_BYTES - 1) + b"\n"

    def renewed(self) -> Self:
        """The same, once more."""
        return replace(self, beat=self.beat + 1)

    def is_gone(self, me: Holder) -> bool:
        """Whether it is proven that he does not live any more, now that we hold the lock file. Blocking.

        Args:
            me: this process, with the place of the lock file it holds.
        """
        if self.job and self.job == me.job and self.restarts < me.restarts:
            return True
        if not self.boot or self.boot != me.boot or self.place[0] != me.place[0]:
            return False
        if self.place != me.place:
            return True  # a copy of another run's folder: nobody ever held this file
        # The lock is free on the kernel he lived on. But a stray close may have freed it under him.
        return self.is_process(me) or self.started == 0 or _started(self.pid) != self.started

    def is_process(self, other: Holder) -> bool:
        """Whether both are one and the same process."""
        return bool(self.boot) and all(
            getattr(self, name) == getattr(other, name) for name in ("boot", "pid", "started")
        )

    def facts(self) -> Mapping[str, Any]:
        """For those who catch the error."""
        return asdict(self)

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(self.since, 0.0), 32e9)))
        return f"process {self.pid} on {self.host or 'an unknown host'}{job}, since {when}"


def _plain(text: str) -> str:
    return text[:_TEXT].encode("ascii", "replace").decode()


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(_TEXT).strip()
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process started; None when there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the program's name, which may hold anything, also ")".
            fields = file.read(4096).rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
