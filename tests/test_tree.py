"""aiockpt turns any state into columns and back."""

from __future__ import annotations

import collections
import gc
from collections import OrderedDict
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given

from aiockpt import _tree
from aiockpt.errors import UnsupportedStateError
from tests.strategies import Config, Point, paths_of, same, states, through_json, trees, trip


@given(trees())
@hypothesis.settings(max_examples=150)
def test_any_tree_comes_back_equal(tree: Any) -> None:
    """Types, order, bits and ties survive the columns and their JSON."""
    assert same(trip(tree), tree)


@given(states())
@hypothesis.settings(max_examples=30)
def test_a_restored_state_flattens_to_the_same_columns(state: Any) -> None:
    """Saving what was loaded writes what was saved."""
    flat = through_json(_tree.flatten(state))
    again = through_json(_tree.flatten(trip(state)))
    assert (flat.value_paths, flat.values) == (again.value_paths, again.values)
    assert (flat.node_paths, flat.node_tags, flat.node_metas) == (
        again.node_paths,
        again.node_tags,
        again.node_metas,
    )
    assert (flat.tensor_paths, flat.tensor_alias) == (again.tensor_paths, again.tensor_alias)


@given(states())
@hypothesis.settings(max_examples=30)
def test_rows_are_numbered_in_the_order_of_the_state(state: Any) -> None:
    """The three tables share one numbering without gaps, and no two rows share a path."""
    flat = _tree.flatten(state)
    assert sorted((*flat.tensor_seq, *flat.value_seq, *flat.node_seq)) == list(
        range(len(list(paths_of(flat))))
    )
    assert len(set(paths_of(flat))) == len(list(paths_of(flat)))


def test_a_part_without_tensors_is_one_row() -> None:
    """Only what leads to a tensor is opened up."""
    state = {
        "model": {"w": torch.ones(2), "cfg": {"deep": [1, {"x": (2, 3)}]}},
        "trainer": {"epoch": 3, "log": [1.5]},
    }
    flat = _tree.flatten(state)
    assert flat.tensor_paths == ["model/w"]
    assert flat.value_paths == ["model/cfg", "trainer"]
    assert flat.values[1] == {"epoch": 3, "log": [1.5]}
    assert flat.node_paths == []


def test_containers_with_tensors_are_nodes() -> None:
    """A node row names the codec of every container that is no plain dict."""
    state = {"a": [torch.ones(1), (torch.zeros(1), 2)], "p": Point(torch.ones(1), 1)}
    flat = _tree.flatten(state)
    assert list(zip(flat.node_paths, flat.node_tags, strict=True)) == [
        ("a", "list"),
        ("a/1", "tuple"),
        ("p", "namedtuple"),
    ]
    assert flat.tensor_paths == ["a/0", "a/1/0", "p/x"]
    assert flat.value_paths == ["a/1/1", "p/y"]


@pytest.mark.parametrize(
    "state", [{}, [], (), 3, None, "x", torch.ones(2), [torch.ones(1)], {"a": {}}, {"": 1}]
)
def test_the_root_may_be_anything(state: Any) -> None:
    """A state needs not be a dict."""
    assert same(trip(state), state)


def test_int_str_and_bool_keys_live_side_by_side() -> None:
    """A real optimizer's state and a Counter keep their key types, twice over."""
    state = {
        "state": {0: {"m": torch.ones(2)}, 1: {}},
        "milestones": collections.Counter({25: 1, 75: 2}),
        "mix": {1: "i", "1": "s", False: 1, "True": 2, "0": 0, None: 3, 1.5: 4},
    }
    once = trip(state)
    assert same(once, state)
    assert same(trip(once), state)
    assert once["milestones"][25] == 1
    assert [type(key) for key in once["mix"]] == [int, str, bool, str, str, type(None), float]


def test_empty_containers_stay_what_they_are() -> None:
    """Empties neither vanish nor change their type."""
    sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    state: Any = {
        "a": [],
        "b": {},
        "c": (),
        "d": [{}, []],
        "e": set(),
        "f": OrderedDict(),
        "opt": sgd.state_dict(),
    }
    assert same(trip(state), state)


def test_odd_keys_survive() -> None:
    """Dots, slashes, empty, very long, surrogates, format words: a key is a key."""
    keys = [
        "",
        ".",
        "/",
        "a/b",
        "~",
        "__metadata__",
        "k" * 5000,
        "日本",
        "\ud800",
        "\ud83d\ude00",
        "\x00",
        '"',
        "np.x",
    ]
    for inner in (1, torch.ones(1)):
        state = dict.fromkeys(keys, inner) | {"nested": {"/": {"": {"..": inner}}}}
        assert same(trip(state), state)


def test_objects_with_a_state_dict_are_asked_for_it() -> None:
    """Modules and optimizers stand for their state dicts; the objects are listed."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).backward()
    optimizer.step()
    flat = _tree.flatten({"model": model, "deep": [{"opt": optimizer}]})
    assert flat.stateful == [model, optimizer]
    state = _tree.rebuild(flat, flat.tensors).state
    assert same(state["model"], model.state_dict())
    assert same(state["deep"][0]["opt"], optimizer.state_dict())


def test_a_module_keeps_its_metadata() -> None:
    """torch's `_metadata` comes back on the state dict, with versions and types."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    loaded = trip({"model": model})["model"]
    assert same(loaded._metadata, model.state_dict()._metadata)  # type: ignore[attr-defined]
    assert loaded._metadata["1"] == {"version": 2}
    loaded._metadata["1"]["version"] = 7
    assert loaded._metadata["0"] == {"version": 1}


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"": {"version": True}},
        OrderedDict(a={"v": 2**80}),
        OrderedDict({"\ud800": {}}),
        OrderedDict(a=[1]),
        None,
    ],
)
def test_odd_metadata_survives_too(metadata: Any) -> None:
    """Metadata in no form that torch makes takes the longer way."""
    state: Any = OrderedDict(w=torch.ones(1))
    state._metadata = metadata
    assert same(trip(state)._metadata, metadata)


