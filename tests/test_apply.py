"""Loading into modules: all is compared first, and only verified bytes reach them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aiockpt._short import load
from aiockpt.checkpoint import Checkpoint
from aiockpt.errors import StateMismatchError
from aiockpt.storage import open_store
from aiockpt.testing import FaultyStore
from tests.loading import equal, hook, net, trained
from tests.make_checkpoint import alike, make_checkpoint


async def test_a_module_is_filled_in_place(tmp_path: Path) -> None:
    """Parameters and buffers keep their identity and memory and get the saved values."""
    saved, model = net(), net()
    trained(saved)
    make_checkpoint(tmp_path, {"model": saved, "epoch": 3}, 1)
    before = {name: t.data_ptr() for name, t in model.state_dict().items()}
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    checkpoint = await load(tmp_path, into={"model": model})
    assert isinstance(checkpoint, Checkpoint)
    assert equal(model, saved)
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == before
    assert {name: p.requires_grad for name, p in model.named_parameters()} == grads
    assert checkpoint.report is not None
    assert checkpoint.report.matched == len(before)
    assert checkpoint.values == {}
    model(torch.randn(4, 3)).sum().backward()  # autograd still works


async def test_a_plain_module_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling a plain module makes no second copy: `load_state_dict` is not called."""
    saved, model = net(), net()
    make_checkpoint(tmp_path, {"model": saved}, 1)
    monkeypatch.setattr(nn.Module, "_load_from_state_dict", None)
    await load(tmp_path, into={"model": model})
    assert equal(model, saved)


async def test_the_root_may_be_a_module(tmp_path: Path) -> None:
    """A checkpoint that is a state dict fills a module given as `into=` itself."""
    saved, model = net(), net()
    make_checkpoint(tmp_path, saved, 1)
    await load(tmp_path, into=model)
    assert equal(model, saved)


async def test_tied_weights(tmp_path: Path) -> None:
    """Tied parameters are filled once and stay tied."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
            self.head.weight = self.emb.weight

    saved, model, untied = Tied(), Tied(), Tied()
    untied.head.weight = nn.Parameter(torch.zeros(7, 3))
    make_checkpoint(tmp_path, {"model": saved}, 1)
    await load(tmp_path, into={"model": model})
    assert equal(model, saved)
    assert model.head.weight is model.emb.weight
    await load(tmp_path, into={"model": untied})
    assert torch.equal(untied.head.weight, saved.emb.weight)


class Extra(nn.Linear):
    """A module with extra state of several kinds."""

    got: Any = None

    def get_extra_state(self) -> Any:
        return {"v": 3, "t": torch.ones(2), "b": b"\0x"}

    def set_extra_state(self, state: Any) -> None:
        self.got = state


async def test_extra_state(tmp_path: Path) -> None:
    """Extra state comes back with its types, through `set_extra_state`."""
    make_checkpoint(tmp_path, {"model": nn.Sequential(Extra(2, 2), nn.Linear(2, 1))}, 1)
    model = nn.Sequential(Extra(2, 2), nn.Linear(2, 1))
    await load(tmp_path, into={"model": model})
    assert alike(model[0].got, {"v": 3, "t": torch.ones(2), "b": b"\0x"})
    with pytest.raises(StateMismatchError) as caught:
        await load(tmp_path, into={"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))})
    assert caught.value.unexpected == ("model/0._extra_state",)


async def test_modules_with_methods_of_their_own(tmp_path: Path) -> None:
    """Whoever overrides loading, or hooks into it, is given the state dict."""

    class Custom(nn.Linear):
        calls = 0

        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            type(self).calls += 1
            return super().load_state_dict(*args, **options)

    saved, hooked = net(), net()
    seen: list[str] = []
    hook(hooked[0], lambda module, state, *rest: seen.extend(state))
    make_checkpoint(tmp_path, {"model": saved, "custom": nn.Linear(3, 3)}, 1)
    custom = Custom(3, 3)
    await load(tmp_path, into={"model": hooked, "custom": custom})
    assert "0.weight" in seen
    assert Custom.calls == 1
    assert equal(hooked, saved)
    wide = net(6)
    hook(wide[2], lambda *rest: None)
    with pytest.raises(StateMismatchError) as caught:
        await load(tmp_path, into={"model": wide})
    assert ("model/0.weight", "saved shape [5, 3], target shape [6, 3]") in caught.value.mismatched


async def test_lazy_and_parametrized_modules(tmp_path: Path) -> None:
    """Modules that materialise while they load work as with torch."""
    lazy, saved = nn.Sequential(nn.LazyLinear(4)), nn.Sequential(nn.Linear(3, 4))
    make_checkpoint(tmp_path, {"model": saved}, 1)
    await load(tmp_path, into={"model": lazy})
    assert equal(lazy, saved)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    make_checkpoint(tmp_path, {"model": normed}, 2)
    other = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    await load(tmp_path, into={"model": other})
    assert equal(other, normed)


async def test_every_difference_is_listed(tmp_path: Path) -> None:
    """Missing, unexpected, shapes and dtypes are all in one error, and nothing was touched."""
    saved = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(4), "only.saved": torch.ones(1)}
    make_checkpoint(tmp_path, {"m": saved, "n": 1}, 1)
    into = {
        "a": torch.zeros(3),
        "b": torch.zeros(4),
        "c": torch.zeros(4, dtype=torch.bfloat16),
        "only.mine": torch.zeros(1),
    }
    store = FaultyStore(open_store(tmp_path))
    with pytest.raises(StateMismatchError) as caught:
        await load(store, into={"m": into, "gone": 3})
    error = caught.value
    assert set(error.missing) == {"m/only.mine", "gone"}
    assert error.unexpected == ("m/only.saved",)
    assert dict(error.mismatched).keys() == {"m/b", "m/c"}
    text = str(error)
    assert all(word in text for word in ("[2, 2]", "[4]", "float32", "bfloat16", "m/only.mine"))
    assert all(not bool(t.any()) for t in into.values())
    assert not any("read_into" in operation for operation in store.operations)


async def test_a_key_behind_a_valid_key_is_unexpected(tmp_path: Path) -> None:
    """`0.weight.foo` is reported although `0.weight` exists."""
    state = net().state_dict()
    state["0.weight.foo"] = torch.ones(1)
    make_checkpoint(tmp_path, {"model": state}, 1)
    with pytest.raises(StateMismatchError) as caught:
        await load(tmp_path, into={"model": net()})
    assert caught.value.unexpected == ("model/0.weight.foo",)


def compiled(model: nn.Module) -> Any:
    """The model as torch.compile wraps it; nothing is compiled before its first call."""
    return torch.compile(model, backend="eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("saved", "into", "named"),
    [
        (lambda m: compiled(m).state_dict(), lambda m: m, "_orig_mod"),
        (lambda m: m.state_dict(), compiled, "_orig_mod"),
        (lambda m: {f"module.{k}": v for k, v in m.state_dict().items()}, lambda m: m, "module"),
        (
            lambda m: {f"a._orig_mod.{k}": v for k, v in m.state_dict().items()},
            lambda m: nn.ModuleDict({"a": m}),
            "_orig_mod",
        ),
    ],
)
async def test_prefixes_of_wrappers_are_named(
    tmp_path: Path, saved: Callable[[Any], Any], into: Callable[[Any], Any], named: str
) -> None:
    """A prefix that a wrapper adds, at any place, is an error that says so."""
    make_checkpoint(tmp_path, {"model": saved(net())}, 1)
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=f"'{named}\\.'"):
            await load(tmp_path, into={"model": into(net())}, strict=strict)


async def test_no_hint_for_a_users_own_names(tmp_path: Path) -> None:
    """A module truly called `module` is no wrapper's prefix."""
    saved = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod_head": nn.Linear(2, 1)})
    make_checkpoint(tmp_path, {"model": saved}, 1)
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod_head": nn.Linear(2, 1)})
    await load(tmp_path, into={"model": model})
    assert equal(model, saved)


