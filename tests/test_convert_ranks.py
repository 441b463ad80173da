"""Conversions of what many ranks wrote, and for many ranks to read; stock torch is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import aiockpt
from tests import dcp_ranks, dcp_states

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    dcp_ranks.start_server()


@pytest.fixture(scope="module", params=[1, 2, 4])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row-wise, column-wise, in a grid, uneven, empty, 0-d: saved by ranks, with our writer and torch's."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    dcp_ranks.run(request.param, dcp_states.save_mixed, folder / "run", 100, folder / "stock")
    return folder


def stock_load(folder: Path) -> list[str]:
    """Load a folder with torch's own reader into sharded tensors; names of what came out wrong."""
    bad = []
    for other_way in (False, True):
        model: dict[str, Any] = dcp_states.sharded(dcp_states.zeros(), other_way=other_way)
        state = {"model": model, "step": 0}
        load(state, checkpoint_id=folder)
        bad += dcp_states.wrong(model) + (["step"] if state["step"] != 12 else [])
    return bad


@pytest.mark.parametrize("source", ["run", "stock"])
async def test_what_ranks_wrote_becomes_whole(saved: Path, source: str) -> None:
    """Every tensor is put together from its shards, by byte ranges."""
    done = await aiockpt.convert(saved / source, saved / f"{source}.pt", to="torch")
    assert done.source == ("aiockpt" if source == "run" else "dcp")
    state = torch.load(saved / f"{source}.pt", weights_only=True)
    for name, tensor in dcp_states.full_tensors().items():
        assert state["model"][name].dtype == tensor.dtype
        assert torch.equal(state["model"][name], tensor), name
    assert (state["step"], state["betas"], state["layers"][1]["name"]) == (12, (0.9, 0.999), "b")
    assert torch.equal(state["pair"][0], torch.arange(3))
    await aiockpt.convert(saved / source, saved / f"{source}-one", to="aiockpt")
    loaded: Any = await aiockpt.load(saved / f"{source}-one")
    assert torch.equal(loaded["model"]["grid"], dcp_states.full_tensors()["grid"])


async def test_ranks_load_what_was_converted(saved: Path) -> None:
    """Two ranks read it with stock `dcp.load`, sharded in two ways."""
    await aiockpt.convert(saved / "run", saved / "dcp", to="dcp")
    assert dcp_ranks.run(2, stock_load, saved / "dcp") == [[], []]
