"""Numbers, text and bytes that JSON cannot hold exactly.

What it can hold (None, bool, str, finite float, int of 64 bits) never comes here.
"""

from __future__ import annotations

import base64
import ctypes
import math
import struct
from collections.abc import Callable
from typing import Any, Final

import torch

from .._paths import escape, unescape
from .._plain import Json
from . import Atom, Children, Codec, Decoding, Encoding, Exploded, Parts, register

INLINE_BYTES: Final = 4096
"""Longer bytes are stored among the tensors, not in the JSON."""

_NAN: Final = struct.pack(">d", math.nan)


def _encode_float(value: float) -> Json:
    bits = struct.pack(">d", value)
    # A NaN may carry a sign and a payload; only the usual one goes by its name.
    return bits.hex() if math.isnan(value) and bits != _NAN else repr(value)


def _decode_float(meta: Any) -> float:
    if meta in ("nan", "inf", "-inf"):
        return float(meta)
    (value,) = struct.unpack(">d", bytes.fromhex(meta))
    return float(value)


def _decode_int(meta: Any) -> int:
    # Base 16: linear in length, and Python puts no limit on it.
    return int(meta, 16)


class _Bytes(Codec):
    """bytes and bytearray."""

    host = True

    def __init__(self, kind: Callable[[bytes], Any]) -> None:
        assert isinstance(kind, type)
        self.tag, self.types, self._make = kind.__name__, (kind,), kind

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        if len(value) <= INLINE_BYTES:
            return base64.b64encode(value).decode(), []
        # bytearray(): a copy taken now, and torch warns about memory it may not write.
        return None, [("data", torch.frombuffer(bytearray(value), dtype=torch.uint8))]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        if meta is None:
            return self._make(tensor_bytes(children["data"]))
        return self._make(base64.b64decode(str(meta), validate=True))


def tensor_bytes(tensor: Any) -> bytes:
    """The bytes of a one-dimensional uint8 tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise TypeError("its data are no bytes")
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


register(Atom("float", float, _encode_float, _decode_float))
register(Atom("int", int, hex, _decode_int))
register(Atom("str", str, escape, unescape))
register(Parts("complex", complex, lambda value: (value.real, value.imag), complex))
register(_Bytes(bytes))
register(_Bytes(bytearray))
