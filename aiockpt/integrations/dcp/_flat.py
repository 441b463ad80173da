"""A checkpoint as DCP sees one: flat names, chunks, objects. Pure.

The nested state is flattened as `torch.distributed.checkpoint` flattens it: mappings
always, lists only if they hold tensors or mappings, anything else is one object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from aiockpt._dtypes import BY_NAME
from aiockpt._paths import join, key_text, parse_key
from aiockpt._plain import Json, unpack
from aiockpt._saved import Outline, Saved
from aiockpt.errors import UsageError

__all__ = ["Flat", "Leaf", "flatten_saved"]

Path = tuple[str | int, ...]
MAPPINGS: Final = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
REQUIRES_GRAD: Final = 1


@dataclass(slots=True)
class Leaf:
    """One leaf by DCP's rules."""

    path: str
    """Ours."""
    rows: list[int] = field(default_factory=list)
    """The stored rows of a tensor; none for an object."""
    json: Json = None
    """Of a plain object."""
    holds_tensors: bool = False
    """Whether an object has to be loaded rather than decoded."""


@dataclass(slots=True)
class Flat:
    """A checkpoint's leaves by DCP's names."""

    leaves: dict[str, Leaf]
    metadata: Metadata


def flatten_saved(saved: Saved, checkpoint_id: str) -> Flat:
    """Describe a checkpoint to DCP.

    Raises:
        UsageError: the state is no dict, or two leaves have one name once it is flattened.
        CorruptCheckpointError: a plain value is nothing that a save writes.
    """
    walk = _Walk(saved)
    if walk.outline.kind("") == "tensor" or walk.outline.tag("") not in MAPPINGS:
        raise UsageError("DCP needs a dict at the top of the state; this checkpoint's state is none")
    leaves: dict[str, Leaf] = {}
    names: dict[str, Path] = {}
    for path, leaf in walk.visit("", ()):
        fqn = ".".join(map(str, path))
        if fqn in leaves:
            raise UsageError(
                f"DCP would call both {leaves[fqn].path!r} and {leaf.path!r} {fqn!r}: a checkpoint with such "
                "keys cannot be loaded through it; use aiockpt.load",
                step=saved.manifest.step,
                path=leaf.path,
            )
        leaves[fqn], names[fqn] = leaf, path
    meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=saved.manifest.save_id)
    described = {fqn: _describe(saved, leaf) for fqn, leaf in leaves.items()}
    return Flat(leaves, Metadata(described, planner_data=names, storage_meta=meta, version="1.0.0"))


def _describe(saved: Saved, leaf: Leaf) -> TensorStorageMetadata | BytesStorageMetadata:
    if not leaf.rows:
        return BytesStorageMetadata()
    stored, row = saved.stored, leaf.rows[0]
    chunks = [
        ChunkStorageMetadata(torch.Size(stored.offsets(row)), torch.Size(stored.shape[row]))
        for row in leaf.rows
    ]
    properties = TensorProperties(
        dtype=BY_NAME[stored.dtype[row]], requires_grad=bool(stored.flags[row] & REQUIRES_GRAD)
    )
    return TensorStorageMetadata(properties, torch.Size(stored.whole(row)), chunks)


Found = Iterator[tuple[Path, Leaf]]


class _Walk:
    """One pass over what is saved."""

    def __init__(self, saved: Saved) -> None:
        self.saved = saved
        self.outline = Outline(saved)
        self.values = dict(zip(saved.value_paths, saved.values, strict=True))

    def visit(self, path: str, keys: Path) -> Found:
        """The leaves at and below a path."""
        row = self.outline.row(path)
        if row is not None:
            yield keys, Leaf(path, self._rows(row))
        elif path in self.values:
            yield from _plain(self.values[path], path, keys)
        elif self._is_mapping(path):
            for text in self.outline.children(path):
                yield from self.visit(join(path, text), (*keys, str(parse_key(text))))
        elif self._is_open_list(path):
            for i, text in enumerate(self.outline.children(path)):
                yield from self.visit(join(path, text), (*keys, i))
        else:
            yield keys, Leaf(path, holds_tensors=True)

    def _rows(self, row: int) -> list[int]:
        base, spread = self.saved.base(row), self.saved.spread
        return [base] if spread is None else spread.rows[base]

    def _is_mapping(self, path: str) -> bool:
        return self.outline.tag(path) in MAPPINGS

    def _is_open_list(self, path: str) -> bool:
        """Whether DCP looks into a list: it holds tensors, mappings, or such lists."""
        if self.outline.tag(path) != "list":
            return False
        return any(self._opens(join(path, text)) for text in self.outline.children(path))

    def _opens(self, path: str) -> bool:
        if self.outline.row(path) is not None:
            return True
        if path in self.values:
            return _opens(self.values[path])
        return self._is_mapping(path) or self._is_open_list(path)


def _plain(json: Json, path: str, keys: Path) -> Found:
    """The leaves of a plain value."""
    tag = _tag(json)
    if tag not in MAPPINGS and not (tag == "list" and _opens(json)):
        yield keys, Leaf(path, json=json)
        return
    opened = unpack(_composite(json), path)
    for key, child in zip(opened.keys, opened.children, strict=True):
        name: Any = key if tag == "list" else str(key)
        yield from _plain(child, join(path, key_text(key)), (*keys, name))


def _composite(json: Json) -> list[Json] | dict[str, Json]:
    assert isinstance(json, (list, dict))
    return json


def _tag(json: Json) -> str:
    if isinstance(json, list):
        return "list"
    return str(json.get("~", "dict")) if isinstance(json, dict) else ""


def _opens(json: Json) -> bool:
    """Whether it makes a list one that DCP looks into."""
    return _tag(json) in MAPPINGS or (isinstance(json, list) and any(_opens(child) for child in json))
