"""`save`, `stage`, `load` and `drain`: DCP from an event loop, with any planner and any storage.

DCP's own calls block, or return futures that no loop can await. Here they run in one
thread of this process, one after the other in the order of the calls: two saves that
overlap on one process group pair their collectives crosswise, and one stager or storage
writer in two saves at once corrupts the first (all of it seen with torch 2.13).

Every rank must make the same calls in the same order, as always with collectives. Give
the saves a process group of their own (`cpu:gloo`): training's collectives on the same
group would mix with those of a save in the background.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_blocking
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from aiockpt._threads import settle
from aiockpt.errors import SaveErrors

from ._call import CheckpointId, SaveCall, asked, text
from ._failures import ours
from ._handle import PendingDcpSave, outcome
from ._queue import submit

__all__ = ["drain", "load", "save", "stage"]

T = TypeVar("T")

_kept: list[PendingDcpSave] = []
"""Saves under way, and failed ones that nobody has been told of."""


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> Awaitable[Metadata]:
    """Save through DCP; returns when all ranks have written and the storage writer has finished.

    The arguments are those of `torch.distributed.checkpoint.save`. Objects of the state dict
    that have a `state_dict` are asked for it at the call; tensors are read until it returns.
    Cancelled, it still waits for the end (a rank that left a collective would hang the
    others), then raises the cancellation.

    Returns:
        An awaitable of DCP's metadata. Never awaited, it writes nothing.

    Raises:
        RanksFailedError: some ranks failed; `failures` tells what each raised. What is on disk then
            depends on the storage writer: with `AioStorageWriter` nothing visible.
        StorageError: the storage said no before DCP began.
    """
    call = SaveCall(asked(state_dict), checkpoint_id, storage_writer, planner, process_group, no_dist)
    return _save(call)


async def _save(call: SaveCall) -> Metadata:
    return await settle(_begin(call).committed())


def stage(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    stager: AsyncStager | None = None,
) -> Awaitable[PendingDcpSave]:
    """Copy the state dict to host memory, then return; the rest goes on in the background.

    A save before it is written first: at most one copy exists. Other arguments as for `save`.

    Args:
        state_dict: the state.
        checkpoint_id: names the checkpoint to the storage.
        storage_writer: where to; chosen by DCP from `checkpoint_id` when None.
        planner: DCP's default planner when None.
        process_group: the ranks; the default group when None.
        no_dist: save from this process alone.
        stager: who copies; kept and closed by the caller. When None a new one for each save, in plain
            host memory. A stager's own future is awaited: DCP's `AsyncSaveResponse.staging_completion`
            reports success for a staging that had failed.

    Returns:
        An awaitable of the handle, whose `committed` is the end. A failure that nobody awaited is
        logged at once and raised by `drain`.

    Raises:
        CheckpointError: the copy failed; nothing was written.
    """
    call = SaveCall(asked(state_dict), checkpoint_id, storage_writer, planner, process_group, no_dist)
    call.copies, call.stager = True, stager
    return _stage(call)


async def _stage(call: SaveCall) -> PendingDcpSave:
    pending = _begin(call)
    await settle(pending.staged())  # cancelled or not: until then the caller's tensors are being read
    return pending


async def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load through DCP into `state_dict`, in place; the arguments are those of DCP's `load`.

    It begins when the saves and loads called before have ended. Cancelled, it still waits for the end.

    Raises:
        RanksFailedError: some ranks failed. The state dict may then be half new, half old, since DCP
            loads in place: load into a copy where that matters, or with `aiockpt.load(atomic=True)`.
        StorageError: the storage said no before DCP began.
    """

    def run() -> None:
        load_blocking(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )

    where = text(checkpoint_id)
    job = submit(lambda: _translated(run, "loading", where))
    await settle(outcome(job))


async def drain() -> None:
    """Wait until every save of this process that was called so far has ended.

    Raises:
        CheckpointError: a save failed and nobody had been told; raised once.
        SaveErrors: several of them.
    """
    saves = list(_kept)
    for pending in saves:
        await settle(_end(pending))
    errors = [error for pending in saves if isinstance(error := pending.unseen(), Exception)]
    _forget()
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SaveErrors(f"{len(errors)} saves through DCP failed", errors)


def _begin(call: SaveCall) -> PendingDcpSave:
    """Queue the save; its handle is kept until somebody knows how it ended."""
    _forget()
    pending = PendingDcpSave(text(call.checkpoint_id))
    _kept.append(pending)
    submit(lambda: _run(call, pending))
    return pending


def _run(call: SaveCall, pending: PendingDcpSave) -> None:
    """Runs on the thread; never raises."""
    try:
        metadata = _translated(lambda: call.run(pending), "saving", pending.checkpoint_id)
    except BaseException as error:
        pending.fail(error)
    else:
        pending.commit(metadata)


def _translated(run: Callable[[], T], doing: str, where: str | None) -> T:
    try:
        return run()
    except BaseException as error:
        raise ours(error, f"{doing} {where or 'a checkpoint'} through DCP", where) from error


async def _end(pending: PendingDcpSave) -> None:
    """Wait until it has ended, however."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    pending.then(lambda: future.set_result(None))
    await outcome(future)


def _forget() -> None:
    _kept[:] = [pending for pending in _kept if not pending.forgotten]
