"""States on many ranks, and what ranks do with them in the tests of the DCP adapters."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from aiockpt.integrations.dcp import AioStorageReader, AioStorageWriter

warnings.filterwarnings("ignore", module="torch")

Placements = list[Any]


def full_tensors() -> dict[str, torch.Tensor]:
    """What the state holds, by name; the same everywhere."""
    return {
        "even": torch.arange(8 * 3, dtype=torch.float32).reshape(8, 3),
        "uneven": torch.arange(5 * 4, dtype=torch.float64).reshape(5, 4) + 0.5,
        "few": torch.arange(2 * 3, dtype=torch.int64).reshape(2, 3),
        "columns": torch.arange(6 * 7, dtype=torch.bfloat16).reshape(6, 7),
        "grid": torch.arange(7 * 9, dtype=torch.float32).reshape(7, 9),
        "none": torch.empty(0, 3),
        "same": torch.arange(5.0),
        "point": torch.tensor(2.5),
    }


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks in a row, and in a grid if there are four."""
    world = dist.get_world_size()
    shape = (2, 2) if world == 4 else (1, world)
    return init_device_mesh("cpu", (world,)), init_device_mesh("cpu", shape)


def sharded(tensors: dict[str, torch.Tensor], *, other_way: bool = False) -> dict[str, DTensor]:
    """The tensors, sharded in all kinds of ways."""
    row, grid = meshes()
    first, second = (1, 0) if other_way else (0, 1)
    placed: dict[str, tuple[DeviceMesh, Placements]] = {
        "even": (row, [Shard(first)]),
        "uneven": (row, [Shard(first)]),
        "few": (row, [Shard(first)]),
        "columns": (row, [Shard(second)]),
        "grid": (grid, [Shard(first), Shard(second)]),
        "none": (row, [Shard(0)]),
        "same": (row, [Shard(0)] if other_way else [Replicate()]),
        "point": (row, [Replicate()]),
    }
    return {name: distribute_tensor(tensors[name], *place) for name, place in placed.items()}


def mixed_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A nested state around the tensors."""
    return {
        "model": sharded(tensors),
        "plain": torch.full((3, 2), 7.0),
        "layers": [{"w": torch.ones(2)}, {"w": torch.zeros(2), "name": "b"}],
        "pair": (torch.arange(3), "text"),
        "step": 12,
        "betas": (0.9, 0.999),
        "epochs": [1, 2, 3],
        "nothing": None,
    }


def zeros() -> dict[str, torch.Tensor]:
    """The tensors with nothing in them."""
    return {name: torch.zeros_like(tensor) - 1 for name, tensor in full_tensors().items()}


def wrong(found: dict[str, Any]) -> list[str]:
    """Names of tensors whose content, gathered from all ranks, is not what was saved."""
    bad = []
    for name, tensor in full_tensors().items():
        mine = found[name]
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        if not torch.equal(whole, tensor):
            bad.append(name)
    return bad


def save_mixed(run: Path, step: int, stock: Path | None = None) -> Any:
    """Save the mixed state; with torch's own writer as well, if wanted."""
    writer = AioStorageWriter(metrics={"loss": 0.5})
    state = mixed_state(full_tensors())
    save(state, checkpoint_id=run / f"step-{step:08d}", storage_writer=writer)
    if stock is not None:
        save(state, checkpoint_id=stock)
    return writer.checkpoint


def load_all_mixed(pairs: list[tuple[Path, Path]], step: int) -> list[str]:
    """Load several checkpoints of the mixed state."""
    return [f"{run}: {what}" for run, stock in pairs for what in load_mixed(run, step, stock)]


def load_mixed(run: Path, step: int, stock: Path | None = None) -> list[str]:
    """Load it into tensors that are sharded in the same and in other ways; what came out wrong."""
    bad = []
    for other_way in (False, True):
        state: dict[str, Any] = {"model": sharded(zeros(), other_way=other_way), "step": 0, "pair": ()}
        state["layers"] = [{"w": torch.zeros(2)}, {"w": torch.ones(2), "name": ""}]
        load(state, storage_reader=AioStorageReader(run / f"step-{step:08d}"))
        bad += wrong(state["model"])
        if state["step"] != 12 or state["pair"][1] != "text" or state["layers"][1]["name"] != "b":
            bad.append("an object")
        if not torch.equal(state["pair"][0], torch.arange(3)) or state["layers"][1]["w"].any():
            bad.append("a tensor beside the model")
        if stock is not None:
            theirs: dict[str, Any] = {"model": sharded(zeros(), other_way=other_way)}
            load(theirs, checkpoint_id=stock)
            bad += [f"stock {name}" for name in wrong(theirs["model"])]
            for name, tensor in theirs["model"].items():
                if not torch.equal(tensor.to_local(), state["model"][name].to_local()):
                    bad.append(f"local part of {name}")
    return bad


# ---------------------------------------------------------------- FSDP2 and DDP


