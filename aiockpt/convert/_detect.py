"""Which format a file or folder is of: by what is in it, never by guessing from a name alone."""

from __future__ import annotations

import os
from typing import Final

from .._names import RUN_FILE
from ..errors import ForeignFormatError, UsageError

__all__ = ["INDEX", "kind_of"]

INDEX: Final = "model.safetensors.index.json"
MANIFEST: Final = "manifest.json"


def kind_of(path: str) -> str:
    """The format of what is at a path; blocking.

    Raises:
        UsageError: there is nothing.
        ForeignFormatError: it is of no format that is read.
    """
    if os.path.isdir(path):
        return _folder(path)
    if not os.path.exists(path):
        raise UsageError(f"{path}: there is no such file or folder", file=path)
    return _file(path)


def _folder(path: str) -> str:
    names = set(os.listdir(path))
    if MANIFEST in names or RUN_FILE in names:
        return "aiockpt"
    if ".metadata" in names:
        return "dcp"
    if any(name.endswith(".safetensors") for name in names) or INDEX in names:
        return "safetensors"
    if any(os.path.exists(os.path.join(path, name, MANIFEST)) for name in names):
        return "aiockpt"
    if any(name.endswith((".distcp", ".metadata")) for name in names):
        raise ForeignFormatError(
            f"{path}: data of Distributed Checkpoint without its .metadata: the save did not finish, or was "
            "made with use_collectives=False",
            file=path,
        )
    raise ForeignFormatError(f"{path}: a folder of no format that is read", file=path)


def _file(path: str) -> str:
    with open(path, "rb") as file:
        head = file.read(4096)
    if head.startswith(b"PK\3\4"):
        return "torch"
    if head.startswith(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"):
        return "torch"
    if len(head) > 8 and head[8:9] == b"{":
        return "safetensors"
    if path.endswith(".safetensors"):
        return "safetensors"
    if head.startswith((b"\x80", b"(")):
        why = (
            "a bare pickle, or a file of a very old torch.save: load it where it is trusted and save it again"
        )
        raise ForeignFormatError(f"{path}: {why}", file=path)
    raise ForeignFormatError(f"{path}: a file of no format that is read", file=path)
