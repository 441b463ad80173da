"""aiockpt meets columns written by an enemy with one error, and makes nothing happen."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import _tree
from aiockpt.errors import CorruptCheckpointError, PickleRefusedError
from aiockpt.values import _BY_TAG, codec_of
from tests.strategies import ANY_TEXT, through_json, trees

TAGS = sorted(_BY_TAG)
CLASSES = [f"tests.strategies:{name}" for name in ("Config", "Colour", "Point", "Access", "Slotted")]
WORDS = st.sampled_from(
    [
        *CLASSES,
        *(
            "os:system",
            "builtins:eval",
            "PCG64",
            "MT19937",
            "<f8",
            "int",
            "nan",
            "0x1",
            "AAAA",
            "torch.float32",
        ),
        *("cpu", "meta", "cuda:99", "torch.sparse_coo", "torch.sparse_csr", "name", "value", "data", "dtype"),
        *("shape", "1", "~", "Europe/Berlin", "state", "seed", "bit_generator", "class", "tag", "Philox"),
    ]
)
NUMBERS = st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1), st.just(2**40), st.just(2**62))
ATOMS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.floats(allow_nan=False, allow_infinity=False), WORDS, ANY_TEXT
)


def _tagged(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects that look like values, with anything inside."""
    plain = st.fixed_dictionaries(
        {"~": st.one_of(st.sampled_from(TAGS), ATOMS)},
        optional={"m": inner, "v": st.lists(inner, max_size=3) | inner},
    )
    keyed = st.lists(st.tuples(st.one_of(WORDS, ANY_TEXT, inner), inner), max_size=4).flatmap(
        lambda pairs: st.fixed_dictionaries(
            {
                "~": st.sampled_from(TAGS),
                "m": inner,
                "k": st.just([key for key, _ in pairs]),
                "v": st.just([value for _, value in pairs]),
            }
        )
    )
    return st.one_of(
        plain,
        keyed,
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(WORDS, ANY_TEXT), inner, max_size=3),
    )


JSON = st.recursive(ATOMS, _tagged, max_leaves=10)


@given(JSON)
@hypothesis.settings(max_examples=200)
def test_any_json_is_a_value_or_damage(json: Any) -> None:
    """Whatever a value row holds, one of two errors comes of it, or a value."""
    before = set(sys.modules)
    path: str | None = "x"
    try:
        _tree.decode_value(json, "x")
    except (CorruptCheckpointError, PickleRefusedError) as error:
        path = error.path
    assert path is not None
    assert path.startswith("x")
    # The library of time zones loads its own data; nothing else is loaded because a file says so.
    assert not {name for name in set(sys.modules) - before if not name.startswith(("tzdata", "importlib."))}


