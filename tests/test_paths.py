"""aiockpt writes keys as text that reads back as the very same key."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiockpt._paths import (
    Selection,
    ancestors,
    escape,
    item_of,
    join,
    key_text,
    parse_key,
    selects,
    split,
    unescape,
)
from tests.strategies import ANY_TEXT, KEYS, same


@given(KEYS)
def test_a_key_comes_back_from_its_text(key: Any) -> None:
    """Value and type of any key survive, and its text is one component that JSON can hold."""
    text = key_text(key)
    assert same(parse_key(text), key)
    assert "/" not in text
    assert text
    assert msgspec.json.decode(msgspec.json.encode(text)) == text


@given(KEYS, KEYS)
def test_different_keys_have_different_texts(one: Any, other: Any) -> None:
    """No two keys share a text unless they are the same in value and type."""
    assert (key_text(one) == key_text(other)) == same(one, other)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("0.weight", "0.weight"),
        ("日本", "日本"),
        ("__metadata__", "__metadata__"),
        ("C:\\x", "C:\\x"),
        ("", '""'),
        ("a/b", '"a\\u002fb"'),
        ("1", '"1"'),
        ("True", '"True"'),
        ("None", '"None"'),
        ("nan", '"nan"'),
        ("-1.5e3", '"-1.5e3"'),
        ("np.float", '"np.float"'),
        ("(", '"("'),
        ('say "hi"', '"say \\u0022hi\\u0022"'),
        ("\ud800\udc00", '"\\ud800\\udc00"'),
        (1, "1"),
        (True, "True"),
        (None, "None"),
        (1.5, "1.5"),
        (-0.0, "-0.0"),
        (1e22, "1e+22"),
        (float("-inf"), "-inf"),
        (np.int64(1), "np.int64(1)"),
        ((), "()"),
        ((1,), "(1,)"),
        ((1, "a", (None,)), '(1,"a",(None,))'),
    ],
)
def test_the_text_of_a_key(key: Any, text: str) -> None:
    """Plain strings stand as they are, everything else in a form of its own."""
    assert key_text(key) == text
    assert same(parse_key(text), key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "01",
        "-0",
        "1.50",
        "1e5",
        "(1)",
        "(1,2,)",
        "(,)",
        "((1)",
        "(1,,2)",
        "()x",
        '"a',
        '"a\\u0041"',
        '"\\n"',
        "(a)",
        "a/b",
        "np.int8(300)",
        "np.int8(01)",
        "np.float64(1)",
        "(" * 100,
        "9" * 5000,
        "-nan",
        "\x00",
    ],
)
def test_a_text_nobody_writes_is_refused(text: str) -> None:
    """There is one spelling for each key; everything else is a ValueError."""
    with pytest.raises(ValueError):
        parse_key(text)


@example('"."')
@given(st.text('("\\1,)anp.int8e-+u0', max_size=30))
def test_reading_any_text_gives_a_key_or_a_value_error(text: str) -> None:
    """What reads at all is what the key writes again."""
    try:
        key = parse_key(text)
    except ValueError:
        return
    assert key_text(key) == text


@pytest.mark.parametrize(
    "key", [b"x", object(), 1j, frozenset(), np.float32(1), np.timedelta64(1), (1, b"x")]
)
def test_other_keys_are_refused_by_type(key: Any) -> None:
    """A key of any other type is a TypeError that names it."""
    with pytest.raises(TypeError, match="a key of type"):
        key_text(key)


def test_a_key_nested_too_deeply_is_refused() -> None:
    """Tuples in tuples have a limit."""
    key: Any = ()
    for _ in range(50):
        key = (key,)
    with pytest.raises(ValueError, match="nested"):
        key_text(key)


def test_a_numpy_key_without_numpy_is_an_int(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numpy is missing its integers come back as plain ones."""
    monkeypatch.delitem(sys.modules, "numpy")
    assert same(parse_key("np.int64(7)"), 7)


@given(ANY_TEXT)
def test_any_text_survives_escaping(text: str) -> None:
    """Escaped text is UTF-8 and reads back, pairs of lone surrogates included."""
    escape(text).encode()
    assert unescape(escape(text)) == text


def test_paths_join_and_split() -> None:
    """A path is its components, the root has none."""
    assert join(join("", "model"), "0.weight") == "model/0.weight"
    assert split("model/0.weight") == ["model", "0.weight"]
    assert split("") == []
    assert item_of("model/0.weight") == "model"
    assert item_of("") == ""
    assert list(ancestors("a/b/c")) == ["a/b/c", "a/b", "a", ""]


def test_a_prefix_selects_whole_components() -> None:
    """`a` selects `a` and `a/b`, never `ab`."""
    assert selects(["a"], "a")
    assert selects(["a"], "a/b")
    assert selects([""], "x")
    assert not selects(["a"], "ab")
    assert not selects(["a/b"], "a")
    assert not selects([], "a")


def test_a_selection_notes_what_it_did_not_meet() -> None:
    """Missing paths come in the order they were asked for."""
    selection = Selection(["z", "a/b", "q"])
    assert selection.leads("a")
    assert not selection.leads("a/b")
    assert selection.selects("a/b/c")
    assert not selection.selects("a")
    assert selection.missing == ("z", "q")
