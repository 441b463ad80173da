"""A target taken apart: one pickle without the bytes of tensors, and the tensors.

The pickle is the copy of everything else at the call, and what another process gets.
Tensors that are one in the target are one again when it is put together; objects with a
`state_dict()` have become what it returned.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ._arena import ALIGN, Arena
from ._capture import SMALL_BYTES, Captured, take
from ._dtypes import BY_NAME
from ._gate import storage_of
from ._paths import join, key_text
from ._stage import copy_part
from ._tree import Flat
from ._tree.flatten import PARAMETER, REQUIRES_GRAD
from ._tree.tensors import PLAIN_TENSORS, Aliases, refusal
from .errors import SaveError, StateMutatedError, UnsupportedStateError

__all__ = ["Parcel", "Row", "pack", "rebuild_from"]

BUFFER: Final = 4
"""The row's flag: no tensor, but memory that some object (a numpy array) lives in."""
DEEP: Final = 50

Row = tuple[str, tuple[int, ...], int, int, int, int]
"""dtype, shape, bytes, offset in the memory, flags, row it is tied to or -1."""


@dataclass(slots=True)
class Parcel:
    """A target as it was at the call."""

    skeleton: bytes
    captured: Captured
    rows: list[Row]
    nbytes: int
    """Of memory that all rows need."""
    buffers: list[pickle.PickleBuffer] = field(default_factory=list)
    target: object = None
    """Kept until `release`, to say where something changed."""

    def copy_into(self, part: Callable[[int, int], torch.Tensor]) -> None:
        """Copy every row; runs in the stage lane's thread.

        Args:
            part: gives the memory at an offset, so many bytes of it.
        """
        with torch.no_grad():
            for (_, _, nbytes, offset, _, alias), source in zip(
                self.rows, self.captured.sources, strict=True
            ):
                if alias < 0 and nbytes:
                    assert isinstance(source, torch.Tensor)
                    copy_part(part(offset, nbytes), source, 0, nbytes)

    def check_unchanged(self, what: str) -> None:
        """Raise if a version counter moved since the call.

        Raises:
            StateMutatedError: naming where.
        """
        changed = self.captured.changed()
        if changed is not None:
            path = _locate(self.target, changed[1])
            message = (
                f"{what}: {path or 'a tensor of the target'} changed while it was being copied; the save was "
                "dropped. Do not touch the target before `staged`."
            )
            raise StateMutatedError(message, path=path)

    def live(self) -> object:
        """The target put together from the caller's own tensors, as far as they were not copied."""
        whole = {row for row, *_ in self.captured.versions}
        raw = iter(self.buffers)

        def tensor(row: int) -> torch.Tensor:
            source = self.captured.sources[row]
            assert isinstance(source, torch.Tensor)
            return source if row in whole else _own(source, *self.rows[row][:2])

        return _rebuild(self.skeleton, self.rows, tensor, lambda _: next(raw).raw())

    def release(self) -> None:
        """The target may change: let go of it."""
        self.captured.release()
        self.buffers.clear()
        self.target = None