def small_model(seed: int) -> torch.nn.Module:
    """Uneven everywhere."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.LayerNorm(13), torch.nn.Linear(13, 5))


def trained(seed: int, *, fsdp: bool, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model after some steps of AdamW."""
    model = small_model(seed)
    if fsdp:
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The same on every rank."""
    torch.manual_seed(5)
    for _ in range(steps):
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters, gathered."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


def train_and_save(run: Path, stock: Path, fsdp: bool) -> list[torch.Tensor]:
    """Train, save with both writers; the parameters one step later."""
    model, optimizer = trained(1, fsdp=fsdp)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    save(state, checkpoint_id=run / "step-00000002", storage_writer=AioStorageWriter())
    save(state, checkpoint_id=stock)
    train(model, optimizer, 1)
    return whole(model)


def load_and_train(run: Path, stock: Path, fsdp: bool) -> dict[str, list[torch.Tensor]]:
    """Load by both readers into strange models, and train one step."""
    after = {}
    for name in ("ours", "stock"):
        model, optimizer = trained(99, fsdp=fsdp, steps=1)
        model_state, optim_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optim": optim_state}
        if name == "ours":
            load(state, storage_reader=AioStorageReader(run / "step-00000002"))
        else:
            load(state, checkpoint_id=stock)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        train(model, optimizer, 1)
        after[name] = whole(model)
    return after


# ---------------------------------------------------------------- torch's older sharded tensors


def sharding_specs() -> list[Any]:
    """By rows, by columns, several shards a rank, shards of all sizes; for a tensor of [10, 20]."""
    by_rows = ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1"])
    by_columns = ChunkShardingSpec(dim=1, placements=["rank:0", "rank:1"])
    in_turns = ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1", "rank:1", "rank:0"])
    cuts = [0, 1, 4, 9, 10]
    uneven = [
        ShardMetadata(shard_offsets=[a, 0], shard_sizes=[b - a, 20], placement=f"rank:{i % 2}")
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    return [by_rows, by_columns, in_turns, EnumerableShardingSpec(shards=uneven)]


def reshard_older(run: Path) -> list[str]:
    """Save with each sharding, load with each other one and as a plain tensor; what came out wrong."""
    bad = []
    specs = sharding_specs()
    for step, spec in enumerate(specs):
        saved = sharded_tensor.rand(spec, 10, 20)
        save({"w": saved}, checkpoint_id=run / f"step-{step:08d}", storage_writer=AioStorageWriter())
        expected = torch.zeros(10, 20) if dist.get_rank() == 0 else None
        saved.gather(out=expected)
        plain: Any = {"w": torch.zeros(10, 20)}
        load(plain, storage_reader=AioStorageReader(run / f"step-{step:08d}"))
        whole = [expected]
        dist.broadcast_object_list(whole)
        if not torch.equal(plain["w"], whole[0]):  # type: ignore[arg-type]
            bad.append(f"{step} as a plain tensor")
        backwards = {"w": sharded_tensor.zeros(spec, 10, 20)}
        save(
            {"w": plain["w"]}, checkpoint_id=run / f"step-{100 + step:08d}", storage_writer=AioStorageWriter()
        )
        load(backwards, storage_reader=AioStorageReader(run / f"step-{100 + step:08d}"))
        for shard, source in zip(backwards["w"].local_shards(), saved.local_shards(), strict=True):
            if not torch.equal(shard.tensor, source.tensor):
                bad.append(f"{step} from a plain tensor")
        for i, other in enumerate(specs):
            target = sharded_tensor.zeros(other, 10, 20)
            load({"w": target}, storage_reader=AioStorageReader(run / f"step-{step:08d}"))
            found = torch.zeros(10, 20) if dist.get_rank() == 0 else None
            target.gather(out=found)
            if found is not None and not torch.equal(found, whole[0]):  # type: ignore[arg-type]
                bad.append(f"{step} as {i}")
    return bad


def in_two_groups(run: Path) -> list[str]:
    """Two groups of two save into one run at the same time, a step each, and load what they saved."""
    mine = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][mine]
    bad = []
    for again in range(3):
        step = 2 * again + mine
        where = run / f"step-{step:08d}"
        state = {"w": torch.full((3,), float(step)), "n": step}
        save(state, checkpoint_id=where, storage_writer=AioStorageWriter(), process_group=group)
        target: dict[str, Any] = {"w": torch.zeros(3), "n": -1}
        load(target, storage_reader=AioStorageReader(where), process_group=group)
        if target["n"] != step or not torch.equal(target["w"], state["w"]):  # type: ignore[arg-type]
            bad.append(f"step {step}")
    return bad


def hybrid(run: Path) -> list[str]:
    """Replicated over one dimension of the mesh, sharded over the other (HSDP): stored once."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3)
    state = {"w": distribute_tensor(full, mesh, [Replicate(), Shard(0)])}
    save(state, checkpoint_id=run / "step-00000001", storage_writer=AioStorageWriter())
    target = {"w": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1), Replicate()])}
    load(target, storage_reader=AioStorageReader(run / "step-00000001"))
    return [] if torch.equal(target["w"].full_tensor(), full) else ["w"]


def load_sharded(run: Path, step: int, names: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Load some float32 tensors of any checkpoint, sharded over all ranks; gathered."""
    row, _ = meshes()
    targets: dict[str, Any] = {}
    for path, shape in names.items():
        *above, name = path.split("/")
        box = targets
        for key in above:
            box = box.setdefault(key, {})
        box[name] = distribute_tensor(torch.zeros(shape), row, [Shard(0)])
    load(targets, storage_reader=AioStorageReader(run / f"step-{step:08d}"))
    found = {}
    for path in names:
        box = targets
        for key in path.split("/"):
            box = box[key]
        found[path] = box.full_tensor()  # type: ignore[attr-defined]
    return found
