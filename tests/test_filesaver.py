"""FileSaver: what each way of working gives, what savefuns get, who is told. Chainer's writers by name."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from aiockpt import (
    BusyError,
    DrainTimeoutError,
    FileSaver,
    Phase,
    PublishError,
    SavedFile,
    SaveErrors,
    StateMutatedError,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from aiockpt._gate import _Gate
from aiockpt.filesaver import Job, Worker
from aiockpt.policies.keep import KeepEvery, KeepLast
from tests.filesavers import LARGE, Gate, fill, names, number_in, read, target, write_folder, write_json
from tests.savers import until

# ---------------------------------------------------------------- Chainer's writers


async def test_simple_writer(tmp_path: Path) -> None:
    """SimpleWriter is `inline`: nothing is copied, and `stage` too returns only when all is written."""
    seen: list[Any] = []

    def savefun(path: str, given: dict[str, Any], compress: bool) -> None:
        seen.append((given["w"].data_ptr(), compress, threading.current_thread() is threading.main_thread()))
        torch.save(given, path)

    w = torch.ones(LARGE)
    async with FileSaver(savefun, worker="inline", compress=True) as saver:
        saved = await saver.save({"w": w}, tmp_path / "a.pt")
        assert seen == [(w.data_ptr(), True, False)]
        pending = await saver.stage({"w": w}, tmp_path / "b.pt")
        assert pending.phase >= Phase.STAGED
        w.zero_()
        assert (await pending).path == tmp_path / "b.pt"
    assert isinstance(saved, SavedFile)
    assert saved.path == tmp_path / "a.pt"
    assert saved.nbytes == saved.path.stat().st_size
    for name in ("a.pt", "b.pt"):
        assert torch.equal(read(tmp_path / name)["w"], torch.ones(LARGE))
    assert names(tmp_path) == ["a.pt", "b.pt"]


async def test_thread_writer(tmp_path: Path) -> None:
    """ThreadWriter is `thread`: the caller goes on; the next save waits for the one before it."""
    gate = Gate()
    async with FileSaver(gate, worker="thread") as saver:
        state = target(1)
        first = await saver.stage(state, tmp_path / "1.pt")
        await until(gate.inside.is_set)
        assert first.phase == Phase.STAGED
        fill(state, 2)
        second = asyncio.create_task(saver.stage(state, tmp_path / "2.pt"))
        await asyncio.sleep(0.02)
        assert not second.done()
        assert not (tmp_path / "1.pt").exists()
        gate.go.set()
        await first
        await (await second)
    assert [number_in(read(tmp_path / f"{n}.pt")) for n in (1, 2)] == [1, 2]
    assert names(tmp_path) == ["1.pt", "2.pt"]


async def test_thread_queue_writer(tmp_path: Path) -> None:
    """ThreadQueueWriter is `thread` with `max_pending`: saves queue up, are written one by one, in order."""
    gate = Gate()
    state = target(0)
    async with FileSaver(gate, max_pending=4) as saver:
        handles = []
        for n in range(4):
            fill(state, n)
            handles.append(await saver.stage(state, tmp_path / f"{n}.pt"))
        assert [handle.phase for handle in handles] == [Phase.STAGED] * 4
        assert saver.pending == tuple(handles)
        fifth = asyncio.create_task(saver.stage(state, tmp_path / "4.pt"))
        await asyncio.sleep(0.02)
        assert not fifth.done()
        gate.go.set()
        await (await fifth)
    assert gate.calls == [f"{n}.pt" for n in range(5)]
    assert gate.most == 1
    assert [number_in(read(tmp_path / f"{n}.pt")) for n in range(4)] == [0, 1, 2, 3]


async def test_on_overlap_error(tmp_path: Path) -> None:
    """Instead of waiting, a save may be refused; once a save is awaited the next one is admitted."""
    gate = Gate()
    async with FileSaver(gate, on_overlap="error") as saver:
        first = await saver.stage(target(1), tmp_path / "1.pt")
        with pytest.raises(BusyError, match=r"2\.pt: 1 save\(s\) are pending already \(.*1\.pt\)") as caught:
            await saver.stage(target(2), tmp_path / "2.pt")
        assert caught.value.file == str(tmp_path / "2.pt")
        gate.go.set()
        await first
        assert number_in(read((await saver.save(target(3), tmp_path / "3.pt")).path)) == 3
    assert _Gate.holds() == []
    assert names(tmp_path) == ["1.pt", "3.pt"]


# ---------------------------------------------------------------- what the savefun gets


async def test_defaults_are_torch_save(tmp_path: Path) -> None:
    """Without anything said: torch's format, each tensor with a storage of its own, ties kept."""
    state = target(1) | {
        "strided": torch.arange(LARGE * 2.0).view(2, -1).t(),
        "empty": torch.empty(0, 3),
        "param": torch.nn.Parameter(torch.ones(4)),
        "complex": torch.ones(5, dtype=torch.complex64).conj(),
        "f8": torch.ones(8).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True]),
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(4).to_sparse(),
    }
    async with FileSaver() as saver:
        await saver.save(state, tmp_path / "a.pt")
    got = torch.load(tmp_path / "a.pt", weights_only=False)
    assert number_in(got) == 1
    assert got["model"]["w"].data_ptr() == got["model"]["tied"].data_ptr()
    assert isinstance(got["param"], torch.nn.Parameter)
    assert got["meta"].is_meta
    for name in ("strided", "complex", "scalar", "bool", "empty"):
        assert torch.equal(got[name], state[name]), name
    assert torch.equal(got["f8"].float(), torch.ones(8))
    assert torch.equal(got["sparse"].to_dense(), torch.eye(4))
    torch.save(state, tmp_path / "plain.pt")
    # Not a byte of other tensors' memory comes along.
    assert (tmp_path / "a.pt").stat().st_size <= (tmp_path / "plain.pt").stat().st_size + 4096


