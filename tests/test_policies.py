"""Retention and triggers are pure functions that do what their names say."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Checkpoint, UsageError
from aiockpt.policies import Moment, as_keep
from aiockpt.policies.keep import KeepAll, KeepBest, KeepEvery, KeepEverySeconds, KeepFirst, KeepLast
from aiockpt.policies.when import AtSteps, EveryOverhead, EverySeconds, EverySteps, First, OnPreemption


def checkpoint(step: int, time: float = 0.0, **metrics: float) -> Checkpoint:
    """A record with what policies look at."""
    return Checkpoint("run", f"step-{step}", step, "0" * 32, "run", time, 1, metrics)


def moment(step: int, **facts: Any) -> Moment:
    """A moment of a run that began at 0 and has not saved yet."""
    return Moment(**{"step": step, "now": 0.0, "last_step": None, "last_time": 0.0} | facts)


@given(st.lists(st.floats(allow_nan=True), max_size=8), st.integers(1, 4), st.integers(1, 4))
def test_union_of_last_and_best_is_what_a_model_says(losses: list[float], k: int, b: int) -> None:
    """Survivors are the last k and the best b, NaN never among the best (huggingface/transformers#25129)."""
    found = [checkpoint(i, loss=loss) for i, loss in enumerate(losses)]
    last = set(range(len(losses))[-k:])
    rated = [i for i, loss in enumerate(losses) if not math.isnan(loss)]
    best = set(sorted(rated, key=lambda i: (losses[i], -i))[:b])
    assert set((KeepLast(k) | KeepBest("loss", b))(found)) == last | best


@given(st.lists(st.integers(0, 10**12), unique=True, min_size=1))
def test_last_goes_by_number_and_never_empties(steps: list[int]) -> None:
    """Order is numeric, however wide the numbers (huggingface/transformers#27138)."""
    found = [checkpoint(step) for step in sorted(steps)]
    assert KeepLast(3)(found) == sorted(steps)[-3:]


def test_best_by_the_larger_value_and_without_the_metric() -> None:
    """`max` turns the order; steps without the metric are no candidates."""
    found = [checkpoint(0, acc=0.5), checkpoint(1), checkpoint(2, acc=0.9), checkpoint(3, acc=0.9)]
    assert KeepBest("acc", mode="max")(found) == [3]
    assert KeepBest("acc", 5, mode="max")(found) == [3, 2, 0]
    assert KeepBest("loss")(found) == []


def test_first_every_all_and_a_function() -> None:
    """The simple ones, and any callable, combine by `|`."""
    found = [checkpoint(step) for step in (1, 50, 100, 150, 200)]
    assert list(KeepAll()(found)) == [1, 50, 100, 150, 200]
    assert KeepFirst()(found) == [1]
    assert KeepEvery(100)(found) == [100, 200]
    only = as_keep(lambda checkpoints: {checkpoints[1].step})
    assert set((only | KeepFirst())(found)) == {1, 50}
    assert set((KeepFirst() | (lambda checkpoints: [checkpoints[-1].step]))(found)) == {1, 200}
    assert set(((lambda checkpoints: [150]) | KeepFirst())(found)) == {1, 150}


def test_every_seconds_survives_a_clock_set_back() -> None:
    """One step an hour stays; a clock that jumps back keeps more, not fewer."""
    found = [checkpoint(i, time) for i, time in enumerate([0, 1000, 3600, 4000, 100, 3700])]
    assert KeepEverySeconds(3600)(found) == [0, 2, 4, 5]


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast(True),
        lambda: KeepEvery(-1),
        lambda: KeepEverySeconds(0),
        lambda: KeepBest("loss", 0),
        lambda: KeepBest("loss", mode=cast(Any, "best")),
        lambda: EverySteps(0),
        lambda: EverySeconds(math.nan),
        lambda: AtSteps(),
        lambda: EveryOverhead(1.0),
    ],
)
def test_senseless_options_are_refused_where_they_are_made(make: Any) -> None:
    """A policy that cannot mean anything is a UsageError at once."""
    with pytest.raises(UsageError):
        make()


def test_every_steps_counts_distance() -> None:
    """Steps that jump over every multiple still save; the restored step is where counting starts."""
    when = EverySteps(100)
    due, last = [], None
    for step in range(7, 1000, 37):
        if when(moment(step, last_step=last)):
            due.append(step)
            last = step
    assert due == [118, 229, 340, 451, 562, 673, 784, 895]
    assert not when(moment(1099, last_step=1000))
    assert when(moment(1100, last_step=1000))


def test_seconds_first_and_at_steps() -> None:
    """Time since the last save; once in a new run; once at or after each named step."""
    assert not EverySeconds(60)(moment(5, now=59.0))
    assert EverySeconds(60)(moment(5, now=60.0))
    assert First()(moment(1))
    assert not First()(moment(2, last_step=1))
    at = AtSteps(10, 20)
    assert not at(moment(9))
    assert at(moment(11))
    assert not at(moment(12, last_step=11))
    assert at(moment(25, last_step=11))


def test_preemption_is_due_until_that_step_is_saved() -> None:
    """Once told to end, the next step saves, and only one save of it."""
    assert not OnPreemption()(moment(5))
    assert OnPreemption()(moment(5, preempted=True, last_step=4))
    assert not OnPreemption()(moment(5, preempted=True, last_step=5))


def test_overhead_spaces_saves_by_what_they_cost() -> None:
    """30 ms of blocking at 3 % is one save a second, unless writing takes longer."""
    when = EveryOverhead(0.03)
    costs = {"last_step": 1, "last_time": 100.0, "blocked_seconds": 0.03}
    assert when(moment(1))
    assert not when(moment(2, now=100.9, **costs))
    assert when(moment(2, now=101.1, **costs))
    assert not when(moment(2, now=104.0, write_seconds=5.0, **costs))
    assert when(moment(2, now=105.0, write_seconds=5.0, **costs))


def test_triggers_combine() -> None:
    """`|` is due when one of them is."""
    when = EverySteps(100) | First()
    assert when(moment(1))
    assert not when(moment(2, last_step=1))
    assert when(moment(101, last_step=1))
