"""CheckpointWriter: one coroutine a phase, parts that travel, a finish in another process."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import aiockpt
from aiockpt import (
    CheckpointError,
    CheckpointWriter,
    CommitUnknownError,
    SaveError,
    StateMutatedError,
    StepExistsError,
    StorageError,
    TensorSpec,
    UnsupportedStateError,
    UsageError,
)
from aiockpt._gate import _Gate
from aiockpt._manifest import PartRecord
from aiockpt._memory import BlockPool
from aiockpt._names import new_save_id
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import FaultyFiles
from tests.proof import assert_exact, leftovers, litter, number_in, save, state_of, steps
from tests.savers import CANCELLATIONS, busy_threads, large, numbers, small_blocks, strike, until
from tests.stalling import Disk, a_write, before_commit, store_on


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small poisoned blocks."""
    with small_blocks():
        yield


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run with one step."""
    await save(tmp_path / "run", state_of(1), 1)
    return tmp_path / "run"


async def write_whole(writer: CheckpointWriter, state: Any) -> aiockpt.Checkpoint:
    """All phases."""
    async with writer:
        await writer.plan_state(state)
        return await writer.finish([await writer.write()])


# ---------------------------------------------------------------- phases


async def test_each_phase_does_what_it_says(run: Path) -> None:
    """plan: nothing on disk; stage: the state may change; write: all there, not visible; finish: visible."""
    state = large(1)
    async with CheckpointWriter(run, step=2, metrics={"loss": 1.5}, meta=[1], files={"a.txt": "x"}) as writer:
        plan = await writer.plan_state(state)
        assert plan.tensors == 6
        assert plan.nbytes == sum(t.nbytes for k in ("item0", "item1") for t in state[k].values())
        assert [name for name, _ in plan.files] == [f"item{i}-00000-00000.safetensors" for i in (0, 1)]
        assert litter(run) == []
        await writer.stage()
        assert _Gate.holds() == []
        for item in ("item0", "item1"):
            for tensor in state[item].values():
                tensor.fill_(9)
        part = await writer.write()
        assert isinstance(part, PartRecord)
        assert pickle.loads(pickle.dumps(part)) == part
        assert {path.name: path.stat().st_size for path in run.glob(".step*/*.safetensors")} == dict(
            plan.files
        )
        assert await steps(run) == (1,)
        checkpoint = await writer.finish([part])
        assert checkpoint is await writer.finish([part])
        assert (checkpoint.step, checkpoint.metrics, checkpoint.meta) == (2, {"loss": 1.5}, [1])
    assert await steps(run) == (1, 2)
    assert numbers(await aiockpt.load(run)) == {1.0}
    assert litter(run) == []


async def test_phases_may_be_asked_for_again(run: Path) -> None:
    """stage and write wait for the same save, from several tasks too; write stages by itself."""
    async with CheckpointWriter(run, step=2) as writer:
        await writer.plan_state(large(1))
        one, other = await asyncio.gather(writer.write(), _after(writer))
        assert one == other
        await writer.finish([one])
    assert await steps(run) == (1, 2)


async def _after(writer: CheckpointWriter) -> PartRecord:
    await until(lambda: writer._task is not None)
    await writer.stage()
    return await writer.write()


async def test_misuse_is_told(run: Path) -> None:
    """Phases out of order, twice, after the end: UsageError, and a save under way is not disturbed."""
    async with CheckpointWriter(run, step=2) as writer:
        with pytest.raises(UsageError, match="plan first"):
            await writer.stage()
        with pytest.raises(UsageError, match="plan first"):
            await writer.write()
        await writer.plan_state(large(1))
        with pytest.raises(UsageError, match="plan already"):
            await writer.plan_state(large(2))
        with pytest.raises(UsageError, match="plan already"):
            await writer.plan([], lambda _: torch.empty(0))
        assert len(_Gate.holds()) == 1  # that of the first plan
        first = asyncio.create_task(writer.stage())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="another task"):
            await writer.stage()
        await first
        part = await writer.write()
        with pytest.raises(SaveError, match="parts"):
            await writer.finish([])
    assert litter(run) == []
    phases: list[Callable[[], Coroutine[Any, Any, object]]] = [
        writer.stage,
        writer.write,
        lambda: writer.finish([part]),
        lambda: writer.plan_state({}),
    ]
    for phase in phases:
        with pytest.raises(UsageError):
            await phase()
    with pytest.raises(UsageError):
        CheckpointWriter(run, step=2, files={"../x": b""})
    assert await steps(run) == (1,)


async def test_left_before_the_end_it_removes_what_it_wrote(run: Path) -> None:
    """After any phase, with an error or without; and again, and from several tasks at once."""
    phases: list[Callable[[CheckpointWriter], Coroutine[Any, Any, object]]] = [
        lambda w: w.plan_state(large(1)),
        lambda w: w.stage(),
        lambda w: w.write(),
    ]
    for count in range(4):
        with pytest.raises(KeyError):
            async with CheckpointWriter(run, step=2) as writer:
                for phase in phases[:count]:
                    await phase(writer)
                raise KeyError
        await asyncio.gather(writer.abort(), writer.abort())
        assert litter(run) == []
        assert _Gate.holds() == []
        assert busy_threads() == []
    assert await steps(run) == (1,)


async def test_every_abort_returns_when_all_is_gone(run: Path) -> None:
    """A second abort, and the write that it ends, wait for the first one's thread."""
    disk = Disk(a_write)
    writer = CheckpointWriter(store_on(disk, run), step=2)
    await writer.plan_state(large(1))
    disk.arm()
    write = asyncio.create_task(writer.write())
    await until(disk.stalled.is_set)
    aborts = [asyncio.create_task(writer.abort()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert [task.done() for task in (*aborts, write)] == [False] * 3
    disk.heal()
    await asyncio.gather(*aborts)
    assert litter(run) == []
    with pytest.raises(SaveError, match="aborted"):
        await write


async def test_an_abort_waits_for_a_commit_that_has_begun(run: Path) -> None:
    """It removes nothing then."""
    disk = Disk(before_commit)
    async with CheckpointWriter(store_on(disk, run), step=2) as writer:
        await writer.plan_state(large(1))
        part = await writer.write()
        disk.arm()
        finish = asyncio.create_task(writer.finish([part]))
        await until(disk.stalled.is_set)
        abort = asyncio.create_task(writer.abort())
        await asyncio.sleep(0.01)
        assert not abort.done()
        disk.heal()
        await abort
        assert (await finish).step == 2
    assert await steps(run) == (1, 2)


async def test_two_writers_of_one_step(run: Path) -> None:
    """The first to finish has the name; the second is told, and leaves nothing."""
    writers = [CheckpointWriter(run, step=2) for _ in range(2)]
    parts = []
    for writer in writers:
        await writer.plan_state(state_of(2))
        parts.append(await writer.write())
    await writers[0].finish([parts[0]])
    with pytest.raises(StepExistsError) as error:
        await writers[1].finish([parts[1]])
    assert error.value.step == 2
    assert litter(run) == []
    assert number_in(await aiockpt.load(run)) == 2


async def test_a_changed_state_is_refused_at_stage(run: Path) -> None:
    """The version counter's alarm, after the last copy."""
    disk = Disk(a_write)
    state = {"w": torch.zeros(3 << 18)}
    async with CheckpointWriter(store_on(disk, run), step=2, pool=BlockPool(2 << 20)) as writer:
        await writer.plan_state(state)
        disk.arm()
        stage = asyncio.create_task(writer.stage())
        await until(disk.stalled.is_set)
        state["w"].add_(1)
        disk.heal()
        with pytest.raises(StateMutatedError) as error:
            await stage
        assert error.value.path == "w"
    assert litter(run) == []


async def test_a_commit_whose_outcome_nobody_knows(run: Path) -> None:
    """The rename was done, its flush failed: CommitUnknownError, for the step is visible."""
    files = FaultyFiles(None, "error")
    async with CheckpointWriter(LocalStore(run, files=files), step=2) as writer:
        await writer.plan_state(state_of(2))
        part = await writer.write()
        # The commit: create, sync_dir, rename, sync_dir.
        files.faults.fail_at = len(files.operations) + 3
        with pytest.raises(CommitUnknownError, match="is visible") as error:
            await writer.finish([part])
        assert files.operations[files.faults.fail_at] == f"sync_dir {run}"
        assert error.value.step == 2
        assert isinstance(error.value.__cause__, OSError)
    assert await steps(run) == (1, 2)
    assert litter(run) == []


# ---------------------------------------------------------------- items


async def test_a_plan_of_tensors_that_do_not_exist_yet(run: Path) -> None:
    """Items and a lazy `resolve`: called in a thread, beside values of the same entries."""
    called: list[tuple[str, int]] = []
    items = [
        TensorSpec("model/a", torch.float32, (600, 600)),
        TensorSpec("optim/m", torch.bfloat16, (3,)),
        TensorSpec("model/b", torch.int64, ()),
        TensorSpec('model/"x\\u002fy"', torch.float32, (0,)),
    ]

    def resolve(item: TensorSpec) -> torch.Tensor:
        called.append((item.path, threading.get_ident()))
        return torch.full(item.shape, 7, dtype=item.dtype)

    values = {"model": {"name": "net", "sub": {"n": 1}}, "optim": {"lr": 0.1}, "step": 3}
    async with CheckpointWriter(run, step=2, pool=BlockPool(2 << 20)) as writer:
        plan = await writer.plan(items, resolve, values=values)
        assert called == []
        assert plan.tensors == 4
        await writer.finish([await writer.write()])
    assert threading.get_ident() not in {thread for _, thread in called}
    found = await aiockpt.load(run)
    expected = {
        "model": {
            "name": "net",
            "sub": {"n": 1},
            "a": torch.full((600, 600), 7.0),
            "b": torch.tensor(7),
            "x/y": torch.empty(0),
        },
        "optim": {"lr": 0.1, "m": torch.full((3,), 7, dtype=torch.bfloat16)},
        "step": 3,
    }
    for key, part in expected.items():
        assert_exact(found[key], part)


async def test_items_that_cannot_be_stored_are_all_named(run: Path) -> None:
    """Two of one path, one inside another, a path that is a value, a strange dtype; then a lying resolve."""
    items = [
        TensorSpec("a", torch.float32, (1,)),
        TensorSpec("a", torch.float32, (1,)),
        TensorSpec("b", torch.quint8, (1,)),
        TensorSpec("c", torch.float32, (1,)),
        TensorSpec("c/d", torch.float32, (1,)),
        TensorSpec("v/x", torch.float32, (1,)),
    ]
    async with CheckpointWriter(run, step=2) as writer:
        with pytest.raises(UnsupportedStateError) as error:
            await writer.plan(items, lambda item: item, values={"v": 1})
        assert [path for path, _ in error.value.problems] == ["a", "b", "c", "v/x"]
        with pytest.raises(UsageError, match="dict"):
            await writer.plan([], lambda item: item, values=[1])
        with pytest.raises(UnsupportedStateError):
            await writer.plan([], lambda item: item, values={"t": torch.zeros(2)})
        await writer.plan([TensorSpec("w", torch.float32, (4,))], lambda _: torch.zeros(5))
        with pytest.raises(SaveError, match="planned were float32") as lied:
            await writer.stage()
        assert lied.value.path == "w"
    assert litter(run) == []


async def test_what_resolve_raises_is_the_cause(run: Path) -> None:
    """A foreign error of the caller's own function arrives as a SaveError around it."""
    raised = ZeroDivisionError("no tensor today")

    def resolve(_: object) -> torch.Tensor:
        raise raised

    async with CheckpointWriter(run, step=2) as writer:
        await writer.plan([TensorSpec("w", torch.float32, (4,))], resolve)
        with pytest.raises(SaveError, match="no tensor today") as error:
            await writer.write()
        assert error.value.__cause__ is raised or raised in getattr(error.value.__cause__, "exceptions", ())
    assert litter(run) == []


# ---------------------------------------------------------------- several parts, several processes


async def test_parts_of_several_writers_are_one_checkpoint(run: Path) -> None:
    """Each rank its own part and files, committed in any order; a hole or a stranger is refused."""
    for end in ("hole", "stranger", "whole"):
        save_id = new_save_id()
        writers = [CheckpointWriter(run, step=2, save_id=save_id, rank=rank, world=2) for rank in (0, 1)]
        parts = []
        for rank, writer in enumerate(writers):
            await writer.plan_state({f"rank{rank}": torch.full((3,), float(rank)), "n": 1})
            parts.append(await writer.write())
        if end == "whole":
            checkpoint = await writers[0].finish(parts[::-1])
            assert checkpoint.items == ("rank0", "rank1")
            await writers[1].abort()
            assert await steps(run) == (1, 2)
            break
        if end == "stranger":
            parts[1] = msgspec.structs.replace(parts[1], save_id=new_save_id())
        else:
            del parts[0]
        with pytest.raises(SaveError, match="part"):
            await writers[0].finish(parts)
        await writers[1].abort()
        assert await steps(run) == (1,)
        assert litter(run) == []


def _finish(run: str, save_id: str, part: bytes) -> None:
    """In a process of its own: commit what another one wrote."""

    async def main() -> None:
        async with CheckpointWriter(run, step=2, save_id=save_id, metrics={"loss": 0.5}) as writer:
            await writer.finish([pickle.loads(part)])

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.leaks("the resource tracker of multiprocessing keeps a pipe")
async def test_finish_in_another_process(run: Path) -> None:
    """Parts are plain records: a spawned process commits, while the writer's own lives on."""
    async with CheckpointWriter(run, step=2, metrics={"loss": 0.5}) as writer:
        await writer.plan_state(state_of(2))
        part = pickle.dumps(await writer.write())
        process = multiprocessing.get_context("spawn").Process(
            target=_finish, args=(str(run), writer.save_id, part)
        )
        process.start()
        await asyncio.get_running_loop().run_in_executor(None, process.join, 50)
        assert process.exitcode == 0
        assert await steps(run) == (1, 2)
    checkpoint = await aiockpt.latest(run)
    assert checkpoint is not None
    assert checkpoint.save_id == writer.save_id
    assert number_in(await aiockpt.load(run)) == 2
    assert litter(run) == []


async def test_finish_by_another_writer_in_memory(run: Path) -> None:
    """The same on a store without folders; one that comes too late is told."""
    store = MemoryStore()
    async with CheckpointWriter(store, step=2) as writer:
        await writer.plan_state(state_of(2))
        part = await writer.write()
        other = CheckpointWriter(store, step=2, save_id=writer.save_id)
        await other.finish([part])
        late = CheckpointWriter(store, step=2, save_id=writer.save_id)
        with pytest.raises(StorageError):
            await late.finish([part])
    assert number_in(await aiockpt.load(store)) == 2
    assert leftovers(store) == []


# ---------------------------------------------------------------- cancellation


@pytest.mark.parametrize("how", CANCELLATIONS)
async def test_cancelled_at_any_wait(how: str, run: Path) -> None:
    """For every n: absent or committed, nothing left, no thread, no block, no gate."""
    pool = BlockPool(3 << 20)
    ends = set()
    for n in itertools.count():
        writer = CheckpointWriter(run, step=n + 2, pool=pool)
        fired, outcome = await strike(n, lambda writer=writer: write_whole(writer, large(2)), how)  # type: ignore[misc]
        assert isinstance(outcome, BaseException) or not fired or writer.checkpoint is not None
        assert not isinstance(outcome, CheckpointError)
        assert busy_threads() == []
        assert not pool._out
        assert _Gate.holds() == []
        assert litter(run) == []
        assert (n + 2 in await steps(run)) == (writer.checkpoint is not None)
        ends.add(writer.checkpoint is not None)
        if not fired:
            break
    assert ends == {True, False}
    assert n > 20
