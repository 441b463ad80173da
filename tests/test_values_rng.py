"""aiockpt.RngState carries the process's random generators over."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from aiockpt import _tree
from aiockpt.values.rng import RngState
from tests.strategies import trip


def draw() -> tuple[Any, ...]:
    """One number from each generator."""
    return random.random(), random.gauss(0, 1), float(np.random.rand()), torch.rand(3).tolist()


def test_all_generators_continue() -> None:
    """After loading each generator draws what it would have drawn."""
    random.gauss(0, 1)
    saved = trip({"rng": RngState()})["rng"]
    expected = draw()
    draw()
    RngState().load_state_dict(saved)
    assert draw() == expected


def test_reading_draws_nothing() -> None:
    """Two saves in a row see the same generators."""
    one, two = RngState().state_dict(), RngState().state_dict()
    assert one["python"] == two["python"]
    assert torch.equal(one["torch"], two["torch"])


def test_it_is_asked_at_the_call() -> None:
    """Flattening reads the generators once, and lists the object as stateful."""
    rng = RngState()
    flat = _tree.flatten({"rng": rng})
    assert flat.stateful == [rng]
    assert "rng/torch" in flat.tensor_paths


def test_numpy_is_left_out_where_it_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without numpy the state says None, and a state with numpy's is loaded all the same."""
    full = RngState().state_dict()
    monkeypatch.delitem(sys.modules, "numpy")
    assert RngState().state_dict()["numpy"] is None
    RngState().load_state_dict(full)


def test_what_is_missing_is_left_alone() -> None:
    """A partial state sets only what it holds."""
    before = random.getstate()
    RngState().load_state_dict({"torch": torch.get_rng_state()})
    RngState().load_state_dict({})
    assert random.getstate() == before


def test_cuda_devices_are_set_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer devices than at the save take the first states."""
    taken: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.ones(2), torch.zeros(2)])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: taken.append((device, state.tolist()))
    )
    rng = RngState()
    rng.load_state_dict({"cuda": rng.state_dict()["cuda"]})
    assert taken == [(0, [1.0, 1.0])]
