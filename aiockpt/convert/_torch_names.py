"""The names a file of `torch.save` may use, and what each stands for here: leaves, not tensors."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .._dtypes import NAME
from ..errors import ForeignFormatError
from ._census import checked_keys, shown
from ._leaf import MB, Bytes, Content, Leaf, Piece
from ._unpickle import Global

__all__ = ["STORAGES", "Dtypeless", "TensorNames", "dtype_named"]

STORAGES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}
"""What torch calls the storage of a dtype; others have none, and are rebuilt from bytes."""
_DTYPES: Final = {name: dtype for dtype, name in STORAGES.items()}
_MOST_DIMS: Final = 64
_UNFOLD: Final = 8
"""How often the bytes of a file may be mentioned by its tensors, taken together."""


@dataclass(frozen=True, slots=True)
class Dtypeless:
    """Stands for a storage of bytes."""


@dataclass(slots=True)
class _Storage:
    """A storage as a pickle mentions it."""

    key: str
    dtype: torch.dtype | None
    bytes: Bytes


@dataclass(slots=True)
class TensorNames:
    """A table of names, and the tensors they made.

    Args:
        file: for messages.
        nbytes: of the file.
        storage: gives a storage by its key, of that many bytes.
    """

    file: str
    nbytes: int
    storage: Callable[[str, int], Bytes]
    contents: dict[tuple[Any, ...], Content] = field(default_factory=dict)
    total: int = 0

    def __call__(self, module: str, name: str) -> Global | None:
        """What a name stands for, or None."""
        if module in ("torch", "torch.cuda") and name in _DTYPES:
            return Global(name, value=_DTYPES[name])
        if module == "torch.storage" and name in ("UntypedStorage", "_UntypedStorage", "TypedStorage"):
            return Global(name, value=Dtypeless())
        if module == "torch" and (dtype := dtype_named(name)) is not None:
            return Global(name, value=dtype)
        make = self._makers().get((module, name))
        return None if make is None else Global(f"{module}.{name}", make)

    def _makers(self) -> Mapping[tuple[str, str], Callable[..., Any]]:
        return {
            **_PLAIN,
            ("torch._utils", "_rebuild_tensor"): self.tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self.tensor_v3,
            ("torch._utils", "_rebuild_parameter"): self.parameter,
            ("torch.nn.parameter", "Parameter"): self.parameter,
        }

    def refuse(self, why: str) -> ForeignFormatError:
        """The error for a tensor that cannot be."""
        return ForeignFormatError(f"{self.file}: {why}", file=self.file)

    def persistent(self, pid: Any) -> _Storage:
        """The storage a persistent id stands for."""
        kind, dtype, key, _, numel, *view = pid
        known = isinstance(dtype, (torch.dtype, Dtypeless)) and isinstance(key, str) and not any(view)
        if kind != "storage" or not known or type(numel) is not int or numel < 0:
            raise self.refuse("it refers to something that is no storage")
        size = dtype.itemsize if isinstance(dtype, torch.dtype) else 1
        plain = dtype if isinstance(dtype, torch.dtype) else None
        return _Storage(key, plain, self.storage(key, numel * size))

    def tensor(
        self, storage: Any, offset: int, size: Any, stride: Any, grad: bool = False, *rest: Any
    ) -> Leaf:
        """Stands for `_rebuild_tensor_v2`: the last of its arguments may say that it is a lazy conjugate."""
        if not isinstance(storage, _Storage) or storage.dtype is None:
            raise self.refuse("a tensor has no storage with a dtype")
        return self._leaf(storage, storage.dtype, offset, size, stride, grad, rest[1:])

    def tensor_v3(
        self,
        storage: Any,
        offset: int,
        size: Any,
        stride: Any,
        grad: bool,
        hooks: Any,
        dtype: Any,
        *rest: Any,
    ) -> Leaf:
        """Stands for `_rebuild_tensor_v3`."""
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise self.refuse("a tensor has no storage, or no dtype")
        return self._leaf(storage, dtype, offset, size, stride, grad, rest)

    def parameter(self, data: Any, grad: bool = True, *_: Any) -> Leaf:
        """Stands for `_rebuild_parameter`."""
        if not isinstance(data, Leaf):
            raise self.refuse("a parameter is no tensor")
        return Leaf(data.content, 2 | bool(grad))

    def _leaf(
        self,
        storage: _Storage,
        dtype: torch.dtype,
        offset: int,
        size: Any,
        stride: Any,
        grad: bool,
        rest: Any,
    ) -> Leaf:
        if any(rest):
            marks = ", ".join(shown(mark) for mark in rest[:4] if mark)
            raise self.refuse(f"a tensor is marked {marks}, which is not read; resolve and save it again")
        shape, strides = sizes(size), sizes(stride)
        if shape is None or strides is None or len(shape) != len(strides) or dtype not in NAME:
            raise self.refuse(f"a tensor of {dtype} has no sound shape, or a dtype that is not read")
        if type(offset) is not int or offset < 0:
            raise self.refuse("a tensor begins before its storage")
        key = (storage.key, dtype, offset, shape, strides)
        if key not in self.contents:
            self.contents[key] = self._content(storage, dtype, offset, shape, strides)
        return Leaf(self.contents[key], 1 if grad else 0)

    def _content(
        self,
        storage: _Storage,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> Content:
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if math.prod(shape) and (last + 1) * dtype.itemsize > storage.bytes.nbytes:
            raise self.refuse("a tensor lies outside of its storage")
        piece = Piece((0,) * len(shape), shape, strides, offset * dtype.itemsize, storage.bytes)
        content = Content(dtype, shape, [piece])
        self.total += content.nbytes
        if self.total > _UNFOLD * self.nbytes + 64 * MB:
            raise self.refuse("its tensors unfold to far more bytes than it has")
        return content


def sizes(value: Any) -> tuple[int, ...] | None:
    """A shape or strides out of a pickle; None if it is none."""
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMS:
        return None
    sound = all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    return tuple(value) if sound else None


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of torch with that name."""
    found = vars(torch).get(name)
    return found if isinstance(found, torch.dtype) else None


