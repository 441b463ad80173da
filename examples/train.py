"""Train a small network on handwritten digits, crash in the middle of a save, and resume.

Run without arguments it plays three acts and proves that nothing was lost:

1. a training run to the end;
2. the same run again, killed with SIGKILL while a save is being written;
3. the killed run resumed from its newest valid step, to the end.

The weights of acts 1 and 3 must be bit-identical; the exit status is 1 if they are not.

    python examples/train.py                        # all three acts
    python examples/train.py --out runs/digits      # just train (and resume) in a folder
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import aiockpt

STEPS, EVERY, BATCH = 120, 20, 64


@dataclass
class Position:
    """Where the run is in its data; saved like everything else that has a state dict."""

    order: torch.Tensor
    at: int = 0

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved."""
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved position."""
        self.order, self.at = state["order"], state["at"]


class Digits:
    """Model, optimizer, scheduler, random states and data position of one run."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        bunch = load_digits()
        self.images = torch.tensor(bunch.data / 16.0, dtype=torch.float32)
        self.labels = torch.tensor(bunch.target)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 1024),
            torch.nn.BatchNorm1d(1024),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(1024, 1024),
            torch.nn.ReLU(),
            torch.nn.Linear(1024, 10),
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, T_max=steps)
        self.position = Position(torch.randperm(len(self.labels)))
        self.rng = aiockpt.RngState()

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {
            "model": self.model,
            "optim": self.optim,
            "scheduler": self.scheduler,
            "position": self.position,
            "rng": self.rng,
        }

    def train_one(self) -> float:
        """One optimizer step on the next batch."""
        if self.position.at + BATCH > len(self.labels):
            self.position.order, self.position.at = torch.randperm(len(self.labels)), 0
        rows = self.position.order[self.position.at : self.position.at + BATCH]
        self.position.at += BATCH
        noisy = self.images[rows] + torch.tensor(np.random.normal(0, 0.01, (BATCH, 64)), dtype=torch.float32)
        loss = torch.nn.functional.cross_entropy(self.model(noisy), self.labels[rows])
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.scheduler.step()
        return loss.item()

    def digest(self) -> str:
        """A fingerprint of every weight and buffer, bit by bit."""
        sha = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            sha.update(name.encode())
            sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


async def train(out: Path, steps: int, every: int, die_in_save: int | None) -> None:
    """Train to `steps`, resuming from what `out` holds; dies in the save of step `die_in_save`."""
    run = Digits(steps)
    handles: list[aiockpt.PendingSave] = []
    async with aiockpt.Saver(out / "ckpt") as saver:
        restored = await saver.restore(run.state())
        first = restored.step + 1 if restored else 1
        loss = restored.metrics["loss"] if restored else float("nan")  # the run may have been complete
        print(f"resumed from step {restored.step}" if restored else "starting fresh", flush=True)
        for step in range(first, steps + 1):
            loss = run.train_one()
            if step % every == 0:
                # The weights may change as soon as this returns; the write goes on meanwhile.
                pending = await saver.stage(run.state(), step=step, metrics={"loss": loss})
                handles.append(pending)
                if step == die_in_save:
                    await kill_in_write(pending)
            await asyncio.sleep(0)  # a real trainer awaits its rollouts here
    report(handles)
    result = {"digest": run.digest(), "loss": loss, "step": steps}
    (out / "final.json").write_text(json.dumps(result) + "\n")


async def kill_in_write(pending: aiockpt.PendingSave) -> None:
    """Die as a machine does: at once, with the save half written."""
    async for event in pending.events():
        if event.written < event.total and event.phase < aiockpt.Phase.WRITTEN:
            print(
                f"SIGKILL in the save of step {event.step}: "
                f"{event.written} of {event.total} bytes were written",
                flush=True,
            )
            os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("the save was over before the process could be killed in it")


def report(handles: list[aiockpt.PendingSave]) -> None:
    """Print what each save cost."""
    print(f"{'step':>6} {'blocked ms':>11} {'staged ms':>10} {'durable ms':>11} {'MB':>7} {'MB/s':>7}")
    for pending in handles:
        seconds = pending.seconds
        staged, durable = seconds[aiockpt.Phase.STAGED], seconds[aiockpt.Phase.COMMITTED]
        size = pending.progress.total / 1e6
        blocked = pending.capture_seconds
        print(
            f"{pending.step:>6} {blocked * 1e3:>11.2f} {staged * 1e3:>10.1f} {durable * 1e3:>11.1f} "
            f"{size:>7.1f} {size / durable:>7.0f}"
        )
    print("(blocked: the loop stood still for the capture; staged, durable: since the call)", flush=True)


def act(title: str, out: Path, *extra: str) -> int:
    """Run this file in a process of its own; returns its exit status."""
    print(f"\n== {title}", flush=True)
    command = [sys.executable, __file__, "--out", str(out), *extra]
    return subprocess.run(command, check=False).returncode


def demo(steps: int, every: int) -> int:
    """The three acts; returns the exit status."""
    common = ["--steps", str(steps), "--every", str(every)]
    kill_at = every * (steps // every - 1)
    with tempfile.TemporaryDirectory(prefix="aiockpt-demo-") as folder:
        whole, crashed = Path(folder, "whole"), Path(folder, "crashed")
        if act("1. to the end", whole, *common):
            return 1
        status = act(f"2. killed in the save of step {kill_at}", crashed, *common, "--die", str(kill_at))
        if status != -signal.SIGKILL:
            print(f"the second run was to be killed, but ended with status {status}")
            return 1
        if act("3. resumed", crashed, *common):
            return 1
        first, second = (json.loads((path / "final.json").read_text()) for path in (whole, crashed))
    same = first["digest"] == second["digest"]
    print(f"\nuninterrupted: {first['digest'][:32]}  loss {first['loss']:.6f}")
    print(f"resumed:       {second['digest'][:32]}  loss {second['loss']:.6f}")
    print("bit-identical: nothing was lost" if same else "NOT IDENTICAL: something was lost")
    return 0 if same else 1


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="train in this folder instead of playing the demo")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--die", type=int, help="SIGKILL yourself in the save of this step")
    args = parser.parse_args()
    torch.set_num_threads(1)  # noqa: TID251  (one order of additions, hence one result)
    if args.out is None:
        return demo(args.steps, args.every)
    args.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(train(args.out, args.steps, args.every, args.die))
    return 0


if __name__ == "__main__":
    sys.exit(main())
