"""Checkpoints from other formats and to them: streamed, verified, and never run.

`await convert(src, dst, to="aiockpt")` reads a folder of torch's Distributed Checkpoint, a
file of `torch.save`, safetensors, or a checkpoint of aiockpt, and writes any of these. No
more than a byte budget is held in memory. Pickles are read by a machine that knows data and
nothing else; whatever in them would run code ends the conversion before anything is made.

Each format is one file of this folder, with two functions:

* `open_source(path, options) -> Opened`: the state, with a `Leaf` for every tensor, of which
  any stretch of bytes can be read. Bounds, sizes, coverage and names have been checked.
* `write(state, path, options, desk) -> Written`: writes the state to a new file or folder at
  `path` and flushes it; gives the state as `open_source` will find it there.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from .._door import translate
from .._threads import offload, settle
from ..errors import CheckpointError, SaveError, StorageError, UsageError
from ._detect import kind_of
from ._drive import Desk, Place, drive
from ._leaf import MB
from ._walk import Columns, columns_of, compare, digests

__all__ = ["Conversion", "Kind", "Opened", "Options", "Written", "convert"]

Kind = Literal["aiockpt", "dcp", "torch", "safetensors"]

_MEMBERS: Final[dict[str, str]] = {
    "aiockpt": "aiockpt_",
    "dcp": "dcp",
    "torch": "torch_",
    "safetensors": "safetensors_",
}
_LEAST: Final = 8 * MB


@dataclass(frozen=True, slots=True)
class Options:
    """What a conversion was asked for."""

    budget: int
    verify: bool
    drop: bool
    step: int | None
    item: str | None
    max_shard_bytes: int | None


@dataclass(slots=True)
class Opened:
    """A source."""

    state: Any
    """Containers, plain values, and leaves."""
    step: int | None = None
    close: Callable[[], Awaitable[None]] | None = None


@dataclass(slots=True)
class Written:
    """What a target has written."""

    state: Any
    """As it will be read back."""
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert` did."""

    source: Kind
    """The format of `src`."""
    target: Kind
    dst: str
    """Where the new file or folder is."""
    tensors: int
    nbytes: int
    """Bytes of tensor data; tied tensors count once."""
    dropped: tuple[str, ...] = field(default=())
    """Paths of what the target cannot hold and was left out on request."""


async def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Kind,
    item: str | None = None,
    step: int | None = None,
    drop: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    budget: int = 64 * MB,
    max_shard_bytes: int | None = None,
) -> Conversion:
    """Convert a checkpoint to another format, within a byte budget, without running anything in it.

    `dst` appears whole or not at all. Cancelled, the call returns when no thread is at work
    any more, and nothing is left of what was written (unless `dst` had got its name by then).

    Args:
        src: a run folder of aiockpt (its newest valid step counts) or one step's folder; a
            folder of Distributed Checkpoint (with `.metadata`); a file of `torch.save`; a
            safetensors file, or a folder of them, with `model.safetensors.index.json` if
            there are several.
        dst: a new folder, for "torch" a new file; for "safetensors" a file if it ends in
            `.safetensors`, else a folder. "aiockpt" makes a run folder.
        to: "aiockpt", "dcp", "torch" or "safetensors".
        item: convert only this top-level entry of the state.
        step: of the step to read from a run folder, and of the one to write; by default the
            newest, and the source's own or 0.
        drop: leave out what the target cannot hold; by default that is an error.
        overwrite: replace `dst`, a folder with all that is in it; refused where that holds `src`.
        verify: check checksums of the source, and read back and compare what was written.
        budget: bytes of host memory, at least 8 MiB.
        max_shard_bytes: for safetensors in a folder, bytes of one file at the most.

    Returns:
        What was done.

    Raises:
        UsageError: an argument is wrong, or `dst` is there already.
        UnsupportedStateError: listing what the target cannot hold.
        UnsafeFileError: the source would run code, or reaches out of its folder.
        ForeignFormatError: the source is damaged or of no known format.
        CorruptCheckpointError: the source, a checkpoint of aiockpt, is damaged.
        StorageError: a file cannot be read or written.
    """
    _check(to, budget)
    options = Options(budget, verify, drop, step, item, max_shard_bytes)
    try:
        return await _carry_out(os.fspath(src), os.fspath(dst), to, options, overwrite)
    except CheckpointError:
        raise
    except OSError as error:
        raise StorageError.wrap(error, "cannot convert", file=str(error.filename or src)) from error
    except Exception as error:
        if isinstance(error, ExceptionGroup):
            raise translate(error, "cannot convert", step=step) from error
        message = f"cannot convert {os.fspath(src)}: {type(error).__name__}: {error}"
        raise SaveError(message, file=os.fspath(src)) from error


def _check(to: str, budget: int) -> None:
    if to not in _MEMBERS:
        raise UsageError(f"to= is one of {', '.join(_MEMBERS)}, not {to!r}")
    if budget < _LEAST:
        message = f"a budget of {budget} bytes is too small: a conversion takes at least {_LEAST >> 20} MiB"
        raise UsageError(message)


async def _carry_out(src: str, dst: str, to: Kind, options: Options, overwrite: bool) -> Conversion:
    place = await offload(Place, dst, src, overwrite)
    source = await offload(kind_of, src)
    opened: Opened = await (await offload(_member, source)).open_source(src, options)
    try:
        columns, dropped = await _convert(opened, place, to, options, Desk(options.budget))
    finally:
        if opened.close is not None:
            await settle(opened.close())
    nbytes = sum({id(leaf.content): leaf.content.nbytes for leaf in columns.leaves}.values())
    return Conversion(cast("Kind", source), to, place.path, len(columns.leaves), nbytes, dropped)


async def _convert(
    opened: Opened, place: Place, to: str, options: Options, desk: Desk
) -> tuple[Columns, tuple[str, ...]]:
    state = opened.state if options.item is None else _item(opened.state, options.item)
    try:
        await offload(place.prepare)
        written: Written = await (await offload(_member, to)).write(
            state, place.attempt, options, desk, opened.step
        )
        columns = await offload(columns_of, written.state)
        if options.verify:
            await _verify(columns, place.attempt, to, options, desk)
        await settle(offload(place.publish))
    except BaseException:
        await settle(offload(place.remove))
        raise
    return columns, written.dropped


async def _verify(columns: Columns, path: str, to: str, options: Options, desk: Desk) -> None:
    """Read back what was written and compare it.

    Raises:
        CheckpointError: it is not what was to be written.
    """
    opened: Opened = await (await offload(_member, to)).open_source(
        path, Options(options.budget, True, False, None, None, None)
    )
    try:
        found = await offload(columns_of, opened.state)
        await drive(digests(columns.leaves, desk.buffer(), desk.room()))
        await drive(digests(found.leaves, desk.buffer(), desk.room()))
        await offload(compare, columns, found, path)
    finally:
        if opened.close is not None:
            await settle(opened.close())


def _item(state: Any, item: str) -> Any:
    if not isinstance(state, dict) or item not in state:
        known = ", ".join(map(str, list(state)[:10])) if isinstance(state, dict) else "none"
        raise UsageError(f"the source has no top-level entry {item!r}; there are: {known}")
    return state[item]


def _member(kind: str) -> Any:
    return importlib.import_module(f"{__name__}.{_MEMBERS[kind]}")