def _spots(json: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as (owner, key)."""
    found = []
    items = (
        list(json.items())
        if isinstance(json, dict)
        else list(enumerate(json))
        if isinstance(json, list)
        else []
    )
    for key, child in items:
        found.append((json, key))
        found += _spots(child)
    return found


@given(trees(), st.data())
@hypothesis.settings(max_examples=50)
def test_a_changed_value_is_a_value_or_damage(tree: Any, data: st.DataObject) -> None:
    """Sound columns with one place overwritten never make another error."""
    flat = through_json(_tree.flatten({"x": tree}))
    columns: dict[str, Any] = {
        name: copy.deepcopy(list(getattr(flat, name)))
        for name in ("tensor_seq", "tensor_paths", "tensor_flags", "tensor_alias", "value_seq", "value_paths")
    }
    columns |= {name: copy.deepcopy(getattr(flat, name)) for name in ("values", "node_seq", "node_paths")}
    columns |= {name: copy.deepcopy(getattr(flat, name)) for name in ("node_tags", "node_metas")}
    spots = [(name, owner, key) for name, column in columns.items() for owner, key in _spots(column)]
    name, owner, key = spots[data.draw(st.integers(0, len(spots) - 1))]
    if name in ("values", "node_metas"):
        owner[key] = data.draw(JSON)
    elif "paths" in name:
        owner[key] = data.draw(
            st.sampled_from(["", "x", "x/0", "x/0/1", "y", "/", "a//b", '"', "x/" * 200 + "x"])
        )
    elif name == "node_tags":
        owner[key] = data.draw(st.sampled_from([*TAGS, "none such"]))
    else:
        owner[key] = data.draw(NUMBERS)
    changed = _tree.Flat(tensors=flat.tensors, **columns)
    select = data.draw(st.sampled_from([None, ["x"], ["x/0", "y"], [""]]))
    with contextlib.suppress(CorruptCheckpointError, PickleRefusedError):
        _tree.rebuild(changed, flat.tensors, select=select)


@pytest.mark.parametrize("depth", [101, 500, 5000])
def test_deep_values_are_damage(depth: int) -> None:
    """However deep, and in whichever form, no recursion runs away."""
    shapes: dict[str, Any] = {"0": 1, "a": 1, "1": 1, "hung": 1}
    for _ in range(depth):
        shapes = {
            "0": [shapes["0"]],
            "a": {"a": shapes["a"]},
            "1": {"~": "tuple", "v": [2, shapes["1"]]},
            "hung": {"~": "OrderedDict", "m": {"metadata": shapes["hung"]}},
        }
    for key, json in shapes.items():
        with pytest.raises(CorruptCheckpointError):
            _tree.decode_value(json, "x")
        flat = _tree.Flat(value_seq=[0], value_paths=["x"], values=[json])
        if key != "hung":
            with pytest.raises(CorruptCheckpointError):
                _tree.rebuild(flat, [], select=["x/" + "/".join(key * depth)])


def test_deep_paths_are_damage() -> None:
    """A path of thousands of components opens no thousand containers."""
    for flat in (
        _tree.Flat(value_seq=[0], value_paths=["x" + "/a" * 5000], values=[1]),
        _tree.Flat(
            node_seq=list(range(300)),
            node_paths=["/".join("x" * n) for n in range(300)],
            node_tags=["list"] * 300,
            node_metas=[None] * 300,
        ),
    ):
        with pytest.raises(CorruptCheckpointError, match="deeper"):
            _tree.rebuild(flat, [])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"value_seq": [0]}, "differ in length"),
        ({"value_seq": [0, 0]}, "one place"),
        ({"value_paths": ["a", "a"]}, "this path"),
        ({"value_paths": ["a", "a/b"]}, "this path"),
        ({"value_paths": ["", "a"]}, "whole state"),
        ({"value_paths": ["a", ""]}, "whole state"),
        ({"value_paths": ["a", "01"]}, "cannot be read"),
        ({"value_paths": ["a", "b//c"]}, "cannot be read"),
        ({"values": [1, {"~": 5}]}, "wrong form"),
        ({"values": [1, {"~": "tuple", "v": 5}]}, "wrong form"),
        ({"values": [1, {"~": "dict", "k": ["x"], "v": [1, 2]}]}, "number of keys"),
        ({"values": [1, {"~": "dict", "k": ["x", "x"], "v": [1, 2]}]}, "twice"),
        ({"values": [1, {"~": "dict", "k": ["1", "True"], "v": [1, 2]}]}, "equal"),
        ({"values": [1, {"~": "dict", "k": ["("], "v": [1]}]}, "bad key"),
        ({"values": [1, {"~": "dict", "k": [["x"]], "v": [1]}]}, "no text"),
        ({"values": [1, {"~": "set", "v": [[1]]}]}, "not a set"),
        ({"values": [1, {"~": "set", "v": [1, 1]}]}, "not a set"),
        ({"values": [1, {"~": "deque", "m": 1, "v": [1, 2]}]}, "not a deque"),
        ({"values": [1, {"~": "defaultdict", "m": "eval"}]}, "not a defaultdict"),
        ({"values": [1, {"~": "tuple", "k": ["a"], "v": [1]}]}, "not a tuple"),
        ({"values": [1, b"x"]}, "no JSON"),
    ],
)
def test_what_no_save_writes_is_damage(change: dict[str, Any], match: str) -> None:
    """Each way of being wrong is told for what it is."""
    columns: dict[str, Any] = {"value_seq": [0, 1], "value_paths": ["a", "b"], "values": [1, 2]} | change
    with pytest.raises(CorruptCheckpointError, match=match):
        _tree.rebuild(_tree.Flat(**columns), [])


@pytest.mark.parametrize(
    ("alias", "flags"),
    [(7, 0), (-1, 9), (-1, -1), (-1, 3), (-1, 1)],
    ids=["alias", "flags", "negative", "int", "leaf"],
)
def test_wrong_tensor_rows_are_damage(alias: int, flags: int) -> None:
    """A tie to nowhere, unknown flags, and integers that require grad."""
    flat = _tree.Flat([0], ["x"], [torch.ones(1, dtype=torch.int64)], [flags], [alias])
    with pytest.raises(CorruptCheckpointError, match="cannot be made") as caught:
        _tree.rebuild(flat, flat.tensors)
    assert alias >= 0 or caught.value.path == "x"


def test_the_tags_are_for_ever() -> None:
    """What stands on disk must be readable later: no tag may go or be renamed."""
    known = [
        "Counter",
        "Decimal",
        "Ellipsis",
        "Fraction",
        "Namespace",
        "OrderedDict",
        "Random",
        "SimpleNamespace",
        "UUID",
        "ZoneInfo",
        "bytearray",
        "bytes",
        "complex",
        "dataclass",
        "date",
        "datetime",
        "defaultdict",
        "deque",
        "dict",
        "enum",
        "float",
        "frozenset",
        "int",
        "leaf",
        "list",
        "namedtuple",
        "numpy.BitGenerator",
        "numpy.Generator",
        "numpy.RandomState",
        "numpy.ndarray",
        "numpy.scalar",
        "path",
        "pickle",
        "range",
        "record",
        "set",
        "slice",
        "sparse",
        "str",
        "time",
        "timedelta",
        "timezone",
        "torch.Generator",
        "torch.Size",
        "torch.device",
        "torch.dtype",
        "torch.layout",
        "torch.memory_format",
        "tuple",
    ]
    assert all(codec_of(tag) is not None for tag in known)
    assert known == TAGS
