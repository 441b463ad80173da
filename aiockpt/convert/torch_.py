"""Files of `torch.save`: read in both formats it ever had, written as zip archives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from .._threads import offload
from . import Opened, Options, Written
from ._drive import Desk, drive
from ._files import ForeignFile
from ._leaf import Room
from ._torch_read import read_archive, read_legacy
from ._torch_write import write_archive
from ._walk import hold, picked

__all__ = ["open_source", "write"]


async def open_source(path: str, options: Options) -> Opened:
    """Open a file of `torch.save`.

    Raises:
        UnsafeFileError: it would run code.
        ForeignFormatError: it is damaged.
    """
    return await offload(_open, path, options.verify)


def _open(path: str, verify: bool) -> Opened:
    file = ForeignFile(path)
    try:
        head = bytearray(4)
        file.read_into(0, memoryview(head))
        state = read_archive(file, verify=verify) if head == b"PK\3\4" else read_legacy(file)
    except BaseException:
        file.close()
        raise

    async def close() -> None:
        await offload(file.close)

    return Opened(state, close=close)


async def write(state: Any, path: str, options: Options, desk: Desk, step: int | None) -> Written:
    """Write a file that `torch.load(weights_only=True)` reads.

    Raises:
        UnsupportedStateError: listing the values it would refuse.
    """
    kept, dropped = await offload(lambda: hold(state, picked, drop=options.drop))
    await drive(_write(kept, path, desk.buffer(), desk.room()))
    return Written(kept, dropped)


def _write(state: Any, path: str, buffer: torch.Tensor, room: Room) -> Iterator[int]:
    with open(path, "xb", buffering=1 << 16) as file:
        yield from write_archive(file, state, buffer, room)
        file.flush()
        os.fsync(file.fileno())
