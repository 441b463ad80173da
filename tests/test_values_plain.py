"""aiockpt keeps Python's own values exactly: numbers, text, dates, paths, containers."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import math
import pathlib
import random
import struct
import subprocess
import sys
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiockpt import _tree
from aiockpt._plain import Json
from aiockpt.errors import CorruptCheckpointError, UnsupportedStateError
from aiockpt.values import Record
from tests.strategies import same, trip

UTC = datetime.UTC
NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0]


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 2**1000, -(2**1000)),
        *(
            0.0,
            -0.0,
            1e16,
            1e22,
            5e-324,
            1.7976931348623157e308,
            0.1,
            math.nan,
            math.inf,
            -math.inf,
            NAN_WITH_PAYLOAD,
        ),
        *(
            "",
            "a",
            "\x00\x1f",
            "\u2028",
            "日本",
            "\U0001f600",
            "\ud800",
            "\ud83d\ude00",
            "\udcff",
            "~",
            '"\\',
        ),
        *(
            b"",
            b"\x00\xff",
            bytes(4096),
            bytes(4097),
            bytearray(b"x"),
            bytearray(5000),
            True,
            False,
            None,
            ...,
        ),
        *(complex(-0.0, math.nan), complex(math.inf, -0.0), 1j),
        *(
            range(3),
            range(5, -(2**70), -3),
            slice(None),
            slice(1, None, "x"),
            Fraction(-1, 3),
            Decimal("1.10"),
        ),
        *(Decimal("NaN123"), Decimal("-Infinity"), Decimal("1e999999")),
        *(
            pathlib.PurePosixPath("/a/b"),
            pathlib.PureWindowsPath("c:\\x"),
            pathlib.Path(),
            pathlib.Path("a\udcff"),
        ),
        *(datetime.date(1, 2, 3), datetime.timedelta(-1, 2, 3), datetime.time(1, 2, 3, 4, UTC), UTC),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        datetime.datetime.max,
        datetime.timezone(datetime.timedelta(hours=1), "CET"),
        [1, 2.5, None, True, "x"],
        (1, (2, [3, ()])),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_value_comes_back_exactly(value: Any) -> None:
    """Alone, beside a tensor and inside containers, type and bits survive."""
    state = {"x": value, "t": torch.ones(1), "in": [value, {"k": (value,)}]}
    loaded = trip(state)
    assert repr(loaded) == repr(state)
    assert type(loaded["x"]) is type(value)
    if not isinstance(value, Decimal):
        assert same(loaded, state)


def test_an_int_of_any_size_survives() -> None:
    """Also one longer than Python would print."""
    assert trip({"n": 10**5000, "m": [-(10**5000)]}) == {"n": 10**5000, "m": [-(10**5000)]}


def test_containers_keep_their_kind() -> None:
    """Factories, lengths, orders and kinds of containers survive, with tensors inside and without."""
    for leaf in (1, torch.ones(2)):
        state: Any = {
            "od": OrderedDict([("b", leaf), ("a", leaf)]),
            "dd": defaultdict(list, {1: [leaf]}),
            "plain": defaultdict(None, a=leaf),
            "count": Counter({"a": 3, "b": -1}),
            "deque": deque([leaf, 2], maxlen=5),
            "open": deque([leaf]),
            "nested": defaultdict(OrderedDict, x=OrderedDict(y=[(leaf,)])),
            "ns": SimpleNamespace(a=leaf),
        }
        loaded = trip(state)
        assert same(loaded, state)
        assert loaded["dd"][99] == []
    args = argparse.Namespace(lr=0.1, w=torch.ones(1))
    assert trip(args).lr == 0.1
    assert type(trip(args)) is argparse.Namespace


def test_sets_do_not_hang_on_the_hash_seed() -> None:
    """Every process writes a set in the same order."""
    script = (
        "from aiockpt import _tree; print(_tree.encode_value({'b', 'a', 1, None, ('x', 2), 'zz', b'q', -1}))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert trip({1, "a", frozenset({2})}) == {1, "a", frozenset({2})}


def test_a_factory_outside_the_list_is_refused() -> None:
    """A defaultdict with a function of its own names itself."""
    with pytest.raises(UnsupportedStateError, match=r"opt/d: a defaultdict whose factory is"):
        _tree.flatten({"opt": {"d": defaultdict(lambda: 0)}})

    class list(collections.UserList[int]):  # a namesake
        pass

    with pytest.raises(UnsupportedStateError, match="factory"):
        _tree.flatten(defaultdict(list))


def test_an_ordered_dict_with_attributes_is_refused() -> None:
    """What would be lost is named."""
    state = OrderedDict(a=1)
    state.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedStateError, match="extra"):
        _tree.flatten({"s": state})


@pytest.mark.parametrize(
    "kind", [dict, list, str, int, tuple, float, bytes, collections.deque, datetime.datetime]
)
def test_a_subclass_is_somebody_elses(kind: Any) -> None:
    """Subclasses of what is stored are refused by name: their type would be lost."""
    made: Any = type("Mine", (kind,), {})
    value = made(2024, 1, 1) if kind is datetime.datetime else made()
    with pytest.raises(UnsupportedStateError, match="Mine"):
        _tree.flatten({"x": value})


def test_python_random_generators_go_on() -> None:
    """A Random and the tuple of `random.getstate()` give the same numbers after loading."""
    generator = random.Random(7)
    generator.gauss(0, 1)
    loaded = trip({"g": generator, "state": generator.getstate()})
    expected = [generator.random(), generator.gauss(0, 1)]
    assert [loaded["g"].random(), loaded["g"].gauss(0, 1)] == expected
    other = random.Random()
    other.setstate(loaded["state"])
    assert [other.random(), other.gauss(0, 1)] == expected


def test_a_zone_that_is_not_installed_is_a_record() -> None:
    """Time zones of another machine do not stop a load."""
    assert _tree.decode_value({"~": "ZoneInfo", "m": "Mars/Olympus"}) == Record(
        "zoneinfo:Mars/Olympus", {}, "ZoneInfo", "Mars/Olympus"
    )
    with pytest.raises(CorruptCheckpointError):
        _tree.decode_value({"~": "ZoneInfo", "m": "../../etc/passwd"})


def test_paths_of_another_system_become_pure() -> None:
    """A Windows path read here is still a path."""
    json: Json = {"~": "path", "m": "WindowsPath", "v": ["c:\\x"]}
    assert same(_tree.decode_value(json), pathlib.PureWindowsPath("c:\\x"))


class Mode(enum.StrEnum):
    """A str that is an enum member."""

    TRAIN = "train"


class Level(enum.IntFlag):
    """An int that is a flag."""

    LOW = 1
    HIGH = 2


def test_enums_that_are_also_numbers_stay_members() -> None:
    """StrEnum and IntFlag members are no plain str and int."""
    loaded = trip({"m": Mode.TRAIN, "l": Level.LOW | Level.HIGH, "z": Level(0)})
    assert loaded["m"] is Mode.TRAIN
    assert same(loaded["l"], Level.LOW | Level.HIGH)
    assert same(loaded["z"], Level(0))
