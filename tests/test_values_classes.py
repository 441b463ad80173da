"""aiockpt stores instances of classes, and makes none that the process does not know."""

from __future__ import annotations

import dataclasses
import enum
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from aiockpt import _tree
from aiockpt._plain import Json
from aiockpt.errors import CorruptCheckpointError, UnsupportedStateError, UsageError
from aiockpt.values import Record, register_leaf
from tests.strategies import Access, Colour, Config, Point, Slotted, same, trip

HERE = "tests.test_values_classes"


@dataclasses.dataclass
class Grown:
    """A dataclass that may have changed since it was saved."""

    a: Any
    b: int = 7
    c: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Watched:
    """Says when any of its code runs."""

    a: Any = 1

    def __post_init__(self) -> None:
        raise AssertionError("its code ran")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("its code ran")


@dataclasses.dataclass
class Acts:
    """Acts when it is thrown away."""

    a: Any

    def __del__(self) -> None:
        """Something a file must not be able to make happen."""


class Odd(enum.Flag):
    """A flag that makes members of its own."""

    ONE = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise AssertionError("its code ran")


def encoded(tag: str, name: str, /, **fields: Json) -> Json:
    """The JSON of an instance."""
    return {"~": tag, "m": name, "k": list(fields), "v": list(fields.values())}


def test_instances_come_back_as_themselves() -> None:
    """Dataclasses, namedtuples and members of loaded modules survive, tensors inside included."""
    state = {
        "c": Config("n", {"t": torch.ones(2)}),
        "s": Slotted([1]),
        "p": Point(torch.ones(1), (1,)),
        "e": [Colour.RED, Colour.BLUE, Access.READ | Access.WRITE],
        "plain": Point(1, 2),
    }
    loaded = trip(state)
    assert same(loaded, state)
    assert loaded["e"][0] is Colour.RED


def test_attributes_beside_the_fields_are_kept() -> None:
    """What an instance's dict holds beyond its fields comes back, in order."""
    value = Grown(1)
    value.z = 3  # type: ignore[attr-defined]
    assert list(vars(trip({"v": value})["v"]).items()) == [("a", 1), ("b", 7), ("c", []), ("z", 3)]


def test_no_code_of_a_class_runs() -> None:
    """Neither constructor nor setter is called on loading."""
    made = _tree.decode_value(encoded("dataclass", f"{HERE}:Watched", a=5))
    assert type(made) is Watched
    assert vars(made) == {"a": 5}


def test_a_local_class_comes_back_as_a_record() -> None:
    """A class that cannot be found by name gives its name and fields."""

    @dataclasses.dataclass
    class Local:
        x: Any

    loaded = trip({"v": Local(torch.ones(1))})["v"]
    assert isinstance(loaded, Record)
    assert loaded.class_name.endswith("<locals>.Local")
    assert same(loaded.fields, {"x": torch.ones(1)})


@pytest.mark.parametrize(
    ("tag", "name", "fields"),
    [
        ("dataclass", "gone.module:Config", {"a": 1}),
        ("dataclass", "os:system", {"a": 1}),
        ("dataclass", "torch:Tensor", {"a": 1}),
        ("dataclass", f"{HERE}:Acts", {"a": 1}),
        ("dataclass", f"{HERE}:nope.deeper", {}),
        ("dataclass", f"{HERE}:Grown", {"b": 1}),
        ("dataclass", "tests.strategies:Slotted", {"value": 1, "more": 2}),
        ("enum", "tests.strategies:Colour", {"name": "GREEN", "value": 3}),
        ("enum", "tests.strategies:Config", {"name": "GREEN"}),
        ("enum", "tests.strategies:Access", {"name": None, "value": 64}),
        ("enum", f"{HERE}:Odd", {"name": None, "value": 6}),
        ("namedtuple", "tests.strategies:Point", {"x": 1}),
        ("namedtuple", "tests.strategies:Config", {"x": 1}),
        ("namedtuple", "builtins:tuple", {"x": 1}),
        ("future", "what.ever", {"x": 1}),
    ],
)
def test_what_is_not_known_is_a_record(tag: str, name: str, fields: dict[str, Any]) -> None:
    """A class that is absent, changed or of another kind gives a record, which saves as it was."""
    before = set(sys.modules)
    json = encoded(tag, name, **fields)
    record = _tree.decode_value(json)
    assert isinstance(record, Record)
    assert record.fields == fields
    assert set(sys.modules) == before
    assert trip({"r": record})["r"] == record


