"""Which tensors can be stored, and which of them are one."""

from __future__ import annotations

from typing import Final

import torch

from .._dtypes import NAME

PLAIN_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
"""The exact types whose bytes are all there is to them."""


def refusal(tensor: torch.Tensor) -> str | None:
    """Why a strided tensor's bytes cannot be stored, or None."""
    if tensor.dtype in NAME and not tensor.is_nested and _has_memory(tensor):
        return None
    if tensor.dtype not in NAME:
        return f"a tensor of dtype {tensor.dtype}, whose items are no plain bytes"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_meta:
        return f"a tensor of dtype {tensor.dtype} on the meta device, which has no data"
    return f"a tensor of dtype {tensor.dtype} whose storage was freed"


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is data behind the shape; reading what was freed would crash."""
    if not tensor.nbytes:
        return not tensor.is_meta
    # A freed storage begins at address 0. The storage itself is not asked: it would grow a Python
    # object that lives as long as the tensor, for the garbage collector to visit ever after.
    return tensor.data_ptr() != tensor.storage_offset() * tensor.itemsize


class Aliases:
    """Finds the first identical view among the tensors stored so far.

    Views are identical when address, dtype, shape, strides, conj and neg bits agree: one
    address alone may be a matrix, its first row, and its real part.
    """

    def __init__(self, stored: list[torch.Tensor]) -> None:
        self._stored = stored
        # One int a tensor, nothing for the garbage collector; a second view at an address is rare.
        self._first_at: dict[int, int] = {}
        self._others_at: dict[int, list[int]] = {}
        self._empty: dict[int, tuple[int, torch.Tensor]] = {}

    def find(self, tensor: torch.Tensor) -> int:
        """The row of the first identical view, or -1: then the tensor will be the next row."""
        row = len(self._stored)
        if not tensor.nbytes:
            # Empty tensors have no address of their own: only the object itself is the same, and it
            # is kept, since another could take over its id.
            first, _ = self._empty.setdefault(id(tensor), (row, tensor))
            return -1 if first == row else first
        place = tensor.data_ptr()
        first = self._first_at.setdefault(place, row)
        if first == row:
            return -1
        others = self._others_at.setdefault(place, [])
        for other in (first, *others):
            if _identical(self._stored[other], tensor):
                return other
        others.append(row)
        return -1


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
        and one.device == other.device
    )
