"""aiockpt puts chosen parts of a state together without the rest."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import _tree
from aiockpt.errors import CorruptCheckpointError
from tests.strategies import Config, Point, same, states, through_json


def parts(state: Any, *paths: str) -> tuple[Any, tuple[str, ...]]:
    """What `select` gives, with the tensors nobody asked for left out."""
    flat = through_json(_tree.flatten(state))
    rows = {row: flat.tensors[row] for row in _tree.wanted_tensors(flat, paths)}
    rebuilt = _tree.rebuild(flat, rows, select=paths)
    return rebuilt.state, rebuilt.missing


STATE: Any = {
    "model": OrderedDict([("0.weight", torch.ones(2)), ("0.bias", torch.zeros(2))]),
    "opt": {
        "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2}],
        "state": {0: {"m": torch.ones(3)}, 1: {}},
    },
    "trainer": {"epoch": 3, "hist": [1, {"a/b": 2}], "cfg": Config("n", (4, 5)), "d": defaultdict(int, a=1)},
    "layers": [torch.ones(1), (torch.ones(2), 7)],
    "point": Point(torch.ones(1), 2),
    "lr": 0.5,
}


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        (["lr"], {"lr": 0.5}),
        (["model/0.bias"], {"model": OrderedDict([("0.bias", torch.zeros(2))])}),
        (["model"], {"model": STATE["model"]}),
        (["opt/state/0"], {"opt": {"state": {0: {"m": torch.ones(3)}}}}),
        (["opt/state/1"], {"opt": {"state": {1: {}}}}),
        (["trainer/epoch"], {"trainer": {"epoch": 3}}),
        (["trainer/hist/1/a\\u002fb"], {}),
        (['trainer/hist/1/"a\\u002fb"'], {"trainer": {"hist": {1: {"a/b": 2}}}}),
        (["trainer/cfg/value/1"], {"trainer": {"cfg": {"value": {1: 5}}}}),
        (["trainer/d/a"], {"trainer": {"d": defaultdict(int, a=1)}}),
        (["opt/groups/1"], {"opt": {"groups": {1: {"lr": 0.2}}}}),
        (["layers/1/0"], {"layers": {1: {0: torch.ones(2)}}}),
        (["layers/1"], {"layers": {1: (torch.ones(2), 7)}}),
        (["point/y"], {"point": {"y": 2}}),
        (["lr", "trainer/epoch", "trainer"], {"trainer": STATE["trainer"], "lr": 0.5}),
        ([""], STATE),
        ([], {}),
    ],
)
def test_parts_come_in_the_same_nesting(paths: list[str], wanted: Any) -> None:
    """Dicts keep their kind, other containers of which a part is left become dicts by index or name."""
    state, missing = parts(STATE, *paths)
    assert same(state, wanted)
    assert missing == (() if wanted or not paths else tuple(paths))


def test_unknown_paths_are_told() -> None:
    """A path that is nowhere is missing, also within a plain value and below a leaf."""
    asked = [
        "nope",
        "trainer/epoch/x",
        "trainer/nope",
        "lr",
        "layers/9",
        "lr/x",
        "opt/groups/0/nope",
        "trainer/hist",
    ]
    state, missing = parts(STATE, *asked)
    assert missing == ("nope", "trainer/epoch/x", "trainer/nope", "layers/9", "lr/x", "opt/groups/0/nope")
    assert same(state, {"trainer": {"hist": [1, {"a/b": 2}]}, "lr": 0.5})


def test_a_state_that_is_one_value_is_entered_all_the_same() -> None:
    """Where no tensor is around, the whole state is one row, and paths still work."""
    assert parts({"a": {"b": [1, 2]}}, "a/b/1") == ({"a": {"b": {1: 2}}}, ())
    assert parts([5, 6], "1") == ({1: 6}, ())


def test_only_the_wanted_tensors_are_needed() -> None:
    """A tied tensor needs its first row's bytes, wherever that lies."""
    shared = torch.ones(2)
    flat = _tree.flatten({"a": shared, "b": torch.ones(3), "c": {"d": shared}})
    assert _tree.wanted_tensors(flat) == [0, 1]
    assert _tree.wanted_tensors(flat, ["c"]) == [0]
    assert _tree.wanted_tensors(flat, ["b"]) == [1]
    assert _tree.rebuild(flat, {0: shared}, select=["c"]).state["c"]["d"] is shared
    with pytest.raises(CorruptCheckpointError, match="cannot be made"):
        _tree.rebuild(flat, {}, select=["c"])


def test_arrays_and_generators_belong_in_host_memory() -> None:
    """What must be host memory after loading is told, tied rows' first ones included."""
    array = np.ones(3)
    state = {"t": torch.from_numpy(array), "w": torch.ones(1), "a": [array], "g": torch.Generator()}
    flat = _tree.flatten(state)
    host = _tree.host_tensors(flat)
    assert {flat.tensor_paths[row] for row in host} == {"t", "a/0/data", "g/state"}


@given(states(), st.data())
@hypothesis.settings(max_examples=30)
def test_selecting_a_path_gives_what_lies_there(state: Any, data: st.DataObject) -> None:
    """Any path of any state can be asked for alone, and is found there."""
    flat = through_json(_tree.flatten(state))
    paths = [*flat.tensor_paths, *flat.value_paths, *flat.node_paths]
    path = data.draw(st.sampled_from(sorted(paths)))
    whole, _ = parts(state, "")
    got, missing = parts(state, path)
    assert missing == ()
    parent = path.rpartition("/")[0]
    if parent not in flat.node_paths:  # inside an array or a set nothing can be looked up
        assert same(_tree.find(got, path), _tree.find(whole, path))


def test_find_walks_every_kind_of_container() -> None:
    """A path leads through keys, indices and field names."""
    assert _tree.find(STATE, "trainer/cfg/value/1") == 5
    assert _tree.find(STATE, "point/y") == 2
    assert _tree.find(STATE, "opt/groups/0/params/1") == 1
    for path in ("nope", "lr/x", "trainer/cfg/nope", "layers/9", "trainer/hist/01"):
        with pytest.raises(KeyError, match=path):
            _tree.find(STATE, path)
