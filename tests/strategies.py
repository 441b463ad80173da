"""Hypothesis strategies for any state aiockpt can store."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import struct
import types
import warnings
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiockpt import _tree
from aiockpt._dtypes import BY_NAME
from tests.same import bits, independent, paths_of, same, through_json, trip

__all__ = [
    "Access",
    "Colour",
    "Config",
    "Point",
    "Slotted",
    "arrays",
    "bits",
    "independent",
    "paths_of",
    "same",
    "states",
    "tensors",
    "through_json",
    "trees",
    "trip",
]

Strategy = st.SearchStrategy[Any]

# torch says once a process that these are young; here it would hit whichever test comes first.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.empty(1, dtype=torch.complex32)
    torch.eye(2).to_sparse_csr()
    torch.nested.nested_tensor([torch.ones(2)])
    torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


class Colour(enum.Enum):
    """An enum of a module that stays loaded."""

    RED = 1
    BLUE = "blue"


class Access(enum.Flag):
    """Flags, whose combinations are no members."""

    READ = 1
    WRITE = 2


class Point(NamedTuple):
    """A namedtuple of a module that stays loaded."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Config:
    """A frozen dataclass."""

    name: Any
    value: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass without a dict."""

    value: Any


# ---------------------------------------------------------------- leaves

ANY_TEXT: Final[Strategy] = st.text(st.characters(exclude_categories=()), max_size=12)
"""Lone surrogates, NUL and line separators included."""
INTEGERS: Final[Strategy] = st.one_of(
    st.integers(-3, 3), st.integers(), st.integers(-(2**70), 2**70), st.integers(2**200, 2**201)
)
_NAN_BITS: Final[Strategy] = st.integers(1, 2**51 - 1).map(
    lambda bits: struct.unpack(">d", struct.pack(">Q", 0xFFF8 << 48 | bits))[0]
)
FLOATS: Final[Strategy] = st.one_of(st.floats(), _NAN_BITS)
ZONES: Final[Strategy] = st.one_of(
    st.none(),
    st.just(datetime.UTC),
    st.builds(
        datetime.timezone,
        st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
        st.sampled_from(["CET", "x"]),
    ),
    st.timezones().filter(lambda zone: zone.key is not None),
)
STDLIB: Final[Strategy] = st.one_of(
    st.builds(complex, FLOATS, FLOATS),
    st.binary(max_size=20),
    st.binary(min_size=4097, max_size=4099),
    st.binary(max_size=8).map(bytearray),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.datetimes(timezones=ZONES),
    st.dates(),
    st.times(timezones=st.none() | st.just(datetime.UTC)),
    st.timedeltas(),
    ZONES,
    st.uuids(),
    st.decimals(allow_nan=False),
    st.fractions(),
    ANY_TEXT.filter(lambda text: "\0" not in text).map(pathlib.PurePosixPath),
    st.sampled_from([pathlib.Path("a/b"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path()]),
    st.sampled_from(
        [torch.float32, torch.strided, torch.channels_last, torch.device("cpu"), torch.Size([2, 0])]
    ),
    st.sampled_from([Colour.RED, Colour.BLUE, Access.READ, Access.READ | Access.WRITE, Access(0), ...]),
)
SIMPLE: Final[Strategy] = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, ANY_TEXT)
NUMPY_SCALARS: Final[Strategy] = (
    hnp.scalar_dtypes().flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda a: a[()])
)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Arrays of any dtype without objects, in any order, some read-only."""
    dtype = draw(st.one_of(hnp.scalar_dtypes(), hnp.array_dtypes(allow_subarrays=True)))
    array = draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)))
    variants = [array, array.T, array[::-1] if array.ndim else array, array[..., None]]
    array = variants[draw(st.integers(0, len(variants) - 1))]
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


def _printable(dtype: torch.dtype) -> bool:
    """Whether torch can show it, as hypothesis must to report a failure."""
    try:
        return bool(repr(torch.zeros(1, dtype=torch.complex128).view(dtype)[0]))
    except NotImplementedError:
        return False


