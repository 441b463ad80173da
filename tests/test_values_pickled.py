"""aiockpt pickles only where it was asked to, at save and at load."""

from __future__ import annotations

import base64
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch

from aiockpt import _tree
from aiockpt.errors import CorruptCheckpointError, PickleRefusedError, UnsupportedStateError
from tests.strategies import same, through_json, trip


class Odd:
    """A class nothing else stores."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and self.x == other.x

    __hash__ = None  # type: ignore[assignment]


def factory() -> int:
    """A factory outside the allow-list."""
    return 5


STATE: Any = {
    "odd": [Odd(1), Odd("x" * 10_000)],
    "keys": {b"k": 1},
    "dd": defaultdict(factory, a=1),
    "t": torch.ones(1),
    "type": int,
}


def test_without_leave_nothing_is_pickled() -> None:
    """Every value that would need it is listed."""
    with pytest.raises(UnsupportedStateError) as caught:
        _tree.flatten(STATE)
    assert [path for path, _ in caught.value.problems] == ["odd/0", "odd/1", "keys", "dd", "type"]


def test_with_leave_on_both_sides_it_comes_back() -> None:
    """Unknown classes, odd keys and factories survive; what needed no pickle has none."""
    flat = _tree.flatten(STATE, allow_pickle=True)
    assert flat.pickled == ["odd/0", "odd/1", "keys", "dd", "type"]
    loaded = trip(STATE, allow_pickle=True)
    assert loaded["odd"] == STATE["odd"]
    assert loaded["keys"] == {b"k": 1}
    assert loaded["dd"]["new"] == 5
    assert loaded["type"] is int
    assert same(loaded["t"], STATE["t"])


def test_loading_refuses_without_leave_and_names_the_path() -> None:
    """The other parts can be loaded without it."""
    flat = through_json(_tree.flatten(STATE, allow_pickle=True))
    with pytest.raises(PickleRefusedError, match="allow_pickle=True") as caught:
        _tree.rebuild(flat, flat.tensors)
    assert caught.value.path == "odd/0"
    assert same(_tree.rebuild(flat, flat.tensors, select=["t"]).state, {"t": STATE["t"]})


def test_a_pickle_in_a_file_never_runs_by_itself() -> None:
    """A planted pickle is refused before it is read."""

    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it ran",)

    data = base64.b64encode(pickle.dumps(Bomb())).decode()
    planted: Any = {"~": "pickle", "m": "x", "k": ["data"], "v": [{"~": "bytes", "m": data}]}
    for json in (
        planted,
        [planted],
        {"~": "record", "m": {"class": "a", "tag": "pickle", "meta": None}}
        | {
            "k": planted["k"],
            "v": planted["v"],
        },
    ):
        with pytest.raises(PickleRefusedError):
            _tree.decode_value(json)


def test_what_cannot_be_pickled_either_is_listed() -> None:
    """The reason is pickle's own."""
    with pytest.raises(UnsupportedStateError, match=r"f: .*cannot be pickled"):
        _tree.flatten({"f": lambda: 0}, allow_pickle=True)


def test_a_broken_pickle_is_damage() -> None:
    """What pickle raises on loading is told as damage, by path."""
    json: Any = {"~": "pickle", "m": "x", "k": ["data"], "v": [{"~": "bytes", "m": "AAAA"}]}
    with pytest.raises(CorruptCheckpointError, match="not a pickle"):
        _tree.decode_value(json, "p", allow_pickle=True)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch's own pickling uses it
def test_a_quantized_tensor_goes_by_pickle() -> None:
    """What the tree refuses, torch's own pickling may still store."""
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    loaded = trip({"q": tensor}, allow_pickle=True)["q"]
    assert torch.equal(loaded.dequantize(), tensor.dequantize())