@pytest.mark.parametrize("worker", ["inline", "thread"])
async def test_what_the_savefun_gets_is_the_target(worker: Any, tmp_path: Path) -> None:
    """Types, order and sharing; modules and optimizers as their state dicts; numpy arrays too."""
    got: list[Any] = []
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    shared = [1, 2]
    array, readonly = np.arange(20_000.0), np.arange(20_000.0)
    readonly.flags.writeable = False
    state = {"b": shared, "a": shared, "set": {3}, "path": tmp_path, "model": model, "optim": optimizer}
    state |= {"np": [array, array, readonly, array[::2]], "grad": torch.ones(2, requires_grad=True)}

    def savefun(path: str, given: Any) -> None:
        torch.save(given, path)
        got.append(torch.load(path, weights_only=False))

    async with FileSaver(savefun, worker=worker) as saver:
        await saver.save(state, tmp_path / "a.pt")
    (given,) = got
    assert list(given) == list(state)
    assert given["b"] is given["a"]
    assert (given["b"], given["set"], given["path"]) == ([1, 2], {3}, tmp_path)
    assert torch.equal(given["model"]["weight"], model.weight)
    assert given["optim"]["param_groups"][0]["lr"] == 0.5
    assert given["np"][0] is given["np"][1]
    for mine, theirs in zip([array, array, readonly, array[::2]], given["np"], strict=True):
        assert np.array_equal(mine, theirs)
    assert given["grad"].requires_grad


async def test_functions_that_take_the_object_first(tmp_path: Path) -> None:
    """torch.save and safetensors' save_file are known, partials too; all others get the path first."""
    flat = {"w": torch.ones(LARGE)}
    async with FileSaver(safetensors.torch.save_file, metadata={"a": "b"}) as saver:
        await saver.save(flat, tmp_path / "a.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a.safetensors")["w"], flat["w"])
    partial = functools.partial(torch.save, _use_new_zipfile_serialization=False)
    async with FileSaver(partial) as saver:
        await saver.save(flat, tmp_path / "a.pt", pickle_protocol=4)
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=False)["w"], flat["w"])
    async with FileSaver(write_json, indent=1, extra="all") as saver:
        await saver.save([1], tmp_path / "a.json", extra="this one")
    assert '"extra": "this one"' in (tmp_path / "a.json").read_text()
    assert "\n " in (tmp_path / "a.json").read_text()