DTYPES: Final = sorted(name for name, dtype in BY_NAME.items() if _printable(dtype))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every storable dtype: 0-d, empty, views, expanded, conj, neg, Parameters."""
    dtype = BY_NAME[draw(st.sampled_from(DTYPES))]
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    variants = _variants(tensor)
    return variants[draw(st.integers(0, len(variants) - 1))]


def _variants(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Other views of a tensor that hold the same or fewer elements."""
    found = [
        tensor,
        tensor.t() if tensor.dim() == 2 else tensor[..., None],
        tensor[None].expand(2, *tensor.shape),
    ]
    if tensor.dim():
        found.append(tensor[1:])
    if tensor.dtype in (torch.complex64, torch.complex128):
        found += [tensor.conj(), tensor.conj().imag]
    if tensor.is_floating_point() or tensor.is_complex():
        found.append(torch.nn.Parameter(tensor, requires_grad=True))
        found.append(tensor.detach().requires_grad_())
    found.append(torch.nn.Parameter(tensor, requires_grad=False))
    return found


# ---------------------------------------------------------------- containers

_KEY_ATOMS: Final[Strategy] = st.one_of(
    ANY_TEXT,
    st.sampled_from(
        ["", "1", "True", "None", "nan", "a.b", "a/b", "~", "__metadata__", "np.int64(1)", "(1,)", "-1e5"]
    ),
    st.text("k", min_size=300, max_size=300),
    st.integers(-3, 3),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.just(math.nan),
    st.builds(np.int64, st.integers(-3, 3)),
    st.builds(np.uint8, st.integers(0, 9)),
)
KEYS: Final[Strategy] = st.recursive(
    _KEY_ATOMS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4
)
MEMBERS: Final[Strategy] = st.one_of(
    st.none(),
    st.booleans(),
    INTEGERS,
    ANY_TEXT,
    st.binary(max_size=9),
    st.tuples(st.integers(), st.text(max_size=3)),
)
FACTORIES: Final = [None, int, list, dict, set, float]


def _dicts(inner: Strategy) -> Strategy:
    return st.lists(st.tuples(KEYS, inner), max_size=4).map(_distinct)


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict without a second NaN key: those are refused."""
    texts = set()
    made = {}
    for key, value in pairs:
        if _tree.key_text(key) not in texts:
            texts.add(_tree.key_text(key))
            made[key] = value
    return made


def _ordered(items: dict[Any, Any], metadata: bool) -> Any:
    made: Any = collections.OrderedDict(items)
    if metadata:
        made._metadata = collections.OrderedDict({"": {"version": 1}, "a": {}, "b": {"version": 1}})
    return made


def _counter(items: dict[Any, Any]) -> Any:
    made: Any = collections.Counter()
    dict.update(made, items)
    return made


def _container(inner: Strategy) -> Strategy:
    """One more level around `inner`."""
    lists, dicts = st.lists(inner, max_size=4), _dicts(inner)
    return st.one_of(
        dicts,
        lists,
        lists.map(tuple),
        st.builds(_ordered, dicts, st.booleans()),
        st.builds(
            lambda factory, items: collections.defaultdict(factory, items), st.sampled_from(FACTORIES), dicts
        ),
        dicts.map(_counter),
        st.builds(lambda items, room: collections.deque(items, len(items) + room), lists, st.integers(0, 2)),
        lists.map(collections.deque),
        st.sets(MEMBERS, max_size=4),
        st.frozensets(MEMBERS, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Config, inner, inner),
        st.builds(Slotted, inner),
        st.dictionaries(st.sampled_from(["a", "b", "__class__"]), inner).map(_namespace),
    )


def _namespace(items: dict[str, Any]) -> types.SimpleNamespace:
    made = types.SimpleNamespace()
    vars(made).update(items)
    return made


LEAVES: Final[Strategy] = st.one_of(SIMPLE, STDLIB, NUMPY_SCALARS, arrays(), tensors())


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Any value that can be stored: a leaf or nested containers, with tied tensors."""
    pool = draw(st.lists(tensors(), min_size=1, max_size=2))
    tied = st.integers(0, len(pool) - 1).map(pool.__getitem__)
    return draw(st.recursive(st.one_of(LEAVES, tied), _container, max_leaves=12))


def states() -> Strategy:
    """States as users have them: a dict of items."""
    return st.dictionaries(
        st.one_of(st.sampled_from(["model", "optim", "rng"]), ANY_TEXT), trees(), max_size=4
    )
