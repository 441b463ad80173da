"""One thread for all of DCP's calls of this process, in the order in which they were made."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextvars
import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from aiockpt._log import log
from aiockpt._threads import LaneExecutor

__all__ = ["submit"]

T = TypeVar("T")


EXIT_SECONDS = 600.0
"""How long the interpreter's exit waits for calls that nobody drained."""


class _Queue:
    """The thread and what was handed to it."""

    def __init__(self) -> None:
        self.lane = LaneExecutor("aiockpt-dcp", 1)
        self.last: concurrent.futures.Future[object] | None = None
        # After the lane's own hook in the code, hence before it at the exit, which ends its thread.
        atexit.register(self.leave)

    def leave(self) -> None:
        """Let staged saves end: they are checkpoints that the program believes in."""
        if self.last is not None and not self.last.done():
            log.warning("waiting for saves through DCP; `await drain()` before the program ends")
            concurrent.futures.wait([self.last], EXIT_SECONDS)


_queue = functools.cache(_Queue)


def submit(call: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `call` after everything that was submitted before it.

    It runs with the caller's context variables and current accelerator, which object
    collectives over NCCL use.
    """
    queue = _queue()
    context = contextvars.copy_context()
    job = queue.lane.submit(_run, context, _device(), call)
    queue.last = job  # type: ignore[assignment]  # its outcome is nobody's concern here
    return job


def _run(context: contextvars.Context, device: int | None, call: Callable[[], T]) -> T:
    if device is not None:
        torch.accelerator.set_device_index(device)  # a thread starts with device 0
    return context.run(call)


def _device() -> int | None:
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
