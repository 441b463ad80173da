"""What happens after a commit: the contract of publishers.

A publisher tells others of a committed step: a link, a marker file, a message. It runs
strictly after `committed`, in the order of the commits, in the background; leaving the
saver waits for it. It can fail without harm: the commit stands, the await of the save
succeeds, the publisher is tried again a few times, and what failed for good is logged,
handed to listeners and kept in `saver.failures`.

Each member is one file of this folder. Any callable that takes a `Checkpoint`, sync or
async, is a publisher too; being tried again, it must bear being called twice.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from .._names import RESERVED
from ..checkpoint import Checkpoint
from ..errors import UsageError
from ..storage import MANIFEST, Store, check_name

__all__ = ["PublishFunction", "Publisher", "as_publisher", "check_published_name"]

PublishFunction = Callable[[Checkpoint], object]
"""Anything that takes a committed checkpoint; an awaitable that it returns is awaited."""


class Publisher(ABC):
    """Tells others of a committed step."""

    pointer: ClassVar[bool] = False
    """It names the newest step only: it is never called for a step below the newest."""
    repeats: ClassVar[bool] = False
    """Publishing the same step again changes nothing. So it is done when a saver opens a run
    (the one before may have died between commit and publication) and after a rewind."""
    marker: str | None = None
    """The empty file it puts into the step's folder; the manifest names it beforehand."""

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__name__

    def check(self, store: Store) -> None:  # noqa: B027 (most work with any store)
        """Refuse a store that it cannot work with; nothing of it is touched.

        Raises:
            UsageError: it cannot.
        """

    @abstractmethod
    async def publish(self, store: Store, checkpoint: Checkpoint) -> None:
        """Publish; whole or not at all. One call at a time, in the order of the commits.

        Raises:
            Exception: it failed; it is called again after a pause.
        """


class _FunctionPublisher(Publisher):
    """A callable of the user's."""

    def __init__(self, function: PublishFunction) -> None:
        self._function = function

    @property
    def name(self) -> str:
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    async def publish(self, store: Store, checkpoint: Checkpoint) -> None:
        outcome = self._function(checkpoint)
        if inspect.isawaitable(outcome):
            await outcome


def as_publisher(value: Publisher | PublishFunction) -> Publisher:
    """A publisher as an object, whatever form it was given in.

    Raises:
        UsageError: it is none.
    """
    if isinstance(value, Publisher):
        return value
    if inspect.isclass(value) or not callable(value):  # a class would be made anew for each commit
        raise UsageError(f"publish= takes publishers and functions of a checkpoint, not {value!r:.80}")
    return _FunctionPublisher(value)


def check_published_name(name: str) -> str:
    """Return `name` if a publisher may use it in a run's folder or a step's.

    Raises:
        UsageError: it is no plain name, or one that the run needs itself.
    """
    ours = name in RESERVED or name == MANIFEST or name.endswith(".safetensors") or name.startswith("part-")
    if ours:
        raise UsageError(f"a publisher may not use the name {name!r}: the run needs it itself")
    return check_name(name)
