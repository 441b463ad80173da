"""Where restored bytes go: tensors that are new, and tensors that live.

A target takes the saved tensor's logical bytes in any order of ranges. Where its memory
is those bytes, filling is a copy of memory; where it is strided, on another device or of
another dtype, a range becomes rectangular boxes that are copied one by one, so that no
second whole copy of a tensor ever exists.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ._dtypes import BY_NAME, NAME
from ._plan import boxes
from ._table import Shape
from .errors import CheckpointError, CorruptCheckpointError

__all__ = ["Target", "make_fresh", "target_problem"]

_LARGEST = 2**63 - 1

_as_memoryview = cast(Callable[[int, int, int], memoryview], ctypes.pythonapi.PyMemoryView_FromMemory)
ctypes.pythonapi.PyMemoryView_FromMemory.restype = ctypes.py_object
ctypes.pythonapi.PyMemoryView_FromMemory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


@dataclass(slots=True)
class Target:
    """One tensor to fill with a saved one.

    Args:
        path: where it sits in the state, for errors.
        tensor: of the saved shape.
        dtype: the saved dtype's name.
        live: somebody may be looking at it, so only verified bytes may go there.
    """

    path: str
    tensor: torch.Tensor
    dtype: str
    live: bool
    origin: torch.Tensor = field(init=False)
    """The tensor as it was given."""
    _flat: torch.Tensor | None = field(init=False)
    """Its memory as uint8, where that is the saved bytes."""

    def __post_init__(self) -> None:
        self.origin = self.tensor
        if self.tensor.requires_grad:
            self.tensor = self.tensor.detach()
        plain = _is_plain(self.tensor) and NAME.get(self.tensor.dtype) == self.dtype
        self._flat = _memory(self.tensor) if plain else None

    @property
    def direct(self) -> bool:
        """Whether unverified bytes may be read straight into its memory."""
        return not self.live and self._flat is not None

    def memory(self, first: int, nbytes: int) -> memoryview:
        """A part of its memory; valid as long as the target. Only where `direct`."""
        assert self._flat is not None
        return _as_memoryview(self._flat.data_ptr() + first, nbytes, _WRITABLE).cast("B")

    def fill(self, first: int, data: torch.Tensor) -> None:
        """Copy the saved bytes `data` (uint8) that begin at `first`. Blocking, for a thread."""
        # An inference tensor may be written in inference mode only; both modes belong to the thread.
        mode = torch.inference_mode() if self.tensor.is_inference() else torch.no_grad()
        with mode:
            if self._flat is not None:
                self._flat[first : first + data.numel()].copy_(data)
            else:
                self._fill_boxes(first, data.view(BY_NAME[self.dtype]))

    def _fill_boxes(self, first: int, data: torch.Tensor) -> None:
        begin = first // data.element_size()
        at = 0
        for index, count in boxes(self.tensor.shape, begin, begin + data.numel()):
            box = self.tensor[index]
            box.copy_(data[at : at + count].view(box.shape))
            at += count


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the logical, row-major content is the memory as it lies there."""
    on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    return on_host and not tensor.is_conj() and not tensor.is_neg()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor, as uint8."""
    # Not reshape(-1): with at most one element any strides count as contiguous, and odd ones stay.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def make_fresh(path: str, dtype: str, shape: Shape, device: torch.device) -> Target:
    """A new tensor with memory of its own, content undefined.

    Raises:
        CorruptCheckpointError: no tensor can have this shape.
        CheckpointError: there is no memory for it.
    """
    strides = 1
    for size in shape:
        strides *= max(size, 1)
    if strides * BY_NAME[dtype].itemsize > _LARGEST or len(shape) > 64:
        raise CorruptCheckpointError(f"no tensor has the shape {str(shape)[:120]}", path=path)
    try:
        tensor = torch.empty(shape, dtype=BY_NAME[dtype], device=device)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{path}: no memory on {device} for {dtype} {shape}", path=path) from error
    return Target(path, tensor, dtype, live=False)


def target_problem(tensor: torch.Tensor, dtype: str, shape: Shape, *, cast: bool) -> str | None:
    """Why a live tensor cannot take a saved one, or None."""
    if tuple(tensor.shape) != shape:
        return f"saved shape {list(shape)}, target shape {list(tensor.shape)}"
    problem = _kind_problem(tensor)
    if problem:
        return problem
    if tensor.dtype != BY_NAME[dtype] and not cast:
        return f"saved dtype {dtype}, target dtype {_dtype_name(tensor)} (cast=True converts)"
    if not torch.can_cast(BY_NAME[dtype], tensor.dtype):
        return f"saved dtype {dtype} does not convert to {_dtype_name(tensor)} without loss of kind"
    return None


def _kind_problem(tensor: torch.Tensor) -> str | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"the target is a {_dtype_name(tensor)} tensor of layout {tensor.layout}, not a strided one"
    if tensor.device.type == "meta":
        return "the target is on the meta device: give it memory first, as with module.to_empty(device=...)"
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "the target is expanded: several elements share one place in memory"
    return None


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a tensor whose memory is its own business: no DTensor, no subclass."""
    return type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
