"""What a checkpoint becomes on disk: a file of `torch.save`, a folder of aiockpt's, or another plugin's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import torch

from aiockpt import _tree
from aiockpt._short import latest
from aiockpt.errors import UnsupportedStateError
from aiockpt.policies.keep import KeepLast
from aiockpt.saver import Saver
from aiockpt.sync import load

from .._replacing import new_file, remove
from .._snapshot import Snapshot, children

__all__ = ["AiockptFolder", "Format", "TorchFile", "Wrapped"]


class Format:
    """Saves, removes and loads at a path. All but `check` and `load` is called on the background thread.

    Args:
        stock: the plugin that Lightning would use.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self._allow_pickle = False

    def check(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        """Refuse, at the call, what could not be written."""
        if storage_options is not None:
            raise TypeError(
                "storage_options need a CheckpointIO that knows what to do with them: "
                f"AioCheckpointIO(TheCheckpointIO()); {path} was not saved"
            )

    def save(self, snapshot: Snapshot, path: str, storage_options: Any) -> None:
        """Write it, durably, in place of what is there."""
        raise NotImplementedError

    def remove(self, path: str) -> None:
        """Remove a file or folder, if there is one."""
        if (local := _local(path)) is None:
            self._stock.remove_checkpoint(path)
        else:
            remove(local)

    def load(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        """Read it back, whatever wrote it."""
        local = _local(path)
        if local is not None and os.path.exists(os.path.join(local, "run.json")):
            return _load_folder(local, options.get("map_location"), self._allow_pickle)
        return self._stock.load_checkpoint(path, **options)  # type: ignore[no-any-return]


class TorchFile(Format):
    """A plain `.ckpt`, which `torch.load` and stock Lightning read. URLs are left to Lightning's own code."""

    def save(self, snapshot: Snapshot, path: str, storage_options: Any) -> None:
        if (local := _local(path)) is None:
            self._stock.save_checkpoint(snapshot.rebuild(), path)
        else:
            with new_file(local) as aside:
                torch.save(snapshot.rebuild(), aside)  # noqa: TID251  # the format of Lightning
        snapshot.release()


class AiockptFolder(Format):
    """A folder with one step: safetensors files and a manifest.

    The step's number is the trainer's global step, or, where the folder has had that one, the next
    number: the old content stays until the new is committed.
    """

    def __init__(self, stock: Any, allow_pickle: bool) -> None:
        super().__init__(stock)
        self._allow_pickle = allow_pickle

    def check(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        super().check(checkpoint, path, storage_options)
        problems = [] if self._allow_pickle else list(_objects(checkpoint, ""))
        try:
            _tree.flatten(checkpoint, allow_pickle=self._allow_pickle)
        except UnsupportedStateError as error:
            problems += error.problems
        if problems:
            remedy = (
                f"{path} was not saved. format='torch' stores whatever pickle can, and so does "
                "allow_pickle=True; hyper-parameters can be left out: save_hyperparameters(ignore=[...])."
            )
            raise UnsupportedStateError(problems, file=path, remedy=remedy)

    def save(self, snapshot: Snapshot, path: str, storage_options: Any) -> None:
        state = snapshot.rebuild()
        asyncio.run(self._save(state, path))
        del state
        snapshot.release()

    async def _save(self, state: dict[str, Any], path: str) -> None:
        keep = KeepLast(1)
        async with Saver(path, keep=keep, keep_grace=0.0, allow_pickle=self._allow_pickle) as saver:
            newest = await latest(path)
            least = 0 if newest is None else newest.step + 1
            step = max(least, int(state.get("global_step", 0)))
            await saver.save(state, step=step)


class Wrapped(Format):
    """Another CheckpointIO, called on the background thread with a copy it may keep."""

    def check(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        """What it takes is its own business."""

    def save(self, snapshot: Snapshot, path: str, storage_options: Any) -> None:
        self._stock.save_checkpoint(snapshot.rebuild(), path, storage_options=storage_options)

    def remove(self, path: str) -> None:
        self._stock.remove_checkpoint(path)

    def load(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        return self._stock.load_checkpoint(path, **options)  # type: ignore[no-any-return]


def _local(path: str) -> str | None:
    """The path in the local file system, or None for what Lightning would hand to another one."""
    if "://" not in path and "::" not in path:
        return path
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    system, stripped = url_to_fs(path)
    return str(stripped) if isinstance(system, LocalFileSystem) else None


def _load_folder(path: str, where: Any, allow_pickle: bool) -> dict[str, Any]:
    if not isinstance(where, (str, torch.device)):
        where = "cpu"  # functions and tables of torch.load speak of the device it was saved from
    return load(path, map_location=where, allow_pickle=allow_pickle)  # type: ignore[no-any-return]


def _objects(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Objects that would come back as their bare `state_dict()`."""
    for name, child in children(value):
        yield from _objects(child, f"{path}/{name}" if path else name)
    if not isinstance(value, (dict, type)) and callable(getattr(value, "state_dict", None)):
        yield path, f"{type(value).__name__} would come back as its state_dict()"
