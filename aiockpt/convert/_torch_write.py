"""Files of `torch.save`, written as a stream: a small pickle, then one storage after the other.

The pickle is made by Python's own pickler, which is told what a leaf stands for; the
archive is made by `zipfile`, stored and aligned as torch does it. `torch.load` reads the
result with `weights_only=True` and with `mmap=True`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import torch

from ._leaf import Content, Leaf, Room, row_major
from ._torch_names import STORAGES
from ._walk import stream

__all__ = ["Window", "write_archive"]

ROOT: Final = "archive"
ALIGNMENT: Final = 64
_PAD: Final = b"FB"
"""The tag of the field that torch pads headers with."""
_LOCAL_HEADER: Final = 30
_WIDE: Final = 20
"""Bytes of the field with sizes that do not fit 32 bits."""


class _Stored:
    """A storage, where the pickler meets one."""

    def __init__(self, content: Content, key: str) -> None:
        self.content = content
        self.key = key


class _Pickler(pickle.Pickler):
    """Writes leaves as torch writes tensors, and notes what they hold."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.stored: dict[int, _Stored] = {}

    def persistent_id(self, value: Any) -> Any:
        """How a storage is mentioned."""
        if type(value) is not _Stored:
            return None
        content, name = value.content, STORAGES.get(value.content.dtype)
        kind = torch.storage.UntypedStorage if name is None else getattr(torch, name)
        size = content.nbytes // (content.dtype.itemsize if name else 1)
        return ("storage", kind, value.key, "cpu", size)

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is mentioned."""
        if type(value) is not Leaf:
            return NotImplemented
        utils: Any = torch._utils
        grad = bool(value.flags & 1)
        if value.flags & 2:
            return utils._rebuild_parameter, (Leaf(value.content), grad, OrderedDict())
        content = value.content
        stored = self.stored.setdefault(id(content), _Stored(content, str(len(self.stored))))
        args: tuple[Any, ...] = (stored, 0, content.shape, row_major(content.shape), grad, OrderedDict())
        if content.dtype in STORAGES:
            return utils._rebuild_tensor_v2, args
        return utils._rebuild_tensor_v3, (*args, content.dtype)


class Window(io.RawIOBase):
    """A file from where it is now on, as if it began there: an archive in it counts from its own begin."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.begin = file.tell()

    def writable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next byte goes."""
        return self.file.tell() - self.begin

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go somewhere."""
        return self.file.seek(offset + (0 if whence else self.begin), whence) - self.begin

    def write(self, data: Any) -> int:
        """Write all of it."""
        return self.file.write(data)


def write_archive(file: BinaryIO, state: Any, buffer: torch.Tensor, room: Room) -> Iterator[int]:
    """Write a state to a file from its present position on; yields after each part of it.

    Args:
        file: seekable, buffered or not.
        state: containers and values that `weights_only=True` reads, and leaves.
        buffer: memory for bytes on their way.
        room: memory for what is not in order in its source.
    """
    data = io.BytesIO()
    pickler = _Pickler(data)
    pickler.dump(state)
    with zipfile.ZipFile(Window(file), "w") as archive:
        for name, content in (
            ("data.pkl", data.getvalue()),
            (".format_version", b"1"),
            (".storage_alignment", str(ALIGNMENT).encode()),
            ("byteorder", b"little"),
        ):
            with _record(archive, name, len(content)) as record:
                record.write(content)
        for stored in sorted(pickler.stored.values(), key=lambda stored: stored.content.place):
            with _record(archive, f"data/{stored.key}", stored.content.nbytes) as record:
                yield from stream(stored.content, buffer, room, record.write)
        with _record(archive, "version", 2) as record:
            record.write(b"3\n")


def _record(archive: zipfile.ZipFile, name: str, nbytes: int) -> Any:
    """A record whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"{ROOT}/{name}")
    info.file_size = nbytes
    wide = nbytes * 1.05 > zipfile.ZIP64_LIMIT
    assert archive.fp is not None
    begin = archive.fp.tell() + _LOCAL_HEADER + len(info.filename) + 4 + (_WIDE if wide else 0)
    pad = -begin % ALIGNMENT
    info.extra = _PAD + pad.to_bytes(2, "little") + bytes(pad)
    return archive.open(info, "w", force_zip64=wide)
