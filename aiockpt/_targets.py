"""Where restored bytes go: tensors that are new, and tensors that live.

Where a tensor's memory is its logical, row-major content, filling is a copy of memory;
where it is strided, on another device or of another dtype, a range of bytes becomes
rectangular boxes that are copied one by one, so that no second copy of a whole tensor
ever exists.

There is no object a tensor here: tens of thousands of small ones would be work for the
garbage collector, and a full collection is a gap in the event loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch

from ._dtypes import BY_NAME, NAME
from ._plan import boxes
from ._reads import Part
from ._spread import Spread
from ._table import Shape, TensorTable
from .errors import CheckpointError, CorruptCheckpointError

__all__ = ["Targets", "fill_tensor", "is_plain_tensor", "make_fresh", "target_problem"]

_LARGEST: Final = 2**63 - 1
_MOST_DIMENSIONS: Final = 64

_as_memoryview = cast(Callable[[int, int, int], memoryview], ctypes.pythonapi.PyMemoryView_FromMemory)
ctypes.pythonapi.PyMemoryView_FromMemory.restype = ctypes.py_object
ctypes.pythonapi.PyMemoryView_FromMemory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE: Final = 0x200


@dataclass(slots=True)
class Targets:
    """The tensors that one load fills, by row of the checkpoint's table.

    Reads speak of stored rows: these are the table's own, unless `spread` says otherwise.
    """

    table: TensorTable
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)
    """New tensors, one a row, that nobody else has seen yet."""
    living: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    """(path, tensor) of the caller's own; only verified bytes may go there."""
    spread: Spread | None = None
    """Which stored rows make up which tensor, where these are not the same."""

    def add_living(self, row: int, path: str, tensor: torch.Tensor) -> None:
        """A tensor of the caller's that wants the row; the same one twice is filled once."""
        there = self.living.setdefault(row, [])
        if not any(other is tensor for _, other in there):
            there.append((path, tensor))

    def rows(self) -> set[int]:
        """The stored rows whose bytes are needed; the meta device needs none."""
        rows = {row for row, tensor in self.fresh.items() if not tensor.is_meta} | self.living.keys()
        return rows if self.spread is None else set(self.spread.stored_rows(rows))

    def living_rows(self) -> set[int]:
        """The stored rows that fill something of the caller's."""
        return set(self.living) if self.spread is None else set(self.spread.stored_rows(self.living))

    def direct(self) -> set[int]:
        """The stored rows that unverified bytes may be read into: new, in host memory, and wanted once."""
        rows = {row for row, tensor in self.fresh.items() if tensor.is_cpu and row not in self.living}
        spread = self.spread
        if spread is None:
            return rows
        return {
            row
            for row in spread.stored_rows(rows)
            if spread.view(self.fresh[spread.owner[row]], row).is_contiguous()
        }

    def memory(self, row: int, first: int, nbytes: int) -> memoryview:
        """A part of a new tensor's memory; valid as long as the tensor. Only where `direct`."""
        if self.spread is None:
            begin = self.fresh[row].data_ptr()
        else:
            begin = self.spread.view(self.fresh[self.spread.owner[row]], row).data_ptr()
        return _as_memoryview(begin + first, nbytes, _WRITABLE).cast("B")

    def fill(self, parts: Iterable[Part], block: torch.Tensor, touched: dict[str, None]) -> None:
        """Copy verified bytes out of a block; blocking, for a thread.

        Args:
            parts: what lies where in the block.
            block: uint8.
            touched: paths of the caller's tensors are noted here before they are written to.
        """
        table, spread = self.table, self.spread
        for row, first, nbytes, at in parts:
            data = block[at : at + nbytes]
            owner = row if spread is None else spread.owner[row]
            tensor = self.fresh.get(owner)
            if tensor is not None and not tensor.is_meta:
                fill_tensor(self._view(tensor, row), table.dtype[owner], first, data)
            for path, tensor in self.living.get(owner, ()):
                touched[path] = None
                fill_tensor(self._view(tensor, row), table.dtype[owner], first, data)
                # As any write in place: a backward that still needs the old values must hear of it.
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)

    def _view(self, tensor: torch.Tensor, row: int) -> torch.Tensor:
        return tensor if self.spread is None else self.spread.view(tensor.detach(), row)


def fill_tensor(tensor: torch.Tensor, dtype: str, first: int, data: torch.Tensor) -> None:
    """Copy the saved bytes that begin at `first` into a tensor; blocking, for a thread.

    Args:
        tensor: of the saved shape.
        dtype: the saved dtype's name.
        first: a multiple of the saved dtype's size.
        data: uint8, contiguous, in host memory.
    """
    if _is_plain(tensor) and NAME.get(tensor.dtype) == dtype:
        # Without the GIL, and at a tenth of what a torch call costs for a small tensor.
        ctypes.memmove(tensor.data_ptr() + first, data.data_ptr(), data.numel())
        return
    # An inference tensor may be written in inference mode only; both modes belong to the thread.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        _fill_boxes(tensor.detach(), first, data.view(BY_NAME[dtype]))


def _fill_boxes(tensor: torch.Tensor, first: int, data: torch.Tensor) -> None:
    begin = first // data.element_size()
    at = 0
    for index, count in boxes(tensor.shape, begin, begin + data.numel()):
        box = tensor[index]
        box.copy_(data[at : at + count].view(box.shape))
        at += count


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the logical, row-major content is the memory as it lies there."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def make_fresh(path: str, dtype: str, shape: Shape, device: torch.device) -> torch.Tensor:
    """A new tensor with memory of its own, content undefined.

    Raises:
        CorruptCheckpointError: no tensor can have this shape.
        CheckpointError: there is no memory for it.
    """
    try:
        return torch.empty(shape, dtype=BY_NAME[dtype], device=device)
    except (RuntimeError, MemoryError, TypeError) as error:
        if _is_impossible(shape, BY_NAME[dtype].itemsize):
            raise CorruptCheckpointError(f"no tensor has the shape {str(shape)[:120]}", path=path) from error
        raise CheckpointError(f"{path}: no memory on {device} for {dtype} {shape}", path=path) from error


def _is_impossible(shape: Shape, itemsize: int) -> bool:
    span = itemsize
    for size in shape:
        span *= max(size, 1)
    return span > _LARGEST or len(shape) > _MOST_DIMENSIONS


def target_problem(tensor: torch.Tensor, dtype: str, shape: Shape, *, cast: bool) -> str | None:
    """Why a caller's tensor cannot take a saved one, or None."""
    if tuple(tensor.shape) != shape:
        return f"saved shape {list(shape)}, target shape {list(tensor.shape)}"
    problem = _kind_problem(tensor)
    if problem or NAME.get(tensor.dtype) == dtype:
        return problem
    if not cast:
        return f"saved dtype {dtype}, target dtype {_dtype_name(tensor)} (cast=True converts)"
    if not torch.can_cast(BY_NAME[dtype], tensor.dtype):
        return f"saved dtype {dtype} does not convert to {_dtype_name(tensor)} without loss of kind"
    return None


def _kind_problem(tensor: torch.Tensor) -> str | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"the target is a {_dtype_name(tensor)} tensor of layout {tensor.layout}, not a strided one"
    if tensor.is_meta:
        return "the target is on the meta device: give it memory first, as with module.to_empty(device=...)"
    if tensor.is_contiguous():
        span = tensor.numel()
    elif any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "the target is expanded: several elements share one place in memory"
    else:
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + span) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < end:
        return "the target's memory was freed"
    return None


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a tensor whose memory is its own business: no DTensor, no subclass."""
    return type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
