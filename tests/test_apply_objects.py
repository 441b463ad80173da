"""Loading into optimizers, generators, containers and arrays; damage on the way there."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiockpt._short import load
from aiockpt.errors import CheckpointError, CorruptCheckpointError, StateMismatchError, UsageError
from aiockpt.values.rng import RngState
from tests.loading import equal, net, trained
from tests.make_checkpoint import alike, make_checkpoint

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
async def test_a_fresh_optimizer_resumes(tmp_path: Path, kind: Any) -> None:
    """A fresh optimizer goes on as the saved one would, and no step was made to get there."""
    torch.manual_seed(1)
    saved = net()
    optimizer = trained(saved, kind)
    make_checkpoint(tmp_path, {"model": saved, "optim": optimizer}, 1)
    model = net()
    fresh = kind(model.parameters(), lr=0.5)
    steps: list[int] = []
    fresh.register_step_pre_hook(lambda *args: steps.append(1))
    await load(tmp_path, into={"model": model, "optim": fresh})
    assert not steps
    assert alike(fresh.state_dict(), optimizer.state_dict())
    batch = torch.randn(4, 3)
    for one, its in ((saved, optimizer), (model, fresh)):
        one(batch).sum().backward()
        its.step()
    assert equal(saved, model)


async def test_an_optimizer_that_does_not_fit(tmp_path: Path) -> None:
    """Groups, parameters and shapes are compared before anything is touched."""
    saved = net()
    make_checkpoint(tmp_path, {"model": saved, "optim": trained(saved)}, 1)
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    groups = [{"params": [p]} for p in model.parameters()]
    wider = net(6)
    for optimizer, path in (
        (torch.optim.AdamW(groups), "optim/param_groups"),
        (torch.optim.AdamW(list(model.parameters())[:-1]), "optim/param_groups/0"),
        (torch.optim.AdamW(wider.parameters()), "optim/state/0/exp_avg"),
        (trained(wider), "optim/state/0/exp_avg"),
    ):
        with pytest.raises(StateMismatchError) as caught:
            await load(tmp_path, into={"model": model, "optim": optimizer})
        assert path in dict(caught.value.mismatched)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


async def test_schedulers_scalers_and_rng(tmp_path: Path) -> None:
    """Whatever has `load_state_dict` gets its part back, a generator its place in the stream."""
    model = net()
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    state: dict[str, Any] = {"train": {"sched": scheduler, "epoch": 4, "rng": RngState()}}
    state |= {"gen": torch.Generator().manual_seed(5), "np": np.random.default_rng(7)}
    make_checkpoint(tmp_path, state, 1)
    expected = (torch.rand(3), np.random.rand(), torch.rand(2, generator=state["gen"]), state["np"].random())
    fresh = torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(net().parameters()), 1)
    generator, numpy_generator = torch.Generator(), np.random.default_rng()
    inner: dict[str, Any] = {"sched": fresh, "epoch": 0, "rng": RngState()}
    into = {"train": inner, "gen": generator, "np": numpy_generator}
    await load(tmp_path, into=into)
    assert fresh.state_dict() == scheduler.state_dict()
    assert into["train"] is inner
    assert inner["epoch"] == 4
    found = (torch.rand(3), np.random.rand(), torch.rand(2, generator=generator), numpy_generator.random())
    assert alike(found, expected)


async def test_a_refusing_object_is_named(tmp_path: Path) -> None:
    """An object that refuses its state makes a typed error that names it and what was done."""

    class Picky:
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("no such thing")

    class Fine:
        got: Any = None

        def load_state_dict(self, state: Any) -> None:
            self.got = state

    make_checkpoint(tmp_path, {"fine": {"a": 1}, "picky": {"b": torch.ones(1)}}, 1)
    fine = Fine()
    with pytest.raises(CheckpointError) as caught:
        await load(tmp_path, into={"fine": fine, "picky": Picky()})
    assert caught.value.path == "picky"
    assert isinstance(caught.value.__cause__, KeyError)
    assert "loaded before it: fine" in str(caught.value)
    assert fine.got == {"a": 1}


async def test_objects_see_verified_state_only(tmp_path: Path) -> None:
    """No object is given anything before every byte was read and verified."""

    class Watch:
        calls = 0

        def load_state_dict(self, state: Any) -> None:
            type(self).calls += 1

    made = make_checkpoint(tmp_path, {"first": {"a": torch.ones(9)}, "second": torch.ones(9)}, 1)
    file = next(made.folder.glob("tensors*"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptCheckpointError):
        await load(tmp_path, into={"first": Watch(), "second": torch.zeros(9)})
    assert Watch.calls == 0


async def test_containers_are_filled_in_place(tmp_path: Path) -> None:
    """Dicts and lists stay the same objects; tensors in them are filled, values replaced."""
    state = {
        "log": [{"k": 1}, {"k": 2}],
        "mix": {"w": torch.ones(3), "n": 2, "list": [torch.full((2,), 7.0), "x"]},
        "count": Counter("aab"),
        "dd": defaultdict(int, a=1),
        "t": torch.ones(2),
        "pair": Pair(torch.ones(1), (5, "five")),
        "tup": (1, {"a": None}),
        7: "seven",
        "7": "text",
    }
    make_checkpoint(tmp_path, state, 1)
    log: list[Any] = []
    weights, inner = torch.zeros(3), torch.zeros(2)
    mix = {"w": weights, "n": 0, "list": [inner, ""]}
    first = torch.zeros(1)
    into: dict[Any, Any] = {
        "log": log,
        "mix": mix,
        "count": Counter(z=4),
        "dd": defaultdict(int),
        "t": torch.zeros(2),
        "pair": Pair(first, ()),
        "tup": None,
        7: 0,
        "7": 0,
    }
    checkpoint = await load(tmp_path, into=into)
    assert into["log"] is log
    assert log == [{"k": 1}, {"k": 2}]
    assert mix["w"] is weights
    assert alike(mix, state["mix"])
    assert into["count"] == Counter("aab")
    assert type(into["count"]) is Counter
    assert dict(into["dd"]) == {"a": 1}
    assert type(into["pair"]) is Pair
    assert into["pair"].x is first
    assert into["pair"].y == (5, "five")
    assert into["tup"] == (1, {"a": None})
    assert into[7] == "seven"
    assert set(checkpoint.values) == {"log", "mix", "count", "dd", "pair", "tup", 7, "7"}
    assert checkpoint.values["log"] is log
    assert checkpoint.values["tup"] == (1, {"a": None})


async def test_kinds_are_compared(tmp_path: Path) -> None:
    """A tensor where a number was saved, and the other way round, is a mismatch."""
    make_checkpoint(
        tmp_path, {"t": torch.ones(1), "n": 3, "d": {"w": torch.ones(1)}, "l": [torch.ones(1)]}, 1
    )
    bad: list[tuple[str, Any]] = [
        ("t", 3),
        ("n", torch.zeros(1)),
        ("d", 3),
        ("t", net()),
        ("d", torch.zeros(1)),
    ]
    bad += [("t", {"a": 1}), ("t", np.zeros(1)), ("n", torch.Generator()), ("l", [1])]
    for name, target in bad:
        with pytest.raises(StateMismatchError) as caught:
            await load(tmp_path, into={name: target})
        assert caught.value.mismatched[0][0].startswith(name)
    for target in ([], [torch.zeros(1), torch.zeros(1)], {"x": torch.zeros(1)}):
        with pytest.raises(StateMismatchError):
            await load(tmp_path, into={"l": target})


async def test_arrays_are_filled_in_place(tmp_path: Path) -> None:
    """numpy arrays get their content in place, whatever their order in memory; others are refused."""
    state = {"a": np.arange(6.0).reshape(2, 3), "s": np.array(["x", "yy"]), "f": np.asfortranarray(np.eye(3))}
    make_checkpoint(tmp_path, state, 1)
    into = {"a": np.zeros((3, 2)).T, "s": np.array(["", "  "]), "f": np.zeros((3, 3))}
    kept = dict(into)
    await load(tmp_path, into=into)
    for name, array in kept.items():
        assert into[name] is array
        assert np.array_equal(array, state[name])
    frozen = np.zeros((2, 3))
    frozen.flags.writeable = False
    for wrong in (np.zeros((3, 2)), np.zeros((2, 3), dtype=np.float32), frozen, np.array([object()])):
        with pytest.raises(StateMismatchError):
            await load(tmp_path, into={"a": wrong})


async def test_loops_in_a_target_are_refused(tmp_path: Path) -> None:
    """A target that contains itself, or has keys no state can have, is named."""
    make_checkpoint(tmp_path, {"a": 1}, 1)
    loop: dict[str, Any] = {}
    loop["a"] = loop
    with pytest.raises(UsageError, match="contains itself"):
        await load(tmp_path, into=loop)
    with pytest.raises(UsageError, match="key"):
        await load(tmp_path, into={object(): 1})


async def test_ties_across_targets(tmp_path: Path) -> None:
    """A tensor saved once is filled into each living one that wants it, and restored for others."""
    shared = torch.randn(1 << 19)
    make_checkpoint(tmp_path, {"a": {"w": shared}, "b": {"w": shared}, "c": {"w": shared}}, 1)

    class Keeper:
        got: Any = None

        def load_state_dict(self, state: Any) -> None:
            self.got = state

    one, keeper = torch.zeros(1 << 19), Keeper()
    strided = torch.zeros(1 << 19, 2)[:, 0]
    await load(tmp_path, into={"a": {"w": one}, "b": {"w": strided}, "c": keeper})
    assert torch.equal(one, shared)
    assert torch.equal(strided, shared)
    assert torch.equal(keeper.got["w"], shared)
    assert keeper.got["w"].data_ptr() != one.data_ptr()
    await load(tmp_path, into={"a": {"w": one}, "b": {"w": one}})
    assert torch.equal(one, shared)


def damage(folder: Path, pattern: str, at: int) -> None:
    """Flip a bit of the first file that matches."""
    file = sorted(folder.glob(pattern))[0]
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


async def test_a_bad_piece_never_reaches_a_living_tensor(tmp_path: Path) -> None:
    """Bytes that fail their check are not copied; `touched` names what had been filled by then."""
    piece = 1 << 20
    state = {"a": {"w": torch.ones(4 * piece)}, "b": {"w": torch.ones(piece)}}
    made = make_checkpoint(tmp_path, state, 1)
    damage(made.folder, "b-*", -1)
    into = {"a": {"w": torch.zeros(4 * piece)}, "b": {"w": torch.zeros(piece)}}
    with pytest.raises(CorruptCheckpointError) as caught:
        await load(tmp_path, into=into, budget=2 * piece)
    assert caught.value.path == "b/w"
    assert str(caught.value.file).startswith("b-")
    assert not bool((into["b"]["w"][-piece // 4 :] != 0).any())
    for path in ("a/w", "b/w"):
        touched = bool(into[path[0]]["w"].any())
        assert touched == (path in caught.value.touched)


async def test_atomic_touches_nothing(tmp_path: Path) -> None:
    """With `atomic=True` everything is verified first: damage anywhere leaves all as it was."""
    piece = 1 << 20
    state = {"a": {"w": torch.ones(piece)}, "b": {"w": torch.ones(piece)}, "c": {"x": torch.ones(piece)}}
    made = make_checkpoint(tmp_path, state, 1)

    class Keeper:
        calls = 0

        def load_state_dict(self, state: Any) -> None:
            type(self).calls += 1

    into: dict[str, Any] = {"a": {"w": torch.zeros(piece)}, "b": {"w": torch.zeros(piece)}, "c": Keeper()}
    await load(tmp_path, into=into, atomic=True)
    assert alike([into["a"], into["b"]], [state["a"], state["b"]])
    for pattern in ("b-*", "c-*"):
        for name in "ab":
            into[name]["w"].zero_()
        damage(made.folder, pattern, -1)
        with pytest.raises(CorruptCheckpointError) as caught:
            await load(tmp_path, into=into, atomic=True)
        assert caught.value.touched == ()
        assert not any(bool(into[name]["w"].any()) for name in "ab")
        damage(made.folder, pattern, -1)
    assert Keeper.calls == 1


async def test_meta_modules_are_told_what_to_do(tmp_path: Path) -> None:
    """A module without memory is refused with the way out in the message."""
    make_checkpoint(tmp_path, {"model": net()}, 1)
    with torch.device("meta"):
        model = net()
    with pytest.raises(StateMismatchError, match="to_empty"):
        await load(tmp_path, into={"model": model})


async def test_ordered_dicts_stay(tmp_path: Path) -> None:
    """A state dict given as a plain container is filled in place too."""
    saved = net().state_dict()
    make_checkpoint(tmp_path, {"model": saved}, 1)
    into = OrderedDict((name, torch.zeros_like(tensor)) for name, tensor in saved.items())
    await load(tmp_path, into={"model": into})
    assert alike(dict(into), dict(saved))
