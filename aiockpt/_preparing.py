"""A checkpoint made ready to serve, aside: built, loaded and verified, covered, checked, warmed up.

All of it in lane threads; what the user gave as `async def` is awaited on the loop.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn

from ._cgroup import memory_left
from ._devices import MapLocation
from ._fitting import compare, fresh, not_finite, put_in, tensors_of, unwrapped
from ._leases import Lease
from ._table import TensorTable
from ._threads import Lane, offload
from ._watching import Watched, watched
from .errors import MemoryShortError, ReloadError, UsageError

__all__ = ["Recipe", "RecipeError", "forget_models", "prepare", "stage_tensors", "validate"]

M = TypeVar("M")
Stage = Callable[[str], None]

ITEM: Final = "model"
"""The entry of a state that is the model, where nobody says."""


_FRAMES: Final = (__name__, put_in.__module__)
"""Modules whose frames hold models and are over when an error has left them."""


class RecipeError(UsageError):
    """What the user gave cannot work with any checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Generic[M]):
    """How a checkpoint becomes a model; see `Reloader`."""

    build: Callable[[], M]
    load: Callable[[Watched, M], M | Awaitable[M | None] | None] | None = None
    validate: Callable[[M], object] | None = None
    warm_up: Callable[[M], object] | None = None
    item: str | None = None
    map_location: MapLocation = None
    cast: bool = False
    finite: bool = True
    meta: bool = True


async def prepare(recipe: Recipe[M], lease: Lease, enter: Stage, in_use: Callable[[object], bool]) -> M:
    """A model of the leased checkpoint that is ready to serve; nobody else has it.

    Args:
        recipe: how.
        lease: of the checkpoint.
        enter: told of each stage.
        in_use: whether a model serves or served: that must not be touched.

    Raises:
        MemoryShortError: there is no room for it now.
        ReloadError: it is not fit to serve.
        RecipeError: `build` returned what needs a `load`.
        CheckpointError: as `Lease.load`.
        Exception: whatever the user's functions raised.
    """
    enter("memory")
    item = await _look(recipe, lease)
    enter("build")
    model = await _build(recipe)
    if in_use(model):
        raise RecipeError("build= returned a model that is in use: it has to make a new one each time")
    if recipe.load is None:
        enter("load")
        state = await _state(recipe, lease, item)
        enter("cover")
        step = lease.checkpoint.step
        await offload(partial(put_in, _as_module(model), state, cast=recipe.cast, step=step))
        del state
    else:
        enter("load")
        made = await _call(recipe.load, watched(lease.checkpoint, lease), model)
        model = model if made is None else made
    if recipe.finite and isinstance(model, nn.Module):
        enter("finite")
        await offload(_check_finite, tuple(tensors_of(model)), lease.checkpoint.step)
    await validate(recipe, model, lease.checkpoint.step, enter)
    if recipe.warm_up is not None:
        enter("warm_up")
        await _call(recipe.warm_up, model)
    return model


async def stage_tensors(
    recipe: Recipe[M], lease: Lease, living: nn.Module, enter: Stage
) -> dict[str, torch.Tensor]:
    """The leased checkpoint's tensors in host memory, by the names of the model that serves.

    Raises:
        As `prepare`.
    """
    enter("memory")
    item = await _look(recipe, lease)
    step = lease.checkpoint.step
    if recipe.load is None:
        enter("load")
        state = await _state(recipe, lease, item, on_host=True)
    else:
        enter("build")
        aside = await _build(recipe)
        enter("load")
        made = await _call(recipe.load, watched(lease.checkpoint, lease), aside)
        state = await offload(_state_of, aside if made is None else made)
    enter("cover")
    call = partial(compare, unwrapped(living), state, cast=recipe.cast, step=step)
    given = await offload(call)
    staged = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    if recipe.finite:
        enter("finite")
        await offload(_check_finite, tuple(staged.items()), step)
    return staged


