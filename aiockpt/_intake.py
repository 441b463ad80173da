"""From a verb to a save that has begun: capture at the call, admission, the caller's wait."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from ._admission import Admission
from ._calls import Staging
from ._capture import Captured, capture
from ._driven import DrivenWriter
from ._exclusion import Exclusion
from ._names import new_save_id
from ._place import as_step
from ._request import Request, SaveOptions
from ._saving import Saving
from .checkpoint import Checkpoint
from .errors import BusyError
from .pending import PendingSave


class Intake(Admission[Request]):
    """The half of a saver through which saves come in.

    Args:
        saving: takes the saves that begin.
        on_overlap: what happens when too many saves are pending.
        on_failure: whether the next save raises what nobody was told of.
        allow_pickle: store what has no codec as a pickle.

    Raises:
        UsageError: an option is none of its words.
    """

    _saving: Saving

    def __init__(
        self,
        saving: Saving,
        *,
        on_overlap: Literal["wait", "error"],
        on_failure: Literal["raise", "log"],
        allow_pickle: bool,
    ) -> None:
        super().__init__(on_overlap=on_overlap, on_failure=on_failure)
        self._saving = saving
        self._allow_pickle = allow_pickle
        self._exclusion = Exclusion()

    def _writer(self, pending: PendingSave, options: SaveOptions) -> DrivenWriter:
        raise NotImplementedError

    # At the call

    def _request(self, state: Any, step: int, options: SaveOptions) -> Request:
        loop = self._owner.check()
        unknown = sorted(options.keys() - SaveOptions.__annotations__.keys())
        if unknown:
            raise TypeError(f"a save got an unexpected keyword argument {unknown[0]!r}")
        pending = PendingSave(as_step(step), new_save_id(), loop)
        writer = self._writer(pending, options)
        take = partial(self._capture, state, pending.step)
        request = Request(pending, writer, options.get("overwrite", False), take)
        if self._exclusion.try_read():
            with pending._blocking():
                request.capture()
        return request

    def _capture(self, state: Any, step: int) -> Captured:
        """Capture with the right to read, which ends when the state is let go."""
        try:
            captured = capture(state, step=step, allow_pickle=self._allow_pickle)
        except BaseException:
            self._exclusion.end_read()
            raise
        captured.on_release = self._exclusion.end_read
        return captured

    def _staging(self, request: Request) -> Staging:
        call = self._call("staging", request, partial(self._stage, request))
        return Staging(call, partial(self._start_watched, request), partial(self._leave, request))

    def _copy_now(self, request: Request) -> PendingSave:
        try:
            if request.held is None:
                message = f"step {request.step}: a thread is inside saver.mutating()"
                raise BusyError(message, step=request.step)
            with request.pending._blocking():
                request.writer.fill_now(request.captured, self._saving.reserve.pool_now)
            request.copied = True
        except BaseException:
            request.drop()
            raise
        return self._begin(request)

    # The caller's coroutine

    async def _start(self, request: Request) -> PendingSave:
        await self._hold(request)
        return self._begin(request)

    async def _start_watched(self, request: Request) -> PendingSave:
        """Start a save whose caller runs on while it reads the state."""
        with request.pending._blocking():
            await self._hold(request)
            try:
                await request.writer.watch(request.captured)
            except BaseException:
                request.drop()
                raise
            return self._begin(request)

    async def _hold(self, request: Request) -> None:
        if request.held is None:  # a thread was inside `mutating()` at the call
            await self._exclusion.read()
            request.capture()

    async def _stage(self, request: Request) -> PendingSave:
        with request.pending._blocking():
            await self._start(request)
            return await self._staged(request)

    async def _save(self, request: Request) -> Checkpoint:
        pending = await self._stage(request)
        return await pending.committed()

    async def _leave(self, request: Request, *, failed: bool) -> None:
        """The end of a `staging` body."""
        if failed:
            await self._saving.withdraw(request)
        else:
            with request.pending._blocking():
                await self._staged(request)
