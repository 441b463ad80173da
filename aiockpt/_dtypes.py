"""The dtypes that can be stored, and what safetensors calls them.

A dtype is storable when its elements are whole bytes that torch can view as uint8.
Quantized dtypes need a quantizer beside the bytes, `bits*` and the sub-byte ints have
no values of their own: they are refused by name.

safetensors has no name for some (complex128, float4, ...): those are stored as bytes
(`U8`, one dimension), and the part holds the real dtype. Names: safetensors' format
page and its reference library, 0.8.
"""

from __future__ import annotations

from typing import Final

import torch

_SAFETENSORS: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_BYTES_ONLY: Final = ("complex128", "complex32", "float8_e8m0fnu", "float4_e2m1fn_x2")


def _known(names: tuple[str, ...]) -> dict[str, torch.dtype]:
    """The dtypes of those names that this torch has."""
    return {name: getattr(torch, name) for name in names if hasattr(torch, name)}


BY_NAME: Final[dict[str, torch.dtype]] = _known((*_SAFETENSORS, *_BYTES_ONLY))
"""Every storable dtype of this torch by its name in a part (`float32`, ...)."""
NAME: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in BY_NAME.items()}
"""The other way round; a dtype that is not in here is refused."""


def safetensors_name(name: str) -> str | None:
    """What a safetensors header calls the dtype, or None when it has no name for it."""
    return _SAFETENSORS.get(name)


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return BY_NAME[name].itemsize
