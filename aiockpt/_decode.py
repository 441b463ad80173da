"""Manifest and parts to what a checkpoint holds.

Decoding checks every number once, so that no later code needs to doubt one. It goes
page by page and belongs in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from ._manifest import (
    FORMAT,
    FileRecord,
    Manifest,
    NodePage,
    Part,
    ValuePage,
    decode_page,
    decode_part,
)
from ._merge import merge
from ._reads import check_extents
from ._saved import Saved, located
from ._table import decode_table
from .errors import CorruptCheckpointError, UnsupportedFormatError

__all__ = ["decode_saved"]


def decode_saved(manifest: Manifest, parts: Sequence[tuple[FileRecord, bytes]]) -> Saved:
    """Decode the parts of a checkpoint; blocking, for a thread.

    Raises:
        CorruptCheckpointError: a part is damaged or missing, does not fit the manifest or the other
            parts, or they do not hold every tensor exactly once.
        UnsupportedFormatError: a part is of a newer format.
    """
    step = manifest.step
    if not parts:
        raise CorruptCheckpointError("the manifest names no part", step=step)
    decoded = [_decode(manifest, record, data) for record, data in parts]
    world = decoded[0][0].world
    ranks = [part.rank for part, _ in decoded]
    if sorted(ranks) != list(range(world)) or any(part.world != world for part, _ in decoded):
        raise CorruptCheckpointError(
            f"parts of ranks {ranks} are no checkpoint of {world} rank(s)", step=step, file=parts[0][0].name
        )
    unknown = {record.name for record in manifest.files if record.kind == "shard"}
    unknown -= {shard.name for part, _ in decoded for shard in part.shards}
    if unknown:
        raise CorruptCheckpointError("no part knows the file", step=step, file=min(unknown))
    in_rank_order = sorted(zip(ranks, (saved for _, saved in decoded), strict=True), key=lambda pair: pair[0])
    try:
        return merge([saved for _, saved in in_rank_order])
    except CorruptCheckpointError as error:
        raise located(error, step, parts[0][0].name) from error


def _decode(manifest: Manifest, record: FileRecord, data: bytes) -> tuple[Part, Saved]:
    """One part by itself."""
    step = manifest.step
    part = decode_part(data, record, step=step)
    try:
        _check_part(manifest, part, record.name)
        table = decode_table(part, file=record.name, step=step)
        problem = check_extents(table, part.shards)
        if problem:
            path = table.path[problem[0]] if problem[0] >= 0 else None
            raise CorruptCheckpointError(problem[1], file=record.name, path=path)
        saved = Saved(manifest, table, part.shards)
        _decode_pages(saved, part, record.name)
    except CorruptCheckpointError as error:
        raise located(error, step, record.name) from error
    return part, saved


def _check_part(manifest: Manifest, part: Part, file: str) -> None:
    if not 0 <= part.format <= FORMAT:
        raise UnsupportedFormatError(part.format, FORMAT, step=manifest.step, file=file)
    if part.save_id != manifest.save_id:
        raise CorruptCheckpointError("the part belongs to another save", file=file)
    shards = {record.name: record for record in manifest.files if record.kind == "shard"}
    for shard in part.shards:
        record = shards.pop(shard.name, None)
        if record is None or record.size != shard.size or record.digest != shard.digest():
            raise CorruptCheckpointError(
                "the part and the manifest do not agree on it", step=manifest.step, file=shard.name
            )


def _decode_pages(saved: Saved, part: Part, file: str) -> None:
    for raw in part.values:
        values = decode_page(raw, ValuePage, file=file)
        saved.value_seq += values.seq
        saved.value_paths += values.path
        saved.values += values.value
    for raw in part.nodes:
        nodes = decode_page(raw, NodePage, file=file)
        saved.node_seq += nodes.seq
        saved.node_paths += nodes.path
        saved.node_tags += nodes.tag
        saved.node_metas += nodes.meta
