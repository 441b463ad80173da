"""Train on handwritten digits with Lightning; checkpoints are written while the next epoch runs.

Run it again with more epochs and it goes on from its last checkpoint.

    python examples/lightning_fit.py --run runs/digits-lightning --epochs 3
    python examples/lightning_fit.py --run runs/digits-lightning --epochs 5
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from aiockpt import CheckpointError
from aiockpt.integrations.lightning import AioCheckpointIO


class Digits(LightningModule):
    """A small classifier of 8x8 pictures."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """The loss of one batch."""
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(run: Path, epochs: int) -> None:
    """Train to `epochs`, resuming from `last.ckpt` if `run` has one."""
    seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    batches = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=64)
    keeper = ModelCheckpoint(run, "{epoch}", monitor="loss", save_top_k=2, save_last=True)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AioCheckpointIO()],
        callbacks=[keeper],
    )
    last = run / "last.ckpt"
    print(f"resuming from {last}" if last.exists() else "started anew")
    trainer.fit(Digits(), batches, ckpt_path=last if last.exists() else None)
    # `fit` returned: everything is on disk. The files are Lightning's own, and any of its tools reads them.
    best = Digits.load_from_checkpoint(keeper.best_model_path)
    print(f"epoch {trainer.current_epoch}, loss {trainer.callback_metrics['loss']:.4f}")
    print(
        f"best: {Path(keeper.best_model_path).name}, kept: {', '.join(sorted(p.name for p in run.iterdir()))}"
    )
    with torch.no_grad():
        right = best.net(images).argmax(1) == torch.tensor(digits.target)
    print(f"accuracy of the best {right.float().mean():.3f}")


def main() -> int:
    """Parse the command line and train; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--run", type=Path, default=Path("runs/digits-lightning"), help="folder of checkpoints"
    )
    parser.add_argument("--epochs", type=int, default=3, help="train up to this epoch")
    args = parser.parse_args()
    try:
        train(args.run, args.epochs)
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