async def validate(recipe: Recipe[M], model: M, step: int, enter: Stage) -> None:
    """The user's own check.

    Raises:
        ReloadError: it said no.
        Exception: whatever it raised.
    """
    if recipe.validate is not None:
        enter("validate")
        said = await _call(recipe.validate, model)
        if said is not None and not said:
            raise ReloadError(f"step {step}: validate() said {said!r:.80}", step=step, stage="validate")


async def _build(recipe: Recipe[M]) -> M:
    # A loader of the user's own may copy into what was built, so that must have memory.
    made = await offload(partial(fresh, recipe.build, meta=recipe.meta and recipe.load is None))
    if inspect.isawaitable(made):
        _unused(made)
        raise RecipeError("build= is a plain function: it returns the model, and runs in a thread")
    model: M = made
    return model


def _as_module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        message = f"build= returned a {type(model).__name__}, no torch module: pass load= as well"
        raise RecipeError(message)
    return model


async def _state(recipe: Recipe[M], lease: Lease, item: str, *, on_host: bool = False) -> Any:
    place = None if on_host else recipe.map_location
    state = await lease.load(paths=[item] if item else None, map_location=place)
    for part in item.split("/") if item else ():
        state = state[part] if isinstance(state, Mapping) else state
    return state


def _state_of(model: object) -> dict[str, Any]:
    return dict(_as_module(model).state_dict())


async def _look(recipe: Recipe[M], lease: Lease) -> str:
    """The entry of the state that is the model, "" for all of it; there is room for it now.

    Raises:
        MemoryShortError: there is none.
    """
    table = (await lease.reader().metadata()).table
    item, need = await offload(_extent, table, recipe.item)
    left = await offload(_room, recipe.map_location, lane=Lane.CONTROL)
    if left is not None and need > left:
        step = lease.checkpoint.step
        raise MemoryShortError(
            f"step {step} takes {need:,} bytes beside the version that serves, and {left:,} are left: free "
            "memory, or use strategy='inplace' on a device. It is tried again.",
            step=step,
            stage="memory",
        )
    return item


def _extent(table: TensorTable, named: str | None) -> tuple[str, int]:
    """The entry of the state that is the model, and the bytes of its tensors."""
    item = named
    if item is None:
        item = ITEM if any(path == ITEM or path.startswith(f"{ITEM}/") for path in table.path) else ""
    under = f"{item}/"
    rows = zip(table.path, table.nbytes, table.alias, strict=True)
    chosen = (n for path, n, tie in rows if tie < 0 and (not item or path == item or path.startswith(under)))
    return item, sum(chosen)


def _room(place: MapLocation) -> int | None:
    """Bytes that are left where the model goes; None where nobody can tell."""
    if place is not None and not isinstance(place, (str, torch.device)):
        return None
    device = torch.device("cpu" if place is None else place)
    if device.type == "cpu":
        return memory_left() or None
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def _check_finite(tensors: tuple[tuple[str, torch.Tensor], ...], step: int) -> None:
    bad = not_finite(tensors)
    if bad:
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        message = (
            f"step {step}: NaN or infinite values in {', '.join(bad[:10])}{more} (finite=False allows them)"
        )
        raise ReloadError(message, step=step, stage="finite", path=bad[0])


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call the user's function in a thread; what it wants awaited is awaited here."""
    result = await offload(partial(function, *args), undo=_unused)
    return await result if inspect.isawaitable(result) else result


def forget_models(error: BaseException) -> None:
    """Let go of what our frames in an error's traceback hold: errors are kept longer than models may be."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        top = left.pop()
        if top is None or id(top) in seen:
            continue
        seen.add(id(top))
        left += [top.__cause__, top.__context__]
        for frame, _ in traceback.walk_tb(top.__traceback__):
            if frame.f_globals.get("__name__") in _FRAMES:
                with contextlib.suppress(RuntimeError):  # it runs
                    frame.clear()


def _unused(result: object) -> None:
    """A coroutine that nobody will await."""
    if isinstance(result, Coroutine):
        result.close()