async def test_a_module_in_the_wrong_place(tmp_path: Path) -> None:
    """The whole checkpoint given to a module, and the other way round, gets a hint."""
    make_checkpoint(tmp_path, {"model": net(), "epoch": 1}, 1)
    with pytest.raises(StateMismatchError, match=r"into=\{'model'"):
        await load(tmp_path, into=net())
    make_checkpoint(tmp_path, net(), 2)
    with pytest.raises(StateMismatchError, match="without a name"):
        await load(tmp_path, into={"model": net()})


async def test_strict_false_fills_what_fits(tmp_path: Path) -> None:
    """What fits is filled, the rest is left alone and reported."""
    saved, model = net(), net()
    last = model[2] = nn.Linear(5, 9)
    before = last.weight.detach().clone()
    make_checkpoint(tmp_path, {"model": saved, "epoch": 3}, 1)
    into: dict[str, Any] = {"model": model, "head": nn.Linear(2, 2), "epoch": 0}
    checkpoint = await load(tmp_path, into=into, strict=False)
    assert torch.equal(model.state_dict()["0.weight"], saved.state_dict()["0.weight"])
    assert torch.equal(last.weight, before)
    report = checkpoint.report
    assert report is not None
    assert report.missing == ("head",)
    assert [path for path, _ in report.mismatched] == ["model/2.weight", "model/2.bias"]
    assert report.matched == 7
    assert checkpoint.values == {"epoch": 3}
    assert into["epoch"] == 3


async def test_nothing_matched_is_an_error(tmp_path: Path) -> None:
    """Even without `strict`, an entry of which nothing matches is an error and stays as it was."""
    saved, model = net(), net()
    make_checkpoint(tmp_path, {"model": {f"x.{k}": v for k, v in saved.state_dict().items()}, "epoch": 1}, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StateMismatchError) as caught:
        await load(tmp_path, into={"model": model, "epoch": 0}, strict=False)
    assert len(caught.value.missing) == len(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(StateMismatchError):
        await load(tmp_path, into={"other": 3}, strict=False)


async def test_casts_on_request(tmp_path: Path) -> None:
    """`cast=True` converts, and the report says where."""
    values = torch.rand(4, 3) * 100
    make_checkpoint(tmp_path, {"w": values, "same": torch.ones(2)}, 1)
    into = {"w": torch.zeros(4, 3, dtype=torch.bfloat16), "same": torch.zeros(2)}
    with pytest.raises(StateMismatchError):
        await load(tmp_path, into=into)
    checkpoint = await load(tmp_path, into=into, cast=True)
    assert torch.equal(into["w"], values.bfloat16())
    assert checkpoint.report is not None
    assert checkpoint.report.cast == ("w",)


@pytest.mark.parametrize(
    ("saved", "target"),
    [((1,), (5,)), ((), (5,)), ((3,), (1, 3)), ((1, 3), (3,)), ((2, 3), (3, 2)), ((6,), (2, 3)), ((), (1,))],
)
async def test_shapes_never_broadcast(
    tmp_path: Path, saved: tuple[int, ...], target: tuple[int, ...]
) -> None:
    """Another shape is an error, also where torch would broadcast or the count agrees."""
    make_checkpoint(tmp_path, {"s": torch.ones(saved)}, 1)
    into = torch.zeros(target)
    for cast in (False, True):
        with pytest.raises(StateMismatchError, match="shape"):
            await load(tmp_path, into={"s": into}, cast=cast)
    assert not bool(into.any())
