"""AioCheckpointIO as a CheckpointIO: order, errors, files; what the stock plugin gets wrong."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import aiockpt
from aiockpt.errors import (
    PreviousSaveError,
    SaveError,
    SaveErrors,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from aiockpt.integrations.lightning.for_lightning import AioCheckpointIO
from tests.lightning_models import WARNINGS, Gate, state

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A writer that is closed at first, and is never left closed."""
    made = Gate()
    yield made
    made.open.set()


def value(path: Path) -> float:
    """What `state` was called with, as stock torch reads it."""
    loaded = torch.load(path, weights_only=True)
    return float(loaded["state_dict"]["weight"][0, 0])


# Files


def test_a_plain_file_that_stock_code_reads(tmp_path: Path) -> None:
    """The same content as Lightning's own plugin writes, tensors that share memory included."""
    shared = torch.arange(8.0)
    checkpoint = state(3, views=[shared[:4], shared[4:], shared], callbacks={"a": (1, None, float("inf"))})
    ours, stock = AioCheckpointIO(), TorchCheckpointIO()
    ours.save_checkpoint(checkpoint, tmp_path / "deep" / "ours.ckpt")
    stock.save_checkpoint(checkpoint, tmp_path / "stock.ckpt")
    ours.teardown()
    ours_read = stock.load_checkpoint(tmp_path / "deep" / "ours.ckpt", weights_only=True)
    stock_read = ours.load_checkpoint(tmp_path / "stock.ckpt", weights_only=True)
    assert ours_read["callbacks"] == stock_read["callbacks"] == checkpoint["callbacks"]
    assert torch.equal(ours_read["state_dict"]["weight"], stock_read["state_dict"]["weight"])
    one, other, whole = ours_read["views"]
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert torch.equal(whole, shared)
    assert os.path.getsize(tmp_path / "deep" / "ours.ckpt") == pytest.approx(
        os.path.getsize(tmp_path / "stock.ckpt"), rel=0.2
    )
    assert os.listdir(tmp_path / "deep") == ["ours.ckpt"]


def test_the_state_may_change_once_save_checkpoint_has_returned(tmp_path: Path, gate: Gate) -> None:
    """Tensors, lists and objects are those of the call, however late they are written."""
    model = torch.nn.Linear(2, 2)
    history = [1]
    checkpoint = state(1, model=model, history=history)
    plugin = AioCheckpointIO(gate)
    plugin.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    with torch.no_grad():
        checkpoint["state_dict"]["weight"].fill_(9)
        kept = model.weight.clone()
        model.weight.zero_()
    history.append(2)
    gate.open.set()
    plugin.teardown()
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert loaded["state_dict"]["weight"].unique().tolist() == [1.0]
    assert loaded["history"] == [1]
    assert torch.equal(loaded["model"].weight, kept)


def test_memory_is_used_again_without_mixing_saves(tmp_path: Path) -> None:
    """Each of many files holds its own save, the tensors of which change size now and then."""
    plugin = AioCheckpointIO(max_pending=2)
    for step in range(12):
        plugin.save_checkpoint(
            state(step, more=torch.full((step % 3 + 1, 7), step)), tmp_path / f"{step}.ckpt"
        )
    plugin.teardown()
    for step in range(12):
        loaded = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)
        assert loaded["more"].unique().tolist() == [step]
        assert value(tmp_path / f"{step}.ckpt") == step


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file under a name is always a whole one: no fsync, no new file."""
    plugin = AioCheckpointIO()
    plugin.save_checkpoint(state(1), tmp_path / "last.ckpt")
    plugin.teardown()
    real = os.fsync

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    plugin.save_checkpoint(state(2), tmp_path / "last.ckpt")
    with pytest.raises(StorageError, match=r"last\.ckpt.*Input/output error") as raised:
        plugin.teardown()
    monkeypatch.setattr(os, "fsync", real)
    assert raised.value.errno == 5
    assert value(tmp_path / "last.ckpt") == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_file_is_seen_only_after_it_was_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, then name, then folder: the order that survives a loss of power."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        events.append("folder" if name == tmp_path.name else "file")
        fsync(fd)

    def note_replace(source: str, target: str) -> None:
        events.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    plugin = AioCheckpointIO()
    plugin.save_checkpoint(state(1), tmp_path / "a.ckpt")
    plugin.teardown()
    assert events == ["file", "name", "folder"]


def test_files_links_and_folders_are_removed(tmp_path: Path) -> None:
    """Lightning has checkpoints of all kinds; what is not there is no error."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "shard").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    plugin = AioCheckpointIO()
    for name in ("link", "file", "nothing", "folder"):
        plugin.remove_checkpoint(tmp_path / name)
    plugin.teardown()
    assert os.listdir(tmp_path) == []


