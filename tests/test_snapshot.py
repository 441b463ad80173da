"""Snapshots hold what a file of `torch.save` would hold, and nothing of the original."""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiockpt.errors import SaveError, SaveErrors, UnsupportedStateError
from aiockpt.integrations._background import Background, one_of
from aiockpt.integrations._replacing import move_folder, new_file, remove, replaced
from aiockpt.integrations._snapshot import Buffers, Snapshot, take

Pair = namedtuple("Pair", "left right")  # a plain one, as in people's configs


def _quietly(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse and quantized tensors beta or deprecated
        return make()


def _conjugate() -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 1j]).conj()


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "bfloat16": lambda: torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "float8": lambda: torch.arange(4.0).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False]),
    "scalar": lambda: torch.tensor(2.5, dtype=torch.float64),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "expanded": lambda: torch.ones(1, 2).expand(4, 2),
    "conjugate": _conjugate,
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "not a leaf": lambda: torch.arange(3.0, requires_grad=True) * 2,
    "sparse": lambda: _quietly(lambda: torch.eye(3).to_sparse()),
    "sparse rows": lambda: _quietly(lambda: torch.eye(3).to_sparse_csr()),
    "inference": lambda: _inference(),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(3.0)


def through_torch(value: Any) -> Any:
    """What stock torch makes of it."""
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")  # torch, of its own beta state
def test_every_kind_of_tensor_comes_back_as_from_a_file(name: str) -> None:
    """Dtype, shape, strides, class, gradient flag, values."""
    tensor = TENSORS[name]()
    ours = Snapshot(tensor, Buffers()).rebuild()
    stock = through_torch(tensor)
    assert type(ours) is type(stock)
    assert (ours.dtype, ours.shape, ours.layout) == (stock.dtype, stock.shape, stock.layout)
    assert ours.requires_grad == stock.requires_grad
    if ours.layout is torch.strided:
        assert ours.stride() == stock.stride()
    with torch.no_grad():
        left, right = (t.to_dense() if t.layout is not torch.strided else t for t in (ours, stock))
        assert torch.equal(
            left.float() if name == "float8" else left, right.float() if name == "float8" else right
        )


def test_a_tensor_without_memory_stays_one() -> None:
    """The meta device has nothing to copy."""
    made = Snapshot(torch.empty(1 << 30, device="meta"), Buffers()).rebuild()
    assert made.device.type == "meta"
    assert made.shape == (1 << 30,)


def test_containers_and_objects_keep_their_class_and_identity() -> None:
    """What is one object in the state is one in the copy; nothing of it is the original."""
    shared = {"a": [1, 2]}
    state = {
        "ordered": OrderedDict(x=1),
        "pair": Pair(torch.ones(2), shared),
        "again": shared,
        "array": np.arange(4),
        "where": Path("runs"),
        3: {None: {1, 2}},
    }
    made = Snapshot(state, Buffers()).rebuild()
    shared["a"].append(3)
    state["array"][0] = 9  # type: ignore[index]
    assert isinstance(made["ordered"], OrderedDict)
    assert isinstance(made["pair"], Pair)
    assert made["pair"].right is made["again"]
    assert made["again"] == {"a": [1, 2]}
    assert made["array"].tolist() == [0, 1, 2, 3]
    assert made["where"] == Path("runs")
    assert made[3] == {None: {1, 2}}


def test_tied_weights_are_copied_once() -> None:
    """As views of one memory, whichever way they look at it."""
    weight = torch.arange(12.0)
    buffers = Buffers()
    snapshot = Snapshot({"a": weight, "b": weight.view(3, 4), "c": weight[3:]}, buffers)
    made = snapshot.rebuild()
    made["a"].zero_()
    assert not made["b"].any()
    assert not made["c"].any()
    del made
    snapshot.release()
    assert buffers.take(48).nbytes() == 48


def test_memory_that_fits_is_used_again() -> None:
    """The second snapshot writes into the memory of the first; what no longer fits is freed."""
    buffers = Buffers()
    first = Snapshot([torch.ones(100), torch.ones(7)], buffers)
    addresses = {tensor.data_ptr() for tensor in first.rebuild()}
    first.release()
    second = Snapshot([torch.zeros(100), torch.zeros(50)], buffers)
    made = second.rebuild()
    assert made[0].data_ptr() in addresses
    assert not made[0].any()
    second.release()
    assert set(buffers._idle) == {400, 200}


def test_what_pickle_refuses_is_named() -> None:
    """Every innermost value, with its path, and where it was to go."""
    bad = {"fine": torch.ones(2), "deep": [0, {"lock": threading.Lock()}], "call": lambda: 0}
    with pytest.raises(UnsupportedStateError) as raised:
        take(bad, Buffers(), file="x.ckpt")
    assert [path for path, _ in raised.value.problems] == ["deep/1/lock", "call"]
    assert raised.value.file == "x.ckpt"


# The queue behind


def test_errors_become_ours_and_are_handed_out_once() -> None:
    """One as it is, several as a group; later calls run all the same."""
    queue = Background("test", max_pending=3)
    done: list[int] = []

    def fail(error: BaseException) -> None:
        raise error

    queue.save("a", lambda: fail(KeyError("key")))
    queue.save("b", lambda: fail(OSError(28, "full", "elsewhere")))
    queue.then("c", lambda: done.append(1))
    errors = queue.finish()
    assert done == [1]
    assert queue.finish() == []
    assert isinstance(errors[0], SaveError)
    assert "saving a failed: KeyError" in str(errors[0])
    assert errors[1].filename == "elsewhere"  # type: ignore[attr-defined]
    assert "saving b" in str(errors[1])
    assert isinstance(one_of(errors), SaveErrors)
    assert one_of(errors[:1]) is errors[0]


def test_a_forked_child_knows_that_the_queue_is_not_its_own() -> None:
    """It would wait for a thread that it does not have."""
    queue = Background("test", max_pending=1)
    queue.save("a", lambda: None)
    queue.finish()
    child = os.fork()
    if child == 0:
        queue.settle()  # returns at once
        os._exit(0 if queue.foreign else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not queue.foreign


# Files and folders


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    """Whatever ends the body."""
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), new_file(str(path)) as aside:
        Path(aside).write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    """The old one is aside for an instant only, under a name that no one takes for a checkpoint."""
    for name in ("new", "old"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / name).write_text(name)
    move_folder(str(tmp_path / "new"), str(tmp_path / "old"))
    assert os.listdir(tmp_path) == ["old"]
    assert os.listdir(tmp_path / "old" / "deep") == ["new"]
    assert os.path.basename(replaced("x/checkpoint-3")) == ".checkpoint-3.replaced"
    remove(str(tmp_path / "old"))
    remove(str(tmp_path / "old"))
    assert os.listdir(tmp_path) == []
