"""AioCheckpointIO under a real Trainer: callbacks, resuming, failures, a second fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from aiockpt.errors import PreviousSaveError, StorageError
from aiockpt.integrations.lightning.for_lightning import AioCheckpointIO
from tests.lightning_models import WARNINGS, Gate, Net, data, trainer

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of a model's parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def fit(
    folder: Path, *, epochs: int, plugin: Any, resume: str | None = None, **options: Any
) -> tuple[Net, Any]:
    """Train with a checkpoint an epoch; returns the model and the callback."""
    torch.manual_seed(0)
    model = Net()
    keeper = ModelCheckpoint(
        folder / "ckpt", "{epoch}", monitor="loss", mode="max", save_top_k=2, save_last=True, **options
    )
    trainer(folder, epochs=epochs, plugin=plugin, callbacks=[keeper]).fit(model, data(), ckpt_path=resume)
    return model, keeper


@pytest.mark.parametrize("format", ["torch", "aiockpt"])
def test_a_resumed_fit_ends_where_an_uninterrupted_one_does(tmp_path: Path, format: Any) -> None:
    """Bit for bit, with the best ones and the last one kept as by the stock plugin."""
    straight, expected = fit(tmp_path / "stock", epochs=4, plugin=TorchCheckpointIO())
    plugin = AioCheckpointIO(format=format)
    fit(tmp_path / "ours", epochs=2, plugin=plugin)
    model, keeper = fit(tmp_path / "ours", epochs=4, plugin=plugin, resume="last")
    assert all(map(torch.equal, weights(model), weights(straight)))
    assert sorted(os.listdir(tmp_path / "ours/ckpt")) == sorted(os.listdir(tmp_path / "stock/ckpt"))
    assert Path(keeper.best_model_path).name == Path(expected.best_model_path).name
    if format == "torch":
        best = Net.load_from_checkpoint(keeper.best_model_path, weights_only=False)
        other = Net.load_from_checkpoint(expected.best_model_path, weights_only=False)
        assert best.hparams["width"] == 8
        assert all(map(torch.equal, weights(best), weights(other)))


def test_stock_lightning_resumes_ours_and_ours_resumes_its(tmp_path: Path) -> None:
    """The file is Lightning's own, in both directions."""
    straight, _ = fit(tmp_path / "straight", epochs=3, plugin=TorchCheckpointIO())
    for first, second in ((AioCheckpointIO(), None), (None, AioCheckpointIO())):
        folder = tmp_path / ("ours-first" if first else "stock-first")
        fit(folder, epochs=1, plugin=first)
        model, _ = fit(folder, epochs=3, plugin=second, resume=str(folder / "ckpt" / "last.ckpt"))
        assert all(map(torch.equal, weights(model), weights(straight)))


def test_the_old_best_goes_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    """With save_top_k=1 there is a whole checkpoint at every moment; the stock plugin removes first."""
    seen: dict[str, list[tuple[str, str]]] = {}
    for name, kind in (("ours", AioCheckpointIO), ("stock", AsyncCheckpointIO)):
        gate = Gate()
        gate.open.set()
        if name == "stock":
            gate.open.clear()  # as a slow disk would; ours would wait for it, as it should
        keeper = ModelCheckpoint(tmp_path / name, "{epoch}", save_top_k=1)
        opener = _OpenAtTheEnd(gate)
        trainer(tmp_path, epochs=3, plugin=kind(gate), callbacks=[keeper, opener]).fit(Net(), data())
        seen[name] = gate.calls
        names = os.listdir(tmp_path / name)
        assert names == ["epoch=2.ckpt"] if name == "ours" else len(names) == 3
    assert seen["ours"] == [
        ("save", "epoch=0.ckpt"),
        ("save", "epoch=1.ckpt"),
        ("remove", "epoch=0.ckpt"),
        ("save", "epoch=2.ckpt"),
        ("remove", "epoch=1.ckpt"),
    ]
    assert seen["stock"][:2] == [("remove", "epoch=0.ckpt"), ("remove", "epoch=1.ckpt")]


class _OpenAtTheEnd(Callback):
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.gate.open.set()


