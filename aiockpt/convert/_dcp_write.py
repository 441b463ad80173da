"""What Distributed Checkpoint makes of a state: flat names, one archive an item, one record of all."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Generator
from typing import Any, BinaryIO, Final

import torch

from ..errors import UsageError
from ._leaf import Content, Leaf, Room
from ._torch_write import write_archive

__all__ = ["DATA", "Path", "encode", "flattened", "nested", "write_items"]

DATA: Final = "__0_0.distcp"
Path = tuple[str | int, ...]


def flattened(state: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Flat names as torch's planner makes them, and the keys each is made of.

    Keys become text, and containers without any value vanish: Distributed Checkpoint has no
    place for them. Lists are taken apart where they hold tensors or dicts, tuples never.

    Raises:
        UsageError: two paths become one name.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}

    def visit(path: Path, value: Any) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                visit((*path, str(key)), child)
        elif isinstance(value, list) and _has_parts(value):
            for number, child in enumerate(value):
                visit((*path, number), child)
        else:
            name = ".".join(map(str, path))
            if name in flat:
                raise UsageError(
                    f"two paths of the state become {name!r} in Distributed Checkpoint: rename one", path=name
                )
            flat[name], paths[name] = _item(value), path

    visit((), state)
    return flat, paths


def _item(value: Any) -> Any:
    """A value as it comes back: a tensor is no Parameter, what is stored apart is tied to nothing else."""
    if isinstance(value, Leaf):
        return Leaf(value.content, value.flags & 1)
    known: dict[int, Content] = {}

    def own(part: Any) -> Any:
        if isinstance(part, Leaf):
            old = part.content
            return Leaf(
                known.setdefault(id(old), Content(old.dtype, old.shape, old.pieces, at=old.at)), part.flags
            )
        if isinstance(part, dict):
            made: Any = type(part)()
            if hasattr(part, "__dict__"):
                vars(made).update(vars(part))
            made.update((key, own(child)) for key, child in part.items())
            return made
        return type(part)(own(child) for child in part) if isinstance(part, (list, tuple)) else part

    return own(value)


def _has_parts(values: list[Any]) -> bool:
    return any(
        isinstance(value, (Leaf, dict)) or (isinstance(value, list) and _has_parts(value)) for value in values
    )


def nested(flat: dict[str, Any], paths: dict[str, Path]) -> dict[str, Any]:
    """The state whose flat names these are.

    Raises:
        UsageError: one path lies under another.
    """
    state: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = paths[name]
        here: Any = state
        for key, following in zip(above, paths[name][1:], strict=True):
            here = _child(here, key, {} if isinstance(following, str) else [], name)
        if _child(here, last, None, name) is not None:
            raise UsageError(f"{name!r} is there twice, or lies under another name", path=name)
        here[last] = value
    return state


def _child(box: Any, key: str | int, fresh: Any, name: str) -> Any:
    """What is at a key, made where nothing is."""
    if isinstance(box, dict) and isinstance(key, str):
        return box.setdefault(key, fresh) if fresh is not None else box.get(key)
    if isinstance(box, list) and isinstance(key, int):
        box.extend([None] * (key + 1 - len(box)))
        if box[key] is None:
            box[key] = fresh
        return box[key]
    raise UsageError(f"{name!r} lies under another name", path=name)


def write_items(
    file: BinaryIO, flat: dict[str, Any], buffer: torch.Tensor, room: Room
) -> Generator[int, None, dict[str, tuple[int, int]]]:
    """Write one archive an item; tied tensors once.

    Returns:
        (offset, bytes) by flat name.
    """
    places: dict[str, tuple[int, int]] = {}
    known: dict[int, tuple[int, int]] = {}
    for name in sorted(flat, key=lambda name: _place(flat[name])):
        value = flat[name]
        tied = known.get(id(value.content)) if isinstance(value, Leaf) else None
        if tied is None:
            begin = file.tell()
            item = Leaf(value.content) if isinstance(value, Leaf) else value
            yield from write_archive(file, item, buffer, room)
            tied = (begin, file.tell() - begin)
        if isinstance(value, Leaf):
            known[id(value.content)] = tied
        places[name] = tied
    return places


def _place(value: Any) -> tuple[int, int]:
    return value.content.place if isinstance(value, Leaf) else (-1, 0)


def encode(flat: dict[str, Any], paths: dict[str, Path], places: dict[str, tuple[int, int]]) -> bytes:
    """The content of `.metadata`, made of torch's own records."""
    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for name, value in flat.items():
        info = _StorageInfo(DATA, *places[name])
        if not isinstance(value, Leaf):
            entries[name] = meta.BytesStorageMetadata()
            stored[meta.MetadataIndex(name)] = info
            continue
        size = torch.Size(value.content.shape)
        offsets = torch.Size([0] * len(size))
        properties = meta.TensorProperties(value.content.dtype, requires_grad=bool(value.flags & 1))
        chunk = meta.ChunkStorageMetadata(offsets, size)
        entries[name] = meta.TensorStorageMetadata(properties, size, [chunk])
        stored[meta.MetadataIndex(name, offsets)] = info
    whole = meta.Metadata(state_dict_metadata=entries, planner_data=dict(paths), storage_data=stored)
    if "version" in {field.name for field in dataclasses.fields(meta.Metadata)}:
        whole.version = "1.0.0"
    return pickle.dumps(whole)
