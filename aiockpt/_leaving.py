"""The end of a run's saver: its last save, its hooks, its lock and its store."""

from __future__ import annotations

from . import _threads
from ._ending import Ending
from ._facts import Facts
from ._on_error import OnError, run_on_error
from ._place import Places
from ._request import Request
from ._rhythm import Rhythm
from .storage import Store


class Leaving(Rhythm, Facts, Ending[Request]):
    """The half of a saver that ends it."""

    store: Store
    _owned: bool
    """Whether the store was opened here, and so is closed here."""
    _places: Places
    _keep_last: bool
    _save_on_error: OnError | None

    def _name(self) -> str:
        return self.store.url

    async def _body_ended(self) -> None:
        if self._keep_last:
            await self._save_last()

    async def _body_raised(self, body: BaseException) -> None:
        if self._save_on_error is not None and self._owner.open:
            await _threads.settle(run_on_error(self._save_on_error, body, self._drain_timeout))

    async def _idle_beside(self) -> None:
        await self._beside.idle()

    async def _let_go(self) -> None:
        await self._places.lock.release()

    async def _dispose(self) -> None:
        if self._owned:
            await self.store.aclose()
