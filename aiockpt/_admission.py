"""What every way into a saver has in common: options, calls, admission, the caller's wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

from ._calls import SaveCall
from ._entry import Entry
from ._owner import Owner
from ._running import Running
from .errors import UsageError
from .pending import PendingSave

__all__ = ["Admission"]

E = TypeVar("E", bound=Entry)


class Admission(Generic[E]):
    """The door of a saver.

    Args:
        on_overlap: what happens when too many saves are pending.
        on_failure: whether the next save raises what nobody was told of.

    Raises:
        UsageError: an option is none of its words.
    """

    _saving: Running[E]
    """Takes the saves that begin."""

    def __init__(self, *, on_overlap: Literal["wait", "error"], on_failure: Literal["raise", "log"]) -> None:
        if on_overlap not in ("wait", "error"):
            raise UsageError(f"on_overlap is 'wait' or 'error', not {on_overlap!r}")
        if on_failure not in ("raise", "log"):
            raise UsageError(f"on_failure is 'raise' or 'log', not {on_failure!r}")
        self._owner = Owner()
        self._on_overlap = on_overlap
        self._on_failure = on_failure
        self._calls: weakref.WeakSet[SaveCall[Any]] = weakref.WeakSet()

    def _call(self, name: str, entry: E, begin: Callable[[], Coroutine[Any, Any, Any]]) -> SaveCall[Any]:
        ledger = self._saving.ledger

        def drop(closed: bool) -> None:
            entry.drop()
            if not closed:
                ledger.never_awaited.append(entry.pending)

        call: SaveCall[Any] = SaveCall(entry.pending, name, begin, drop)
        self._calls.add(call)
        return call

    def _begin(self, entry: E) -> PendingSave:
        try:
            self._owner.check()
            if self._on_overlap == "error":
                self._saving.ledger.refuse_if_busy(entry.pending._label, **entry.pending._facts)
        except BaseException:
            entry.forget()
            entry.drop()
            raise
        return self._saving.begin(entry)

    async def _staged(self, entry: E) -> PendingSave:
        await self._saving.own(entry)
        if self._on_failure == "raise":
            previous = self._saving.ledger.previous_error(entry.pending)
            if previous is not None:
                raise previous
        return entry.pending
