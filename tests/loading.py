"""What the tests of loading share: states, models, a count of what was read."""

from __future__ import annotations

import gc
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aiockpt._manifest import PIECE_BYTES
from aiockpt.testing import FaultyStore
from tests.leaks import descriptors, threads
from tests.make_checkpoint import alike

MIB = 1 << 20
SMALL = 2 * PIECE_BYTES
"""The smallest budget a load takes."""


def mixed() -> dict[str, Any]:
    """A state with large, small, tied, strided and empty tensors among plain values."""
    big = torch.randn(1 << 20)
    return {
        "model": OrderedDict(w=big, tied=big, small=torch.arange(7), empty=torch.empty(0, 3)),
        "optim": {"state": {0: {"step": torch.tensor(3.0), "avg": torch.randn(300, 1000).t()}}},
        "epoch": 4,
        "trainer": {"best": float("nan"), "names": ("a", 1, None), "deep": {"x": [1, {"y": 2}]}},
        "loose": torch.ones(2, dtype=torch.bool),
    }


def data_read(store: FaultyStore) -> int:
    """Bytes of data sections that were read (headers are read from offset 0)."""
    found = 0
    for operation in store.operations:
        match = re.fullmatch(r"source\.read_into .*@(\d+)\+(\d+)", operation)
        found += int(match[2]) if match and int(match[1]) else 0
    return found


def quiet() -> None:
    """Nothing of a load is left: no file open, no thread inside anything."""
    gc.collect()
    assert not [name for name in descriptors().values() if "safetensors" in name]
    assert all(thread.daemon for thread in threads())


def flip(folder: Path, name: str, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 4
    (folder / name).write_bytes(data)


def net(width: int = 5) -> nn.Sequential:
    """A small model with buffers of several dtypes."""
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def trained(model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    """An optimizer of the model that has made two steps."""
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same state, bit by bit."""
    return alike(dict(one.state_dict()), dict(other.state_dict()))


def hook(module: nn.Module, function: Callable[..., None]) -> None:
    """Register what runs before a state dict is loaded."""
    register: Any = module.register_load_state_dict_pre_hook
    register(function)
