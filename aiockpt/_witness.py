"""A witness of what a state was: digests of its memory, for those who run while it is copied.

During `staging()` the caller's own code runs beside the copy, and nothing in torch sees
every change it could make: not `.data`, not a numpy alias, not a kernel of one's own. So
the digests of all pieces are taken before that code begins; every block must then have
these digests when it has been filled. What is written is the state of the call, or the
save fails. Reading memory once more is several times faster than copying it.

Memory of other devices is not read for this: it would cross the bus once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from ._capture import Source, bits
from ._manifest import PIECE_BYTES
from ._plan import BlockPlan, ShardPlan, plan_blocks
from ._stage import copy_part, is_plain
from ._table import TensorTable
from .errors import StateMutatedError

__all__ = ["Witness"]

DIGITS = 16
"""Of a piece's digest."""


class Witness:
    """What the data files of a save have to contain.

    Args:
        table: the rows, planned.
        shards: the files.
        sources: the rows' tensors; read now, so make it in a thread.
        step: for the error.
    """

    def __init__(
        self, table: TensorTable, shards: Sequence[ShardPlan], sources: Sequence[Source | None], step: int
    ) -> None:
        self._step = step
        self._table = table
        self._pieces: list[list[str | None]] = [[] for _ in shards]
        scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        with torch.no_grad():
            for plan in plan_blocks(table, shards, PIECE_BYTES):
                self._pieces[plan.shard].append(_digest(plan, sources, scratch))

    def check(self, plan: BlockPlan, pieces: str) -> None:
        """Compare what a block was filled with.

        Raises:
            StateMutatedError: naming a path in the first piece that differs.
        """
        first = plan.offset // PIECE_BYTES
        for number in range(len(pieces) // DIGITS):
            expected = self._pieces[plan.shard][first + number]
            if expected not in (None, pieces[number * DIGITS : (number + 1) * DIGITS]):
                raise self._error(plan, number * PIECE_BYTES)

    def _error(self, plan: BlockPlan, at: int) -> StateMutatedError:
        end = at + PIECE_BYTES
        rows = [row for row, _, nbytes, begin in plan.parts if begin < end and begin + nbytes > at]
        paths = [self._table.path[row] for row in rows]
        shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        message = (
            f"step {self._step}: {shown} changed before it had been copied (one of these, if there are "
            "several); the save was dropped. The body of `staging` may read the state, not change it."
        )
        return StateMutatedError(message, step=self._step, path=paths[0])


def _digest(plan: BlockPlan, sources: Sequence[Source | None], scratch: torch.Tensor) -> str | None:
    """The digest of one piece; None if a part of it is not to be read."""
    tensors = [sources[row] for row, _, _, _ in plan.parts]
    if not all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in tensors):
        return None
    state = xxhash.xxh3_64()
    for tensor, (_, first, nbytes, _) in zip(tensors, plan.parts, strict=True):
        assert isinstance(tensor, torch.Tensor)
        if is_plain(tensor):
            state.update(_memory(bits(tensor), first, nbytes))
        else:
            part = scratch[:nbytes]
            copy_part(part, tensor, first, nbytes)
            state.update(_memory(part, 0, nbytes))
    return state.hexdigest()


def _memory(tensor: torch.Tensor, first: int, nbytes: int) -> Any:
    """Some bytes of a contiguous tensor, as a buffer; the tensor must outlive it."""
    return (ctypes.c_char * nbytes).from_address(tensor.data_ptr() + first)
