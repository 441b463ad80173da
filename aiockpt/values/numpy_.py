"""numpy's arrays, scalars and random generators.

numpy is not needed by the library: a state can hold its values only if it is loaded, and
a checkpoint that holds some gives records where it is not installed.
"""

from __future__ import annotations

import base64
import importlib
import math
import re
import sys
from typing import Any, Final

import torch

from .._plain import Json
from . import Absent, Children, Codec, Decoding, Encoding, Exploded, Unsupported, class_name, register
from .torch_ import sizes

_SIMPLE: Final = re.compile(r"[<>=|]?[?bBhHiIlLqQefdgFDGSUVmMcu][0-9]*(\[[0-9]*[a-zA-Z]+\])?\Z")
"""One item type, as numpy spells it; never a comma list or an expression."""
_NESTING: Final = 8
_BIT_GENERATORS: Final = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_SEED: Final = ("entropy", "spawn_key", "pool_size", "n_children_spawned")


def _loaded() -> Any:
    """numpy if some other code loaded it; a value of it cannot exist otherwise."""
    return sys.modules.get("numpy")


def _numpy(what: str) -> Any:
    """numpy for decoding, loaded if it is installed: its name comes from here, not from a file."""
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise Absent(f"numpy:{what}") from error


def encode_dtype(dtype: Any) -> Json:
    """A numpy dtype as JSON; the same one comes back, or none.

    Raises:
        Unsupported: objects, or a dtype from outside numpy.
    """
    if dtype.hasobject:
        raise Unsupported(f"a numpy dtype of Python objects ({dtype})")
    meta = _dtype_json(dtype)
    try:
        back = decode_dtype(_loaded(), meta)
    except (TypeError, ValueError):
        back = None
    if back != dtype or back.type is not dtype.type:
        raise Unsupported(f"the numpy dtype {dtype}")
    return meta


def _dtype_json(dtype: Any) -> Json:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _dtype_json(base), "shape": list(shape)}
    if dtype.names is None:
        # Two C types may be one size: `l` and `q` are both `<i8`, and both are kept.
        text = str(dtype.str)
        same = _loaded().dtype(text).char == dtype.char
        return text if same else dtype.byteorder + dtype.char
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_dtype_json(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def decode_dtype(numpy: Any, meta: Json, depth: int = 0) -> Any:
    """The dtype out of JSON; bounded, and without numpy's mini-languages."""
    if depth > _NESTING:
        raise ValueError("a dtype nested too deeply")
    if isinstance(meta, str):
        if not _SIMPLE.match(meta):
            raise ValueError("not a dtype")
        return numpy.dtype(meta)
    if not isinstance(meta, dict):
        raise TypeError("not a dtype")
    if "base" in meta:
        return numpy.dtype((decode_dtype(numpy, meta["base"], depth + 1), sizes(meta["shape"])))
    formats = meta["formats"]
    if not isinstance(formats, list):
        raise TypeError("not a dtype")
    spec = {name: meta[name] for name in ("names", "offsets", "itemsize")}
    titles = meta["titles"]
    if isinstance(titles, list) and any(title is not None for title in titles):
        spec["titles"] = titles
    spec["formats"] = [decode_dtype(numpy, part, depth + 1) for part in formats]
    return numpy.dtype(spec, align=meta["aligned"] is True)


class _Array(Codec):
    """Arrays: the numbers as a tensor, other items as their bytes."""

    tag = "numpy.ndarray"
    host = True

    def match(self, value: object) -> bool:
        numpy = _loaded()
        return numpy is not None and type(value) is numpy.ndarray

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        numpy = _loaded()
        meta: dict[str, Json] = {"dtype": encode_dtype(value.dtype), "shape": list(value.shape)}
        if not value.flags.writeable:
            meta["readonly"] = True
        if value.flags.f_contiguous and not value.flags.c_contiguous:
            meta["order"] = "F"
            value = value.T
        tensor = _as_tensor(numpy, value)
        if tensor is None:
            # Through a copy where the items do not lie side by side.
            flat = numpy.ascontiguousarray(value).reshape(-1)
            tensor = torch.empty(0, dtype=torch.uint8)
            if flat.nbytes:
                tensor = torch.from_numpy(_writable(numpy, flat.view(numpy.uint8)))
        return meta, [("data", tensor)]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        numpy = _numpy("ndarray")
        if not isinstance(meta, dict):
            raise TypeError("no meta")
        data, dtype, shape = children["data"], decode_dtype(numpy, meta["dtype"]), sizes(meta["shape"])
        fortran = meta.get("order") == "F"
        made = _array(numpy, data, dtype, shape[::-1] if fortran else shape)
        made = made.T if fortran else made
        if meta.get("readonly") is True:
            made.flags.writeable = False
        return made


def _as_tensor(numpy: Any, value: Any) -> torch.Tensor | None:
    """A tensor over the array's memory, or None where torch has no such items or steps."""
    if value.dtype.kind not in "biufc" or not value.dtype.isnative or any(s < 0 for s in value.strides):
        return None
    try:
        return torch.from_numpy(_writable(numpy, value))
    except (TypeError, ValueError):
        return None


class _Lender:
    """Shows an array's memory as writable, since torch warns about any other; nobody writes."""

    def __init__(self, array: Any) -> None:
        self.array = array
        place, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (place, False)}