def test_urls_go_through_lightnings_own_code(tmp_path: Path) -> None:
    """Any file system of fsspec; here one in memory, and local paths in a URL."""
    plugin = AioCheckpointIO()
    for base in ("memory://runs", f"file://{tmp_path}"):
        plugin.save_checkpoint(state(4), f"{base}/a.ckpt")
        assert plugin.load_checkpoint(f"{base}/a.ckpt")["global_step"] == 4
        plugin.remove_checkpoint(f"{base}/a.ckpt")
        with pytest.raises(FileNotFoundError):
            plugin.load_checkpoint(f"{base}/a.ckpt")
    plugin.teardown()


def test_weights_only_is_passed_on(tmp_path: Path) -> None:
    """What only a pickle can hold is loaded only when asked for."""
    plugin = AioCheckpointIO()
    plugin.save_checkpoint(state(1, where=tmp_path), tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)["where"] == tmp_path
    plugin.teardown()


def test_a_value_that_cannot_be_pickled_is_named_at_the_call(tmp_path: Path) -> None:
    """Every path; nothing is written, and the plugin goes on."""
    plugin = AioCheckpointIO()
    bad = state(1, hyper_parameters={"act": lambda x: x, "deep": [1, {"lock": threading.Lock()}]})
    with pytest.raises(UnsupportedStateError) as raised:
        plugin.save_checkpoint(bad, tmp_path / "a.ckpt")
    assert [path for path, _ in raised.value.problems] == [
        "hyper_parameters/act",
        "hyper_parameters/deep/1/lock",
    ]
    plugin.save_checkpoint(state(2), tmp_path / "b.ckpt")
    plugin.teardown()
    assert os.listdir(tmp_path) == ["b.ckpt"]


# Order


