"""The one instant a checkpoint begins to exist.

Before: every data file, every part and every file of the user's is whole and flushed to
stable storage; none of it is visible, since no manifest names it. Then the manifest is
put, last and never over another one; the store makes that a single event (a folder
renamed into place, or an object created only if absent). After it the step is a
checkpoint and no crash can undo that; before it there is none, whatever else lies
around. So a crash leaves the old newest step or the new one, never neither.

Proof obligations kept elsewhere: a store's `commit` is whole and durable or nothing; a
file whose fsync failed is never committed (its save has failed by then).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ._chunks import share_problem
from ._manifest import FORMAT, MANIFEST, MANIFEST_LIMIT, ItemRecord, Manifest, PartRecord, encode_manifest
from .errors import CommitUnknownError, DrainTimeoutError, SaveError, UsageError
from .storage import Attempt, Store

WRITER = "aiockpt"


def check_parts(parts: Sequence[PartRecord], save_id: str) -> list[PartRecord]:
    """The parts in rank order: each rank once, all of this save.

    Raises:
        SaveError: a part is missing, double, or of another save, or a tensor is not held exactly
            once. Never committed then.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    ranks = [part.rank for part in ordered]
    world = ordered[0].world if ordered else 1
    if ranks != list(range(world)) or any(part.world != world for part in ordered):
        raise SaveError(
            f"parts of ranks {ranks} do not make a checkpoint of {world} rank(s)", save_id=save_id
        )
    problem = share_problem([share for part in ordered for share in part.shares])
    if problem:
        path, why = problem
        raise SaveError(f"the ranks' parts do not make {path} whole: {why}", path=path, save_id=save_id)
    for part in ordered:
        if part.save_id != save_id:
            message = f"the part of rank {part.rank} belongs to save {part.save_id}, not to {save_id}"
            raise SaveError(message, save_id=save_id)
    return ordered


def build_manifest(
    parts: Sequence[PartRecord],
    *,
    step: int,
    save_id: str,
    run_id: str,
    metrics: Any,
    meta: Any,
    markers: Sequence[str] = (),
) -> Manifest:
    """Put the parts together; pure but for the clock."""
    ordered = check_parts(parts, save_id)
    records = [record for part in ordered for record in (part.part, *part.files)]
    return Manifest(
        format=FORMAT,
        step=step,
        save_id=save_id,
        run_id=run_id,
        time=time.time(),
        metrics=metrics,
        meta=meta,
        items=merge_items(ordered),
        files=records,
        writer=WRITER,
        markers=list(markers),
    )


def merge_items(parts: Sequence[PartRecord]) -> list[ItemRecord]:
    """The items of all ranks, in order of first appearance."""
    merged: dict[str, ItemRecord] = {}
    for part in parts:
        for item in part.items:
            old = merged.get(item.name, ItemRecord(item.name, 0, 0))
            merged[item.name] = ItemRecord(item.name, old.tensors + item.tensors, old.nbytes + item.nbytes)
    return list(merged.values())


async def commit(store: Store, attempt: Attempt, manifest: Manifest) -> None:
    """Make it a checkpoint.

    Raises:
        FileExistsError: the name is taken by another save; ours is not visible.
        OSError: the store failed; ours is not visible.
        CommitUnknownError: the store failed, and ours is visible, or nobody can tell.
        UsageError: no reader would take a manifest of that length; nothing is visible.
    """
    data = encode_manifest(manifest)
    if len(data) > MANIFEST_LIMIT:
        message = (
            f"step {manifest.step}: metrics and meta make a manifest of {len(data) >> 20} MiB, the limit is "
            f"{MANIFEST_LIMIT >> 20} MiB: put large things into the state, or into files="
        )
        raise UsageError(message, step=manifest.step, file=MANIFEST)
    try:
        await attempt.commit(data)
    except (FileExistsError, DrainTimeoutError):
        raise
    except OSError as error:
        found = await _found(store, f"{attempt.name}/{MANIFEST}", data)
        if found is False:
            raise
        what = "is visible" if found else "may be visible"
        message = (
            f"the commit of step {manifest.step} failed ({error}), but the step {what}: "
            "a crash of the machine may still take it away"
        )
        step, save_id = manifest.step, manifest.save_id
        raise CommitUnknownError(message, step=step, file=attempt.name, save_id=save_id) from error


async def _found(store: Store, key: str, data: bytes) -> bool | None:
    """Whether the manifest is there and ours; None when the store does not say."""
    try:
        return await store.get(key) == data
    except FileNotFoundError:
        return False
    except OSError:
        return None
