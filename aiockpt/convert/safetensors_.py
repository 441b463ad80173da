"""safetensors: one file, or a folder of them with an index, as Hugging Face writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import torch

from .._threads import offload
from ..errors import ForeignFormatError
from . import Opened, Options, Written
from ._detect import INDEX
from ._drive import Desk, drive, flush
from ._files import Folder, Member, Range
from ._leaf import Leaf, Room
from ._safetensors import Header, Plan, decode_json, plan_files, read_header
from ._walk import Columns, columns_of, hold, stream

__all__ = ["open_source", "write"]

_INDEX_LIMIT: Final = 64 << 20


async def open_source(path: str, options: Options) -> Opened:
    """Open a file, or a folder of files.

    Raises:
        UnsafeFileError: the index names a file outside of the folder.
        ForeignFormatError: something is damaged, missing or too much.
    """
    folder = await offload(_folder, path)

    async def close() -> None:
        await offload(folder.close)

    try:
        state = await offload(_open, folder, path)
    except BaseException:
        await close()
        raise
    return Opened(state, close=close)


def _folder(path: str) -> Folder:
    """The folder, or the one a file lies in; a link to a file is followed first."""
    path = os.path.realpath(path)
    return Folder(path if os.path.isdir(path) else os.path.dirname(path))


def _open(folder: Folder, path: str) -> dict[str, Leaf]:
    path = os.path.realpath(path)
    if not os.path.isdir(path):
        return _state([read_header(Member(folder, os.path.basename(path)))])
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    listed = _index(folder) if os.path.lexists(os.path.join(path, INDEX)) else None
    if listed is not None:
        names = sorted(set(listed.values()))
    headers = [read_header(Member(folder, name)) for name in names]
    if listed is not None:
        _check_index(listed, headers)
    return _state(headers)


def _index(folder: Folder) -> dict[str, str]:
    member = Member(folder, INDEX)
    if member.nbytes > _INDEX_LIMIT:
        raise ForeignFormatError(f"{INDEX}: more than {_INDEX_LIMIT >> 20} MiB", file=INDEX)
    found = decode_json(Range(member, 0, member.nbytes).read(0, member.nbytes), INDEX)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ForeignFormatError(f"{INDEX}: it has no weight_map", file=INDEX)
    return names


def _check_index(listed: dict[str, str], headers: list[Header]) -> None:
    """The index and the files name the same tensors."""
    there = {name: header.file for header in headers for name in (*header.leaves, *header.tied)}
    for name, file in listed.items():
        if there.get(name) != file:
            raise ForeignFormatError(
                f"{file}: it lacks {name[:200]}, which {INDEX} places there", file=file, path=name
            )
    extra = next((name for header in headers for name in header.leaves if name not in listed), None)
    if extra is not None:
        raise ForeignFormatError(
            f"{there[extra]}: {INDEX} does not list {extra[:200]}", file=INDEX, path=extra
        )


def _state(headers: list[Header]) -> dict[str, Leaf]:
    state: dict[str, Leaf] = {}
    for header in headers:
        for name, leaf in header.leaves.items():
            if name in state:
                raise ForeignFormatError(
                    f"{header.file}: {name[:200]} is in another file too", file=header.file, path=name
                )
            state[name] = leaf
    for header in headers:
        for name, first in header.tied.items():
            if name not in state:
                state[name] = Leaf(state[first].content)
    return state


def _no_value(value: Any) -> str | None:
    return f"a {type(value).__name__}, and safetensors holds tensors only"


async def write(state: Any, path: str, options: Options, desk: Desk, step: int | None) -> Written:
    """Write a file if the name ends in `.safetensors`, else a folder.

    Raises:
        UnsupportedStateError: listing what it cannot hold.
    """
    kept, dropped = await offload(lambda: hold(state, _no_value, drop=options.drop))
    columns: Columns = await offload(columns_of, kept)
    alone = path.endswith(".safetensors")
    plan: Plan = await offload(plan_files, columns, options.max_shard_bytes, alone, options.drop)
    await drive(_write(plan, path, alone, desk.buffer(), desk.room()))
    return Written(plan.state, (*dropped, *plan.dropped))


def _write(plan: Plan, path: str, alone: bool, buffer: torch.Tensor, room: Room) -> Iterator[int]:
    if not alone:
        os.mkdir(path)
    for name, header, contents in plan.files:
        with open(path if alone else os.path.join(path, name), "xb", buffering=1 << 16) as file:
            file.write(header)
            for content in contents:
                yield from stream(content, buffer, room, file.write)
            file.flush()
            os.fsync(file.fileno())
    if plan.index is not None and not alone:
        with open(os.path.join(path, INDEX), "xb") as file:
            file.write(plan.index)
            file.flush()
            os.fsync(file.fileno())
    if not alone:
        flush(path)