def _own(source: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A small copy made at the call lies among others: give it a storage of its own."""
    return source.clone().view(torch.uint8).view(BY_NAME[dtype]).view(shape)


def pack(target: object, *, file: str) -> Parcel:
    """Take a target apart; runs on the caller's thread, linear in its leaves.

    Args:
        target: the caller's.
        file: where it is to go, for messages.

    Raises:
        UnsupportedStateError: listing every path that cannot be pickled.
    """
    flat, buffers, out = Flat(), list[pickle.PickleBuffer](), io.BytesIO()
    try:
        _Pickler(out, flat, buffers).dump(target)
    except Exception as error:
        remedy = f"Nothing was written to {file}. A target must be picklable, as torch.save demands too."
        raise UnsupportedStateError(_culprits(target, "", error), file=file, remedy=remedy) from error
    captured = take(flat, None, file)
    table, rows, end = captured.table, list[Row](), 0
    for dtype, shape, nbytes, flags, alias in zip(
        table.dtype, table.shape, table.nbytes, table.flags, table.alias, strict=True
    ):
        rows.append((dtype, shape, nbytes, end, flags, alias))
        if alias < 0:
            end += -(-nbytes // ALIGN) * ALIGN
    return Parcel(out.getvalue(), captured, rows, end, buffers, target)


class _Pickler(pickle.Pickler):
    """Pickles all but tensors and large buffers, which go to the columns."""

    def __init__(self, out: io.BytesIO, flat: Flat, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(out, protocol=5, buffer_callback=self._buffer)
        self._flat = flat
        self._buffers = buffers
        self._aliases = Aliases(flat.tensors)

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild an object; called for all but plain containers and values."""
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        ask = None if isinstance(obj, type) else getattr(obj, "state_dict", None)
        if not callable(ask):
            return NotImplemented
        self._flat.stateful.append(obj)
        return _as_it_is, (ask(),)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        kind = type(tensor)
        if kind not in PLAIN_TENSORS or tensor.layout is not torch.strided or refusal(tensor) is not None:
            on_host = tensor.device.type in ("cpu", "meta")
            return NotImplemented if on_host else (_as_it_is, (tensor.detach().cpu(),))
        flags = PARAMETER if kind is torch.nn.Parameter else 0
        flags |= REQUIRES_GRAD if tensor.requires_grad else 0
        plain = tensor.detach() if tensor.requires_grad else tensor
        return _row, (self._add(plain, flags),)

    def _buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether to pickle the buffer in place; a large one is copied with the tensors instead."""
        raw = buffer.raw()
        if raw.readonly or raw.nbytes <= SMALL_BYTES:
            return True
        self._add(torch.frombuffer(raw, dtype=torch.uint8), BUFFER)
        self._buffers.append(buffer)
        return False

    def _add(self, tensor: torch.Tensor, flags: int) -> int:
        flat = self._flat
        row = len(flat.tensors)
        flat.tensor_seq.append(row)
        flat.tensor_paths.append("")
        flat.tensor_flags.append(flags)
        # Buffers must be rows of their own: they come back one by one, in order.
        flat.tensor_alias.append(-1 if flags & BUFFER else self._aliases.find(tensor))
        flat.tensors.append(tensor)
        return row


def rebuild_from(arena: Arena, skeleton: bytes, rows: Sequence[Row]) -> object:
    """Put a target together from the memory that `Parcel.copy_into` filled, here or in another process."""

    def tensor(row: int) -> torch.Tensor:
        dtype, shape, nbytes, offset, *_ = rows[row]
        if not nbytes:
            return torch.empty(shape, dtype=BY_NAME[dtype])
        return arena.bytes(offset, nbytes).view(BY_NAME[dtype]).view(shape)

    return _rebuild(skeleton, rows, tensor, lambda row: arena.view(rows[row][3], rows[row][2]))


def _rebuild(
    skeleton: bytes,
    rows: Sequence[Row],
    tensor: Callable[[int], torch.Tensor],
    buffer: Callable[[int], memoryview],
) -> object:
    buffers = [buffer(i) for i, row in enumerate(rows) if row[4] & BUFFER]
    return _Unpickler(skeleton, _Made(rows, tensor).get, buffers).load()


class _Made:
    """The tensors of a target that is put together, made when the pickle comes to them.

    No cycle of references may run through it: the memory counts as used until all of them are gone.
    """

    def __init__(self, rows: Sequence[Row], tensor: Callable[[int], torch.Tensor]) -> None:
        self._rows = rows
        self._tensor = tensor
        self._made: dict[int, torch.Tensor] = {}

    def get(self, row: int) -> torch.Tensor:
        """The row's tensor; of tied rows the same one, unless one is a parameter and the other is not."""
        if row not in self._made:
            *_, flags, alias = self._rows[row]
            plain = self._tensor(row) if alias < 0 else self.get(alias)
            if alias < 0 or self._rows[alias][4] != flags:
                plain = _dressed(plain, flags)
            self._made[row] = plain
        return self._made[row]


def _dressed(plain: torch.Tensor, flags: int) -> torch.Tensor:
    grad = bool(flags & REQUIRES_GRAD)
    if flags & PARAMETER:
        return torch.nn.Parameter(plain.detach(), requires_grad=grad)
    return plain.detach().requires_grad_() if grad else plain.detach()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, skeleton: bytes, get: Callable[[int], torch.Tensor], buffers: list[memoryview]
    ) -> None:
        super().__init__(io.BytesIO(skeleton), buffers=buffers)
        self._get = get

    def find_class(self, module: str, name: str, /) -> Any:
        """Find what the pickle names; rows are looked up here."""
        if module == __name__ and name == _row.__name__:
            return self._get
        return super().find_class(module, name)


def _as_it_is(value: object) -> object:
    return value


def _row(row: int) -> torch.Tensor:
    raise SaveError(f"row {row} of a target was unpickled without its tensors")


# What to say when something is wrong


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            try:
                yield key_text(key), child
            except (TypeError, ValueError):
                yield repr(key), child
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), child) for i, child in enumerate(value))


def _culprits(value: Any, path: str, error: Exception) -> list[tuple[str, str]]:
    """Where in a target the pickling fails."""
    found = []
    for text, child in _children(value) if path.count("/") < DEEP else ():
        try:
            _Pickler(io.BytesIO(), Flat(), []).dump(child)
        except Exception as cause:
            found += _culprits(child, join(path, text), cause)
    return found or [(path, f"a {type(value).__qualname__}: {type(error).__name__}: {error}")]


def _locate(value: Any, tensor: torch.Tensor, path: str = "") -> str | None:
    """The first path with the tensor's memory."""
    ask = getattr(value, "state_dict", None)
    if isinstance(value, torch.Tensor):
        return path if storage_of(value) == storage_of(tensor) else None
    inner = ask() if callable(ask) and not isinstance(value, type) else value
    for text, child in _children(inner) if path.count("/") < DEEP else ():
        found = _locate(child, tensor, join(path, text))
        if found is not None:
            return found
    return None
