"""Where a savefun runs: the contract of workers, and what they are given."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._arena import Arena
from .._parcel import Parcel, rebuild_from

__all__ = ["Call", "Job", "Worker"]

OBJECT_FIRST = frozenset({("torch.serialization", "save"), ("safetensors.torch", "save_file")})
"""Functions, by module and name, that take the object before the path."""


@dataclass(frozen=True)
class Call:
    """A savefun and its keywords: how it is to be called."""

    savefun: Callable[..., Any]
    options: Mapping[str, Any]

    @property
    def plain(self) -> Any:
        """The function itself, inside of `functools.partial`s that fix keywords only."""
        found: Any = self.savefun
        while isinstance(found, functools.partial) and not found.args:
            found = found.func
        return found

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine."""
        by_name = getattr(type(self.plain), "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.plain) or inspect.iscoroutinefunction(by_name)

    def __call__(self, path: str, target: object) -> Any:
        plain = self.plain
        name = getattr(plain, "__module__", None), getattr(plain, "__qualname__", None)
        first, second = (target, path) if name in OBJECT_FIRST else (path, target)
        return self.savefun(first, second, **self.options)


@dataclass(slots=True)
class Job:
    """One call of a savefun: `job()` makes it, here and now, blocking.

    Attributes:
        path: where it is to write.
        call: the savefun with the keywords of this save.
    """

    path: str
    call: Call
    parcel: Parcel
    arena: Arena | None = None
    """Holds the copies of the target's tensors; without it they are the caller's own."""
    kept: bool = False
    """Set by a worker: something of the savefun's still refers to the memory, which is not used again."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What a worker keeps for itself."""

    def target(self) -> object:
        """The target, put together anew."""
        if self.arena is None:
            return self.parcel.live()
        return rebuild_from(self.arena, self.parcel.skeleton, self.parcel.rows)

    def __call__(self) -> Any:
        return self.call(self.path, self.target())


class Worker(ABC):
    """Runs the savefun of one `FileSaver`. Its methods are called on the saver's loop.

    A worker of your own needs `run` only, say to use an executor that you have:

        class Mine(Worker):
            async def run(self, job):
                return await asyncio.get_running_loop().run_in_executor(executor, job)
    """

    copies = True
    """Whether the target is copied before, so that it may change while the savefun runs."""
    remote = False
    """Whether the savefun runs in another process: copies then lie in memory that can be shared."""

    def check(self, call: Call) -> None:  # noqa: B027
        """Refuse, when the saver is made, a savefun that it could not run.

        Raises:
            UsageError: says why.
        """

    def prepare(self, job: Job) -> None:  # noqa: B027
        """Look at a job at the call of the save, before anything is written.

        Raises:
            UsageError: it cannot be run.
        """

    async def start(self, call: Call) -> None:  # noqa: B027
        """The saver was entered."""

    @abstractmethod
    async def run(self, job: Job) -> Any:
        """Call the job. Cancelled, return only when nothing uses its memory and path any more.

        Returns:
            What the savefun returned; if that is an awaitable, it is awaited on the loop.
        """

    def forget(self, arenas: list[int]) -> None:
        """Memory by these numbers is gone; take them out of the list."""
        arenas.clear()

    async def stop(self) -> None:  # noqa: B027
        """All saves have ended: leave nothing behind; may be called again."""