def test_an_ordered_dict_that_hangs_on_itself_is_refused() -> None:
    """Neither a cycle nor a tensor in the metadata gets by."""
    state: Any = OrderedDict(w=torch.ones(1))
    state._metadata = {"me": state}
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        _tree.flatten({"s": state})
    state._metadata = {"t": torch.ones(1)}
    with pytest.raises(UnsupportedStateError, match="at t: a tensor"):
        _tree.flatten({"s": state})


def test_extra_state_of_modules_survives() -> None:
    """A module's own extra state, dicts and bytes included, comes back and is accepted."""

    class Extra(torch.nn.Linear):
        got: Any = None

        def get_extra_state(self) -> Any:
            return {"v": 3, "t": torch.ones(1), "b": b"\0x"}

        def set_extra_state(self, state: Any) -> None:
            self.got = state

    model = torch.nn.Sequential(Extra(1, 1), Extra(1, 1))
    model.load_state_dict(trip(model.state_dict()))
    assert same(model[0].got, {"v": 3, "t": torch.ones(1), "b": b"\0x"})


def test_containers_are_copied_at_the_call() -> None:
    """What changes after the call is not saved."""
    inner = {"n": [1, 2], "step": 1}
    flat = _tree.flatten({"t": torch.ones(1), "i": inner})
    inner["step"] = 2
    inner["n"].append(3)  # type: ignore[attr-defined]
    assert flat.values == [{"n": [1, 2], "step": 1}]


def test_cycles_are_refused_by_path() -> None:
    """A container inside itself is named at the place where it closes."""
    state: Any = {"a": [1, {}], "t": torch.ones(1)}
    state["a"][1]["again"] = state["a"]
    with pytest.raises(UnsupportedStateError) as caught:
        _tree.flatten(state)
    assert caught.value.problems == (("a/1/again", "contains itself"),)


def test_a_container_in_two_places_is_no_cycle() -> None:
    """Sharing is fine; only its tensors stay tied."""
    shared = {"w": torch.ones(1)}
    loaded = trip({"a": shared, "b": [shared, shared]})
    assert loaded["a"]["w"] is loaded["b"][0]["w"] is loaded["b"][1]["w"]


def test_depth_is_bounded_by_path() -> None:
    """A hundred levels are stored and come back; more are refused."""
    deep: Any = torch.ones(1)
    plain: Any = 1
    for _ in range(100):
        deep, plain = [deep], {"k": plain}
    assert same(trip({"a": deep[0], "b": plain["k"]}), {"a": deep[0], "b": plain["k"]})
    for state in ({"a": [deep, [[]]]}, {"x": {"k": {"y": {"k": plain}}}}):
        with pytest.raises(UnsupportedStateError, match="nested deeper than 100"):
            _tree.flatten(state)


def test_a_value_encoded_at_its_path_is_as_deep_as_in_its_state() -> None:
    """What is encoded alone can be decoded where it belongs."""
    deep: Any = 1
    for _ in range(98):
        deep = [deep]
    assert _tree.decode_value(_tree.encode_value(deep, "a/b"), "a/b") == deep
    with pytest.raises(UnsupportedStateError, match="nested deeper"):
        _tree.encode_value([[[deep]]], "a/b")


def test_all_problems_are_listed_in_order() -> None:
    """One call names everything that is wrong."""

    class Broken:
        def state_dict(self) -> Any:
            raise KeyError("gone")

    state = {
        "a": {"x": object(), "ok": 1},
        "q": torch.ones(3, device="meta"),
        "f": lambda: 0,
        "b": Broken(),
        "k": {b"x": 1},
        "n": {float("nan"): 1, float("nan") * 1: 2},
        "t": torch.ones(1),
        "c": int,
    }
    with pytest.raises(UnsupportedStateError) as caught:
        _tree.flatten(state)
    paths = [path for path, _ in caught.value.problems]
    assert paths == ["a/x", "q", "f", "b", "k", "n", "c"]
    reasons = dict(caught.value.problems)
    assert "builtins.object" in reasons["a/x"]
    assert "meta" in reasons["q"]
    assert "float32" in reasons["q"]
    assert "KeyError" in reasons["b"]
    assert "bytes" in reasons["k"]
    assert "read the same" in reasons["n"]
    assert isinstance(caught.value.__cause__, KeyError)


def test_planning_leaves_nothing_for_the_garbage_collector() -> None:
    """Thousands of tensors make no object each that a full collection would visit."""
    state = {"model": {f"layers.{i}.weight": torch.ones(1) for i in range(2000)}}
    gc.collect()
    before = len(gc.get_objects())
    flat = _tree.flatten(state)
    gc.collect()
    assert len(flat.tensors) == 2000
    assert len(gc.get_objects()) - before < 100


def test_a_value_alone_goes_through_json() -> None:
    """Metrics and the user's own facts are encoded without a tree around them."""
    value = {"loss": float("nan"), "tags": ("a", Config("x", 2))}
    json = _tree.encode_value(value)
    assert same(_tree.decode_value(json), value)
    with pytest.raises(UnsupportedStateError, match="a tensor is no plain value"):
        _tree.encode_value({"w": torch.ones(1)})
