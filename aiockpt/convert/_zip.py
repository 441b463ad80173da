"""Zip archives as torch writes them: stored, not compressed, each record where the directory says.

Whatever else the format allows is refused: compression (and with it every bomb),
encryption, records that overlap, names that occur twice or lead somewhere, sizes that
disagree, anything before or behind the archive.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from ..errors import ForeignFormatError
from ._files import Range, Source

__all__ = ["Archive", "StoredRecord"]

_DIRECTORY_LIMIT: Final = 64 << 20
_END: Final = struct.Struct("<4s4H2LH")
_LOCATOR: Final = struct.Struct("<4sLQL")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED: Final = 0x2041
"""Flag bits: encrypted, strongly encrypted, masked."""
_STEP: Final = 1 << 20


@dataclass(slots=True)
class StoredRecord:
    """One record of an archive."""

    archive: Archive = field(repr=False)
    name: str
    nbytes: int
    crc: int
    header: int
    """Where its local header begins."""
    end: int = 0
    """Where the next record begins."""
    data: Range | None = None
    sound: bool = False

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view; the whole record is checked against its CRC at the first time."""
        self.check()
        assert self.data is not None
        self.data.read_into(offset, view)

    def read(self, limit: int) -> bytes:
        """The whole record.

        Raises:
            ForeignFormatError: it has more than `limit` bytes, or is damaged.
        """
        if self.nbytes > limit:
            self.archive.refuse(f"{self.name} has {self.nbytes} bytes, more than {limit}")
        data = bytearray(self.nbytes)
        self.read_into(0, memoryview(data))
        return bytes(data)

    def check(self) -> None:
        """Find the record's bytes and compare them with their CRC, once.

        Raises:
            ForeignFormatError: they are damaged.
        """
        if self.sound:
            return
        self.data = self.archive.locate(self)
        if self.archive.verify:
            crc, buffer = 0, memoryview(bytearray(min(_STEP, self.nbytes)))
            for at in range(0, self.nbytes, _STEP):
                part = buffer[: min(_STEP, self.nbytes - at)]
                self.data.read_into(at, part)
                crc = zlib.crc32(part, crc)
            if crc != self.crc:
                self.archive.refuse(f"the bytes of {self.name} do not match their CRC")
        self.sound = True


