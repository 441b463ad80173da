"""Count operations and say which of them goes wrong; shared by all faulty doubles."""

from __future__ import annotations

import errno as errnos
import os
import signal
import threading
from collections.abc import Callable
from typing import Literal

__all__ = ["Faults", "Kind"]

Kind = Literal["error", "after", "stall", "tear", "full", "kill", "cancel"]
"""How an operation goes wrong:

- `error`: an OSError before anything was done;
- `after`: all of it was done, then an OSError (the reply was lost);
- `stall`: it waits for `release` before it starts;
- `tear`: half of the bytes it writes go through, then an OSError;
- `full`: ENOSPC, as for every writing operation that follows until `heal()`;
- `kill`: the process is killed with SIGKILL before anything was done;
- `cancel`: `on_fault` is called first, then the operation goes on.
"""


class Faults:
    """Count operations; the one with index `fail_at` goes wrong. Thread-safe.

    Attributes:
        operations: every operation so far, as `sink.write model@0+4096`; `fail_at` is an
            index into it.
        fired: whether the fault has happened.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        kind: Kind = "error",
        *,
        errno: int = errnos.EIO,
        on_fault: Callable[[], object] | None = None,
    ) -> None:
        self.fail_at = fail_at
        self.kind: Kind = kind
        self.errno = errnos.ENOSPC if kind == "full" else errno
        self.on_fault = on_fault
        self.operations: list[str] = []
        self.fired = False
        self._full = False
        self._lock = threading.Lock()

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        with self._lock:
            self.fail_at = None
            self._full = False

    def next(self, operation: str, *, writes: bool) -> Kind | None:
        """Count one operation and return what happens to it; None: it goes well.

        `kill` and `cancel` have happened when this returns.
        """
        with self._lock:
            due = len(self.operations) == self.fail_at
            self.operations.append(operation)
            self.fired = self.fired or due
            self._full = self._full or (due and self.kind == "full")
            if self._full and writes:
                return "full"
        if not due or self.kind == "full":
            return None
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "cancel" and self.on_fault is not None:
            self.on_fault()
        return None if self.kind == "cancel" else self.kind

    def error(self, where: str) -> OSError:
        """Make the error that the fault raises."""
        return OSError(self.errno, f"{os.strerror(self.errno)} (injected)", where)
