"""aiockpt stores what torch makes, or refuses it by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiockpt import _tree
from aiockpt._dtypes import BY_NAME
from aiockpt.errors import CorruptCheckpointError, UnsupportedStateError
from tests.strategies import bits, same, through_json, trip

ALL_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


def refused(state: Any) -> dict[str, str]:
    """The problems of a state by path."""
    with pytest.raises(UnsupportedStateError) as caught:
        _tree.flatten(state)
    return dict(caught.value.problems)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_is_exact_or_refused_by_name(dtype: torch.dtype) -> None:
    """No dtype that torch knows is stored wrongly; the refused ones are a known list."""
    name = str(dtype).removeprefix("torch.")
    tensor = torch.arange(16, dtype=torch.uint8).view(torch.uint8 if dtype == torch.bool else dtype)
    if dtype == torch.bool:
        tensor = tensor > 7
    if name in BY_NAME:
        loaded = trip({"x": tensor})["x"]
        assert loaded.dtype == dtype
        assert bits(loaded) == bits(tensor)
        return
    problems = refused({"deep": [tensor], "ok": torch.ones(1)})
    assert list(problems) == ["deep/0"]
    assert str(dtype) in problems["deep/0"]
    assert name.startswith(("q", "bits", "int", "uint"))


def test_odd_tensors_have_an_outcome_each() -> None:
    """Meta, nested, quantized, freed and opaque tensors are refused; all of them in one call."""
    freed = torch.ones(8)[4:]
    freed.untyped_storage().resize_(0)
    odd: dict[str, Any] = {
        "meta": torch.empty(3, device="meta"),
        "meta0": torch.empty(0, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "freed": freed,
        "mkldnn": torch.ones(3).to_mkldnn(),
        "lazy": torch.nn.LazyLinear(2).weight,
        "coo": torch.empty((3, 3), layout=torch.sparse_coo, device="meta"),
        "ok": torch.ones(1),
    }
    problems = refused(odd)
    assert problems.keys() == odd.keys() - {"ok", "coo"} | {"coo/indices", "coo/values"}
    assert "meta" in problems["meta"]
    assert "nested" in problems["nested"]
    assert "qint8" in problems["quantized"]
    assert "freed" in problems["freed"]
    assert "mkldnn" in problems["mkldnn"]
    assert "UninitializedParameter" in problems["lazy"]


def test_a_tensor_inside_a_function_transform_is_refused() -> None:
    """Its memory is not its own."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        assert list(refused({"x": x})) == ["x"]
        return x

    torch.vmap(inside)(torch.ones(2, 2))


def test_empty_tensors_are_not_merged() -> None:
    """All of them lie at address 0; each keeps its own shape and dtype."""
    same_one = torch.empty(0)
    state = {
        "e1": torch.empty(0, 3),
        "e2": torch.empty(0, dtype=torch.int64),
        "e3": torch.empty(2, 0),
        "e4": torch.empty(0, 3),
        "a": same_one,
        "b": same_one,
        "slice": torch.ones(3)[:0],
    }
    flat = _tree.flatten(state)
    assert flat.tensor_alias == [-1, -1, -1, -1, -1, 4, -1]
    loaded = trip(state)
    assert same(loaded, state)
    assert loaded["a"] is loaded["b"]
    assert loaded["e1"] is not loaded["e4"]


