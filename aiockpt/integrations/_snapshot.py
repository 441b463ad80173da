"""Any picklable state as it is now: a pickle of everything but the bytes of tensors, which are copied.

Two tensors that share memory share it in the copy, too, as in a file of `torch.save`; objects are
frozen by the pickle, so that a later change of a list or a config is not seen. Copies lie in host
memory, whatever device the tensors are on, and that memory is used again by the next snapshot.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from aiockpt.errors import UnsupportedStateError

__all__ = ["Buffers", "Snapshot", "children", "take"]

Storage: TypeAlias = torch.UntypedStorage
Reference: TypeAlias = tuple[int, torch.dtype]
"""Which storage, and of what dtype; as in files of torch, one that has none is of bytes."""


class Buffers:
    """Host memory of earlier snapshots: copying into fresh memory is several times slower."""

    def __init__(self) -> None:
        self._idle: dict[int, list[Storage]] = {}

    def take(self, nbytes: int) -> Storage:
        """Memory of this size, with any content."""
        idle = self._idle.get(nbytes)
        return idle.pop() if idle else torch.UntypedStorage(nbytes)

    def put(self, storages: list[Storage]) -> None:
        """Take back what a snapshot had; what lay idle meanwhile fits no longer and is freed."""
        fresh: dict[int, list[Storage]] = {}
        for storage in storages:
            fresh.setdefault(storage.nbytes(), []).append(storage)
        self._idle = fresh


def take(state: object, buffers: Buffers, *, file: str) -> Snapshot:
    """Copy a state that is to go into `file`.

    Raises:
        UnsupportedStateError: listing every path that cannot be pickled. Nothing was written.
    """
    try:
        return Snapshot(state, buffers)
    except Exception as error:
        remedy = f"Nothing was written to {file}: this format holds what pickle can store, and no more."
        raise UnsupportedStateError(list(_culprits(state, "", error)), file=file, remedy=remedy) from error


class Snapshot:
    """An independent copy of a state, made by the constructor on the caller's thread.

    Args:
        state: anything that `torch.save` takes.
        buffers: where the memory comes from.

    Raises:
        Exception: what pickle raises for a value that cannot be pickled.
    """

    def __init__(self, state: object, buffers: Buffers) -> None:
        self._buffers = buffers
        self._copies: list[Storage] = []
        out = io.BytesIO()
        with torch.no_grad():
            _Pickler(out, self._copies, buffers).dump(state)
        self._pickle = out.getvalue()

    def rebuild(self) -> Any:
        """The state anew, over the copies."""
        return _Unpickler(io.BytesIO(self._pickle), self._copies).load()

    def release(self) -> None:
        """Give the memory back; only once nothing that was rebuilt is alive."""
        self._buffers.put(self._copies)
        self._copies = []


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, copies: list[Storage], buffers: Buffers) -> None:
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self._copies = copies
        self._buffers = buffers
        self._known: dict[int, int] = {}
        self._held: list[Storage] = []

    def persistent_id(self, obj: Any) -> Reference | None:
        """What to write in place of a storage; called for every object."""
        if isinstance(obj, torch.storage.TypedStorage):
            return self._index(obj._untyped_storage), obj.dtype
        if isinstance(obj, torch.UntypedStorage):
            return self._index(obj), torch.uint8
        return None

    def _index(self, storage: Storage) -> int:
        key = storage._cdata
        if key not in self._known:
            self._held.append(storage)  # or else another one might get its address
            self._known[key] = len(self._copies)
            self._copies.append(_copy(storage, self._buffers))
        return self._known[key]


def _copy(storage: Storage, buffers: Buffers) -> Storage:
    if storage.device.type == "meta":
        return storage
    copy = buffers.take(storage.nbytes())
    if storage.nbytes():
        # As tensors: torch copies those with several threads, storages with one.
        _bytes(copy).copy_(_bytes(storage))
    return copy


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, copies: list[Storage]) -> None:
        super().__init__(source)
        self._copies = copies

    def persistent_load(self, pid: Reference) -> Any:
        """The copy that stands for a storage."""
        index, dtype = pid
        return torch.storage.TypedStorage(wrap_storage=self._copies[index], dtype=dtype, _internal=True)


# What to say when something cannot be pickled


def children(value: object) -> Iterator[tuple[str, Any]]:
    """The entries of a plain container, with their names."""
    if isinstance(value, dict):
        yield from ((str(key), child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), child) for index, child in enumerate(value))


def _culprits(value: object, path: str, error: Exception) -> Iterator[tuple[str, str]]:
    """The innermost values that pickle refuses, with what it says."""
    found = False
    for name, child in children(value):
        try:
            _Dry(io.BytesIO()).dump(child)
        except Exception as refused:
            found = True
            yield from _culprits(child, f"{path}/{name}" if path else name, refused)
    if not found:
        yield path, f"{type(value).__name__} cannot be pickled: {error}"


class _Dry(pickle.Pickler):
    """Only tries: bytes of tensors are neither copied nor written."""

    def persistent_id(self, obj: Any) -> str | None:
        """Anything, for a storage."""
        return "storage" if isinstance(obj, (torch.storage.TypedStorage, torch.UntypedStorage)) else None
