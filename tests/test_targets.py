"""A target takes the saved bytes in any pieces, whatever its own layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt._dtypes import NAME
from aiockpt._table import TensorTable
from aiockpt._targets import Targets, fill_tensor, make_fresh, target_problem
from tests.make_checkpoint import raw


@st.composite
def places(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, an empty target of the same shape and any layout)."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from([torch.uint8, torch.float32, torch.complex64, torch.float64]))
    values = torch.randint(0, 255, shape).to(dtype)
    order = draw(st.permutations(range(len(shape))))
    room = torch.zeros([2 * shape[i] + 1 for i in order], dtype=dtype)
    steps = draw(st.sampled_from([1, 2]))
    part = room[tuple(slice(1, 1 + steps * shape[i], steps) for i in order)] if shape else room
    target = part.permute([order.index(i) for i in range(len(shape))])
    return values, (target if draw(st.booleans()) else torch.zeros(shape, dtype=dtype))


@given(places(), st.data())
def test_any_layout_is_filled(place: tuple[torch.Tensor, torch.Tensor], data: st.DataObject) -> None:
    """Bytes that come in ranges of any length end up right in contiguous and strided targets."""
    values, tensor = place
    dtype = NAME[values.dtype]
    content = (
        torch.frombuffer(bytearray(raw(values)), dtype=torch.uint8) if values.numel() else torch.empty(0)
    )
    at, size = 0, values.element_size()
    while at < values.nbytes:
        take = size * data.draw(st.integers(1, 7))
        fill_tensor(tensor, dtype, at, content[at : at + take])
        at += take
    assert torch.equal(tensor, values)


def test_bits_of_conjugates_are_kept_apart() -> None:
    """A conjugate target gets the logical values, not their bytes."""
    values = torch.tensor([1 + 2j, 3 - 4j])
    base = torch.zeros(2, dtype=torch.complex64)
    fill_tensor(base.conj(), "complex64", 0, values.view(torch.float32).view(torch.uint8))
    assert torch.equal(base.conj(), values)


def test_inference_tensors_are_filled() -> None:
    """Tensors made in inference mode can be filled from any thread."""
    with torch.inference_mode():
        tensor, strided = torch.zeros(4), torch.zeros(2, 4).t()
    data = torch.arange(8.0).view(torch.uint8)
    fill_tensor(tensor, "float32", 0, data[:16])
    fill_tensor(strided, "float32", 0, data)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert strided.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def freed() -> torch.Tensor:
    """A tensor whose storage was given up, as sharded training does between steps."""
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(3, 4), "shape"),
        (torch.zeros(4), "shape"),
        (torch.zeros(1, 3), "shape"),
        (torch.zeros(()), "shape"),
        (torch.zeros(3, dtype=torch.float64), "float64"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(1).expand(3), "expanded"),
        (torch.zeros(3).to_sparse(), "layout"),
        (freed(), "freed"),
    ],
)
def test_what_cannot_be_filled(tensor: torch.Tensor, why: str) -> None:
    """Shapes never broadcast, dtypes never convert by themselves, and odd targets are named."""
    assert why in (target_problem(tensor, "float32", (3,), cast=False) or "")


def test_casts_keep_the_kind() -> None:
    """On request dtypes convert, but never drop an imaginary part or a fraction."""
    assert target_problem(torch.zeros(3, dtype=torch.bfloat16), "float32", (3,), cast=True) is None
    assert target_problem(torch.zeros(3, dtype=torch.int32), "float32", (3,), cast=True)
    assert target_problem(torch.zeros(3), "complex64", (3,), cast=True)


def test_memory_views_are_exact() -> None:
    """The view of a new tensor's memory covers the asked bytes and nothing else."""
    tensor = make_fresh("t", "float32", (4,), torch.device("cpu")).zero_()
    view = Targets(TensorTable(), {0: tensor}).memory(0, 4, 8)
    assert len(view) == 8
    view[:] = b"\xff" * 8
    assert tensor.view(torch.int32).tolist() == [0, -1, -1, 0]


def test_autograd_hears_of_it() -> None:
    """A backward that needs values which a load has overwritten fails, and does not go wrong."""
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    table = TensorTable()
    table.add(0, "w", "float32", (3,))
    targets = Targets(table)
    targets.add_living(0, "w", weight)
    targets.fill([(0, 0, 12, 0)], torch.zeros(12, dtype=torch.uint8), {})
    assert weight.tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
