"""Many ranks save and load through DCP; stock torch is the oracle in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests import dcp_ranks, dcp_states

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    dcp_ranks.start_server()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The mixed state as 1, 2 and 4 ranks saved it, each in a run of its own, with torch's beside."""
    runs = {}
    for world in (1, 2, 4):
        runs[world] = tmp_path_factory.mktemp(f"world{world}")
        run = runs[world] / "run"
        results = dcp_ranks.run(world, dcp_states.save_mixed, run, 100, runs[world] / "stock")
        assert results[0].step == 100
        assert results[1:] == [None] * (world - 1)
    return runs


@pytest.mark.parametrize("world", [1, 2, 4])
async def test_what_ranks_saved_loads_as_one_nested_state(world: int, saved: dict[int, Path]) -> None:
    """`aiockpt.load` gives whole tensors in their places, objects and lists; every byte verifies."""
    run = saved[world] / "run"
    state: Any = await aiockpt.load(run)
    assert list(state) == ["model", "plain", "layers", "pair", "step", "betas", "epochs", "nothing"]
    for name, tensor in dcp_states.full_tensors().items():
        assert torch.equal(state["model"][name], tensor), name
        assert state["model"][name].dtype == tensor.dtype
    assert torch.equal(state["plain"], torch.full((3, 2), 7.0))
    assert [sorted(layer) for layer in state["layers"]] == [["w"], ["name", "w"]]
    assert torch.equal(state["layers"][0]["w"], torch.ones(2))
    assert torch.equal(state["pair"][0], torch.arange(3))
    assert (state["pair"][1], state["step"], state["nothing"]) == ("text", 12, None)
    assert (state["betas"], state["epochs"]) == ((0.9, 0.999), [1, 2, 3])
    async with aiockpt.Catalog(run) as catalog:
        newest = await catalog.latest()
        assert newest is not None
        assert newest.metrics == {"loss": 0.5}
        report = await catalog.verify(newest)
        assert report.tensors == len(dcp_states.full_tensors()) + 4
    assert dcp_ranks.visible(run) == ["step-00000100"]


@pytest.mark.parametrize("read", [1, 2, 4])
def test_any_world_size_reads_what_any_other_wrote(read: int, saved: dict[int, Path]) -> None:
    """Sharded the same and another way, each rank gets what torch's own reader would give it."""
    pairs = [(where / "run", where / "stock") for where in saved.values()]
    results = dcp_ranks.run(read, dcp_states.load_all_mixed, pairs, 100)
    assert results == [[]] * read


def test_older_sharded_tensors(tmp_path: Path) -> None:
    """`ShardedTensor` is saved and loaded in any sharding, and as a plain tensor."""
    assert dcp_ranks.run(2, dcp_states.reshard_older, tmp_path / "run") == [[], []]


async def test_two_groups_save_into_one_run_at_once(tmp_path: Path) -> None:
    """Neither disturbs the other, nor sweeps away what it is about to commit."""
    run = tmp_path / "run"
    assert dcp_ranks.run(4, dcp_states.in_two_groups, run) == [[]] * 4
    async with aiockpt.Catalog(run) as catalog:
        assert await catalog.steps() == tuple(range(6))


async def test_replicas_are_stored_once(tmp_path: Path) -> None:
    """Of a tensor that is replicated over half of the mesh, one copy is written."""
    run = tmp_path / "run"
    assert dcp_ranks.run(4, dcp_states.hybrid, run) == [[]] * 4
    newest = await aiockpt.latest(run)
    assert newest is not None
    files = [p for p in (run / newest.name).iterdir() if p.suffix == ".safetensors"]
    assert sum(p.stat().st_size - 4096 for p in files) == 7 * 3 * 4


@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp2", "ddp"])
def test_training_goes_on_as_if_nothing_had_happened(fsdp: bool, tmp_path: Path) -> None:
    """Model and optimizer, saved on 4 ranks and loaded on 2, train on as with torch's own storage."""
    run, stock = tmp_path / "run", tmp_path / "stock"
    expected = dcp_ranks.run(4, dcp_states.train_and_save, run, stock, fsdp)[0]
    for result in dcp_ranks.run(2, dcp_states.load_and_train, run, stock, fsdp):
        for ours, theirs, kept in zip(result["ours"], result["stock"], expected, strict=True):
            assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, kept)


async def test_what_a_saver_wrote_is_read_by_ranks(tmp_path: Path) -> None:
    """A checkpoint of `Saver` is one for DCP, sharded over any number of ranks."""
    model = torch.nn.Linear(9, 11)
    async with aiockpt.Saver(tmp_path / "run") as saver:
        await saver.save({"model": model, "extra": {"w": torch.arange(10.0)}}, step=3)
    names = {"model/weight": (11, 9), "model/bias": (11,), "extra/w": (10,)}
    for world in (2, 4):
        for found in dcp_ranks.run(world, dcp_states.load_sharded, tmp_path / "run", 3, names):
            assert torch.equal(found["model/weight"], model.weight)
            assert torch.equal(found["model/bias"], model.bias)
            assert torch.equal(found["extra/w"], torch.arange(10.0))