@pytest.mark.parametrize("worker", ["inline", "thread"])
async def test_an_async_savefun_runs_on_the_loop(worker: Any, tmp_path: Path) -> None:
    """A coroutine function, and a function that returns an awaitable."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def savefun(path: str, given: Any) -> None:
        loops.append(asyncio.get_running_loop())
        Path(path).write_text(str(number_in(given)))

    async with FileSaver(savefun, worker=worker) as saver:
        await saver.save(target(1), tmp_path / "a")
    async with FileSaver(lambda path, given: savefun(path, given), worker=worker) as saver:
        await saver.save(target(2), tmp_path / "b")
    assert loops == [asyncio.get_running_loop()] * 2
    assert [(tmp_path / name).read_text() for name in "ab"] == ["1.0", "2.0"]


async def test_another_file_saver_as_savefun(tmp_path: Path) -> None:
    """Chainer's `task=`: the outer one queues copies, the inner one writes; hooks of both, keywords pass."""
    told: list[str] = []
    inner = FileSaver(write_json, worker="inline")
    inner.add_after_save(lambda path: told.append(f"inner {path.name}"))
    async with FileSaver(inner, max_pending=3, extra="x") as outer:
        outer.add_after_save(lambda path: told.append(f"outer {path.name}"))
        handles = [await outer.stage([n], tmp_path / f"{n}.json") for n in range(3)]
        saved = [await handle for handle in handles]
        assert saved[0].nbytes == (tmp_path / "0.json").stat().st_size
        with pytest.raises(StorageError, match=r"(?i)not a directory"):
            await outer.save([9], tmp_path / "0.json" / "below")
    assert '"extra": "x"' in (tmp_path / "2.json").read_text()
    assert sorted(told) == sorted(f"{who} {n}.json" for who in ("inner", "outer") for n in range(3))
    with pytest.raises(UsageError, match="closed"):
        await inner.save([1], tmp_path / "late")
    with pytest.raises(UsageError, match="runs on the loop"):
        FileSaver(FileSaver(), worker="process")


async def test_a_cancelled_outer_save_cancels_the_inner_one(tmp_path: Path) -> None:
    """The task saver's save does not go on alone."""
    gate = Gate()
    async with FileSaver(gate) as inner, FileSaver(inner, worker="inline") as outer:
        save = asyncio.create_task(outer.save([1], tmp_path / "a"))
        await until(gate.inside.is_set)
        save.cancel()
        await asyncio.sleep(0.01)
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await save
        assert inner.pending == outer.pending == ()
    assert names(tmp_path) == []


async def test_a_worker_of_ones_own(tmp_path: Path) -> None:
    """`run` is enough."""

    class Mine(Worker):
        ran = 0

        async def run(self, job: Job) -> Any:
            self.ran += 1
            return await asyncio.get_running_loop().run_in_executor(None, job)

    mine = Mine()
    async with FileSaver(worker=mine) as saver:
        await saver.save(target(1), tmp_path / "a.pt")
    assert mine.ran == 1
    assert number_in(read(tmp_path / "a.pt")) == 1


# ---------------------------------------------------------------- capture and memory


