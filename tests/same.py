"""A comparison as strict as the promise of a round trip, and the trip itself, without a disk."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import fractions
import struct
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from aiockpt import _tree


def same(one: Any, other: Any) -> bool:
    """Equal in types, order, bits and ties: what a round trip promises."""
    left: list[torch.Tensor] = []
    right: list[torch.Tensor] = []
    return _same(one, other, left, right) and _ties(left) == _ties(right)


def _same(one: Any, other: Any, left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        left.append(one)
        right.append(other)
        return _same_tensor(one, other)
    if isinstance(one, np.ndarray):
        return one.flags.writeable == other.flags.writeable and _same_array(one, other)
    if isinstance(one, np.generic):
        return _same_array(np.asarray(one), np.asarray(other))
    parts, others = _parts(one), _parts(other)
    if parts is None or others is None:
        return _same_atom(one, other)
    if len(parts) != len(others) or getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
        return False
    if getattr(one, "default_factory", None) is not getattr(other, "default_factory", None):
        return False
    return all(_same(a, b, left, right) for a, b in zip(parts, others, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """What a container holds, keys included, in order; None for a leaf."""
    if isinstance(value, dict):
        metadata = getattr(value, "_metadata", None)
        return [metadata, *(part for item in value.items() for part in item)]
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=lambda member: (type(member).__name__, repr(member)))
    if isinstance(value, (list, tuple, collections.deque)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, types.SimpleNamespace):
        return [part for item in vars(value).items() for part in item]
    return None


def _same_atom(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return _same_atom(one.real, other.real) and _same_atom(one.imag, other.imag)
    if isinstance(one, (datetime.datetime, datetime.time)):
        return repr(one) == repr(other) and one.fold == other.fold
    if isinstance(one, (decimal.Decimal, fractions.Fraction, datetime.timezone, slice)):
        return repr(one) == repr(other)
    return bool(one == other)


def _same_array(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.dtype.type is not other.dtype.type or one.shape != other.shape:
        return False
    if one.dtype.names is not None:
        # Field by field: what lies between them is nobody's.
        return all(_same_array(one[name], other[name]) for name in one.dtype.names)
    return bool(one.tobytes() == other.tobytes())


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    facts: list[Callable[[torch.Tensor], object]] = [
        lambda t: t.dtype,
        lambda t: t.shape,
        lambda t: t.layout,
        lambda t: t.requires_grad and t.is_leaf,
    ]
    return all(fact(one) == fact(other) for fact in facts) and bits(one) == bits(other)


def bits(tensor: torch.Tensor) -> bytes:
    """The logical values of a strided tensor as bytes."""
    tensor = independent(tensor)
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def independent(tensor: torch.Tensor) -> torch.Tensor:
    """What a reader would load: contiguous memory of its own, logical values."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    whole = torch.empty(plain.shape, dtype=plain.dtype)
    if plain.numel():
        places = [plain[place] for place in np.ndindex(*plain.shape)] if plain.dim() else [plain]
        raw = torch.cat([place.reshape(1).view(torch.uint8) for place in places])
        whole = raw.view(plain.dtype).reshape(plain.shape)
    return whole


def _ties(found: list[torch.Tensor]) -> list[int]:
    """For each tensor, the first that is the same view of the same memory."""
    return [next(j for j, other in enumerate(found) if _tied(other, tensor)) for tensor in found]


def _tied(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if not one.numel() or not other.numel() or one.data_ptr() != other.data_ptr():
        return False
    same_steps = one.shape == other.shape and one.stride() == other.stride()
    return (
        same_steps
        and one.dtype == other.dtype
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


# ---------------------------------------------------------------- the trip


def through_json(flat: _tree.Flat) -> _tree.Flat:
    """The columns as they come back from disk: tensors of their own, JSON written and read."""
    names = [field.name for field in dataclasses.fields(flat)]
    columns = {name: getattr(flat, name) for name in names if name not in ("tensors", "stateful")}
    read = msgspec.json.decode(msgspec.json.encode(columns))
    read["tensors"] = [independent(tensor) for tensor in flat.tensors]
    return _tree.Flat(**read)


def trip(state: Any, *, allow_pickle: bool = False, **options: Any) -> Any:
    """A state through columns and JSON and back; `options` go to `rebuild`."""
    flat = through_json(_tree.flatten(state, allow_pickle=allow_pickle))
    return _tree.rebuild(flat, flat.tensors, allow_pickle=allow_pickle, **options).state


def paths_of(flat: _tree.Flat) -> Iterator[str]:
    """Every path of the columns."""
    yield from (*flat.tensor_paths, *flat.value_paths, *flat.node_paths)