@dataclass(slots=True)
class Archive:
    """The records of an archive by name, without the folder all of them lie in.

    Args:
        file: the archive, from its first byte to its last.
        verify: whether records are compared with their CRC.

    Raises:
        ForeignFormatError: it is damaged, or nothing that torch writes.
    """

    file: Source
    verify: bool = True
    records: dict[str, StoredRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        begin, size, count = self._end()
        entries = sorted(self._entries(begin, size, count), key=lambda entry: entry.header)
        if len(entries) != count:
            self.refuse("its directory does not list what it counts")
        after = [entry.header for entry in entries[1:]] + [begin]
        for entry, end in zip(entries, after, strict=True):
            # The header, its name and at least the bytes: what follows may only begin behind them.
            if entry.header + _LOCAL.size + len(entry.name.encode()) + entry.nbytes > end:
                self.refuse("records overlap")
            entry.end = end
        if entries and entries[0].header != 0:
            self.refuse("something stands before the archive")
        self._name(entries)

    def refuse(self, why: str) -> NoReturn:
        """Raise what a damaged archive is."""
        raise ForeignFormatError(f"{self.file.name}: {why}", file=self.file.name)

    def _name(self, entries: list[StoredRecord]) -> None:
        roots = {entry.name.partition("/")[0] for entry in entries}
        if len(roots) != 1:
            self.refuse("its records do not lie in one folder, as those of torch.save do")
        for entry in entries:
            name = entry.name.partition("/")[2]
            if not name or name in self.records or any(p in ("", ".", "..") for p in entry.name.split("/")):
                self.refuse(f"a record has the name {entry.name[:80]!r}, or two have it")
            self.records[name] = entry

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        return Range(self.file, offset, nbytes).read(0, nbytes)

    def _end(self) -> tuple[int, int, int]:
        """(begin, bytes, entries) of the directory."""
        at = self.file.nbytes - _END.size
        if at < 0:
            self.refuse("not a whole zip archive")
        sign, disk, first, here, count, size, begin, comment = _END.unpack(self._bytes(at, _END.size))
        if sign != b"PK\5\6" or comment or disk or first not in (0, _FULL16) or here != count:
            self.refuse("not a whole zip archive of torch.save: it has no end, or a comment behind it")
        if at >= _LOCATOR.size:
            sign, _, at64, _ = _LOCATOR.unpack(self._bytes(at - _LOCATOR.size, _LOCATOR.size))
            if sign == b"PK\6\7":
                at = at - _LOCATOR.size - _END64.size
                begin, size, count = self._end64(at, at64)
        if size > _DIRECTORY_LIMIT or begin + size != at:
            self.refuse("its directory is too large, or not where it is said to be")
        return begin, size, count

    def _end64(self, at: int, stated: int) -> tuple[int, int, int]:
        if at < 0 or stated != at:
            self.refuse("its directory is not where it is said to be")
        found = _END64.unpack(self._bytes(at, _END64.size))
        if found[0] != b"PK\6\6" or found[6] != found[7]:
            self.refuse("its end is damaged")
        return found[9], found[8], found[7]

    def _entries(self, begin: int, size: int, count: int) -> Iterator[StoredRecord]:
        data = self._bytes(begin, size)
        if count > size // _ENTRY.size:
            self.refuse("its directory is shorter than it says")
        at = 0
        while at + _ENTRY.size <= size:
            fields = _ENTRY.unpack_from(data, at)
            name, extra, comment = fields[10], fields[11], fields[12]
            text = data[at + _ENTRY.size : at + _ENTRY.size + name + extra]
            yield self._entry(fields, text[:name], text[name:])
            at += _ENTRY.size + name + extra + comment
        if at != size:
            self.refuse("its directory is damaged")

    def _entry(self, fields: tuple[Any, ...], name: bytes, extra: bytes) -> StoredRecord:
        sign, flags, method = fields[0], fields[3], fields[4]
        crc, packed, nbytes, header = fields[7], fields[8], fields[9], fields[16]
        if sign != b"PK\1\2" or flags & _ENCRYPTED:
            self.refuse("its directory is damaged, or a record is encrypted")
        if method:
            self.refuse("a record is compressed, which torch.save never does")
        nbytes, packed, header = _wide(extra, nbytes, packed, header)
        if nbytes != packed:
            self.refuse("the sizes of a record disagree")
        return StoredRecord(self, name.decode("utf-8", "replace"), nbytes, crc, header)

    def locate(self, record: StoredRecord) -> Range:
        """Where a record's bytes are, by the header before them."""
        found = _LOCAL.unpack(self._bytes(record.header, _LOCAL.size))
        name = self._bytes(record.header + _LOCAL.size, found[9])
        if found[0] != b"PK\3\4" or found[3] or name != record.name.encode():
            self.refuse("a record and the directory do not agree")
        begin = record.header + _LOCAL.size + found[9] + found[10]
        if begin + record.nbytes > record.end:
            self.refuse("records overlap")
        return Range(self.file, begin, record.nbytes, self.file.name)


def _wide(extra: bytes, *numbers: int) -> list[int]:
    """Size, packed size and offset, each from the zip64 field where it does not fit 32 bits."""
    at = 0
    values = b""
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = extra[at + 4 : at + 4 + size]
        at += 4 + size
    wide = iter(struct.unpack(f"<{len(values) // 8}Q", values[: len(values) // 8 * 8]))
    return [next(wide, number) if number == _FULL32 else number for number in numbers]