def _writable(numpy: Any, array: Any) -> Any:
    return array if array.flags.writeable else numpy.asarray(_Lender(array))


def _array(numpy: Any, data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """An array over the tensor's memory."""
    if not isinstance(data, torch.Tensor) or data.requires_grad:
        raise TypeError("its data are no plain tensor")
    items = data.cpu().contiguous().numpy()
    if items.dtype == dtype:
        # The view turns int64 into its namesake of the same size, and costs nothing.
        return items.reshape(shape).view(dtype)
    if items.dtype != numpy.uint8 or items.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError("its data do not fit its shape")
    if not items.nbytes:
        return numpy.empty(shape, dtype)
    return items.reshape(-1).view(dtype).reshape(shape)


class _Scalar(Codec):
    """Scalars of any dtype, by their bytes."""

    tag = "numpy.scalar"

    def match(self, value: object) -> bool:
        numpy = _loaded()
        return numpy is not None and isinstance(value, numpy.generic)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        meta: dict[str, Json] = {"dtype": encode_dtype(value.dtype)}
        if type(value) is not value.dtype.type:
            raise Unsupported(f"a subclass {class_name(type(value))} of a numpy scalar")
        # An empty text has an item size of 0 and yet four bytes.
        data = value.tobytes()[: value.dtype.itemsize]
        return meta | {"data": base64.b64encode(data).decode()}, []

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        numpy = _numpy("scalar")
        if not isinstance(meta, dict):
            raise TypeError("no meta")
        dtype = decode_dtype(numpy, meta["dtype"])
        data = base64.b64decode(str(meta["data"]), validate=True)
        if len(data) != dtype.itemsize:
            raise ValueError("its data do not fit its dtype")
        # bytearray(): a structured scalar stays a view, which its owner may write.
        return numpy.ndarray((), dtype, bytearray(data) or bytearray(1))[()]


class _BitGenerator(Codec):
    """numpy's bit generators: state, and the seed that later spawns come from."""

    tag = "numpy.BitGenerator"
    host = True

    def match(self, value: object) -> bool:
        return type(value).__name__ in _BIT_GENERATORS and type(value) is _random_class(type(value).__name__)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        seed = value.seed_seq
        parts = {name: getattr(seed, name, None) for name in _SEED}
        known = type(seed) is _loaded().random.SeedSequence
        return type(value).__name__, [("state", value.state), ("seed", parts if known else None)]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        numpy = _numpy("BitGenerator")
        if meta not in _BIT_GENERATORS:
            raise Absent(f"numpy.random:{meta}")
        state, seed = children["state"], children["seed"]
        _check_state(state)
        source = None if seed is None else numpy.random.SeedSequence(**{name: seed[name] for name in _SEED})
        made = getattr(numpy.random, str(meta))(source)
        made.state = state
        return made


def _check_state(state: Any) -> None:
    """Bounds that numpy itself does not check: a wrong one would read beyond the state."""
    if "buffer_pos" in state and not 0 <= state["buffer_pos"] <= 4:
        raise ValueError("its position lies outside its buffer")
    inner = state["state"]
    if isinstance(inner, dict) and "pos" in inner and not 0 <= inner["pos"] <= 624:
        raise ValueError("its position lies outside its state")


def _random_class(name: str) -> Any:
    numpy = _loaded()
    return None if numpy is None else getattr(numpy.random, name, None)


class _Generator(Codec):
    """numpy.random.Generator, over its bit generator."""

    tag = "numpy.Generator"
    host = True

    def match(self, value: object) -> bool:
        return type(value).__name__ == "Generator" and type(value) is _random_class("Generator")

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return None, [("bit_generator", value.bit_generator)]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        numpy = _numpy("Generator")
        source = children["bit_generator"]
        if isinstance(source, numpy.random.BitGenerator):
            return numpy.random.Generator(source)
        raise Absent("numpy.random:Generator")


class _RandomState(Codec):
    """The legacy numpy.random.RandomState."""

    tag = "numpy.RandomState"
    host = True

    def match(self, value: object) -> bool:
        return type(value).__name__ == "RandomState" and type(value) is _random_class("RandomState")

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        state = value.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            raise Unsupported(f"a RandomState over {state['bit_generator']}")
        return None, [("state", state)]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        numpy = _numpy("RandomState")
        state = children["state"]
        _check_state(state)
        made = numpy.random.RandomState(numpy.random.MT19937())
        made.set_state(state)
        return made


for _codec in (_Array(), _Scalar(), _BitGenerator(), _Generator(), _RandomState()):
    register(_codec)