async def test_the_target_is_captured_at_the_call(tmp_path: Path) -> None:
    """Plain values and small tensors are as they were at the call; until `staged` the gate is held."""
    weight = torch.nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(LARGE)
    small, plain = torch.ones(3), [1]
    async with FileSaver() as saver:
        call = saver.stage({"w": weight, "small": small, "plain": plain}, tmp_path / "a.pt")
        small.zero_()
        plain.append(2)
        with pytest.raises(UsageError, match=r"save of .*a\.pt still"):
            optimizer.step()
        pending = await call
        optimizer.step()
        await pending
        got = read(tmp_path / "a.pt")
        assert (got["small"].sum(), got["plain"], got["w"].sum()) == (3, [1], LARGE)


@pytest.mark.parametrize("worker", ["inline", "thread"])
async def test_a_change_before_staged_is_found(worker: Any, tmp_path: Path) -> None:
    """The version counters are looked at after the last read; the place is named, nothing is left."""
    async with FileSaver(worker=worker) as saver:
        w = torch.ones(LARGE)
        call = saver.stage({"deep": [{"w": w}]}, tmp_path / "a.pt")
        w.add_(1)
        with pytest.raises(StateMutatedError, match=r"a\.pt: deep/0/w changed") as caught:
            await call
        assert (caught.value.path, caught.value.file) == ("deep/0/w", str(tmp_path / "a.pt"))
    assert names(tmp_path) == []


async def test_memory_is_used_again_unless_somebody_holds_it(tmp_path: Path) -> None:
    """The next save of the same size takes the same memory; what a savefun kept stays as it was."""
    kept: list[Any] = []
    addresses: list[int] = []

    def savefun(path: str, given: Any) -> None:
        addresses.append(given["model"]["w"].data_ptr())
        if path.endswith("keep.pt"):
            kept.append(given)
        torch.save(given, path)

    order = ["a.pt", "b.pt", "keep.pt", "c.pt"]
    async with FileSaver(savefun) as saver:
        for n, name in enumerate(order):
            await saver.save(target(n), tmp_path / name)
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3]
    assert number_in(kept[0]) == 2
    assert [number_in(read(tmp_path / name)) for name in order] == [0, 1, 2, 3]


async def test_what_cannot_be_pickled_is_told_by_path(tmp_path: Path) -> None:
    """At the call, all of it, before anything is written."""

    class Broken:
        def state_dict(self) -> None:
            raise RuntimeError("no state today")

    state = {"fine": torch.ones(2), "bad": [1, {"f": lambda: 1}], "worse": Broken()}
    async with FileSaver() as saver:
        with pytest.raises(UnsupportedStateError, match="no state today") as caught:
            saver.save(state, tmp_path / "a.pt")  # type: ignore[unused-coroutine]
        assert [path for path, _ in caught.value.problems] == ["bad/1/f", "worse"]
        assert caught.value.file == str(tmp_path / "a.pt")
        assert "register_leaf" not in str(caught.value)
    assert names(tmp_path) == []


# ---------------------------------------------------------------- hooks and retention


async def test_hooks_run_after_the_move(tmp_path: Path) -> None:
    """Sync ones in a thread, async ones on the loop, in order, added at any time; before `save` returns."""
    told: list[Any] = []

    def note(name: str, path: Path) -> None:
        on_loop = threading.current_thread() is threading.main_thread()
        told.append((name, path.name, path.exists(), on_loop))

    async with FileSaver() as saver:

        @saver.add_after_save
        def first(path: Path) -> None:
            note("first", path)

        await saver.save(1, tmp_path / "a.pt")
        assert len(told) == 1

        async def second(path: Path) -> None:
            await asyncio.sleep(0)
            note("second", path)

        assert saver.add_after_save(second) is second
        await (await saver.stage(2, tmp_path / "b.pt"))
        await saver.drain()
    assert told == [
        ("first", "a.pt", True, False),
        ("first", "b.pt", True, False),
        ("second", "b.pt", True, True),
    ]


