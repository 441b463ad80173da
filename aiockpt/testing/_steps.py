"""Small tools for tests of stores: make a file, a step; read one back; look around."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from ..storage import MANIFEST, Attempt, Store

__all__ = ["BLOCK", "exists", "new_id", "raw_tree", "read_file", "read_step", "write_file", "write_step"]

BLOCK = 1 << 20
"""How much one write of `write_file` holds."""


def new_id() -> str:
    """A fresh save id."""
    return uuid.uuid4().hex


async def write_file(attempt: Attempt, filename: str, data: bytes, *, block: int = BLOCK) -> str:
    """Write a data file in blocks, the last one padded to 4096; returns its stored name."""
    sink = await attempt.create(filename, len(data))
    try:
        padded = data + bytes(-len(data) % 4096)
        for offset in range(0, len(padded), block):
            await sink.write(offset, memoryview(padded)[offset : offset + block])
        await sink.finish(len(data))
    except BaseException:
        await sink.discard()
        raise
    return attempt.prefix + filename


async def write_step(
    store: Store, name: str, files: Mapping[str, bytes], *, save_id: str | None = None
) -> bytes:
    """Write and commit a step; its manifest lists the stored file names, one a line."""
    attempt = await store.begin(name, save_id or new_id())
    try:
        names = [await write_file(attempt, filename, data) for filename, data in files.items()]
        manifest = "\n".join([attempt.save_id, *names]).encode()
        await attempt.commit(manifest)
    finally:
        await attempt.abort()
    return manifest


async def read_file(store: Store, key: str) -> bytes:
    """Read a data file whole."""
    source = await store.open(key)
    try:
        data = bytearray(source.size)
        await source.read_into(0, [memoryview(data)])
    finally:
        await source.aclose()
    return bytes(data)


async def read_step(store: Store, name: str) -> list[bytes]:
    """Read the data files of a step made by `write_step`, in order.

    Raises:
        FileNotFoundError: there is no such step.
    """
    manifest = await store.get(f"{name}/{MANIFEST}")
    return [await read_file(store, f"{name}/{file}") for file in manifest.decode().split("\n")[1:]]


async def exists(store: Store, name: str) -> bool:
    """Whether `name` is a step."""
    try:
        await store.get(f"{name}/{MANIFEST}")
    except FileNotFoundError:
        return False
    return True


def raw_tree(path: Path) -> dict[str, bytes]:
    """Every file under a folder by key; a folder without files as its key and a slash.

    Empty files are not opened: closing one that is locked by this process would free it.
    """
    found: dict[str, bytes] = {}
    for item in sorted(path.rglob("*")):
        key = item.relative_to(path).as_posix()
        if item.is_file():
            found[key] = item.read_bytes() if item.stat().st_size else b""
        elif not any(item.iterdir()):
            found[f"{key}/"] = b""
    return found
