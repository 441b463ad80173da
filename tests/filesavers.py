"""What the tests of `FileSaver` share: savefuns that a worker process can import, looks at what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from aiockpt import FileSaver

LARGE = 70_000
"""float32 elements that are more than a capture copies at the call."""


def target(number: float) -> dict[str, Any]:
    """A nested target with what usually is in one; each tensor tells its number."""
    large = torch.full((LARGE,), float(number))
    return {
        "model": {"w": large, "b": torch.full((3, 2), float(number)), "tied": large},
        "half": torch.full((LARGE,), float(number), dtype=torch.bfloat16),
        "steps": [1, (2, "x"), {"n": int(number)}],
    }


def fill(state: dict[str, Any], number: int) -> None:
    """Change a `target` in place, its tensors past every version counter."""
    for tensor in (state["model"]["w"], state["model"]["b"], state["half"]):
        tensor.data.fill_(number)
    state["steps"][2]["n"] = number


def number_in(state: dict[str, Any]) -> float:
    """The number of a `target`; all its parts agree on it."""
    parts = [state["model"]["w"], state["model"]["b"], state["half"], state["model"]["tied"]]
    found = {float(value) for part in parts for value in part.float().unique()} | {state["steps"][2]["n"]}
    assert len(found) == 1, found
    return found.pop()


def read(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote, by torch's own reader."""
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def names(folder: Path) -> list[str]:
    """All that lies in a folder, hidden things too."""
    return sorted(os.listdir(folder))


def children() -> list[psutil.Process]:
    """Processes below this one that have not been reaped."""
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def worker_pid(saver: FileSaver) -> int:
    """The process of a saver with `worker="process"`."""
    pid: int = saver._saving.worker.pid  # type: ignore[attr-defined]
    return pid


class Gate:
    """A savefun that waits inside until it is let go."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        self.calls: list[str] = []
        self.most = 0
        self._now = 0

    def __call__(self, path: str, target: Any) -> None:
        self.calls.append(Path(path).name)
        self._now += 1
        self.most = max(self.most, self._now)
        self.inside.set()
        assert self.go.wait(30)
        torch.save(target, path)
        self._now -= 1


# Savefuns for a process


def write_json(path: str, target: Any, *, indent: int | None = None, extra: str = "") -> None:
    """Path first; says who wrote it."""
    record = {"pid": os.getpid(), "main": threading.current_thread() is threading.main_thread()}
    Path(path).write_text(json.dumps(record | {"target": target, "extra": extra}, indent=indent))


def write_folder(path: str, target: dict[str, Any]) -> None:
    """A folder with a file an entry, one of them deeper."""
    os.makedirs(os.path.join(path, "deep"))
    for name, value in target.items():
        torch.save(value, os.path.join(path, "deep" if name == "model" else "", f"{name}.pt"))


class OddError(Exception):
    """An error that does not survive pickling."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"odd {one} {two}")


def fail(path: str, target: Any, *, how: str = "value") -> None:
    """Write a little, then fail."""
    Path(path).write_text("half of it")
    if how == "value":
        raise ValueError("the savefun says no")
    if how == "odd":
        raise OddError(1, 2)
    if how == "os":
        raise PermissionError(13, "not here", path)
    if how == "exit":
        raise SystemExit(3)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def slow(path: str, target: Any, *, mark: str, seconds: float = 60.0) -> None:
    """Say that it is inside, then take its time."""
    Path(path).write_text("half of it")
    Path(mark).touch()
    time.sleep(seconds)
    torch.save(target, path)


KEPT: list[Any] = []


async def keeper(path: str, target: Any) -> None:
    """Hold on to what it got; write what all it got looks like by now."""
    await asyncio.sleep(0)
    KEPT.append(target)
    torch.save([number_in(one) for one in KEPT], path)
