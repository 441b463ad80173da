"""`.metadata` of Distributed Checkpoint, read as data: what is in the folder, and where.

The file is a pickle of torch's own classes. None of them is looked up: their names stand
for records, whose fields are checked one by one. Metadata of older versions lack some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .._chunks import cover_problem
from .._dtypes import NAME
from ..errors import ForeignFormatError
from ._census import census, shown
from ._torch_names import TensorNames, sizes
from ._unpickle import LIMIT, Global, Record, unpickle

__all__ = ["Chunk", "Index", "Item", "TensorEntry", "read_metadata"]

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_RECORDS: Final[dict[str, frozenset[str]]] = {
    _METADATA: frozenset(
        {
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        {"TensorProperties", "MEM_FORMAT_ENCODING"}
    ),
}
_ENUMS: Final = frozenset({"_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"})
_GETATTR: Final = frozenset({("builtins", "getattr"), ("__builtin__", "getattr")})
_PATHS: Final = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})
_MOST_INDEX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Enum:
    """The class of an enum, mentioned by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """Where an item's bytes are."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """What was done to them on the way to the file."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    grad: bool
    chunks: list[Chunk]


@dataclass(slots=True)
class Index:
    """Everything `.metadata` says, checked."""

    entries: dict[str, TensorEntry | Item] = field(default_factory=dict)
    """By flat name: a tensor, or the item of a plain value."""
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Flat name to the keys it was made of."""


def read_metadata(data: bytes, *, file: str) -> Index:
    """Read the metadata of a folder.

    Args:
        data: the file's content.
        file: its name, for messages.

    Raises:
        UnsafeFileError: it would run code.
        ForeignFormatError: it is damaged, or of a version that is not known.
    """
    if len(data) > LIMIT:
        raise ForeignFormatError(f"{file}: more than {LIMIT >> 20} MiB of metadata", file=file)
    meta = unpickle(data, _table(file), file=file)
    reader = _Reader(file)
    if not isinstance(meta, Record) or meta.name != "Metadata":
        raise reader.bad("it holds no Metadata")
    places = reader.places(meta.field("storage_data"))
    index = Index()
    entries = meta.field("state_dict_metadata")
    for name, entry in reader.items(entries):
        index.entries[name] = reader.entry(name, entry, places)
    index.paths = reader.paths(meta.field("planner_data"), index)
    census(meta.field("planner_data"), len(data), file=file)
    return index


def _table(file: str) -> TensorNames | Any:
    names = TensorNames(file, 0, _no_storage)

    def find(module: str, name: str) -> Global | None:
        if name in _RECORDS.get(module, ()):
            enum = _Enum(name) if name in _ENUMS else None
            return Global(name, lambda *args: Record(name, args), enum)
        if module.split(".", 1)[0] == "pathlib" and name in _PATHS:
            return Global(name, lambda *args: Record("path", args))
        if (module, name) in _GETATTR:
            return Global(name, _member)
        plain = module in ("torch", "collections", "torch.serialization")
        return names(module, name) if plain else None

    return find


def _member(*args: Any) -> Record:
    """A member of an enum, as Python 3.11.0 to 3.11.3 pickle it: by `getattr` of the class and a name.

    Nothing is looked up: it becomes the record that other versions' pickles make of a member.
    """
    match args:
        case (_Enum(name=name), str(member)):
            return Record(name, (member,))
    raise ValueError("getattr asks for something else than a member of a known enum")


def _no_storage(key: str, nbytes: int) -> Any:
    raise ValueError("metadata has no storages")


@dataclass(slots=True)
class _Reader:
    """Checks records one by one."""

    file: str

    def bad(self, why: str, path: str | None = None) -> ForeignFormatError:
        """The error of metadata that cannot be right."""
        return ForeignFormatError(f"{self.file}: {why}", file=self.file, path=path)

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Name and entry of a dict by name."""
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.bad("a table by name is missing")
        yield from value.items()

    def shape(self, value: Any) -> tuple[int, ...]:
        """A size."""
        found = sizes(value)
        if found is None:
            raise self.bad("a size is none")
        return found

    def places(self, value: Any) -> dict[tuple[str, tuple[int, ...] | None], Item]:
        """Where each chunk and value is, by name and offset."""
        if not isinstance(value, dict):
            raise self.bad("it does not say where anything is stored")
        found: dict[tuple[str, tuple[int, ...] | None], Item] = {}
        for key, info in value.items():
            if (
                not isinstance(key, Record)
                or key.name != "MetadataIndex"
                or not isinstance(key.field("fqn"), str)
            ):
                raise self.bad("the key of a place is none")
            offset = key.field("offset")
            place = (key.field("fqn"), None if offset is None else self.shape(offset))
            if place in found:
                raise self.bad("two places for one thing", place[0])
            found[place] = self.place(info, place[0])
        return found

    def place(self, info: Any, path: str) -> Item:
        """One place."""
        if not isinstance(info, Record) or info.name != "_StorageInfo":
            raise self.bad("a place is none", path)
        file, offset, nbytes = info.field("relative_path"), info.field("offset"), info.field("length")
        if not isinstance(file, str) or any(type(n) is not int or n < 0 for n in (offset, nbytes)):
            raise self.bad("a place is none", path)
        transforms = info.field("transform_descriptors") or ()
        if not isinstance(transforms, (list, tuple)) or not all(isinstance(t, str) for t in transforms):
            raise self.bad("the transforms of a place are none", path)
        return Item(file, offset, nbytes, tuple(transforms))

    def entry(self, name: str, entry: Any, places: dict[Any, Item]) -> TensorEntry | Item:
        """A tensor, or where a value is."""
        kind = entry.name if isinstance(entry, Record) else ""
        if kind == "BytesStorageMetadata" and (name, None) in places:
            return places[name, None]
        if kind != "TensorStorageMetadata":
            raise self.bad("it is neither a tensor nor a value with a place", name)
        dtype, grad = self.properties(entry.field("properties"), name)
        shape = self.shape(entry.field("size"))
        boxes = entry.field("chunks")
        chunks = [self.chunk(name, box, places, shape) for box in boxes] if isinstance(boxes, list) else []
        problem = cover_problem(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        if problem is not None:
            raise self.bad(problem, name)
        return TensorEntry(dtype, shape, grad, chunks)

    def properties(self, value: Any, name: str) -> tuple[torch.dtype, bool]:
        """dtype and requires_grad."""
        state = value.state if isinstance(value, Record) and value.name == "TensorProperties" else None
        dtype: Any = state[0] if isinstance(state, tuple) and state else None
        grad: Any = state[2] if isinstance(state, tuple) and len(state) > 2 else False
        if isinstance(state, dict):
            dtype, grad = state.get("dtype"), state.get("requires_grad", False)
        if not isinstance(dtype, torch.dtype) or dtype not in NAME:
            known = str(dtype) if isinstance(dtype, torch.dtype) else shown(dtype)
            raise self.bad(f"a dtype that is not read: {known}", name)
        return dtype, grad is True

    def chunk(self, name: str, box: Any, places: dict[Any, Item], shape: tuple[int, ...]) -> Chunk:
        """A chunk and its place."""
        if not isinstance(box, Record) or box.name != "ChunkStorageMetadata":
            raise self.bad("a chunk is none", name)
        offsets, extent = self.shape(box.field("offsets")), self.shape(box.field("sizes"))
        if len(offsets) != len(shape) or len(extent) != len(shape):
            raise self.bad("a chunk has another number of dimensions than its tensor", name)
        if any(a + n > size for a, n, size in zip(offsets, extent, shape, strict=True)):
            raise self.bad("a chunk reaches out of its tensor", name)
        item = places.get((name, offsets))
        if item is None:
            raise self.bad(f"it does not say where the chunk at {offsets} is stored", name)
        return Chunk(offsets, extent, item)

    def paths(self, value: Any, index: Index) -> dict[str, tuple[str | int, ...]]:
        """The keys each flat name was made of; older versions do not say."""
        if value is None:
            return {name: (name,) for name in index.entries}
        found = dict(self.items(value))
        most = min(_MOST_INDEX, 16 * len(found) + 1024)
        for name, path in found.items():
            sound = isinstance(path, (tuple, list)) and 0 < len(path) <= 100
            if not sound or not all(isinstance(k, str) or (type(k) is int and 0 <= k < most) for k in path):
                raise self.bad("the path of a name is none", name)
        missing = next((name for name in index.entries if name not in found), None)
        if missing is not None:
            raise self.bad("it has no path", missing)
        return {name: tuple(found[name]) for name in index.entries}
