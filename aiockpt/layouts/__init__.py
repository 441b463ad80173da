"""Which tensor goes into which file: the contract of a layout.

A layout is a pure function from the tensor table to named groups of rows. It never
sees values. How a group is cut into shards and packed is not its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .._table import TensorTable

__all__ = ["Group", "Layout"]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share data files."""

    stem: str
    """The beginning of the files' names; unique among the groups, safe in a path."""
    strip: str
    """The path prefix that tensor names inside the files leave out, such as `model/`."""
    rows: list[int]
    """Rows of the table; every stored row is in exactly one group."""


class Layout(Protocol):
    """Decides the files of a checkpoint."""

    @property
    def shard_bytes(self) -> int:
        """A shard is closed before it would grow beyond this; one tensor is never cut."""

    def assign(self, table: TensorTable) -> list[Group]:
        """Put every row of `table.stored()` into one group."""
        ...