def test_save_remove_and_load_keep_the_order_of_the_calls(tmp_path: Path, gate: Gate) -> None:
    """A load waits; a removal comes after the save of what it removes."""
    plugin = AioCheckpointIO(gate, max_pending=2)
    plugin.save_checkpoint(state(1), tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    plugin.save_checkpoint(state(2), tmp_path / "b.ckpt")
    threading.Timer(0.1, gate.open.set).start()
    assert plugin.load_checkpoint(tmp_path / "b.ckpt")["global_step"] == 2
    assert gate.calls == [("save", "a.ckpt"), ("remove", "a.ckpt"), ("save", "b.ckpt"), ("load", "b.ckpt")]
    plugin.teardown()
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_the_stock_plugin_resurrects_a_removed_file(tmp_path: Path, gate: Gate) -> None:
    """Its removal overtakes the save: the file appears afterwards, and stays."""
    plugin = AsyncCheckpointIO(gate)
    plugin.save_checkpoint(state(1), tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    gate.open.set()
    plugin.teardown()
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_what_stays_when_the_save_before_a_removal_failed(tmp_path: Path, gate: Gate) -> None:
    """The old checkpoint may be the only one: it goes when a newer one is there."""
    gate.open.set()
    plugin = AioCheckpointIO(gate, on_failure="log")
    plugin.save_checkpoint(state(1), tmp_path / "old.ckpt")
    plugin.load_checkpoint(tmp_path / "old.ckpt")
    gate.fail.append(OSError(28, "No space left on device"))
    plugin.save_checkpoint(state(2), tmp_path / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert plugin.load_checkpoint(tmp_path / "old.ckpt")["global_step"] == 1
    plugin.save_checkpoint(state(3), tmp_path / "newer.ckpt")
    with pytest.raises(StorageError, match="No space left"):
        plugin.teardown()
    assert os.listdir(tmp_path) == ["newer.ckpt"]


def test_the_queue_is_bounded(tmp_path: Path, gate: Gate) -> None:
    """A second save waits for the first before it copies anything; the stock plugin takes any number."""
    plugin = AioCheckpointIO(gate)
    plugin.save_checkpoint(state(1), tmp_path / "1.ckpt")
    second = threading.Thread(target=plugin.save_checkpoint, args=(state(2), tmp_path / "2.ckpt"))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.open.set()
    second.join(20)
    assert not second.is_alive()
    plugin.teardown()
    assert gate.calls == [("save", "1.ckpt"), ("save", "2.ckpt")]


def test_the_stock_queue_has_no_bound(tmp_path: Path, gate: Gate) -> None:
    """Eight copies of the state at once, none written."""
    plugin = AsyncCheckpointIO(gate)
    for step in range(8):
        plugin.save_checkpoint(state(step), tmp_path / f"{step}.ckpt")
    assert gate.calls == []
    gate.open.set()
    plugin.teardown()
    assert len(gate.calls) == 8


# Errors


def test_an_error_is_raised_once_by_the_next_save_which_goes_on(tmp_path: Path, gate: Gate) -> None:
    """With the earlier error as its cause; later saves and the end are quiet."""
    gate.open.set()
    gate.fail.append(OSError(28, "No space left on device", str(tmp_path / "1.ckpt")))
    plugin = AioCheckpointIO(gate)
    plugin.save_checkpoint(state(1), tmp_path / "1.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(PreviousSaveError, match=r"2\.ckpt was accepted") as raised:
        plugin.save_checkpoint(state(2), tmp_path / "2.ckpt")
    assert isinstance(raised.value.__cause__, StorageError)
    assert raised.value.__cause__.errno == 28
    plugin.save_checkpoint(state(3), tmp_path / "3.ckpt")
    plugin.teardown()
    assert sorted(os.listdir(tmp_path)) == ["2.ckpt", "3.ckpt"]


def test_the_stock_plugin_raises_one_error_for_ever(tmp_path: Path, gate: Gate) -> None:
    """Each later save says it again although it was written, and so does each end."""
    gate.fail.append(OSError(28, "No space left on device"))
    plugin = AsyncCheckpointIO(gate)
    plugin.save_checkpoint(state(1), tmp_path / "1.ckpt")
    gate.open.set()
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            plugin.teardown()
    with pytest.raises(OSError, match="No space"):
        plugin.save_checkpoint(state(2), tmp_path / "2.ckpt")
    with pytest.raises(OSError, match="No space"):
        plugin.teardown()
    assert os.listdir(tmp_path) == ["2.ckpt"]


def test_several_errors_come_as_a_group_at_the_end(tmp_path: Path, gate: Gate) -> None:
    """None of them is lost; each has its type, its text and its traceback."""
    gate.fail += [ValueError("first"), OSError(5, "second")]
    plugin = AioCheckpointIO(gate, max_pending=2)
    plugin.save_checkpoint(state(1), tmp_path / "1.ckpt")
    plugin.save_checkpoint(state(2), tmp_path / "2.ckpt")
    gate.open.set()
    with pytest.raises(SaveErrors) as raised:
        plugin.teardown()
    first, second = raised.value.exceptions
    assert isinstance(first, SaveError)
    assert isinstance(first.__cause__, ValueError)
    assert first.__cause__.__traceback__ is not None
    assert isinstance(second, StorageError)
    plugin.teardown()


def test_an_error_does_not_keep_the_copy_of_the_state(tmp_path: Path, gate: Gate) -> None:
    """A failed save of gigabytes must not hold them until somebody hears of it."""
    held: list[Any] = []

    def refuse(checkpoint: dict[str, Any], *_: Any, **__: Any) -> None:
        import weakref

        held.append(weakref.ref(checkpoint["state_dict"]["weight"]))
        raise OSError(28, "No space left on device")

    gate.save_checkpoint = refuse  # type: ignore[method-assign]
    plugin = AioCheckpointIO(gate)
    plugin.save_checkpoint(state(1), tmp_path / "1.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "1.ckpt")
    assert held[0]() is None
    with pytest.raises(StorageError):
        plugin.teardown()


def test_teardown_ends_the_wrapped_plugin_and_can_be_repeated(tmp_path: Path, gate: Gate) -> None:
    """The stock plugin never tears down what it wraps."""
    gate.open.set()
    plugin = AioCheckpointIO(gate)
    for step in (1, 2):
        plugin.save_checkpoint(state(step), tmp_path / f"{step}.ckpt")
        plugin.teardown()
        assert value(tmp_path / f"{step}.ckpt") == step
        assert gate.torn_down == step
    stock = AsyncCheckpointIO(gate)
    stock.teardown()
    assert gate.torn_down == 2


# Options


def test_storage_options_are_for_a_wrapped_plugin(tmp_path: Path, gate: Gate) -> None:
    """Alone it has no use for them, and says so at the call."""
    alone = AioCheckpointIO()
    with pytest.raises(TypeError, match="storage_options"):
        alone.save_checkpoint(state(1), tmp_path / "a.ckpt", storage_options={"tier": "cold"})
    alone.teardown()
    gate.open.set()
    wrapping = AioCheckpointIO(gate)
    wrapping.save_checkpoint(state(1), tmp_path / "a.ckpt", storage_options={"tier": "cold"})
    wrapping.teardown()
    assert gate.options == [{"tier": "cold"}]


@pytest.mark.parametrize(
    "options",
    [
        {"format": "zip"},
        {"max_pending": 0},
        {"on_failure": "ignore"},
        {"format": "aiockpt", "checkpoint_io": TorchCheckpointIO()},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """When the plugin is made."""
    with pytest.raises(UsageError):
        AioCheckpointIO(**options)


def test_a_strategy_may_offer_its_own_writer(gate: Gate) -> None:
    """Lightning's stock plugin is not needed, any other is wrapped; a chain passes it on."""
    alone = AioCheckpointIO()
    alone.checkpoint_io = TorchCheckpointIO()
    assert alone.checkpoint_io is None
    alone.checkpoint_io = gate
    assert alone.checkpoint_io is gate
    chain = AioCheckpointIO(AsyncCheckpointIO())
    chain.checkpoint_io = gate
    assert chain.checkpoint_io.checkpoint_io is gate


def test_a_plugin_travels_with_a_pickled_trainer(tmp_path: Path) -> None:
    """Launchers that spawn processes pickle it; the copy works."""
    plugin = AioCheckpointIO(max_pending=3, on_failure="log")
    plugin.save_checkpoint(state(1), tmp_path / "a.ckpt")
    copy = pickle.loads(pickle.dumps(plugin))
    copy.save_checkpoint(state(2), tmp_path / "b.ckpt")
    copy.teardown()
    plugin.teardown()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


# The format of aiockpt


def test_the_folder_format_holds_the_same_values(tmp_path: Path) -> None:
    """Verified safetensors, no pickle; saved again, the new content takes the place of the old."""
    plugin = AioCheckpointIO(format="aiockpt")
    callbacks = {"ModelCheckpoint{'monitor': 'loss'}": {"best": torch.tensor(1.5), "kth": None}}
    for step in (5, 9, 9, 2):
        checkpoint = state(step, callbacks=callbacks, optimizer_states=[{"state": {0: {"step": 1.0}}}])
        plugin.save_checkpoint(checkpoint, tmp_path / "last.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "last.ckpt")
    plugin.teardown()
    assert loaded["global_step"] == 2
    assert loaded["state_dict"]["weight"].unique().tolist() == [2.0]
    assert loaded["callbacks"] == callbacks
    assert loaded["optimizer_states"] == [{"state": {0: {"step": 1.0}}}]
    with aiockpt.sync.Catalog(tmp_path / "last.ckpt") as catalog:
        assert len(catalog.steps()) == 1
    plugin.remove_checkpoint(tmp_path / "last.ckpt")
    plugin.teardown()
    assert os.listdir(tmp_path) == []


def test_the_folder_format_names_the_hyper_parameter_it_cannot_hold(tmp_path: Path) -> None:
    """A class of the user's, and a module that would come back as a dict."""
    plugin = AioCheckpointIO(format="aiockpt")
    bad = state(1, hyper_parameters={"lr": 0.1, "loss": torch.nn.MSELoss(), "data": {"source": Gate}})
    with pytest.raises(UnsupportedStateError) as raised:
        plugin.save_checkpoint(bad, tmp_path / "a.ckpt")
    assert {path for path, _ in raised.value.problems} == {
        "hyper_parameters/loss",
        "hyper_parameters/data/source",
    }
    assert "save_hyperparameters(ignore=" in str(raised.value)
    plugin.teardown()
    assert os.listdir(tmp_path) == []


def test_either_format_loads_what_the_other_wrote(tmp_path: Path) -> None:
    """The choice is about writing only."""
    folder, file = AioCheckpointIO(format="aiockpt"), AioCheckpointIO()
    folder.save_checkpoint(state(1), tmp_path / "folder.ckpt")
    file.save_checkpoint(state(2), tmp_path / "file.ckpt")
    folder.teardown()
    file.teardown()
    assert file.load_checkpoint(tmp_path / "folder.ckpt", map_location=lambda s, _: s)["global_step"] == 1
    assert folder.load_checkpoint(tmp_path / "file.ckpt", map_location="cpu")["global_step"] == 2


# Packages, forks, exits


@pytest.mark.parametrize(
    ("imported", "package"),
    [
        (["lightning.pytorch"], "lightning"),
        (["pytorch_lightning"], "pytorch_lightning"),
        (["lightning.pytorch", "pytorch_lightning"], "lightning"),
        ([], "lightning"),
    ],
)
def test_the_class_is_of_the_package_in_use(
    imported: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each package only takes plugins of its own base class."""
    names = ("lightning.pytorch", "pytorch_lightning")
    importlib.import_module("aiockpt.integrations.lightning.for_pytorch_lightning")
    loaded = {name: importlib.import_module(name) for name in names}
    for name in names:
        if name in imported:
            monkeypatch.setitem(sys.modules, name, loaded[name])
        else:
            monkeypatch.delitem(sys.modules, name)
    found = importlib.import_module("aiockpt.integrations.lightning").AioCheckpointIO
    base = next(kind for kind in found.__mro__ if kind.__name__ == "_WrappingCheckpointIO")
    assert base.__module__.startswith(f"{package}.")


def test_unknown_names_are_refused() -> None:
    """As by any module."""
    module = importlib.import_module("aiockpt.integrations.lightning")
    with pytest.raises(AttributeError, match="Nothing"):
        module.Nothing  # noqa: B018


def test_a_program_that_just_ends_loses_no_checkpoint(tmp_path: Path) -> None:
    """No teardown, an interpreter on its way out: what was accepted is written."""
    code = """
import sys, time, torch
from aiockpt.integrations._background import Background
def write():
    time.sleep(1.5)
    torch.save({"weight": torch.ones(4)}, sys.argv[1])
Background("test", max_pending=1).save(sys.argv[1], write)
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "a.ckpt")],
        timeout=50,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert torch.load(tmp_path / "a.ckpt")["weight"].tolist() == [1, 1, 1, 1]
