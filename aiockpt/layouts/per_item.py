"""One set of files for each top-level entry of the state."""

from __future__ import annotations

from dataclasses import dataclass

from .._names import shard_stem
from .._table import TensorTable
from ..errors import UsageError
from . import Group

__all__ = ["LOOSE", "PerItem"]

LOOSE = "tensors"
"""The stem of the files of tensors that stand at the top level themselves."""


@dataclass(frozen=True)
class PerItem:
    """`{"model": ..., "optim": ...}` becomes `model-*.safetensors`, `optim-*.safetensors`.

    Tensors that stand at the top level themselves share files named `tensors-*`, and so
    do small items when there are very many: a state of thousands of entries is not to
    become thousands of files.

    Args:
        shard_bytes: a shard is closed before it would grow beyond this.
        most_items: items with files of their own; beyond it, those under `small_bytes`
            share.
        small_bytes: see `most_items`.
    """

    shard_bytes: int = 1 << 30
    most_items: int = 64
    small_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if self.shard_bytes < 1 or self.most_items < 1 or self.small_bytes < 0:
            raise UsageError("PerItem: shard_bytes and most_items must be at least 1, small_bytes at least 0")

    def assign(self, table: TensorTable) -> list[Group]:
        """Group the stored rows by the first component of their path."""
        items: dict[str, list[int]] = {}
        loose: list[int] = []
        for row in table.stored():
            item, slash, _ = table.path[row].partition("/")
            (items.setdefault(item, []) if slash else loose).append(row)
        if len(items) > self.most_items:
            for item in [
                k for k, rows in items.items() if sum(table.nbytes[r] for r in rows) < self.small_bytes
            ]:
                loose += items.pop(item)
        groups = [Group(_stem(item), f"{item}/", rows) for item, rows in items.items()]
        if loose:
            groups.append(Group(LOOSE, "", sorted(loose)))
        return groups


def _stem(item: str) -> str:
    # An item may be called like the shared files; the two must not meet.
    return shard_stem(f"{item}_" if item.rstrip("_") == LOOSE else item)
