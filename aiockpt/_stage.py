"""Device to host blocks: fill one block with the bytes its plan says.

Runs in the stage lane's thread and does nothing but copy: hashing here would keep the
caller from changing the weights for longer. Small tensors of one dtype are packed by a
single `torch.cat`, which does not hold the GIL as a Python call a tensor would. A leaf
that is strided, or on another device, is copied box by box straight into the block, so
that no second copy of it ever exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ._capture import Ranged, Source, bits
from ._plan import PAGE, BlockPlan, boxes
from ._table import TensorTable
from .errors import SaveError

PACK_BYTES = 1 << 20
"""Contiguous tensors up to this size are packed together."""


def fill_block(
    block: torch.Tensor, plan: BlockPlan, table: TensorTable, sources: Sequence[Source | None]
) -> int:
    """Copy the planned parts into the block and zero its padding.

    Args:
        block: uint8, one-dimensional, at least `plan.nbytes` long.
        plan: what goes where.
        table: the rows' shapes and dtypes.
        sources: the rows' tensors.

    Returns:
        How many bytes are to be written: `plan.nbytes`, rounded up to a page.
    """
    with torch.no_grad():
        pack: list[torch.Tensor] = []
        start = 0
        for row, first, nbytes, at in plan.parts:
            source = sources[row]
            if isinstance(source, Ranged):
                _flush(block, start, pack)
                source.read(first, block[at : at + nbytes])
                continue
            tensor = _resolve(source, table, row)
            whole = first == 0 and nbytes == table.nbytes[row]
            if whole and nbytes <= PACK_BYTES and is_plain(tensor):
                flat = bits(tensor).view(-1)
                if pack and flat.dtype != pack[0].dtype:
                    _flush(block, start, pack)
                start = start if pack else at
                pack.append(flat)
                continue
            _flush(block, start, pack)
            copy_part(block[at : at + nbytes], tensor, first, nbytes)
        _flush(block, start, pack)
        padded = -(-plan.nbytes // PAGE) * PAGE
        # Blocks are reused: without this the pad would carry another tensor's bytes.
        block[plan.nbytes : padded].zero_()
        return padded


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory, from front to back, is what is stored."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _flush(block: torch.Tensor, start: int, pack: list[torch.Tensor]) -> None:
    if not pack:
        return
    nbytes = sum(t.numel() for t in pack) * pack[0].element_size()
    torch.cat(pack, out=block[start : start + nbytes].view(pack[0].dtype))
    pack.clear()


def copy_part(out: torch.Tensor, tensor: torch.Tensor, first: int, nbytes: int) -> None:
    """Copy bytes [first, first + nbytes) of the tensor's logical, row-major content."""
    if is_plain(tensor):
        out.copy_(bits(tensor).view(-1).view(torch.uint8)[first : first + nbytes])
        return
    size = tensor.element_size()
    at = 0
    for index, count in boxes(tensor.shape, first // size, (first + nbytes) // size):
        box = bits(tensor[index])
        target = out[at * size : (at + count) * size].view(box.dtype)
        target.view(box.shape).copy_(box)
        at += count


def _resolve(
    source: torch.Tensor | Callable[[], torch.Tensor] | None, table: TensorTable, row: int
) -> torch.Tensor:
    if isinstance(source, torch.Tensor):
        return source
    if source is None:
        raise SaveError(f"{table.path[row]} has no source", path=table.path[row])
    tensor = source()
    if math.prod(tensor.shape) * tensor.element_size() != table.nbytes[row]:
        message = (
            f"{table.path[row]}: resolve gave {tensor.dtype} {tuple(tensor.shape)}, planned were "
            f"{table.dtype[row]} {table.shape[row]}"
        )
        raise SaveError(message, path=table.path[row])
    return tensor.detach()