def test_a_record_becomes_real_where_its_class_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a process that lacked the class nothing is lost."""
    flat = _tree.flatten({"v": Config("n", torch.ones(1)), "w": Config(1, 2)})
    import tests.strategies as module

    with monkeypatch.context() as patch:
        patch.delattr(module, "Config")
        records = _tree.rebuild(flat, flat.tensors).state
        assert isinstance(records["v"], Record)
        again = _tree.flatten(records)
    assert same(
        _tree.rebuild(again, again.tensors).state, {"v": Config("n", torch.ones(1)), "w": Config(1, 2)}
    )


def test_a_grown_dataclass_takes_its_defaults() -> None:
    """A field that came later with a plain default is filled; one with a factory is not guessed."""
    made = _tree.decode_value(encoded("dataclass", f"{HERE}:Grown", a=1, c=[2]))
    assert made == Grown(1, 7, [2])
    assert isinstance(_tree.decode_value(encoded("dataclass", f"{HERE}:Grown", a=1, b=2)), Record)


def test_names_never_reach_beyond_the_dict() -> None:
    """`__class__` as a field is a mere name."""
    made = _tree.decode_value(encoded("dataclass", f"{HERE}:Watched", a=1, __class__="x"))
    assert type(made) is Watched
    space = _tree.decode_value({"~": "SimpleNamespace", "k": ["__class__"], "v": [1]})
    assert vars(space) == {"__class__": 1}


def test_looking_a_class_up_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy module is not made to load, a proxy is not called."""

    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("it was asked")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError("it was asked")

    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("it was asked")

        __slots__ = ()

    monkeypatch.setitem(sys.modules, "lazy_one", Lazy("lazy_one"))
    monkeypatch.setitem(sys.modules, "proxy_one", Proxy())
    for name in ("lazy_one:Config", "proxy_one:Config.x"):
        assert isinstance(_tree.decode_value(encoded("dataclass", name, a=1)), Record)


def test_a_dataclass_with_data_of_its_own_kind_is_refused() -> None:
    """A dataclass that is also a dict would lose the dict."""

    @dataclasses.dataclass
    class Both(dict[str, int]):
        x: int = 1

    with pytest.raises(UnsupportedStateError, match="Both"):
        _tree.flatten({"v": Both()})


class Money:
    """A type of the user's own."""

    def __init__(self, cents: int, paper: torch.Tensor) -> None:
        self.cents, self.paper = cents, paper


class Coin:
    """Another one."""


def test_a_registered_type_is_stored() -> None:
    """Whatever `encode` returns is stored, tensors and nested registered values included."""
    register_leaf(
        Money, lambda m: {"cents": m.cents, "paper": m.paper}, lambda d: Money(d["cents"], d["paper"])
    )
    loaded = trip({"m": [Money(10**30, torch.ones(2))]})["m"][0]
    assert type(loaded) is Money
    assert loaded.cents == 10**30
    assert same(loaded.paper, torch.ones(2))


def test_an_unregistered_type_is_a_record_and_a_name_is_for_ever() -> None:
    """The stored name decides, and stays usable after the class has moved."""
    register_leaf(Coin, lambda coin: "heads", lambda text: Coin(), name="coin-v1")
    json = _tree.encode_value(Coin())
    assert json == {"~": "leaf", "m": "coin-v1", "k": ["value"], "v": ["heads"]}
    assert type(_tree.decode_value(json)) is Coin
    other = {"~": "leaf", "m": "coin-v0", "k": ["value"], "v": ["tails"]}
    assert _tree.decode_value(other) == Record("coin-v0", {"value": "tails"}, "leaf", "coin-v0")  # type: ignore[arg-type]


def test_registering_twice_replaces_and_taken_names_are_refused() -> None:
    """The last functions count; built-in kinds and others' names are not for taking."""

    class Mine:
        pass

    register_leaf(Mine, lambda value: 1, lambda value: Mine(), name="mine-once")
    register_leaf(Mine, lambda value: 2, lambda value: Mine(), name="mine-once")
    assert _tree.encode_value(Mine()) == {"~": "leaf", "m": "mine-once", "k": ["value"], "v": [2]}
    for kind in (dict, int, torch.Tensor, torch.Size):
        with pytest.raises(UsageError, match="stored by aiockpt itself"):
            register_leaf(kind, lambda value: 1, lambda value: value)
    with pytest.raises(UsageError, match="belongs to"):
        register_leaf(type("Other", (), {}), lambda value: 1, lambda value: value, name="mine-once")
    with pytest.raises(UsageError, match="wants a type"):
        register_leaf("x", lambda value: 1, lambda value: value)  # type: ignore[arg-type]


def test_failing_functions_of_the_user_are_told_by_path() -> None:
    """`encode` that raises is a problem of the state, `decode` that raises is damage."""

    class Bad:
        pass

    def fail(value: Any) -> Any:
        raise RuntimeError("no way")

    register_leaf(Bad, fail, fail, name="bad-one")
    with pytest.raises(UnsupportedStateError, match=r"x/0: .*RuntimeError: no way"):
        _tree.flatten({"x": [Bad()]})
    with pytest.raises(CorruptCheckpointError, match="no way") as caught:
        _tree.decode_value({"a": {"~": "leaf", "m": "bad-one", "k": ["value"], "v": [1]}}, "x")
    assert caught.value.path == "x/a"


def test_an_encode_function_without_end_is_bounded() -> None:
    """A value that encodes to itself over and over is refused, not recursed into."""

    class Loop:
        pass

    register_leaf(Loop, lambda value: Loop(), lambda value: Loop(), name="loop-one")
    with pytest.raises(UnsupportedStateError, match="nested deeper"):
        _tree.flatten(Loop())


def test_namedtuple_types_without_fields_are_refused() -> None:
    """torch's named results have no such fields: turn them into tuples."""
    with pytest.raises(UnsupportedStateError, match="return_types"):
        _tree.flatten({"m": torch.ones(2, 2).max(0)})


class Pair(NamedTuple):
    """A namedtuple."""

    left: Any
    right: Any


def test_a_namedtuple_inside_itself_is_fine() -> None:
    """Nesting of one class in itself is no cycle."""
    state = Pair(Pair(1, torch.ones(1)), Pair(torch.ones(1), ()))
    assert same(trip(state), state)