def test_tied_tensors_are_tied_again() -> None:
    """One view in several places is stored once; a module's tied weights work."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = torch.nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model = Tied()
    flat = _tree.flatten({"m": model, "again": model.a.weight, "list": [model.b.weight.detach()]})
    assert flat.tensor_alias == [-1, -1, 0, -1, 0, 0]
    state = _tree.rebuild(flat, flat.tensors).state
    assert state["m"]["a.weight"] is state["m"]["b.weight"] is state["list"][0]
    assert type(state["again"]) is torch.nn.Parameter
    assert state["again"].data_ptr() == state["m"]["a.weight"].data_ptr()


def test_views_at_one_address_are_not_merged() -> None:
    """Address alone says little: shape, steps, dtype, conj and neg bits differ."""
    whole = torch.randn(4, 4, dtype=torch.complex64)
    state = {
        "whole": whole,
        "conj": whole.conj(),
        "real": whole.real,
        "neg": whole.conj().imag,
        "imag": whole.imag,
        "row": whole[0],
        "flat": whole.view(-1),
        "t": whole.t(),
        "bytes": whole.view(torch.uint8),
        "first": whole[0, 0],
        "again": whole[0],
    }
    flat = _tree.flatten(state)
    assert flat.tensor_alias == [-1] * 10 + [5]
    assert same(trip(state), state)


def test_gradients_and_parameters_keep_their_flags() -> None:
    """Leaves that require grad do so again; results are stored without their graph."""
    weight = torch.nn.Parameter(torch.ones(2))
    result = weight * 2
    state = {
        "p": weight,
        "frozen": torch.nn.Parameter(torch.ones(1), requires_grad=False),
        "int": torch.nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False),
        "leaf": torch.ones(1, requires_grad=True),
        "result": result,
        "buffer": torch.nn.Buffer(torch.ones(1)),
    }
    flat = _tree.flatten(state)
    assert flat.tensor_flags == [3, 2, 2, 1, 0, 0]
    assert all(not tensor.requires_grad for tensor in flat.tensors)
    loaded = trip(state)
    assert same(loaded, state)
    assert loaded["leaf"].is_leaf
    assert loaded["leaf"].requires_grad
    assert not loaded["result"].requires_grad


def test_inference_tensors_are_stored() -> None:
    """A tensor without a version counter is a tensor."""
    with torch.inference_mode():
        tensor = torch.ones(2) * 3
    assert torch.equal(trip({"x": tensor})["x"], torch.full((2,), 3.0))


def _sparse() -> dict[str, torch.Tensor]:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    twice = torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 2), check_invariants=True
    )
    return {
        "coo": dense.to_sparse(),
        "hybrid": torch.eye(3).to_sparse(1),
        "uncoalesced": twice,
        "empty": torch.zeros(2, 2).to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 1)),
        "bsc": dense.to_sparse_bsc((1, 1)),
        "bool": (dense > 0).to_sparse(),
    }


@pytest.mark.parametrize("name", _sparse())
def test_sparse_tensors_are_exact(name: str) -> None:
    """All five layouts survive by their components, coalesced or not."""
    tensor = _sparse()[name]
    loaded = trip({"x": tensor})["x"]
    assert loaded.layout == tensor.layout
    assert loaded.shape == tensor.shape
    assert torch.equal(loaded.to_dense(), tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        assert loaded.is_coalesced() == tensor.is_coalesced()
        assert loaded._nnz() == tensor._nnz()
        assert loaded.dense_dim() == tensor.dense_dim()


def test_a_sparse_parameter_stays_one() -> None:
    """Flags hold for sparse tensors too."""
    loaded = trip({"p": torch.nn.Parameter(torch.eye(2).to_sparse())})["p"]
    assert type(loaded) is torch.nn.Parameter
    assert loaded.requires_grad


def test_sparse_components_that_lie_are_damage() -> None:
    """An index outside the shape never makes a tensor."""
    flat = through_json(_tree.flatten({"x": torch.eye(2).to_sparse()}))
    flat.tensors[0][0, 0] = 99
    with pytest.raises(CorruptCheckpointError, match="x: not a sparse"):
        _tree.rebuild(flat, flat.tensors)


def test_generators_go_on() -> None:
    """A torch.Generator draws the same numbers after loading."""
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    loaded = trip({"g": generator})["g"]
    assert torch.equal(torch.rand(4, generator=loaded), torch.rand(4, generator=generator))


PARAMS = 3


def _stepped(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(PARAMS)]
    optimizer = make(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((p @ p).square().mean() for p in params), start=torch.zeros(()))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    return optimizer


def _groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "betas": (0.5, 0.9)}]


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "groups": lambda p: torch.optim.AdamW(_groups(p)),
    "LBFGS": lambda p: torch.optim.LBFGS(p, history_size=3),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.1, centered=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_resume_exactly(name: str) -> None:
    """The state dict of each of torch's optimizers comes back equal and is accepted."""
    optimizer = _stepped(OPTIMIZERS[name])
    loaded = trip({"opt": optimizer})["opt"]
    assert same(loaded, optimizer.state_dict())
    fresh = OPTIMIZERS[name]([torch.nn.Parameter(torch.ones(4, 4)) for _ in range(PARAMS)])
    fresh.load_state_dict(loaded)
    assert same(fresh.state_dict(), optimizer.state_dict())


class Decay:
    """A callable object, whose dict LambdaLR stores."""

    def __init__(self) -> None:
        self.rate = 0.5

    def __call__(self, epoch: int) -> float:
        return self.rate**epoch


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "callable": lambda o: torch.optim.lr_scheduler.LambdaLR(o, Decay()),
    "multiplicative": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 3),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.PolynomialLR(o)]
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_resume_exactly(name: str) -> None:
    """The state dict of each of torch's schedulers comes back equal and is accepted."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*([0.5] if name == "plateau" else []))
    loaded = trip({"s": scheduler})["s"]
    assert same(loaded, scheduler.state_dict())
    fresh = SCHEDULERS[name](torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9))
    fresh.load_state_dict(loaded)
    assert same(fresh.state_dict(), scheduler.state_dict())


def test_the_scaler_and_averaged_models_pass() -> None:
    """GradScaler and AveragedModel are objects with state dicts like all others."""
    scaler = torch.amp.GradScaler("cpu")
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    state = trip({"scaler": scaler, "ema": averaged})
    assert state["scaler"] == scaler.state_dict()
    assert same(state["ema"], averaged.state_dict())
    assert math.isfinite(state["scaler"]["scale"])