async def test_a_hook_that_fails_is_told_and_harms_no_save(tmp_path: Path) -> None:
    """The save stands, later hooks run; the error is in `failures` at once and raised at the end."""
    told: list[Path] = []

    def bad(path: Path) -> None:
        raise ValueError("no upload")

    saver = await FileSaver().__aenter__()
    saver.add_after_save(bad)
    saver.add_after_save(told.append)
    saved = await saver.save(1, tmp_path / "a.pt")
    assert told == [saved.path]
    (error,) = saver.failures
    assert isinstance(error, PublishError)
    assert isinstance(error.__cause__, ValueError)
    assert error.file == str(saved.path)
    with pytest.raises(PublishError, match=r"a\.pt is in place.*bad failed: ValueError: no upload"):
        await saver.finalize()
    await saver.finalize()
    assert torch.load(saved.path) == 1


async def test_a_hook_that_never_ends_is_cancelled_at_the_end(tmp_path: Path) -> None:
    """It keeps neither the saver nor whoever waits for its save, or for a later one."""
    saver = await FileSaver(drain_timeout=0.1).__aenter__()

    @saver.add_after_save
    async def forever(path: Path) -> None:
        await asyncio.Event().wait()

    saves = [asyncio.create_task(saver.save(n, tmp_path / f"{n}")) for n in range(2)]
    await until(lambda: len(names(tmp_path)) == 2 and not saver.pending)
    with pytest.raises(DrainTimeoutError, match="after-save hooks did not end in time"):
        await saver.aclose()
    assert [(await save).path.name for save in saves] == ["0", "1"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (2, ["4.pt", "5.pt", "other.pt"]),
        (KeepLast(1) | KeepEvery(2), ["2.pt", "4.pt", "5.pt", "other.pt"]),
        (lambda files: [file.step for file in files if file.name == "1.pt"], ["1.pt", "5.pt", "other.pt"]),
    ],
)
@pytest.mark.parametrize("savefun", [write_folder, torch.save])
async def test_keep_is_about_what_this_saver_wrote(
    savefun: Any, keep: Any, left: list[str], tmp_path: Path
) -> None:
    """Chainer's n_retains, or a policy; the newest stays, what others wrote too; folders as well as files."""
    (tmp_path / "other.pt").write_bytes(b"")
    seen: list[bool] = []
    async with FileSaver(savefun, keep=keep) as saver:
        saver.add_after_save(lambda path: seen.append((tmp_path / "1.pt").exists()))
        for n in range(1, 6):
            await saver.save(target(n), tmp_path / f"{n}.pt")
    assert names(tmp_path) == left
    assert seen[0] is True


async def test_keep_counts_a_path_once(tmp_path: Path) -> None:
    """A path that is written again is the newest, not one more; a policy that fails removes nothing."""
    async with FileSaver(keep=2) as saver:
        for name in ("last.pt", "a.pt", "last.pt", "b.pt", "last.pt"):
            await saver.save(name, tmp_path / name)
    assert names(tmp_path) == ["b.pt", "last.pt"]
    saver = await FileSaver(keep=lambda files: 1 // 0).__aenter__()  # type: ignore[return-value, arg-type]
    for name in "xyz":
        await saver.save(name, tmp_path / name)
    with pytest.raises(SaveErrors) as group:
        await saver.aclose()
    assert ["keep= raised ZeroDivisionError" in str(error) for error in group.value.exceptions] == [True] * 3
    assert names(tmp_path) == ["b.pt", "last.pt", "x", "y", "z"]


async def test_collected_calls_leave_no_gate(tmp_path: Path) -> None:
    """A call that is never awaited writes nothing, warns when collected, and the saver says so at the end."""
    saver = await FileSaver().__aenter__()
    with pytest.warns(RuntimeWarning, match=r"saver.stage\(\.\.\., '.*a\.pt'\) was never awaited"):
        saver.stage({"w": torch.ones(LARGE)}, tmp_path / "a.pt")  # type: ignore[unused-coroutine]
    gc.collect()
    assert _Gate.holds() == []
    with pytest.raises(UsageError, match=r"a\.pt was called and never awaited"):
        await saver.aclose()
    assert names(tmp_path) == []
