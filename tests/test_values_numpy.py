"""aiockpt stores numpy's arrays, scalars and generators, and does not need numpy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import _tree
from aiockpt.errors import CorruptCheckpointError, UnsupportedStateError
from aiockpt.values import Record
from tests.strategies import arrays, same, through_json, trip

STRUCT = np.dtype([("a", "<i2"), ("b", ">f8", (2, 2)), ("c", [("d", "U3")])], align=True)

ARRAYS: dict[str, Any] = {
    "float": np.arange(6.0).reshape(2, 3),
    "0-d": np.array(3, dtype=np.int8),
    "empty": np.empty((0, 3), dtype=np.float32),
    "empty struct": np.empty(0, dtype=STRUCT),
    "big endian": np.arange(4, dtype=">u4"),
    "bool": np.array([True, False]),
    "half": np.ones(3, dtype=np.float16),
    "complex": np.array([1 + 2j, complex(np.nan, -0.0)]),
    "long double": np.array([1, 2], dtype=np.longdouble),
    "long long": np.array([1, 2], dtype=np.longlong),
    "unicode": np.array(["a", "日本", ""]),
    "bytes": np.array([b"a", b"bc"]),
    "no letters": np.array(["", ""], dtype="U0"),
    "dates": np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
    "spans": np.array([1, 2], dtype="timedelta64[25us]"),
    "struct": np.zeros(3, dtype=STRUCT),
    "title": np.zeros(2, dtype=[(("long name", "n"), "i4")]),
    "void": np.array([b"abc"], dtype="V3"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed": np.arange(5)[::-1],
    "steps": np.arange(10)[::3],
    "field": np.zeros(3, dtype=[("a", "i1"), ("b", "f8")])["b"],
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_exactly(name: str) -> None:
    """Dtype with byte order and fields, shape, order, items and the read-only flag survive."""
    array = ARRAYS[name]
    loaded = trip({"a": array, "n": [array]})
    assert same(loaded, {"a": array, "n": [array]})
    assert loaded["a"].flags.f_contiguous == array.flags.f_contiguous or not array.flags.contiguous


@given(arrays(), st.booleans())
@hypothesis.settings(max_examples=50)
def test_any_array_comes_back_exactly(array: Any, locked: bool) -> None:
    """Whatever hypothesis makes of numpy survives, and a writable array can be written."""
    array.flags.writeable = array.flags.writeable and not locked
    loaded = trip(array)
    assert same(loaded, array)
    assert loaded.flags.writeable == array.flags.writeable


def test_an_array_shares_memory_until_it_is_staged() -> None:
    """Numbers are not copied on the caller's thread, a read-only array is no exception."""
    array = np.ones(1000)
    locked = np.ones(1000)
    locked.flags.writeable = False
    flat = _tree.flatten([array, locked])
    assert flat.tensors[0].data_ptr() == array.__array_interface__["data"][0]
    assert flat.tensors[1].data_ptr() == locked.__array_interface__["data"][0]


def test_an_array_and_its_tensor_stay_tied() -> None:
    """One memory seen from both sides is one memory again."""
    array = np.zeros(3)
    loaded = trip({"a": array, "t": torch.from_numpy(array)})
    loaded["a"][1] = 5
    assert loaded["t"][1] == 5


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.array([object()]), "objects"),
        (np.array(["a"], dtype=np.dtypes.StringDType()), "dtype"),
        (np.zeros(2, dtype=[("a", "O")]), "objects"),
        (np.ma.masked_array([1, 2]), "MaskedArray"),
        (np.rec.array([(1,)], dtype=[("a", "i4")]), "recarray"),
        (np.random.RandomState(np.random.PCG64()), "PCG64"),
    ],
)
def test_what_would_lose_something_is_refused(value: Any, why: str) -> None:
    """Objects, foreign dtypes and subclasses are named."""
    with pytest.raises(UnsupportedStateError, match=f"x: .*{why}"):
        _tree.flatten({"x": value})


