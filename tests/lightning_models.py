"""What the tests of the Lightning integration train, and how they look at plugins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

WARNINGS = [
    # lightning.pytorch asks torch in a way that torch 2.13 deprecates, in each fit.
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    # lightning.pytorch, when a fit goes on in the folder of an earlier one, as these tests do on purpose.
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
]


class Net(LightningModule):
    """Two linear layers; the learning rate and Adam make every resumed step depend on the state."""

    def __init__(self, width: int = 8, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def data() -> DataLoader[Any]:
    """Six batches, the same every time and in the same order."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trainer(folder: Path, *, epochs: int, plugin: Any = None, callbacks: Any = (), **options: Any) -> Trainer:
    """A quiet Trainer on the CPU."""
    return Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        plugins=[plugin] if plugin is not None else [],
        callbacks=list(callbacks),
        **options,
    )


def state(value: float = 0.0, **more: Any) -> dict[str, Any]:
    """A small checkpoint as Lightning makes them."""
    weight = torch.full((4, 4), value)
    return {"epoch": 0, "global_step": int(value), "state_dict": {"weight": weight}, **more}


class Gate(CheckpointIO):
    """A CheckpointIO that waits to be let through, and tells what it was asked."""

    def __init__(self) -> None:
        self.inner = TorchCheckpointIO()
        self.open = threading.Event()
        self.calls: list[tuple[str, str]] = []
        self.options: list[Any] = []
        self.fail: list[BaseException] = []
        self.torn_down = 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert self.open.wait(20)
        self.calls.append(("save", Path(path).name))
        self.options.append(storage_options)
        if self.fail:
            raise self.fail.pop(0)
        self.inner.save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        self.calls.append(("load", Path(path).name))
        return self.inner.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", Path(path).name))
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.torn_down += 1
