"""How tensors are spread over files: which stored rows make up which tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ._chunks import slices
from ._table import TensorTable

__all__ = ["Spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The tensors of a checkpoint of several ranks, and the rows that hold their bytes."""

    stored: TensorTable
    """The rows of all parts, chunks and whole tensors."""
    owner: list[int]
    """The tensor of each stored row."""
    rows: dict[int, list[int]]
    """The stored rows of each tensor that is tied to no other."""

    def stored_rows(self, tensors: Iterable[int]) -> Iterator[int]:
        """The stored rows that make up the tensors."""
        for tensor in tensors:
            yield from self.rows[tensor]

    def view(self, tensor: torch.Tensor, row: int) -> torch.Tensor:
        """The part of a tensor that a stored row fills."""
        if row not in self.stored.chunks:
            return tensor
        return tensor[slices((self.stored.offsets(row), self.stored.shape[row]))]
