"""Folders of torch's Distributed Checkpoint: read by byte ranges, written for stock `dcp.load`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .._threads import offload
from ..errors import ForeignFormatError, UsageError
from . import Opened, Options, Written
from ._dcp_meta import Chunk, Index, Item, TensorEntry, read_metadata
from ._dcp_write import DATA, encode, flattened, nested, write_items
from ._drive import Desk, drive, flush
from ._files import Folder, Member, Range
from ._leaf import MB, Content, Leaf, Piece, Room
from ._torch_read import read_archive
from ._transforms import undo
from ._unpickle import LIMIT
from ._walk import hold, picked
from ._zip import StoredRecord

__all__ = ["open_source", "write"]

METADATA: Final = ".metadata"
_UNFOLD: Final = 8
"""How often the bytes of a folder may be mentioned by its tensors, taken together."""
_PACKED: Final = 1000
"""The same, where some of them are compressed."""


async def open_source(path: str, options: Options) -> Opened:
    """Open a folder with `.metadata`.

    Raises:
        UnsafeFileError: it would run code, or names a file outside of it.
        ForeignFormatError: it is damaged, or incomplete.
    """
    folder = await offload(Folder, path)

    async def close() -> None:
        await offload(folder.close)

    try:
        state = await offload(_open, folder, options.verify)
    except BaseException:
        await close()
        raise
    return Opened(state, close=close)


def _open(folder: Folder, verify: bool) -> Any:
    member = Member(folder, METADATA)
    if member.nbytes > LIMIT:
        raise ForeignFormatError(f"{folder.path}: {METADATA} has more than {LIMIT >> 20} MiB", file=METADATA)
    index = read_metadata(Range(member, 0, member.nbytes).read(0, member.nbytes), file=METADATA)
    return nested(_Items(folder, index, verify).values(), index.paths)


@dataclass(slots=True)
class _Items:
    """The items of a folder."""

    folder: Folder
    index: Index
    verify: bool
    members: dict[str, Member] = field(default_factory=dict)
    contents: dict[Any, Content] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Leaves and plain values by flat name; every place is checked, no tensor is read."""
        found = {name: self._value(name, entry) for name, entry in self.index.entries.items()}
        total = sum(content.nbytes for content in self.contents.values())
        unfold = _PACKED if any(self._packed()) else _UNFOLD
        if total > unfold * sum(member.nbytes for member in self.members.values()) + 64 * MB:
            raise ForeignFormatError(
                f"{self.folder.path}: its tensors claim far more bytes than it has", file=METADATA
            )
        return found

    def _packed(self) -> Iterator[tuple[str, ...]]:
        """What was done to each item."""
        for entry in self.index.entries.values():
            yield from (
                [entry.transforms] if isinstance(entry, Item) else (c.item.transforms for c in entry.chunks)
            )

    def _value(self, name: str, entry: TensorEntry | Item) -> Any:
        if isinstance(entry, Item):
            source = undo(self._range(entry, name), entry.transforms, LIMIT, path=name)
            return read_archive(source, verify=self.verify)
        key = (entry.dtype, entry.shape, *((c.offsets, c.sizes, c.item) for c in entry.chunks))
        content = self.contents.get(key)
        if content is None:
            ranges = [self._range(chunk.item, name) for chunk in entry.chunks]
            at = (hash(entry.chunks[0].item.file), entry.chunks[0].item.offset) if ranges else (0, 0)
            content = Content(entry.dtype, entry.shape, self._pieces(name, entry, ranges), at=at)
            self.contents[key] = content
        return Leaf(content, 1 if entry.grad else 0)

    def _range(self, item: Item, name: str) -> Range:
        member = self.members.get(item.file)
        if member is None:
            member = self.members[item.file] = Member(self.folder, item.file)
        return Range(member, item.offset, item.nbytes, f"{self.folder.path}: {name} in {item.file}")

    def _pieces(self, name: str, entry: TensorEntry, ranges: list[Range]) -> Callable[[], list[Piece]]:
        """The archives of the chunks are opened when the tensor is read."""

        def pieces() -> list[Piece]:
            pairs = zip(entry.chunks, ranges, strict=True)
            return [self._piece(name, entry, chunk, source) for chunk, source in pairs]

        return pieces

    def _piece(self, name: str, entry: TensorEntry, chunk: Chunk, source: Range) -> Piece:
        most = math.prod(chunk.sizes) * entry.dtype.itemsize + MB
        source = undo(source, chunk.item.transforms, most, path=name)
        found = read_archive(source, verify=self.verify)
        if (
            not isinstance(found, Leaf)
            or found.content.dtype != entry.dtype
            or found.content.shape != chunk.sizes
        ):
            why = f"{source.name}: the chunk is not the tensor that {METADATA} says"
            raise ForeignFormatError(why, file=chunk.item.file, path=name)
        made = found.content.pieces
        assert not callable(made)
        if isinstance(made[0].storage, StoredRecord):
            # A folder may have a hundred thousand chunks: of each archive only what is needed stays.
            made[0].storage.archive.records.clear()
        return Piece(chunk.offsets, chunk.sizes, made[0].strides, made[0].begin, made[0].storage)


async def write(state: Any, path: str, options: Options, desk: Desk, step: int | None) -> Written:
    """Write a folder that stock `dcp.load` reads.

    Raises:
        UnsupportedStateError: listing the values that it would not read.
        UsageError: the state is no dict, or two paths become one name.
    """
    if not isinstance(state, dict):
        raise UsageError(f"Distributed Checkpoint holds dicts, and the state is a {type(state).__name__}")
    kept, dropped = await offload(lambda: hold(state, picked, drop=options.drop))
    flat, paths = await offload(flattened, kept)
    await drive(_write(flat, paths, path, desk.buffer(), desk.room()))
    return Written(await offload(nested, flat, paths), dropped)


def _write(
    flat: dict[str, Any], paths: dict[str, tuple[str | int, ...]], path: str, buffer: torch.Tensor, room: Room
) -> Iterator[int]:
    os.mkdir(path)
    with open(os.path.join(path, DATA), "xb", buffering=1 << 16) as file:
        places = yield from write_items(file, flat, buffer, room)
        file.flush()
        os.fsync(file.fileno())
    with open(os.path.join(path, METADATA), "xb") as file:
        file.write(encode(flat, paths, places))
        file.flush()
        os.fsync(file.fileno())
    flush(path)
