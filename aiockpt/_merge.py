"""The parts of all ranks put together: whole tensors with the rows that hold them, one order.

Each rank counts the places of the state (`seq`) for itself. Merged, rows are ordered by
that number and then by rank, what lies in one container is kept together, and all are
numbered anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ._chunks import cover_problem
from ._plain import Json
from ._saved import Saved
from ._spread import Spread
from ._table import TensorTable
from ._tree import in_order
from .errors import CorruptCheckpointError

__all__ = ["merge"]


def merge(parts: Sequence[Saved]) -> Saved:
    """Make one checkpoint of what the ranks wrote, in rank order.

    Raises:
        CorruptCheckpointError: a tensor is not covered exactly once, or ranks disagree.
    """
    if len(parts) == 1 and not parts[0].table.chunks:
        return parts[0]
    stored = _stack(parts)
    numbers = _numbers(parts)
    spread = _gather(stored)
    merged = replace(
        parts[0], table=_whole(spread, numbers), shards=[s for p in parts for s in p.shards], spread=spread
    )
    _add_values(merged, parts, numbers)
    _add_nodes(merged, parts, numbers)
    return merged


def _stack(parts: Sequence[Saved]) -> TensorTable:
    """The rows of all parts under each other."""
    stacked = TensorTable()
    shards = 0
    for part in parts:
        table, first = part.table, len(stacked)
        stacked.seq += table.seq
        stacked.path += table.path
        stacked.dtype += table.dtype
        stacked.shape += table.shape
        stacked.nbytes += table.nbytes
        stacked.flags += table.flags
        stacked.alias += [alias if alias < 0 else alias + first for alias in table.alias]
        stacked.shard += [shard if shard < 0 else shard + shards for shard in table.shard]
        stacked.begin += table.begin
        stacked.chunks |= {row + first: chunk for row, chunk in table.chunks.items()}
        shards += len(part.shards)
    return stacked


def _numbers(parts: Sequence[Saved]) -> dict[str, int]:
    """The place of every path in the merged state."""
    places: list[tuple[int, int, str]] = []
    for rank, part in enumerate(parts):
        for seqs, paths in (
            (part.node_seq, part.node_paths),
            (part.table.seq, part.table.path),
            (part.value_seq, part.value_paths),
        ):
            places += [(seq, rank, path) for seq, path in zip(seqs, paths, strict=True)]
    paths = list(dict.fromkeys(path for *_, path in sorted(places)))
    return {path: number for number, path in enumerate(in_order(paths))}


def _gather(stored: TensorTable) -> Spread:
    """Which stored rows are of one tensor; every tensor must be there exactly once."""
    rows: dict[str, list[int]] = {}
    for row, path in enumerate(stored.path):
        rows.setdefault(path, []).append(row)
    owner = [-1] * len(stored)
    spread = Spread(stored, owner, {})
    for number, (path, chunks) in enumerate(rows.items()):
        for row in chunks:
            owner[row] = number
        problem = _problem(stored, chunks)
        if problem:
            raise CorruptCheckpointError(problem, path=path)
        if stored.alias[chunks[0]] < 0:
            spread.rows[number] = chunks
    return spread


def _problem(stored: TensorTable, chunks: list[int]) -> str | None:
    first = chunks[0]
    if len(chunks) > 1 and any(stored.alias[row] >= 0 for row in chunks):
        return "two ranks hold it"
    if len({(stored.dtype[row], stored.whole(row), stored.flags[row]) for row in chunks}) != 1:
        return "its chunks differ in dtype or in the shape of the whole"
    if first not in stored.chunks and len(chunks) == 1:
        return None
    return cover_problem(stored.whole(first), [(stored.offsets(row), stored.shape[row]) for row in chunks])


def _whole(spread: Spread, numbers: dict[str, int]) -> TensorTable:
    """One row a tensor."""
    stored, table = spread.stored, TensorTable()
    first: dict[int, int] = {}
    for row, owner in enumerate(spread.owner):
        first.setdefault(owner, row)
    for row in first.values():
        path, alias = stored.path[row], stored.alias[row]
        owner = alias if alias < 0 else spread.owner[alias]
        table.add(numbers[path], path, stored.dtype[row], stored.whole(row), stored.flags[row], owner)
    return table


def _add_values(merged: Saved, parts: Sequence[Saved], numbers: dict[str, int]) -> None:
    """Ranks that hold the same value hold it once."""
    known: dict[str, Json] = {}
    for part in parts:
        for path, value in zip(part.value_paths, part.values, strict=True):
            if known.setdefault(path, value) != value:
                raise CorruptCheckpointError("ranks hold different values of it", path=path)
    merged.value_paths, merged.values = list(known), list(known.values())
    merged.value_seq = [numbers[path] for path in known]


def _add_nodes(merged: Saved, parts: Sequence[Saved], numbers: dict[str, int]) -> None:
    """Ranks that share a container both know it, and must agree."""
    known: dict[str, tuple[str, Json]] = {}
    for path, tag, meta in _nodes(parts):
        if known.setdefault(path, (tag, meta)) != (tag, meta):
            raise CorruptCheckpointError("ranks disagree on what this container is", path=path)
    merged.node_paths = list(known)
    merged.node_seq = [numbers[path] for path in known]
    merged.node_tags = [tag for tag, _ in known.values()]
    merged.node_metas = [meta for _, meta in known.values()]


def _nodes(parts: Sequence[Saved]) -> Iterator[tuple[str, str, Json]]:
    for part in parts:
        yield from zip(part.node_paths, part.node_tags, part.node_metas, strict=True)
