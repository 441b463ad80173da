"""What `saver.save(...)`, `stage` and `staging` return: captured, waiting to be awaited.

The capture has happened at the call; the rest happens when the call is awaited (or
entered). One that never is writes nothing, says so when it is collected, and its saver
raises at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Protocol, TypeVar

from .errors import UsageError
from .pending import PendingSave

__all__ = ["SaveCall", "Staging"]

T_co = TypeVar("T_co", covariant=True)


class SaveCall(Coroutine[Any, Any, T_co]):
    """A captured save that begins when it is awaited.

    It is a coroutine object, so that `asyncio.create_task`, task groups and `wait_for`
    take it like the result of any `async def`.

    Args:
        pending: the save it would become.
        name: of the method called, for the warning.
        begin: makes the coroutine that does the work; called once, at the first step.
        drop: called, with whether that was on purpose, when it will never begin.
    """

    def __init__(
        self,
        pending: PendingSave,
        name: str,
        begin: Callable[[], Coroutine[Any, Any, T_co]],
        drop: Callable[[bool], None],
    ) -> None:
        self.pending = pending
        self.name = name
        self._begin = begin
        self._drop = drop
        self._running: Coroutine[Any, Any, T_co] | None = None
        self._taken = False
        """It has begun, was entered, or will never begin."""

    def take(self) -> None:
        """Count as awaited from now on.

        Raises:
            UsageError: it was entered or closed before, or its saver is closed.
        """
        if self._taken and self._running is None:
            message = f"{self._text()} was entered or closed before, or its saver is closed"
            raise UsageError(message, **self.pending._facts)
        self._taken = True

    def _coroutine(self) -> Coroutine[Any, Any, T_co]:
        if self._running is None:
            self.take()
            self._running = self._begin()
        return self._running

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._coroutine().__await__()

    def send(self, value: Any, /) -> Any:
        """Go on; for whoever drives coroutines."""
        return self._coroutine().send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None, /) -> Any:
        """Raise inside. Before the first step (a task cancelled before it ran) it ends the call."""
        error = typ if isinstance(typ, BaseException) else (val or typ())
        if self._running is not None:
            return self._running.throw(error)
        self.close()
        raise error

    def close(self) -> None:
        """End it; before the first step nothing was written and nothing is owed."""
        if self._running is not None:
            self._running.close()
        elif not self._taken:
            self._taken = True
            self._drop(True)

    def abandon(self) -> None:
        """Its saver closes: it can no longer begin, and counts as never awaited."""
        if not self._taken:
            self._taken = True
            self._drop(False)

    def _text(self) -> str:
        return f"saver.{self.name}({self.pending._arguments})"

    def __del__(self) -> None:
        if getattr(self, "_taken", True):
            return
        self.abandon()
        how = "entered" if self.name == "staging" else "awaited"
        warnings.warn(
            f"{self._text()} was never {how}: nothing was written. "
            "There is no fire-and-forget; `await saver.stage(...)` lets you go on while it is written.",
            RuntimeWarning,
            stacklevel=2,
            source=self,
        )


class _Leave(Protocol):
    async def __call__(self, *, failed: bool) -> None: ...


class Staging:
    """`async with saver.staging(...)`: the copy runs while the body does.

    Args:
        call: of the save; entering takes it.
        begin: starts the save.
        leave: waits for `staged`, or withdraws the save when the body failed.
    """

    def __init__(
        self, call: SaveCall[PendingSave], begin: Callable[[], Awaitable[PendingSave]], leave: _Leave
    ) -> None:
        self._call = call
        self._begin = begin
        self._leave = leave

    async def __aenter__(self) -> PendingSave:
        self._call.take()
        return await self._begin()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._leave(failed=kind is not None)
