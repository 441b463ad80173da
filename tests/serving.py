"""What the tests of reloading share: a model that tells its version, quick commits, damage."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aiockpt import Reloader
from tests.make_checkpoint import make_checkpoint
from tests.savers import until

POLL = 0.01
"""Seconds between two looks, for tests."""


class Net(nn.Module):
    """Every value of its state is one number: the version it is of."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one = nn.Linear(width, 3)
        self.two = nn.Linear(3, 2, bias=False)
        self.register_buffer("scale", torch.ones(5))

    def versions(self) -> set[float]:
        """All numbers in it: one, unless it is a mix."""
        return {float(v) for t in self.state_dict().values() for v in t.unique()}


def weights(number: float, width: int = 4) -> dict[str, torch.Tensor]:
    """The state of a `Net` of a version."""
    return {name: torch.full_like(t, number) for name, t in Net(width).state_dict().items()}


def commit(run: Path, step: int, model: Any = None, **more: Any) -> Path:
    """Commit a step at one instant; returns its folder. `model` is a state, by default of version `step`."""
    state = {"model": weights(step) if model is None else model, "optim": {"m": torch.ones(50)}, **more}
    aside = run.parent / "aside"
    made = make_checkpoint(aside, state, step)
    run.mkdir(parents=True, exist_ok=True)
    if (run / made.folder.name).exists():
        shutil.rmtree(run / made.folder.name)
    made.folder.rename(run / made.folder.name)
    return run / made.folder.name


def shard(folder: Path) -> Path:
    """The data file with the model."""
    return next(folder.glob("model*.safetensors"))


def served(reloader: Reloader[Any]) -> int | None:
    """The step that serves now."""
    found = reloader.status()["serving"]
    return None if found is None else int(found["step"])


async def answer(reloader: Reloader[Net]) -> tuple[int, set[float]]:
    """One request: the step it was told, and the versions it saw, before and after a while."""
    async with reloader.use() as live:
        seen = live.model.versions()
        await asyncio.sleep(0)
        return live.step, seen | live.model.versions()


async def waited(done: Callable[[], object], seconds: float = 20) -> None:
    """Until something is so."""
    async with asyncio.timeout(seconds):
        await until(lambda: bool(done()))


def leases(run: Path) -> dict[int, int]:
    """How many leases there are, by step."""
    found: dict[int, int] = {}
    for name in os.listdir(run / "leases") if (run / "leases").exists() else ():
        if name.startswith("step-"):
            step = int(name.split(".")[0].removeprefix("step-"))
            found[step] = found.get(step, 0) + 1
    return found