def _size(value: Any = ()) -> torch.Size:
    shape = sizes(value)
    if shape is None:
        raise ValueError("not a size")
    return torch.Size(shape)


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("no text, or an encoding that pickles do not use")
    return text.encode("latin1")


def _layout(name: Any) -> Any:
    if name != "torch.strided":
        raise ValueError(f"layout {shown(name)} is not read")
    return torch.strided


def _device(*args: Any) -> torch.device:
    if not args or not isinstance(args[0], str):
        raise ValueError("not a device")
    try:
        return torch.device(*args)
    except RuntimeError as error:
        raise ValueError("not a device") from error


def _counter(counts: dict[Any, Any] | None = None) -> Counter[Any]:
    return Counter(counts if isinstance(counts, dict) else {})


def _bytes(text: Any = b"", encoding: Any = "latin1") -> bytes:
    # Of a number bytes() makes that many zeros, of a list its members: no pickler writes either.
    return text if isinstance(text, bytes) else _encoded(text, encoding)


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    pairs = [(key, value) for key, value in items]
    return OrderedDict(zip(checked_keys(key for key, _ in pairs), (value for _, value in pairs), strict=True))


_PLAIN: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("collections", "OrderedDict"): _ordered,
    ("collections", "Counter"): _counter,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("_codecs", "encode"): _encoded,
    **{
        (module, name): make
        for module in ("builtins", "__builtin__")
        for name, make in (
            ("set", lambda items=(): set(checked_keys(items))),
            ("bytearray", lambda text=b"", encoding="latin1": bytearray(_bytes(text, encoding))),
            ("bytes", _bytes),
            ("complex", lambda real=0.0, imag=0.0: complex(float(real), float(imag))),
        )
    },
}
