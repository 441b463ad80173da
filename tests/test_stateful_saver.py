"""A saver under any sequence of calls: what is visible is always what a small model says."""

from __future__ import annotations

import asyncio
import gc
import itertools
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from aiockpt import (
    CheckpointError,
    PendingSave,
    Phase,
    PreviousSaveError,
    SaveCancelledError,
    Saver,
    StepError,
    StepExistsError,
    StorageError,
    load,
)
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles
from tests.proof import litter, steps
from tests.savers import assert_quiet, fill, large, numbers, small_blocks

T = TypeVar("T")


class Story(RuleBasedStateMachine):
    """One run, its savers one after the other, and the state that a training loop changes.

    The model: `visible` maps each committed step to the number its tensors hold. A save in
    flight is in `flying` with the number it was called with; once awaited it is in `visible`,
    or it failed and is nowhere.
    """

    pendings = Bundle("pendings")

    def __init__(self) -> None:
        super().__init__()
        self.exits = ExitStack()
        self.exits.enter_context(small_blocks())
        self.runner = self.exits.enter_context(asyncio.Runner())
        self.folder = Path(tempfile.mkdtemp(prefix="aiockpt-story-"))
        self.numbers = itertools.count(1)
        self.state = large(0, leaves=2)
        self.visible: dict[int, float] = {}
        self.flying: dict[int, tuple[PendingSave, float]] = {}
        self.unseen: set[int] = set()
        self.retired: set[int] = set()
        self.newest = 0
        self.saver: Saver | None = None
        self.enter()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coro)

    # ------------------------------------------------------------ life

    def enter(self) -> None:
        self.files = FaultyFiles()
        saver = Saver(LocalStore(self.folder, files=self.files), max_pending=2, budget=3 << 20)
        self.saver = self.run(saver.__aenter__())

    @precondition(lambda self: self.saver is not None)
    @rule(how=st.sampled_from(["aclose", "abort", "body error", "loop ends"]))
    def leave(self, how: str) -> None:
        """The saver is left; whatever was in flight has an end then."""
        assert self.saver is not None
        saver, self.saver = self.saver, None
        if how == "loop ends":
            saver._owner.closed = True  # (its warning is no business of this test)
            self.runner.close()
            self.runner = self.exits.enter_context(asyncio.Runner())
            del saver
            gc.collect()  # with it goes its hold on the run
        else:
            told = False
            try:
                if how == "aclose":
                    self.run(saver.aclose())
                elif how == "abort":
                    self.run(saver.abort())
                else:
                    self.run(saver.__aexit__(ValueError, ValueError("body"), None))
            except CheckpointError:
                told = True
            assert not told or self.unseen or self.any_failed()
        self.unseen.clear()
        self.settle(everything=True)
        assert litter(self.folder) == []
        self.enter()

    def any_failed(self) -> bool:
        return any(p.done() and p._error is not None for p, _ in self.flying.values())

    def settle(self, *, everything: bool = False) -> None:
        """Bring the model up to date with saves that have ended meanwhile."""
        for step, (pending, number) in list(self.flying.items()):
            assert pending.done() or not everything
            if pending.done():
                del self.flying[step]
                if pending._error is None:
                    self.visible[step] = number
                elif not pending._reported:
                    self.unseen.add(step)

    # ------------------------------------------------------------ saving

    def begin(self) -> tuple[int, float]:
        self.newest += 1
        number = float(next(self.numbers))
        fill(self.state, number)
        return self.newest, number

    async def told(self, make: Callable[[], Coroutine[Any, Any, T]], step: int) -> T | PendingSave:
        """The outcome of a call, which is made on the loop; an earlier failure may be told first."""
        try:
            return await make()
        except PreviousSaveError as error:
            pending = error.pending
        assert self.unseen or self.any_failed()
        assert isinstance(pending, PendingSave)
        assert pending.step == step
        return pending

    @rule()
    def save(self) -> None:
        """Visible when it returns."""
        step, number = self.begin()
        saver = self.saver
        assert saver is not None
        outcome = self.run(self.told(lambda: saver.save(self.state, step=step), step))
        if isinstance(outcome, PendingSave):
            self.run(outcome.committed())
        self.settle()
        self.unseen.clear()
        self.visible[step] = number

    @rule(target=pendings, way=st.sampled_from(["stage", "staging", "save_nowait"]))
    def stage(self, way: str) -> Any:
        """In flight when it returns; the state may change."""
        step, number = self.begin()
        saver = self.saver
        assert saver is not None

        async def staging() -> PendingSave:
            async with saver.staging(self.state, step=step) as pending:
                await asyncio.sleep(0)
            return pending

        async def nowait() -> PendingSave:
            await asyncio.gather(*(p._ended.wait() for p in saver.pending))
            return saver.save_nowait(self.state, step=step)

        def stage() -> Coroutine[Any, Any, PendingSave]:
            return saver.stage(self.state, step=step)

        make = {"stage": stage, "staging": staging, "save_nowait": nowait}[way]
        pending = self.run(self.told(make, step))
        if way != "save_nowait":
            assert pending.phase >= Phase.STAGED
        self.settle()
        self.flying[step] = (pending, number)
        fill(self.state, -1)  # must never be seen
        return pending

    @rule(pending=consumes(pendings))
    def wait(self, pending: PendingSave) -> None:
        """Its end: visible, or its own error."""

        async def look() -> Exception | None:
            try:
                await pending
            except (StorageError, SaveCancelledError) as error:
                return error
            return None

        if pending.step in self.flying or pending.done():
            error = self.run(look()) if pending._loop is self.runner.get_loop() else pending.exception()
            self.settle()
            self.unseen.discard(pending.step)
            assert (error is None) == (pending.step in self.visible or pending.step in self.retired)

    @rule(pending=pendings)
    def cancel(self, pending: PendingSave) -> None:
        """True: it is gone; False: it has its end already, or gets it."""
        if pending._loop is not self.runner.get_loop():
            return

        async def cancel() -> bool:
            said = pending.cancel()
            await pending.cancel_and_wait()
            return said

        said = self.run(cancel())
        assert pending.done()
        self.settle()
        assert not (said and pending.step in self.visible)

    @rule(at=st.integers(0, 12))
    def cancelled_call(self, at: int) -> None:
        """A call whose caller goes after some turns of the loop: absent, or staged and owned by the saver."""
        step, number = self.begin()
        saver = self.saver
        assert saver is not None

        async def go() -> PendingSave | None:
            task = asyncio.create_task(self.told(lambda: saver.save(self.state, step=step), step))
            for _ in range(at):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            left = [p for p in saver.pending if p.step == step]
            if not task.cancelled():
                await asyncio.gather(*(p.committed() for p in left))
                self.visible[step] = number
                return None
            assert all(p.phase >= Phase.STAGED for p in left)
            return left[0] if left else None

        pending = self.run(go())
        fill(self.state, -1)
        self.settle()
        if pending is not None:
            self.flying[step] = (pending, number)

    @rule(after=st.integers(0, 14))
    def failing_save(self, after: int) -> None:
        """The disk fails at some call of the save: an error, then nothing of it; or it had committed."""
        step, number = self.begin()
        saver = self.saver
        assert saver is not None
        self.run(saver._saving.idle())
        self.settle()
        self.files.faults.fail_at = len(self.files.operations) + after
        failed: CheckpointError | None = None
        try:
            self.run(self.told(lambda: saver.save(self.state, step=step), step))
            self.run(saver._saving.idle())
        except CheckpointError as error:
            failed = error
        assert failed is None or failed.step == step
        self.files.faults.heal()
        self.unseen.clear()
        if step in self.run(steps(self.folder)):
            self.visible[step] = number

    @rule(after=st.integers(0, 14), again=st.booleans())
    def crash(self, after: int, again: bool) -> None:
        """As a crash at some call of a save would leave it: old steps whole, the new one whole or absent."""
        saver = self.saver
        assert saver is not None
        self.run(saver._saving.idle())
        self.settle()
        step, number = self.begin()
        if again and self.visible:
            step = max(self.visible)
        copy = Path(tempfile.mkdtemp(prefix="aiockpt-crash-"))
        faults = self.files.faults
        faults.kind, faults.fail_at = "cancel", len(self.files.operations) + after
        faults.on_fault = lambda: shutil.copytree(self.folder, copy / "run")
        outcome = self.run(self.told(lambda: saver.save(self.state, step=step, overwrite=again), step))
        if isinstance(outcome, PendingSave):
            self.run(outcome.committed())
        self.run(saver._saving.idle())
        faults.kind, faults.fail_at = "error", None
        before, self.visible = self.visible, {**self.visible, step: number}
        self.unseen.clear()
        if (copy / "run").exists():
            found = self.run(self.look(copy / "run"))
            assert found in (before, self.visible, {**before, step: number})
        shutil.rmtree(copy)

    async def look(self, run: Path) -> dict[int, float]:
        """What the next process finds in the run, and that it can go on."""
        async with Saver(run) as saver:
            assert litter(run) == []
            found: dict[int, float] = {}
            for step in await steps(run):
                (found[step],) = numbers(await load(run, step))
            await saver.save({"n": 1}, step=10**6)
        return found

    @rule(pick=st.integers(0, 5))
    def refused(self, pick: int) -> None:
        """A step that is there, or below the newest: refused, nothing changes."""
        saver = self.saver
        assert saver is not None
        self.run(saver._saving.idle())
        self.settle()
        if not self.visible:
            return
        step = sorted(self.visible)[pick % len(self.visible)]
        with pytest.raises((StepError, StepExistsError)):
            self.run(self.told(lambda: saver.save(self.state, step=step), step))

    @rule(pick=st.integers(0, 5))
    def overwrite(self, pick: int) -> None:
        """A committed step anew: the new one is what is seen."""
        saver = self.saver
        assert saver is not None
        self.run(saver._saving.idle())
        self.settle()
        if not self.visible:
            return
        step = sorted(self.visible)[pick % len(self.visible)]
        number = float(next(self.numbers))
        fill(self.state, number)
        outcome = self.run(self.told(lambda: saver.save(self.state, step=step, overwrite=True), step))
        if isinstance(outcome, PendingSave):
            self.run(outcome.committed())
        self.unseen.clear()
        self.visible[step] = number

    @rule()
    def drain(self) -> None:
        """Everything in flight ends; what nobody was told of is raised."""
        saver = self.saver
        assert saver is not None
        told = False
        try:
            self.run(saver.drain())
        except CheckpointError:
            told = True
        assert not told or self.unseen or self.any_failed()
        self.settle(everything=True)
        self.unseen.clear()
        self.run(self.quiet())

    async def quiet(self) -> None:
        assert self.saver is not None
        assert_quiet(self.saver)

    @rule()
    def rewind(self) -> None:
        """Back to some earlier step: the later ones are gone."""
        saver = self.saver
        assert saver is not None
        self.run(saver._saving.idle())
        self.settle()
        if len(self.visible) < 2:
            return
        step = sorted(self.visible)[-2]
        found = self.run(saver.restore(step=step, rewind=True))
        assert found is not None
        assert numbers(found.values) == {self.visible[step]}
        self.retired |= {s for s in self.visible if s > step}
        self.visible = {s: n for s, n in self.visible.items() if s <= step}

    # ------------------------------------------------------------ always

    @invariant()
    def what_is_visible(self) -> None:
        """Exactly the committed steps, perhaps with some in flight; the newest holds its own number."""
        if self.saver is None:
            return
        found = set(self.run(steps(self.folder)))
        assert set(self.visible) <= found <= set(self.visible) | set(self.flying)
        newest = self.run(self.saver._catalog.restore())
        assert (newest is None) == (not found) or self.flying
        if newest is not None:
            known = {**{step: number for step, (_, number) in self.flying.items()}, **self.visible}
            assert numbers(newest.values) == {known[newest.step]}

    def teardown(self) -> None:
        """End it all."""
        try:
            if self.saver is not None:
                with suppress(CheckpointError):
                    self.run(self.saver.abort())
            self.settle(everything=True)
            assert litter(self.folder) == []
        finally:
            self.exits.close()
            shutil.rmtree(self.folder)


# Without `explain`: its tracer looks at files from within whatever runs, which the guard takes for our doing.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
Story.TestCase.settings = settings(max_examples=20, stateful_step_count=15, deadline=None, phases=PHASES)
TestStory = pytest.mark.slow(pytest.mark.timeout(300)(Story.TestCase))
