"""See in TensorBoard what saving costs, beside the loss it was saved with.

python examples/tensorboard_costs.py --run runs/digits --logs runs/logs
tensorboard --logdir runs/logs
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import torch
from sklearn.datasets import load_digits

import aiockpt
from aiockpt.integrations.tensorboard import TensorBoard
from aiockpt.policies.when import EverySteps


async def train(run: Path, logs: Path, steps: int, every: int) -> None:
    """Train on handwritten digits; every few steps a save, whose costs go to the event file."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3)
    when = EverySteps(every)
    async with aiockpt.Saver(run, when=when, listeners=[TensorBoard(logs)], progress=True) as saver:
        for step in range(1, steps + 1):
            rows = torch.randint(len(labels), (64,))
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optim.zero_grad()
            loss.backward()
            optim.step()
            state = {"model": model, "optim": optim}
            await saver.stage_if_due(state, step=step, metrics={"loss": loss.item()}, if_busy="wait")
        await saver.drain()
        stats = saver.stats
    print(f"{stats.committed} checkpoints, {stats.nbytes / 1e6:.1f} MB")
    print(
        f"training stood still for {stats.total_blocked_seconds:.3f} s of {stats.total_write_seconds:.3f} s"
    )
    print(f"see it with: tensorboard --logdir {logs}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/digits"), help="folder of the checkpoints")
    parser.add_argument("--logs", type=Path, default=Path("runs/logs"), help="folder of the event file")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    asyncio.run(train(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
