"""Reloader: serve a run's newest weights without dropping a request.

    reloader = aiockpt.Reloader("runs/digits", lambda: Model())
    async with reloader:
        async with reloader.use() as live:
            answer = live.model(question)  # of live.step, from beginning to end

A new checkpoint is leased, loaded and verified beside the one that serves. Every parameter
has to come from it; it has to be finite, pass the user's own check and be warm before any
request sees it. Then new requests get it, and the old one goes with its last request.
Whatever fails, the version before serves on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import anyio

from ._choices import Choices
from ._devices import MapLocation
from ._leaselist import LeaseInfo
from ._memory import ByteBudget
from ._preparing import Recipe
from ._reloadlog import Events
from ._serving import Live, Use
from ._status import status_of
from ._switching import Switching
from ._watching import Watched
from .catalog import Catalog
from .checkpoint import Checkpoint
from .errors import UsageError
from .storage import Store

__all__ = ["Live", "Reloader"]

M = TypeVar("M")


class Reloader(Generic[M]):
    """Serves the checkpoints of one run as they come; an async context manager, entered once.

    Entering returns at once; `ready()` waits for the first version, and so does `use()`. At
    the start the newest checkpoint that is fit to serve is taken.

    Args:
        run: the run's folder or URL, or a store. It need not be there yet.
        build: makes a new model; runs in a thread, on torch's meta device where that loses
            nothing. The model is put into evaluation mode.
        load: `load(checkpoint, model)`, where the state is more than a model's: fills the
            model, or returns another one. `await checkpoint.load(...)` reads. Coverage is then
            its own affair. This and the next two may be `async`; else they run in a thread.
        validate: `validate(model)`: raises or returns False for a model that is not to serve.
        warm_up: `warm_up(model)`: what the first request should not have to wait for.
        strategy: `swap` loads beside what serves. `inplace` copies into the memory of what
            serves while requests queue, for captured graphs, and devices without room for two;
            `validate` then runs while they queue, and its no puts the old weights back.
        follow: `latest`, or `alias:NAME`.
        poll: seconds between two looks at the run.
        item: the entry of the state that is the model; by default `model`, or all of the
            state where there is no such entry.
        map_location: device of the model.
        cast: whether dtypes may differ; they are converted.
        finite: whether NaN and infinities keep a model from serving.
        meta: whether to try to build on the meta device.
        on_busy: with `inplace`, when requests do not leave within `gate_timeout`: `defer` the
            update, `proceed` all the same (requests under way see both), or `abort` them
            (`RequestAbortedError`).
        gate_timeout: seconds for which new requests may queue before that.
        drain_timeout: seconds for which the next checkpoint waits for requests on an old version,
            and closing for requests under way.
        retry: seconds before a checkpoint that failed is tried again; doubled each time.
        ttl: of the leases, in seconds.
        budget: as for `Catalog`.
        allow_pickle: as for `Catalog`.
        step_format: as for `Catalog`.

    Attributes:
        catalog: of the run, for those who look at its checkpoints.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Store,
        build: Callable[[], M],
        *,
        load: Callable[[Watched, M], M | Awaitable[M | None] | None] | None = None,
        validate: Callable[[M], object] | None = None,
        warm_up: Callable[[M], object] | None = None,
        strategy: Literal["swap", "inplace"] = "swap",
        follow: str = "latest",
        poll: float = 1.0,
        item: str | None = None,
        map_location: MapLocation = None,
        cast: bool = False,
        finite: bool = True,
        meta: bool = True,
        on_busy: Literal["defer", "proceed", "abort"] = "defer",
        gate_timeout: float = 5.0,
        drain_timeout: float = 30.0,
        retry: float = 30.0,
        ttl: float = 60.0,
        budget: int | ByteBudget | None = None,
        allow_pickle: bool = False,
        step_format: str | None = None,
    ) -> None:
        functions: dict[str, object] = {
            "build": build,
            "load": load,
            "validate": validate,
            "warm_up": warm_up,
        }
        for name, given in functions.items():
            if not callable(given) and (given is not None or name == "build"):
                raise UsageError(f"{name}= is a function, not {given!r:.80}")
        recipe = Recipe(
            build=build,
            load=load,
            validate=validate,
            warm_up=warm_up,
            item=item,
            map_location=map_location,
            cast=cast,
            finite=finite,
            meta=meta,
        )
        choices = Choices(
            strategy=strategy,
            follow=follow,
            poll=poll,
            on_busy=on_busy,
            gate_timeout=gate_timeout,
            drain_timeout=drain_timeout,
            retry=retry,
            ttl=ttl,
        )
        self.catalog = Catalog(run, budget=budget, allow_pickle=allow_pickle, step_format=step_format)
        self._switching: Switching[M] = Switching(self.catalog, recipe, choices)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._task is not None or self._switching.serving.closed:
            raise UsageError("a reloader is entered once; make another one")
        self._task = asyncio.get_running_loop().create_task(self._switching.run(), name="aiockpt reloader")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
        fatal = self._switching.fatal
        if fatal is None:
            return
        if error is None:
            raise fatal
        if error is not fatal and error.__cause__ is not fatal:
            error.add_note(f"The reloader had ended: {type(fatal).__name__}: {fatal}")

    async def aclose(self) -> None:
        """Let nobody in any more, wait for requests under way (`drain_timeout`), let go of leases.

        A checkpoint that is being loaded is dropped; a pin or rollback under way is waited for.
        Any number of times.
        """
        switching = self._switching
        if switching.serving.closed:
            return
        switching.serving.close()
        if self._task is not None:
            self._task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._task])
        async with switching.lock:
            await switching.close()

    # ------------------------------------------------------------- for requests

    def use(self) -> Use[M]:
        """One version for one request: `async with reloader.use() as live:`.

        `live.model`, `live.step` and `live.save_id` stay the same to the end of the block,
        whatever is loaded meanwhile. Entering waits only where nothing serves yet, or while an
        update in place has the gate closed.

        Raises:
            UsageError: on entering: the reloader is closed.
            ReloadError: on entering: it has ended by an error, and nothing serves.
            RequestAbortedError: on leaving: with `on_busy="abort"`, see there.
        """
        return self._switching.serving.use()

    async def ready(self) -> Checkpoint:
        """Wait until something serves; returns its checkpoint.

        Raises:
            As `use`.
        """
        return await self._until(lambda _: True)

    async def wait_for(self, step: int) -> Checkpoint:
        """Wait until a step, or a later one, serves; returns its checkpoint.

        Raises:
            As `use`.
        """
        return await self._until(lambda found: found.step >= step)

    async def _until(self, good: Callable[[Checkpoint], bool]) -> Checkpoint:
        serving = self._switching.serving
        while True:
            serving.check()
            if serving.current is not None and good(serving.current.checkpoint):
                return serving.current.checkpoint
            if self._switching.fatal is not None:
                raise self._switching.fatal
            await serving.change()

    # ------------------------------------------------------------- orders

    async def rollback(self) -> Checkpoint:
        """Serve what served before, and say so: returns its checkpoint.

        With an alias, the alias is promoted to it, and every replica follows. With `latest`,
        what was left is not taken again by this reloader; what is committed from now on is.

        Raises:
            StepNotFoundError: there is nothing to go back to.
            ReloadError: it cannot be put to service; what serves now serves on.
            UsageError: a checkpoint is pinned, or nothing serves yet.
        """
        async with self._order():
            return await self._switching.roll_back()

    async def pin(self, checkpoint: Checkpoint | int) -> Checkpoint:
        """Serve one checkpoint, whatever is committed or promoted, until `unpin`.

        Raises:
            StepNotFoundError: there is no such checkpoint.
            ReloadError: it cannot be put to service; what serves now serves on, and nothing is pinned.
            As `Catalog.get`.
        """
        async with self._order():
            return await self._switching.pin(checkpoint)

    async def unpin(self) -> None:
        """Follow the run again; without a pin nothing happens."""
        async with self._order():
            if self._switching.pinned is not None:
                self._switching.unpin()

    async def reload(self) -> bool:
        """Look now instead of at the next poll, also at what has failed before.

        Returns:
            Whether another version serves now.

        Raises:
            ReloadError: what was found cannot be put to service; what serves now serves on.
            StorageError: the store failed.
        """
        async with self._order():
            return await self._switching.reload()

    def _order(self) -> asyncio.Lock:
        self._switching.serving.check()
        return self._switching.lock

    # ------------------------------------------------------------- facts

    def status(self) -> dict[str, Any]:
        """What goes on, in plain values that JSON can hold.

        `state` (`starting`, `serving`, `failed`, `closed`), `ready`, `gate` (`open`, `shut`), `run`,
        `follow`, `strategy`, `pinned`; `serving` and `previous` (step, save id, since, users);
        `draining`: old versions that requests still use; `reloading`: step and stage of what is being loaded;
        `quarantined`: step, stage, reason, tries, `retry_in`; `reloads` and `failures`, counted;
        `history`: each attempt with its outcome, reason and `seconds` by stage; `error`.
        """
        return status_of(self._switching)

    def events(self) -> Events:
        """Each step of each reload from now on, as plain records: `async for event in reloader.events():`.

        `event` is `found`, `stage`, `swapped`, `drained`, `failed`, `deferred` or `cancelled`; the rest
        as in `history`. A listener that is slow misses the oldest. The stream ends with the reloader.
        """
        return self._switching.log.events()

    async def replicas(self) -> tuple[LeaseInfo, ...]:
        """Who serves what of this run, in all processes: the leases whose purpose is `serving`.

        Raises:
            StorageError: the store failed.
        """
        return tuple(lease for lease in await self.catalog.leases() if lease.purpose == "serving")