def test_a_failed_write_stops_the_fit_once_and_the_next_fit_works(tmp_path: Path) -> None:
    """The next save raises, having been accepted; teardown and a second fit are quiet."""
    gate = Gate()
    gate.open.set()
    gate.fail.append(OSError(28, "No space left on device"))
    plugin = AioCheckpointIO(gate)
    with pytest.raises(PreviousSaveError, match="No space left"):
        fit(tmp_path, epochs=3, plugin=plugin)
    model, keeper = fit(tmp_path, epochs=3, plugin=plugin)
    assert Path(keeper.last_model_path).exists()
    assert gate.torn_down == 2
    del model


def test_the_last_failure_is_raised_by_the_end_of_the_fit(tmp_path: Path) -> None:
    """No later save would tell."""
    gate = Gate()
    plugin = AioCheckpointIO(gate)
    gate.fail.append(OSError(28, "No space left on device"))
    keeper = ModelCheckpoint(tmp_path, save_top_k=1)
    opened = trainer(tmp_path, epochs=1, plugin=plugin, callbacks=[keeper, _OpenAtTheEnd(gate)])
    with pytest.raises(StorageError, match="No space left"):
        opened.fit(Net(), data())


def test_the_reason_of_a_failing_fit_comes_before_a_lost_checkpoint(tmp_path: Path) -> None:
    """The training's own error goes through unchanged, the checkpoint's as a note on it."""
    gate = Gate()
    gate.open.set()
    gate.fail.append(OSError(28, "No space left on device"))

    class Breaks(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1:
                raise ZeroDivisionError("of the user's")

    keeper = ModelCheckpoint(tmp_path, save_top_k=1)
    plugin = AioCheckpointIO(gate)
    with pytest.raises(ZeroDivisionError) as raised:
        trainer(tmp_path, epochs=2, plugin=plugin, callbacks=[keeper, Breaks()]).fit(Net(), data())
    assert any("No space left" in note for note in raised.value.__notes__)


def test_a_fit_that_is_tried_again_while_an_error_is_handled(tmp_path: Path) -> None:
    """Only the Trainer's own failure quietens the end; not one that the program is recovering from."""
    gate = Gate()
    gate.fail.append(OSError(28, "No space left on device"))
    keeper = ModelCheckpoint(tmp_path, save_top_k=1)
    second = trainer(
        tmp_path, epochs=1, plugin=AioCheckpointIO(gate), callbacks=[keeper, _OpenAtTheEnd(gate)]
    )
    try:
        raise MemoryError("the first try")
    except MemoryError:
        with pytest.raises(StorageError, match="No space left"):
            second.fit(Net(), data())


def test_a_test_run_after_the_fit_loads_the_best(tmp_path: Path) -> None:
    """`ckpt_path="best"` and `save_checkpoint` outside of a fit, with the same plugin."""
    plugin = AioCheckpointIO()

    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("tested", self.training_loss(batch))

        def training_loss(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    keeper = ModelCheckpoint(tmp_path / "ckpt", monitor="loss")
    runner = trainer(tmp_path, epochs=2, plugin=plugin, callbacks=[keeper])
    runner.fit(Tested(), data())
    runner.test(dataloaders=data(), ckpt_path="best", verbose=False, weights_only=False)
    runner.save_checkpoint(tmp_path / "by-hand.ckpt")
    plugin.teardown()
    assert "optimizer_states" in torch.load(tmp_path / "by-hand.ckpt", weights_only=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_the_older_package_name(tmp_path: Path) -> None:
    """`pytorch_lightning` has a Trainer and base classes of its own."""
    import pytorch_lightning as pl

    from aiockpt.integrations.lightning.for_pytorch_lightning import AioCheckpointIO as Older

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    keeper = pl.callbacks.ModelCheckpoint(tmp_path / "ckpt", save_last=True)
    runner = pl.Trainer(
        default_root_dir=tmp_path,
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[Older()],
        callbacks=[keeper],
    )
    runner.fit(Small(), data())
    loaded = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=False)
    assert loaded["global_step"] == 12


def test_under_fabric(tmp_path: Path) -> None:
    """Fabric saves through the same contract; it has no end of its own, `teardown` is the user's."""
    plugin = AioCheckpointIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = torch.nn.Linear(2, 2)
    fabric.save(tmp_path / "a.ckpt", {"model": model, "step": 3})
    kept = weights(model)
    with torch.no_grad():
        model.weight.zero_()
    state = {"model": model, "step": 0}
    fabric.load(tmp_path / "a.ckpt", state)
    plugin.teardown()
    assert state["step"] == 3
    assert all(map(torch.equal, weights(model), kept))
