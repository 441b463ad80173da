"""aiockpt turns any state into columns and back."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import _tree
from tests.strategies import KEYS, same, states, through_json, trees, trip


@given(trees())
def test_any_tree_comes_back_equal(tree: Any) -> None:
    """Types, order, bits and ties survive the columns and their JSON."""
    assert same(trip(tree), tree)
