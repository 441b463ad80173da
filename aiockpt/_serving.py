"""The version that serves, and the requests that use it.

A request keeps the version it began with. A version that was replaced is let go of when
its last request leaves. For updates in place there is a gate: while it is closed, new
requests queue. Everything here runs on the loop's thread and never waits for a disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from ._leases import Lease
from .checkpoint import Checkpoint
from .errors import CheckpointError, ReloadError, RequestAbortedError, UsageError

__all__ = ["Live", "Serving", "Use", "Version"]

M = TypeVar("M")


class Version(Generic[M]):
    """A model that serves or served, and who uses it.

    Args:
        model: the model.
        lease: of its checkpoint.
        on_drained: called when nobody uses it any more.
    """

    def __init__(self, model: M, lease: Lease, on_drained: Callable[[], object]) -> None:
        self._on_drained = on_drained
        self.model: M | None = model
        self.checkpoint = lease.checkpoint
        self.lease: Lease | None = lease
        self.since = time.time()
        self.users: set[Use[M]] = set()
        self.retired: float | None = None
        """Monotonic seconds when it was replaced; None while it serves."""
        self.ended = 0.0
        """Monotonic seconds when it was drained."""
        self.drained = asyncio.Event()
        """Set when it was replaced and nobody uses it any more; the model is gone then."""
        self.left = asyncio.Event()
        """Set, and replaced, when a request leaves."""

    def retire(self) -> None:
        """Another one serves from now on."""
        self.retired = time.monotonic()
        self._look()

    def leave(self, use: Use[M]) -> None:
        """One request less."""
        self.users.discard(use)
        self.left.set()
        self.left = asyncio.Event()
        self._look()

    def _look(self) -> None:
        if self.retired is not None and not self.users and not self.drained.is_set():
            self.model = None
            self.ended = time.monotonic()
            self.drained.set()
            self._on_drained()

    def facts(self) -> dict[str, Any]:
        """What a status tells of it."""
        found = self.checkpoint
        return {
            "step": found.step,
            "save_id": found.save_id,
            "name": found.name,
            "since": self.since,
            "users": len(self.users),
            "metrics": dict(found.metrics),
        }


class Live(Generic[M]):
    """The version a request works with, as long as its block lasts."""

    def __init__(self, version: Version[M]) -> None:
        self._version: Version[M] | None = version
        self.checkpoint: Checkpoint = version.checkpoint

    @property
    def model(self) -> M:
        """The model; the same one from the beginning of the block to its end."""
        model = None if self._version is None else self._version.model
        if model is None:
            raise UsageError("the model is only there inside `async with reloader.use()`")
        return model

    @property
    def step(self) -> int:
        """The step it came from."""
        return self.checkpoint.step

    @property
    def save_id(self) -> str:
        """The save it came from."""
        return self.checkpoint.save_id

    def end(self) -> None:
        """The block is over."""
        self._version = None


class Use(Generic[M]):
    """`async with reloader.use() as live:`; entered once."""

    def __init__(self, serving: Serving[M]) -> None:
        self._serving: Serving[M] | None = serving
        self._version: Version[M] | None = None
        self._live: Live[M] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancels = 0
        self._aborted = False

    async def __aenter__(self) -> Live[M]:
        serving, self._serving = self._serving, None
        if serving is None:
            raise UsageError("a use is entered once; ask the reloader for another one")
        self._version = await serving.enter(self)
        self._task = asyncio.current_task()
        self._cancels = self._task.cancelling() if self._task else 0
        self._live = Live(self._version)
        return self._live

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        version, self._version = self._version, None
        task, self._task = self._task, None
        if self._live is not None:
            self._live.end()
        if version is None:
            return
        version.leave(self)
        if self._aborted and task is not None:
            ours = task.uncancel() <= self._cancels
            if ours and isinstance(error, asyncio.CancelledError):
                step = version.checkpoint.step
                message = f"the request on step {step} was ended: its model is being updated in place"
                raise RequestAbortedError(message, step=step) from error

    def abort(self) -> None:
        """End the request: its task is cancelled, and leaves the block with RequestAbortedError."""
        if self._task is not None and not self._aborted:
            self._aborted = True
            self._task.cancel()


class Serving(Generic[M]):
    """Which version serves now, and the door to it."""

    def __init__(self) -> None:
        self.current: Version[M] | None = None
        self.failed: CheckpointError | None = None
        """Why nothing will ever serve (again)."""
        self.closed = False
        self._shut = False
        self._changed = asyncio.Event()

    def use(self) -> Use[M]:
        """A block in which one version is used."""
        return Use(self)

    async def enter(self, use: Use[M]) -> Version[M]:
        """Wait until something serves, and be counted as its user.

        Raises:
            UsageError: the reloader is closed.
            CheckpointError: nothing will serve.
        """
        while self.current is None or self._shut or self.closed:
            self.check()
            await self.change()
        self.check()
        self.current.users.add(use)
        return self.current

    @property
    def is_shut(self) -> bool:
        """Whether new requests queue for an update in place."""
        return self._shut

    def check(self) -> None:
        """Raise if nothing will serve.

        Raises:
            UsageError: the reloader is closed.
            CheckpointError: it failed for good.
        """
        if self.closed:
            raise UsageError("the reloader is closed")
        if self.failed is not None and (self._shut or self.current is None):
            message = f"the reloader has ended: {self.failed}"
            raise ReloadError(message, step=self.failed.step, stage="ended") from self.failed

    def put(self, version: Version[M]) -> Version[M] | None:
        """Let a version serve from now on; returns the one before."""
        old, self.current = self.current, version
        if old is not None:
            old.retire()
        self.tell()
        return old

    async def change(self) -> None:
        """Wait until anything has changed."""
        await self._changed.wait()

    def tell(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------- the gate

    async def shut(self, seconds: float) -> bool:
        """Let new requests queue; returns whether those under way have left within the time."""
        self._shut = True
        version = self.current
        if version is None:
            return True
        try:
            async with asyncio.timeout(seconds):
                while version.users:
                    await version.left.wait()
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """End the requests that are under way."""
        for use in list(self.current.users if self.current else ()):
            use.abort()

    def open(self) -> None:
        """Let requests in again."""
        self._shut = False
        self.tell()

    def close(self) -> None:
        """Let nobody in any more."""
        self.closed = True
        self.tell()
