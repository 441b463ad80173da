"""Files of `torch.save`, zip archives and the format before them, as states of leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import ForeignFormatError, UnsafeFileError
from ._census import census
from ._files import ForeignFile, Limited, Range, Source
from ._torch_names import TensorNames
from ._unpickle import LIMIT, unpickle
from ._zip import Archive

__all__ = ["read_archive", "read_legacy"]

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001


def read_archive(file: Source, *, verify: bool = True) -> Any:
    """The state in a zip archive of `torch.save`.

    Args:
        file: the archive, from its first byte to its last.
        verify: whether its records are compared with their CRC.

    Raises:
        UnsafeFileError: it would run code.
        ForeignFormatError: it is damaged, or nothing that is read.
    """
    archive = Archive(file, verify)
    pickle = archive.records.get("data.pkl")
    if pickle is None:
        archive.refuse("it has no data.pkl: no archive of torch.save")
    _check_order(archive)

    def storage(key: str, nbytes: int) -> Any:
        record = archive.records.get(f"data/{key}")
        if record is None or record.nbytes != nbytes:
            archive.refuse(f"the storage {key[:40]!r} is missing, or not {nbytes} bytes long")
        return record

    names = TensorNames(file.name, file.nbytes, storage)
    data = pickle.read(LIMIT)
    state = unpickle(data, names, file=file.name, persistent=names.persistent)
    census(state, len(data), file=file.name)
    return state


def _check_order(archive: Archive) -> None:
    order = archive.records.get("byteorder")
    if order is not None and order.read(16) != b"little":
        archive.refuse("its bytes are not in little-endian order")
    if "constants.pkl" in archive.records:
        why = f"{archive.file.name}: an archive of TorchScript, which holds code; save its state_dict()"
        raise UnsafeFileError(why, file=archive.file.name)


@dataclass(slots=True)
class _Late:
    """A storage of the old format, whose place is known only once all pickles are read."""

    nbytes: int
    found: Range | None = None

    def read_into(self, offset: int, view: memoryview) -> None:
        assert self.found is not None
        self.found.read_into(offset, view)


@dataclass(slots=True)
class _Storages:
    """The storages of an old file by key."""

    file: ForeignFile
    known: dict[str, _Late] = field(default_factory=dict)

    def get(self, key: str, nbytes: int) -> _Late:
        found = self.known.setdefault(key, _Late(nbytes))
        if found.nbytes != nbytes:
            self.refuse(f"the storage {key[:40]!r} has two sizes")
        return found

    def refuse(self, why: str) -> None:
        raise ForeignFormatError(f"{self.file.name}: {why}", file=self.file.path)

    def place(self, keys: Any, at: int) -> None:
        """Find every storage's bytes: one after the other, each behind its number of elements."""
        sound = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        if not sound or set(keys) != set(self.known) or len(keys) != len(self.known):
            self.refuse("it does not list the storages it uses")
        for key in keys:
            late = self.known[key]
            numel = int.from_bytes(Range(self.file, at, 8).read(0, 8), "little")
            if numel > late.nbytes or (numel == 0) != (late.nbytes == 0) or (numel and late.nbytes % numel):
                self.refuse(f"the storage {key[:40]!r} has another size than is said")
            late.found = Range(self.file, at + 8, late.nbytes)
            at += 8 + late.nbytes
        if at != self.file.nbytes:
            self.refuse("something stands behind its last storage")


def read_legacy(file: ForeignFile) -> Any:
    """The state in a file of `torch.save` before version 1.6, or without the zip format.

    Raises:
        As `read_archive`.
    """
    storages = _Storages(file)
    names = TensorNames(file.name, file.nbytes, storages.get)
    source = Limited(Range(file, 0, file.nbytes), LIMIT)

    def following(**more: Any) -> Any:
        source.begin()
        return unpickle(source, names, file=file.name, **more)

    if following() != _MAGIC or following() != _PROTOCOL:
        storages.refuse("not a file of torch.save")
    info = following()
    if not isinstance(info, dict) or info.get("little_endian") is not True:
        storages.refuse("its bytes are not in little-endian order")
    state = following(persistent=names.persistent)
    census(state, source.at, file=file.name)
    storages.place(following(), source.at)
    return state
