"""The look for NaN and infinities before a model may serve."""

from __future__ import annotations

import math

import pytest
import torch

from aiockpt._fitting import CHUNK, not_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_found(dtype: torch.dtype, value: float) -> None:
    """Wherever it is, also in the second chunk."""
    for length, place in ((1, 0), (5000, 4321), (CHUNK + 3, CHUNK + 1)):
        tensor = torch.ones(length, dtype=dtype)
        tensor[place] = value
        assert not_finite([("w", tensor)]) == ["w"]


def test_infinities_that_cancel_each_other_are_found() -> None:
    """Their sum is NaN, not 0."""
    assert not_finite([("w", torch.tensor([math.inf, 1.0, -math.inf]))]) == ["w"]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_numbers_whose_sum_is_too_large_are_finite(dtype: torch.dtype) -> None:
    """An overflow of the quick look is not believed."""
    largest = torch.finfo(dtype).max
    assert not_finite([("w", torch.full((3000,), largest, dtype=torch.float64).to(dtype))]) == []


def test_what_has_no_such_values_is_left_alone() -> None:
    """Integers, nothing at all, memory that is not there."""
    tensors = (torch.ones(3, dtype=torch.int64), torch.ones(0), torch.ones(3, device="meta"))
    assert not_finite([(str(n), tensor) for n, tensor in enumerate(tensors)]) == []
