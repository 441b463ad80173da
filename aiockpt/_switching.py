"""The work of a reloader: find the next checkpoint, prepare it, let it serve, let go of the old one.

One checkpoint at a time, under a lock: the task that follows the run and those who pin or
roll back take turns. Whatever goes wrong with one checkpoint, the version before serves on.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

import anyio
from torch import nn

from ._aliases import Aliases
from ._choices import Choices
from ._exchange import Exchange
from ._fitting import unwrapped
from ._following import Follower, follower, identity
from ._leases import Lease
from ._log import log
from ._preparing import Recipe, RecipeError, forget_models, prepare, stage_tensors, validate
from ._quarantine import Quarantine
from ._reloadlog import Attempt, ReloadLog
from ._serving import Serving, Version
from ._threads import offload
from ._versions import Versions
from ._waking import Patience, Waker
from .catalog import Catalog
from .checkpoint import Checkpoint
from .errors import (
    CheckpointError,
    CorruptCheckpointError,
    MemoryShortError,
    ReloadError,
    StepNotFoundError,
    StorageError,
    UsageError,
)

__all__ = ["Switching"]

M = TypeVar("M")


class _BusyError(Exception):
    """Requests did not leave in time for an update in place."""


class Switching(Generic[M]):
    """One reloader's machinery."""

    def __init__(self, catalog: Catalog, recipe: Recipe[M], choices: Choices) -> None:
        self.catalog = catalog
        self.recipe = recipe
        self.choices = choices
        self.serving: Serving[M] = Serving()
        self.quarantine = Quarantine(choices.retry)
        self.log = ReloadLog()
        self.waker = Waker(catalog.store)
        self.attempt: Attempt | None = None
        self.pinned: Checkpoint | None = None
        self.fatal: Exception | None = None
        self.lock = asyncio.Lock()
        self.versions: Versions[M] = Versions(self.serving, catalog, choices)
        self._follower = self._follow(None)
        self._looking = Patience(choices.poll, catalog.store.url)
        self._trouble = Patience(choices.poll, catalog.store.url)

    def _follow(self, after: Checkpoint | None) -> Follower:
        return follower(self.catalog.loader.finder, self.choices.follow, after=after)

    @property
    def alias(self) -> str | None:
        """The alias that is followed, if one is."""
        return self.choices.follow.removeprefix("alias:") if self.choices.follow != "latest" else None

    # ------------------------------------------------------------- following

    async def run(self) -> None:
        """Follow the run until cancelled. What is nobody's fault but ours ends it, and is told to all."""
        try:
            while True:
                await self.versions.tidy()
                pause = await self._round()
                if pause:
                    await self.waker.wait(pause)
        except Exception as error:
            log.exception("%s: the reloader has ended; what serves goes on serving", self.catalog.store.url)
            self.fatal = error
            known = isinstance(error, CheckpointError)
            self.serving.failed = error if known else ReloadError(f"{type(error).__name__}: {error}")  # type: ignore[assignment]
            self.serving.tell()
        finally:
            self.waker.close()

    async def _round(self) -> float:
        """One look and what follows from it; returns how long to pause."""
        if self.versions.draining():
            return self.choices.poll
        async with self.lock:
            try:
                wanted = await self._wanted()
            except UsageError:
                raise
            except CheckpointError as error:
                return self._looking.failed(error)
            pause = self._looking.worked()
            if wanted is None:
                return pause
            try:
                await self.switch(wanted, "follow")
            except RecipeError:
                raise
            except ReloadError as error:
                if self.fatal is not None:
                    raise
                # The next candidate may be tried at once, unless the model itself cannot be built.
                return self._trouble.failed(error) if error.stage in ("build", "gate") else 0.0
            self._trouble.worked()
            return 0.0

    async def _wanted(self) -> Checkpoint | None:
        if self.pinned is None:
            return await self._follower.next(self.quarantine.holds)
        there = self.is_at(self.pinned) or self.quarantine.holds(self.pinned)
        return None if there else self.pinned

    def is_at(self, checkpoint: Checkpoint) -> bool:
        """Whether this very checkpoint serves."""
        current = self.serving.current
        return current is not None and identity(current.checkpoint) == identity(checkpoint)

    # ------------------------------------------------------------- one checkpoint

    async def switch(self, checkpoint: Checkpoint, why: str) -> None:
        """Put a checkpoint to service. The caller has the lock.

        Raises:
            ReloadError: it was not; the version before serves on, and the history says why.
        """
        self.attempt = attempt = self.log.begin(checkpoint, why)
        try:
            await self._switch(checkpoint, attempt)
        except RecipeError as error:
            attempt.end("failed", error)
            raise
        except _BusyError as error:
            attempt.end("deferred", error)
            raise ReloadError(str(error), step=checkpoint.step, stage="gate") from error
        except ReloadError as error:
            error.stage = self._note(checkpoint, attempt, error)
            raise  # anew and from itself it would keep itself, and the model in its frames
        except Exception as error:
            stage = self._note(checkpoint, attempt, error)
            message = (
                f"step {checkpoint.step} is not put to service ({stage}): {type(error).__name__}: {error}"
            )
            raise ReloadError(message, step=checkpoint.step, stage=stage) from error
        except BaseException as error:
            attempt.end("cancelled", error)
            raise
        finally:
            self.attempt = None

    def _note(self, checkpoint: Checkpoint, attempt: Attempt, error: Exception) -> str:
        """Tell of a failure, and keep away from the checkpoint for a while; returns the stage."""
        stage = attempt.stage
        attempt.end("failed", error)
        forget_models(error)
        if stage != "build":  # else no checkpoint is to blame
            soon = isinstance(error, (StorageError, MemoryShortError))
            self.quarantine.add(checkpoint, stage, error, soon=soon)
        log.error(
            "%s: step %d is not put to service (%s): %s: %s",
            self.catalog.store.url,
            checkpoint.step,
            stage,
            type(error).__name__,
            str(error),  # whoever keeps the record must not keep the model that the traceback holds
            extra={"step": checkpoint.step},
        )
        return stage

    async def _switch(self, checkpoint: Checkpoint, attempt: Attempt) -> None:
        lease = Lease(self.catalog.loader, checkpoint, self.choices.ttl, "loading")
        await lease.__aenter__()
        try:
            current = self.serving.current
            if self.choices.strategy == "inplace" and current is not None:
                await self._exchange(lease, attempt, current)
            else:
                # No name for the model here: the traceback of a later cancellation would keep it.
                self._put(await self._prepared(lease, attempt), attempt)
        except BaseException:
            await lease.__aexit__(None, None, None)
            raise
        await self.versions.relabel()

    async def _prepared(self, lease: Lease, attempt: Attempt) -> Version[M]:
        made = await prepare(self.recipe, lease, attempt.enter, self.versions.in_use)
        return Version(made, lease, self.waker.wake)

    async def _exchange(self, lease: Lease, attempt: Attempt, current: Version[M]) -> None:
        """Put new weights into the model that serves."""
        model = current.model
        if not isinstance(model, nn.Module):
            raise RecipeError(f"strategy='inplace' needs a torch module, not a {type(model).__name__}")
        staged = await stage_tensors(self.recipe, lease, model, attempt.enter)
        attempt.enter("gate")
        try:
            await self._shut()
            attempt.enter("copy")
            exchange = Exchange(unwrapped(model), staged)
            staged.clear()
            try:
                await offload(exchange.forward)
                await validate(self.recipe, model, lease.checkpoint.step, attempt.enter)
            except BaseException:
                await self._back(exchange, lease.checkpoint.step)
                raise
            exchange.forget()
            self._put(Version(model, lease, self.waker.wake), attempt)
        finally:
            if self.serving.failed is None:
                self.serving.open()

    async def _back(self, exchange: Exchange, step: int) -> None:
        """Undo an update. A model that is neither the one nor the other must not serve."""
        try:
            with anyio.CancelScope(shield=True):
                await offload(exchange.back)
        except Exception as error:
            message = f"step {step} could not be undone half-way: the model is a mix, and serves no more"
            self.fatal = self.serving.failed = failed = ReloadError(
                f"{message}: {error}", step=step, stage="copy"
            )
            self.serving.tell()
            raise failed from error

    async def _shut(self) -> None:
        """Wait until no request is inside, and let none in.

        Raises:
            _BusyError: they do not leave.
        """
        seconds = self.choices.gate_timeout
        if await self.serving.shut(seconds) or self.choices.on_busy == "proceed":
            return
        if self.choices.on_busy == "abort":
            self.serving.abort()
            if await self.serving.shut(seconds):
                return
        raise _BusyError(f"requests did not leave within {seconds:g} s: the update is tried again later")

    def _put(self, version: Version[M], attempt: Attempt) -> None:
        """The instant of the change; nothing in it waits."""
        attempt.enter("swap")
        self.versions.put(version, attempt)
        self._follower.delivered(version.checkpoint)
        self.quarantine.release(version.checkpoint)
        attempt.end("swapped")
        log.info("%s: step %d serves", self.catalog.store.url, version.checkpoint.step)

    async def close(self) -> None:
        """Wait for the last requests, for so long; then let everything go."""
        self.serving.close()
        try:
            await self.versions.close()
        finally:
            self.log.close()
            with anyio.CancelScope(shield=True):
                await self.versions.let_all_go()
                await self.catalog.aclose()

    # ------------------------------------------------------------- orders

    async def roll_back(self) -> Checkpoint:
        """Serve what served before; see `Reloader.rollback`."""
        current = self.serving.current
        if self.pinned is not None:
            raise UsageError(f"step {self.pinned.step} is pinned: unpin it first")
        if current is None:
            raise UsageError("nothing serves yet: there is nothing to go back from")
        target = await self._one_before(current.checkpoint)
        left = current.checkpoint
        del current
        await self.switch(target, "rollback")
        self.versions.before = self.versions.before[:-1]  # what was left is no place to go back to
        if self.versions.before and identity(self.versions.before[-1]) == identity(target):
            self.versions.before.pop()
        if self.alias is not None:
            await self.catalog.promote(target, self.alias)
        else:
            self.quarantine.bar(left, f"rolled back to step {target.step}")
            await self._follower.settle(target)
        return target

    async def _one_before(self, current: Checkpoint) -> Checkpoint:
        """What served before; where that is unknown or gone, what the alias or the run had before."""
        finder = self.catalog.loader.finder
        while self.versions.before:
            try:
                return (await finder.resolve(self.versions.before[-1]))[0]
            except (StepNotFoundError, CorruptCheckpointError):
                self.versions.before.pop()
        if self.alias is not None:
            return await Aliases(finder).previous(self.alias)
        older = [
            c for c in await finder.checkpoints() if c.step < current.step and not self.quarantine.holds(c)
        ]
        if not older:
            message = f"there is nothing before step {current.step} to go back to"
            raise StepNotFoundError(message, step=current.step)
        return older[-1]

    async def pin(self, checkpoint: Checkpoint | int) -> Checkpoint:
        """Serve one checkpoint until further notice; see `Reloader.pin`."""
        found = (await self.catalog.loader.finder.resolve(checkpoint))[0]
        if not self.is_at(found):
            await self.switch(found, "pin")
        self.pinned = found
        return found

    def unpin(self) -> None:
        """Follow again, from what serves now."""
        self.pinned = None
        current = self.serving.current
        self._follower = self._follow(None if current is None else current.checkpoint)
        self.waker.wake()

    async def reload(self) -> bool:
        """Look now, at what is quarantined as well; see `Reloader.reload`."""
        self.quarantine.forgive()
        wanted = await self._wanted()
        if wanted is None:
            return False
        await self.switch(wanted, "reload")
        return True
