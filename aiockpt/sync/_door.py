"""The generic part: methods of an async class, made blocking, and who may call them."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from ..errors import UsageError
from ._bridge import Bridge, Make

__all__ = ["Door", "blocking", "like", "once"]

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")

COPIED = ("__name__", "__qualname__", "__doc__")


class Door(Generic[A]):
    """An object of an async class `A`, used from threads over a bridge.

    Attributes:
        what: what it is, for messages.
    """

    what = ""

    def __init__(self, inner: A) -> None:
        self._inner = inner
        self._bridge: Bridge | None = None
        self._closed = False
        self._warned = False
        self._lock = threading.RLock()

    def _open(self) -> Bridge:
        """The bridge, if the caller may use the object.

        Raises:
            UsageError: it is closed, or used from where it would never end.
        """
        if self._closed:
            raise UsageError(f"the {self.what} is closed")
        with self._lock:
            if self._bridge is None:
                self._bridge = self._make_bridge()
        self._bridge.check()
        self._warn()
        return self._bridge

    def _make_bridge(self) -> Bridge:
        raise NotImplementedError

    def _warn(self) -> None:
        """Say once that a loop which is running here stands still meanwhile."""
        if not self._warned and _loop_runs():
            self._warned = True
            warn_running(f"aiockpt.{type(self).__name__}")

    def _run(self, make: Make[T]) -> T:
        return self._open().run(make)


class _Bound(Protocol):
    """What `blocking` needs of the object it is a method of."""

    _inner: Any

    def _run(self, make: Make[T]) -> T: ...


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The method of an async class as a blocking one, for a `Door` to an object of it."""

    @functools.wraps(method, COPIED)
    def call(self: _Bound, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(lambda: method(self._inner, *args, **kwargs))

    return call


def once(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The async function as a blocking one, with a bridge of its own for each call."""

    @functools.wraps(verb, COPIED)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _loop_runs():
            warn_running(f"aiockpt.{verb.__name__}")
        bridge = Bridge("call")
        try:
            return bridge.run(lambda: verb(*args, **kwargs))
        finally:
            bridge.close()

    return call


def like(
    template: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` that only passes its arguments on the signature of where they go."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        functools.update_wrapper(init, template, ())
        return cast("Callable[Concatenate[Any, P], None]", init)

    return decorate


def warn_running(instead: str) -> None:
    """Say, where the call was made, that the running loop stands still, and what would not make it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("aiockpt."):
        level, frame = level + 1, frame.f_back
    message = f"aiockpt.sync blocks the event loop that runs on this thread; `await` {instead} here instead"
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