@pytest.mark.parametrize(
    "scalar",
    [
        np.float32(1.5),
        np.float64("nan"),
        np.bool_(True),
        np.int8(-1),
        np.longlong(5),
        np.ulonglong(5),
        np.longdouble(1) / 3,
        np.complex64(1j),
        np.str_("日本"),
        np.str_(""),
        np.bytes_(b"a\x00b"),
        np.datetime64("2024-01-01T00:00", "ns"),
        np.timedelta64(5, "D"),
        np.zeros((), dtype=STRUCT)[()],
    ],
    ids=repr,
)
def test_a_scalar_keeps_its_type(scalar: Any) -> None:
    """A numpy scalar does not become a Python number."""
    loaded = trip({"x": scalar, "l": [scalar], "k": {np.int16(3): 1}})
    assert same(loaded, {"x": scalar, "l": [scalar], "k": {np.int16(3): 1}})


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_generators_go_on_and_spawn_alike(name: str) -> None:
    """Each bit generator draws and spawns after loading as it would have before."""
    generator = np.random.Generator(getattr(np.random, name)(7))
    generator.integers(10, size=3, dtype=np.uint32)
    generator.spawn(1)
    loaded = trip({"g": generator, "b": generator.bit_generator})
    assert type(loaded["g"].bit_generator).__name__ == name
    expected = generator.random(3), generator.spawn(1)[0].random(3)
    assert np.array_equal(loaded["g"].random(3), expected[0])
    assert np.array_equal(loaded["g"].spawn(1)[0].random(3), expected[1])
    assert np.array_equal(np.random.Generator(loaded["b"]).random(3), expected[0])


def test_the_legacy_generator_goes_on() -> None:
    """A RandomState and the tuple of get_state() draw alike after loading."""
    legacy = np.random.RandomState(7)
    legacy.standard_normal()
    loaded = trip({"r": legacy, "s": legacy.get_state()})
    other = np.random.RandomState()
    other.set_state(loaded["s"])
    expected = legacy.standard_normal(3)
    assert np.array_equal(loaded["r"].standard_normal(3), expected)
    assert np.array_equal(other.standard_normal(3), expected)


@pytest.mark.parametrize("key", ["pos", "buffer_pos"])
def test_a_generator_state_out_of_bounds_is_damage(key: str) -> None:
    """A position outside the state would make numpy read beyond it."""
    generator = np.random.Philox(1) if key == "buffer_pos" else np.random.MT19937(1)
    state: Any = generator.state
    (state if key == "buffer_pos" else state["state"])[key] = 10**6
    flat = _tree.flatten({"g": {"state": state, "seed": None}})
    # The same dict, as if a bit generator had been taken apart into it.
    flat.node_seq.append(-1)
    flat.node_paths.append("g")
    flat.node_tags.append("numpy.BitGenerator")
    flat.node_metas.append(type(generator).__name__)
    with pytest.raises(CorruptCheckpointError, match="outside"):
        _tree.rebuild(flat, flat.tensors)


@pytest.mark.parametrize(
    "meta",
    [
        {"dtype": "O", "shape": [1]},
        {"dtype": "f8,f8", "shape": [1]},
        {"dtype": "__import__('os')", "shape": [1]},
        {"dtype": {"base": "f4", "shape": [2**40, 2**40]}, "shape": [1]},
        {"dtype": "<f4", "shape": [3]},
        {"dtype": "<f4", "shape": [-1]},
        {"dtype": "<f4", "shape": "x"},
        {
            "dtype": {"names": ["a"], "formats": ["f4"], "offsets": [-4], "titles": [], "itemsize": 8},
            "shape": [1],
        },
        {"dtype": "<U99999999999", "shape": [2]},
        {"shape": [2]},
        None,
        [],
    ],
)
def test_a_hostile_array_is_damage(meta: Any) -> None:
    """Whatever stands in the meta, the answer is one error."""
    flat = through_json(_tree.flatten({"x": np.ones(2)}))
    flat.node_metas[0] = meta
    with pytest.raises(CorruptCheckpointError) as caught:
        _tree.rebuild(flat, flat.tensors)
    assert caught.value.path == "x"


def test_without_numpy_its_values_are_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint with arrays loads where numpy is missing, arrays as records."""
    flat = through_json(_tree.flatten({"a": np.ones(2), "s": np.float32(1), "t": torch.ones(1)}))
    monkeypatch.setitem(sys.modules, "numpy", None)
    state = _tree.rebuild(flat, flat.tensors).state
    assert isinstance(state["a"], Record)
    assert state["a"].class_name == "numpy:ndarray"
    assert torch.equal(state["a"].fields["data"], torch.ones(2, dtype=torch.float64))
    assert isinstance(state["s"], Record)
    assert torch.equal(state["t"], torch.ones(1))


def test_states_work_where_numpy_is_not_installed() -> None:
    """Nothing in the tree needs numpy."""
    script = """
import sys
sys.modules["numpy"] = None
import warnings; warnings.simplefilter("ignore")
import torch
from aiockpt import _tree
state = {"t": torch.ones(2), "b": bytes(5000), "s": {1, 2}, "x": object}
del state["x"]
flat = _tree.flatten(state)
assert _tree.rebuild(flat, flat.tensors).state["b"] == bytes(5000)
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)})
