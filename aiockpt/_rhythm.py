"""Saving when it is due: the verbs that ask a trigger, and the last save at the end."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any, Literal, Unpack

from ._due import Due
from ._intake import Intake
from ._place import as_step
from ._ranks import Decision, Decisions, Kind
from ._request import Request, SaveOptions
from .errors import UsageError
from .pending import PendingSave, Phase

SKIP_GRACE = 0.1
"""Seconds that a due save waits for an older one to end before it is skipped."""


class Rhythm(Intake):
    """An intake that knows when a save is due."""

    _due: Due
    _decisions: Decisions
    _last: tuple[Any, int, SaveOptions] | None = None
    """What `stage_if_due` was last asked to save, for the end."""

    def due(self, step: int) -> bool:
        """Whether the trigger (`when=`) wants a save after `step` completed steps.

        A save of any kind, and a restore, is where it counts from.
        """
        return self._ask(as_step(step))

    def stage_if_due(
        self,
        state: Any,
        *,
        step: int,
        if_busy: Literal["skip", "wait"] = "skip",
        **options: Unpack[SaveOptions],
    ) -> Coroutine[Any, Any, PendingSave | None]:
        """As `stage` if a save is due, else nothing. Call it at every step.

        The state is captured only if it is due; it must not change until the await returns.
        Leaving the saver saves what was last given here, if its step is above the newest
        committed one (`save_last=False` does not).

        Args:
            state: as for `save`.
            step: completed steps.
            if_busy: with `max_pending` saves under way: `skip` this one, after a short
                grace, or `wait` for admission.
            **options: see `SaveOptions`.

        Returns:
            The handle, or None when nothing was due or the save was skipped.
        """
        if not self._wants(state, step, if_busy, options):
            return _nothing()
        request = self._request(state, step, options)
        return self._call("stage_if_due", request, partial(self._stage_or_skip, request, if_busy))

    def _wants(self, state: Any, step: int, if_busy: str, options: SaveOptions) -> bool:
        """Whether a save is due; remembers what was asked for, for the end."""
        if if_busy not in ("skip", "wait"):
            raise UsageError(f"if_busy is 'skip' or 'wait', not {if_busy!r}")
        if self._due.when is None:
            raise UsageError("stage_if_due needs a trigger: Saver(..., when=EverySteps(100))")
        self._owner.check()
        number = as_step(step)
        self._last = (state, number, options)
        return self._ask(number)

    def _ask(self, step: int) -> bool:
        self._due.preempted = self._saving.beside.preempted
        self._due.pending = len(self._saving.ledger.active)
        return bool(self._decisions.note(Decision(Kind.DUE, step, self._due.ask(step))).value)

    async def _stage_or_skip(self, request: Request, if_busy: str) -> PendingSave | None:
        decision = Decision(Kind.ADMIT, request.step)
        try:
            if if_busy == "skip" and not await self._saving.ledger.free_within(SKIP_GRACE):
                decision = Decision(Kind.SKIP, request.step, "saves are pending")
            if if_busy == "wait" and self._on_overlap == "error":
                await self._saving.ledger.free_within(None)
            decision = await self._decisions.agree(decision)
        except BaseException:
            request.drop()
            raise
        if decision.kind is Kind.SKIP:
            request.drop()
            self._due.skipped += 1
            return None
        return await self._stage(request)

    async def _save_last(self) -> None:
        """The save at the end: what was last seen, unless it is committed already."""
        last, self._last = self._last, None
        if last is None:
            return
        state, step, options = last
        await self._saving.idle()
        if step > self._saving.newest:
            await self._save(self._request(state, step, options))

    def _begin(self, request: Request) -> PendingSave:
        pending = super()._begin(request)
        self._due.begun(request.step)
        return pending

    def _restored(self, step: int) -> None:
        """The state is that of `step` now: what was seen before is not there any more."""
        self._last = None
        self._due.restored(step)

    def _measure(self, pending: PendingSave) -> None:
        """Learn from a committed save what saves cost."""
        self._due.measured(blocked=pending.blocked_seconds, write=pending.seconds.get(Phase.COMMITTED))


async def _nothing() -> None:
    return None
