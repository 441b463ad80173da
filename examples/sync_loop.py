"""Train on handwritten digits in a plain loop, without asyncio, and save on the way.

Run it again with more steps and it goes on where it stopped; interrupt it with Ctrl-C and
nothing that was staged is lost.

    python examples/sync_loop.py --run runs/digits --steps 200 --every 20
    python examples/sync_loop.py --run runs/digits --steps 300 --every 20
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import aiockpt.sync

BATCH = 64


class Training:
    """Everything one run is made of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        digits = load_digits()
        self.images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
        self.labels = torch.tensor(digits.target)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        # With the random state saved, a resumed run draws the batches the first one would have drawn.
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim, "rng": aiockpt.RngState()}

    def train_one(self) -> float:
        """One optimizer step on a random batch; returns the loss."""
        rows = torch.randint(len(self.labels), (BATCH,))
        loss = torch.nn.functional.cross_entropy(self.model(self.images[rows]), self.labels[rows])
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self) -> float:
        """The share of all digits it reads correctly."""
        return float((self.model(self.images).argmax(1) == self.labels).float().mean())


def train(run: Path, steps: int, every: int) -> None:
    """Train to `steps`, resuming from what `run` holds, with a save after each `every` steps."""
    training = Training()
    handles: list[aiockpt.sync.PendingSave] = []
    with aiockpt.sync.Saver(run) as saver:
        restored = saver.restore(training.state)
        first = restored.step + 1 if restored else 1
        print(f"resumed from step {restored.step}" if restored else "started anew")
        for step in range(first, steps + 1):
            loss = training.train_one()
            if step % every == 0 or step == steps:
                # Blocks until the weights may change again; they are written while we train on.
                handles.append(saver.stage(training.state, step=step, metrics={"loss": loss}))
                print(f"step {step}: loss {loss:.4f}, staged")
    for handle in handles:
        checkpoint = handle.result()
        print(f"step {checkpoint.step}: durable, {checkpoint.nbytes} bytes")
    print(f"trained {max(0, steps + 1 - first)} steps, accuracy {training.accuracy():.3f}")


def positive(text: str) -> int:
    """A number of steps from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main() -> int:
    """Parse the command line and train; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/digits-sync"), help="the run's folder")
    parser.add_argument("--steps", type=positive, default=200, help="train up to this step")
    parser.add_argument("--every", type=positive, default=20, help="save after so many steps")
    args = parser.parse_args()
    try:
        train(args.run, args.steps, args.every)
    except aiockpt.CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run again to go on from the newest save", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
