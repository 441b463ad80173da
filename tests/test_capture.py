"""Captured at the call, read until `staged`: who may change the state when, and what stops the others."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiockpt
from aiockpt import (
    BusyError,
    PendingSave,
    Saver,
    StateMutatedError,
    StepError,
    UnsupportedStateError,
    UsageError,
)
from aiockpt._capture import SMALL_BYTES, SMALL_TOTAL, capture
from aiockpt._gate import _Gate
from tests.proof import steps
from tests.savers import LARGE, assert_quiet, fill, in_thread, large, numbers, small_blocks, until
from tests.stalling import Disk, a_write, before_staged, store_on


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small poisoned blocks; the gate is open in the end."""
    with small_blocks():
        yield


def network(width: int = 300) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with parameters above the capture's limit, and a fused optimizer that has stepped."""
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    train(model, optimizer)
    return model, optimizer


def backward(model: torch.nn.Module) -> None:
    """Forward (which moves BatchNorm's buffers) and backward."""
    model(torch.randn(8, 300)).square().mean().backward()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def frozen(*parts: Any) -> list[Any]:
    """Deep copies of state dicts as they are now."""
    return [copy.deepcopy(part.state_dict()) for part in parts]


def assert_same(found: Any, expected: Any) -> None:
    """Equal, bit by bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


# ---------------------------------------------------------------- at the call


async def test_what_is_small_or_plain_is_taken_at_the_call(tmp_path: Path) -> None:
    """Changed between the call and the await: the file has what was there at the call."""
    state: dict[str, Any] = {
        "list": [1, [2]],
        "dict": {"a": 1},
        "small": torch.zeros(SMALL_BYTES // 4),
        "step": torch.tensor(3),
        "array": np.arange(5),
        "large": torch.zeros(LARGE),
    }
    async with Saver(tmp_path) as saver:
        call = saver.save(state, step=1)
        state["list"][1].append(9)
        state["dict"]["b"] = 9
        state["small"].fill_(9)
        state["step"].fill_(9)
        state["array"][:] = 9
        del state["large"]
        await call
    found = await aiockpt.load(tmp_path)
    assert found["list"] == [1, [2]]
    assert found["dict"] == {"a": 1}
    assert found["small"].eq(0).all()
    assert found["step"] == 3
    assert found["array"].tolist() == [0, 1, 2, 3, 4]
    assert found["large"].eq(0).all()


async def test_state_dicts_are_asked_once_at_the_call(tmp_path: Path) -> None:
    """Not later, not in a thread; what is asked then is what is stored."""
    asked: list[int] = []

    class Loader:
        position = 5

        def state_dict(self) -> dict[str, int]:
            asked.append(threading.get_ident())
            return {"position": self.position}

    loader = Loader()
    async with Saver(tmp_path) as saver:
        call = saver.stage({"loader": loader}, step=1)
        assert asked == [threading.get_ident()]
        loader.position = 6
        await (await call)
    assert asked == [threading.get_ident()]
    assert (await aiockpt.load(tmp_path))["loader"] == {"position": 5}


async def test_an_optimizers_int_step_is_the_one_of_the_call(tmp_path: Path) -> None:
    """`Optimizer.state_dict()` holds live inner dicts: they are copied too."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"step": 1}
    async with Saver(tmp_path) as saver:
        call = saver.save({"optim": optimizer}, step=1)
        optimizer.state[parameter]["step"] = 2
        await call
    assert (await aiockpt.load(tmp_path))["optim"]["state"][0]["step"] == 1


async def test_buffers_of_modules_are_taken_at_the_call(tmp_path: Path) -> None:
    """Also large ones: a forward during `staging` moves them."""
    norm = torch.nn.BatchNorm1d(LARGE)
    before = frozen(norm)[0]
    async with Saver(tmp_path) as saver:
        async with saver.staging({"norm": norm}, step=1):
            norm(torch.randn(2, LARGE))
        assert not torch.equal(norm.running_mean, before["running_mean"])  # type: ignore[arg-type]
    assert_same(dict((await aiockpt.load(tmp_path))["norm"]), dict(before))


def test_the_copies_of_a_call_are_bounded() -> None:
    """Small tensors are copied until they come to 4 MiB; the others are read later."""
    each = SMALL_BYTES // 4
    state = [torch.zeros(each) for _ in range(SMALL_TOTAL // SMALL_BYTES + 5)]
    captured = capture(state, step=1)
    try:
        own = {t.data_ptr() for t in state}
        live = [s for s in captured.sources if isinstance(s, torch.Tensor) and s.data_ptr() in own]
        assert len(live) == 5
    finally:
        captured.release()


async def test_what_cannot_be_stored_is_told_at_the_call(tmp_path: Path) -> None:
    """Before anything is awaited; nothing is held afterwards, nothing was written."""
    async with Saver(tmp_path) as saver:
        verbs: list[Callable[..., object]] = [saver.save, saver.stage, saver.staging, saver.save_nowait]
        for verb in verbs:
            with pytest.raises(UnsupportedStateError) as error:
                verb({"ok": torch.zeros(LARGE), "bad": object(), "worse": [lambda: 1]}, step=1)
            assert [path for path, _ in error.value.problems] == ["bad", "worse/0"]
            for step in (-1, 1.5, "1", True, None, 1 << 63):
                with pytest.raises(StepError):
                    verb({}, step=step)
            with pytest.raises(TypeError, match="metricks"):
                verb({}, step=1, metricks={})
        assert_quiet(saver)
    assert await steps(tmp_path) == ()


async def test_context_variables_are_those_of_the_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Codecs and log records see the context in which the save was called."""
    tag: contextvars.ContextVar[str] = contextvars.ContextVar("tag", default="none")
    seen: list[str] = []

    class Thing:
        def state_dict(self) -> dict[str, str]:
            seen.append(tag.get())
            return {"tag": tag.get()}

    class Noting(Disk):
        def rename(self, src: str, dst: str) -> None:
            seen.append(tag.get())  # in a thread of the control lane
            super().rename(src, dst)

    disk = Noting(lambda _: False)
    async with Saver(store_on(disk, tmp_path)) as saver:
        tag.set("called")
        call = saver.save({"thing": Thing()}, step=1)
        tag.set("awaited")
        await call
        assert tag.get() == "awaited"
        assert aiockpt._threads.OWNER.get() is None
    assert seen == ["called", "called"]


# ---------------------------------------------------------------- after `staged`


@pytest.mark.parametrize("verb", ["stage", "staging", "save_nowait"])
async def test_nothing_done_after_staged_reaches_the_file(verb: str, tmp_path: Path) -> None:
    """While the disk stands still: changed in place, resized, freed; the file has the old values."""
    disk = Disk(a_write)
    state = large(1) | {
        "strided": torch.ones(300, 300).t(),
        "shared": torch.ones(LARGE).share_memory_(),
        "array": np.ones(LARGE),
        "alias": torch.from_numpy(np.ones(LARGE, dtype=np.float32)),
        "freed": torch.ones(LARGE),
    }
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        if verb == "stage":
            pending = await saver.stage(state, step=1)
        elif verb == "staging":
            async with saver.staging(state, step=1) as pending:
                pass
        else:
            pending = saver.save_nowait(state, step=1)
        fill(state, 9)
        state["strided"].fill_(9)
        state["shared"].fill_(9)
        state["array"][:] = 9
        state["alias"].numpy()[:] = 9
        state["freed"].untyped_storage().resize_(0)
        await until(disk.stalled.is_set)
        disk.heal()
        await pending
    found = await aiockpt.load(tmp_path)
    assert numbers(found) == {1.0}
    for key in ("strided", "shared", "array", "alias", "freed"):
        assert (found[key] == 1).all()


@pytest.mark.parametrize("end", ["commit", "fail", "cancel"])
async def test_a_saved_state_can_go(end: str, tmp_path: Path) -> None:
    """Neither handle nor saver nor error keeps a tensor alive, however the save ended."""
    disk = Disk(a_write, kind="error")
    async with Saver(store_on(disk, tmp_path)) as saver:
        tensors = [torch.zeros(LARGE), torch.zeros(3)]
        refs = [weakref.ref(tensor) for tensor in tensors]
        if end == "fail":
            disk.arm()
        call: asyncio.Task[PendingSave] = asyncio.create_task(saver.stage(tensors, step=1))
        await until(lambda: len(saver.pending) == 1)
        pending = saver.pending[0]
        if end == "cancel":
            await pending.cancel_and_wait()
        await asyncio.wait([call])
        (outcome,) = await asyncio.gather(pending, return_exceptions=True)
        assert isinstance(outcome, Exception) == (end != "commit")
        del tensors, call
        assert [ref() for ref in refs] == [None, None]
        assert pending.done()


# ---------------------------------------------------------------- the gate


async def test_a_fused_step_is_stopped_before_it_changes_anything(tmp_path: Path) -> None:
    """On the loop's thread `step()` raises while the save is unstaged, and works right after."""
    disk = Disk(before_staged)
    model, optimizer = network()
    before = frozen(model, optimizer)
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        async with saver.staging({"model": model, "optim": optimizer}, step=1) as pending:
            await until(disk.stalled.is_set)
            with pytest.raises(UsageError, match="step 1") as error:
                optimizer.step()
            assert error.value.step == 1
            assert_same(frozen(model, optimizer), before)
            backward(model)  # forward and backward may run
            disk.heal()
            await pending.staged()
            optimizer.step()
    assert _Gate._handle is None
    found = await aiockpt.load(tmp_path)
    assert_same(dict(found["model"]), dict(before[0]))
    assert_same(found["optim"], before[1])


async def test_a_step_in_another_thread_waits(tmp_path: Path) -> None:
    """The thread stands at the gate until `staged`; the file has the state of the call."""
    disk = Disk(before_staged)
    model, optimizer = network()
    backward(model)
    before = frozen(model, optimizer)
    stepped = threading.Event()

    def step() -> None:
        optimizer.step()
        stepped.set()

    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        async with saver.staging({"model": model, "optim": optimizer}, step=1):
            await until(disk.stalled.is_set)
            thread = threading.Thread(target=step)
            thread.start()
            await asyncio.sleep(0.05)  # (long enough to go wrong; going right takes no time)
            assert not stepped.is_set()
            disk.heal()
        await until(stepped.is_set)
        thread.join()
    found = await aiockpt.load(tmp_path)
    assert_same(dict(found["model"]), dict(before[0]))


@pytest.mark.parametrize("kind", ["plain dicts", "optimizer alone", "parameter alone"])
async def test_the_gate_knows_optimizers_by_their_memory(kind: str, tmp_path: Path) -> None:
    """Also when the state holds only state dicts, or only one of the two."""
    model, optimizer = network()
    states: dict[str, dict[str, Any]] = {
        "plain dicts": {"m": model.state_dict(), "o": optimizer.state_dict()},
        "optimizer alone": {"o": optimizer},
        "parameter alone": {"w": next(iter(model.parameters()))},
    }
    state = states[kind]
    async with Saver(tmp_path) as saver:
        call = saver.stage(state, step=1)
        with pytest.raises(UsageError):
            optimizer.step()
        await call
        optimizer.step()


async def test_other_optimizers_step_freely(tmp_path: Path) -> None:
    """The gate is for those whose weights are being read; and there is none without a save."""
    _, mine = network()
    model, others = network()
    async with Saver(tmp_path) as saver:
        call = saver.stage({"o": mine}, step=1)
        others.step()
        await call
    assert _Gate._handle is None
    del model


@pytest.mark.parametrize("end", ["failed", "cancelled", "never awaited", "collected", "refused"])
async def test_the_gate_opens_however_a_save_ends(end: str, tmp_path: Path) -> None:
    """No end of a save leaves an optimizer locked."""
    disk = Disk(before_staged, kind="error")
    model, optimizer = network()
    saver = await Saver(store_on(disk, tmp_path), on_overlap="error").__aenter__()
    call = saver.stage({"o": optimizer, "m": model}, step=1)
    if end == "failed":
        disk.arm()
        with pytest.raises(aiockpt.StorageError):
            await call
    elif end == "cancelled":
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    elif end == "collected":
        with pytest.warns(RuntimeWarning, match="never awaited"):
            del call
    elif end == "refused":
        other = saver.save_nowait({}, step=0)
        with pytest.raises(BusyError):
            await call
        await other
    if end in ("never awaited", "collected"):
        with pytest.raises(UsageError, match="never awaited"):
            await saver.aclose()
    else:
        await saver.aclose()
    optimizer.step()
    assert _Gate._handle is None


# ---------------------------------------------------------------- what no gate sees


def changes(array: Any, tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to change a state; only the last two move a version counter of torch."""
    return {
        "data": lambda: tensor.data.add_(1),
        "one byte": lambda: tensor.data.view(torch.uint8).__setitem__(-1, 7),
        "numpy": lambda: array.__setitem__(3, 9),
        "in place": lambda: tensor.add_(1),
        "no_grad": lambda: torch.no_grad()(tensor.mul_)(2),
    }


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("way", ["data", "one byte", "numpy", "in place", "no_grad"])
async def test_a_change_during_staging_never_reaches_the_file(way: str, copied: bool, tmp_path: Path) -> None:
    """Whether torch sees it or not: the save fails loudly, or what is written is the state of the call."""
    disk = Disk(a_write)
    # Two blocks of 1 MiB: while the disk stands still the first two tensors are copied, the last one is not.
    arrays = [np.ones(1 << 18, dtype=np.float32) for _ in range(3)]
    state = {name: torch.from_numpy(array) for name, array in zip("abz", arrays, strict=True)}
    where = "a" if copied else "z"
    refused: StateMutatedError | None
    async with Saver(store_on(disk, tmp_path), budget=2 << 20) as saver:
        disk.arm()
        try:
            async with saver.staging(state, step=1) as pending:
                await until(disk.stalled.is_set)
                await until(lambda: pending.progress.staged == 2 << 20)
                changes(arrays[0 if copied else 2], state[where])[way]()
                disk.heal()
        except StateMutatedError as error:
            refused = error
            assert_quiet(saver)
            state[where].fill_(1)
            await saver.save(state, step=1)
        else:
            refused = None
            await pending
    assert copied if refused is None else (refused.path, refused.step) == (where, 1)
    found = await aiockpt.load(tmp_path)
    assert all((tensor == 1).all() for tensor in found.values())


@pytest.mark.parametrize("way", ["data", "one byte", "numpy"])
async def test_a_change_before_the_first_copy_is_refused(way: str, tmp_path: Path) -> None:
    """While the save waits for admission: what is copied later would be of another time than the rest."""
    disk = Disk(a_write)
    array = np.ones(LARGE, dtype=np.float32)
    weight = torch.ones(300, 300)
    state = {"model": {"w": weight.t(), "alias": torch.from_numpy(array)}, "n": 1}
    async with Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        saver.save_nowait({"w": torch.zeros(LARGE)}, step=1)
        await until(disk.stalled.is_set)
        with pytest.raises(StateMutatedError, match=r"model/(w|alias)") as error:
            async with saver.staging(state, step=2):
                changes(array, weight)[way]()
                disk.heal()
        assert error.value.step == 2
    assert await steps(tmp_path) == (1,)


async def test_reading_is_no_change(tmp_path: Path) -> None:
    """Inference tensors, expanded and strided ones, forward and backward: nothing is refused."""
    with torch.inference_mode():
        inference = torch.ones(LARGE)
    model, optimizer = network()
    nan = torch.full((LARGE,), float("nan"))
    state = {
        "inference": inference,
        "expanded": torch.ones(1).expand(LARGE),
        "strided": torch.ones(300, 300)[:, ::2],
        "conj": torch.ones(LARGE, dtype=torch.complex64).conj(),
        "nan": nan,
        "model": model,
        "optim": optimizer,
    }
    async with Saver(tmp_path) as saver:
        async with saver.staging(state, step=1):
            for _ in range(3):
                backward(model)
                await asyncio.sleep(0)
    assert (await aiockpt.load(tmp_path))["strided"].eq(1).all()


# ---------------------------------------------------------------- never awaited


async def test_a_call_nobody_awaits_writes_nothing_and_is_told(tmp_path: Path) -> None:
    """A warning when it is collected, an error at the end; no folder, no gate."""

    async def body() -> None:
        async with Saver(tmp_path) as saver:
            with pytest.warns(RuntimeWarning, match=r"saver\.save\(\.\.\., step=1\) was never awaited"):
                saver.save(large(1), step=1)  # type: ignore[unused-coroutine]
            with pytest.warns(RuntimeWarning, match="never entered"):
                saver.staging(large(1), step=2)
            kept = saver.stage(large(1), step=3)
            await saver.save(state_small(), step=4)
            assert kept is not None

    with pytest.raises(UsageError, match="step 1, 2, 3 was called and never awaited") as error:
        await body()
    assert error.value.step == 1
    assert await steps(tmp_path) == (4,)
    assert _Gate.holds() == []


def state_small() -> dict[str, Any]:
    """Nothing to stage."""
    return {"n": 1}


async def test_a_call_is_awaited_once(tmp_path: Path) -> None:
    """A second await, an await after closing, a second entering: refused."""
    async with Saver(tmp_path) as saver:
        call = saver.save(state_small(), step=1)
        await call
        with pytest.raises(RuntimeError, match="already awaited"):
            await call
        staging = saver.staging(state_small(), step=2)
        async with staging:
            pass
        with pytest.raises(UsageError):
            await staging.__aenter__()
        late = saver.save(state_small(), step=3)
        with pytest.raises(UsageError, match="never awaited"):
            await saver.aclose()
        with pytest.raises(UsageError):
            await late


async def test_a_call_given_to_a_task_is_awaited(tmp_path: Path) -> None:
    """A task that has not begun when the saver is left begins, and is drained."""
    async with Saver(tmp_path) as saver:
        task = asyncio.create_task(saver.save(large(1), step=1))
    assert (await task).step == 1


async def test_a_closed_call_owes_nothing(tmp_path: Path) -> None:
    """`close()` says that it is not wanted: no warning, no error."""
    async with Saver(tmp_path) as saver:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            saver.save(large(1), step=1).close()
            gc.collect()
        assert_quiet(saver)


async def test_a_running_call_that_is_closed_takes_its_save_along(tmp_path: Path) -> None:
    """Whoever steps coroutines by hand and gives up: the save does not go on reading the state."""
    async with Saver(tmp_path) as saver:
        call = saver.save(large(1), step=1)
        call.send(None)
        (pending,) = saver.pending
        call.close()
        await pending.cancel_and_wait()
        assert_quiet(saver)
    assert await steps(tmp_path) == ()


# ---------------------------------------------------------------- mutating()


async def test_threads_that_mutate_and_saves_exclude_each_other(tmp_path: Path) -> None:
    """A training thread and a saving loop, many times: every file holds one number only."""
    state = large(0)
    stop = threading.Event()
    trained: list[int] = []
    async with Saver(tmp_path, budget=2 << 20) as saver:

        def train() -> None:
            n = 0
            while not stop.is_set():
                with saver.mutating():
                    n += 1
                    fill(state, n)
                trained.append(n)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            for step in range(15):
                await saver.stage(state, step=step)
        finally:
            stop.set()
            thread.join()
    assert trained
    async with aiockpt.Catalog(tmp_path) as catalog:
        for step in range(15):
            assert len(numbers(await catalog.load(step))) == 1


async def test_a_save_waits_for_a_mutating_thread(tmp_path: Path) -> None:
    """Called while a thread is inside: the state is taken when the thread has left, in order of the calls."""
    state = large(1)
    inside, leave = threading.Event(), threading.Event()
    async with Saver(tmp_path, max_pending=2) as saver:

        def train() -> None:
            with saver.mutating(), saver.mutating():
                inside.set()
                leave.wait()
                fill(state, 2)

        thread = threading.Thread(target=train)
        thread.start()
        await until(inside.is_set)
        with pytest.raises(BusyError, match="mutating"):
            saver.save_nowait(state, step=1)
        tasks = [asyncio.create_task(saver.save(state, step=step)) for step in (1, 2)]
        gone = asyncio.create_task(saver.save(state, step=3))
        await asyncio.sleep(0.01)
        assert saver.pending == ()
        gone.cancel()
        await asyncio.wait([gone])
        leave.set()
        await asyncio.gather(*tasks)
        thread.join()
        assert_quiet(saver)
    async with aiockpt.Catalog(tmp_path) as catalog:
        assert [numbers(await catalog.load(step)) for step in await catalog.steps()] == [{2.0}, {2.0}]


async def test_a_thread_waits_for_the_copy(tmp_path: Path) -> None:
    """`mutating()` in a thread waits until `staged`; on the loop's own thread it raises."""
    disk = Disk(before_staged)
    state = large(1)
    entered = threading.Event()
    async with Saver(store_on(disk, tmp_path)) as saver:

        def train() -> None:
            with saver.mutating():
                entered.set()

        disk.arm()
        task = asyncio.create_task(saver.stage(state, step=1))
        await until(disk.stalled.is_set)
        thread = threading.Thread(target=train)
        thread.start()
        with pytest.raises(UsageError, match="loop's thread"):
            with saver.mutating():
                pass
        assert not entered.wait(0.05)
        disk.heal()
        await task
        await until(entered.is_set)
        thread.join()
        with saver.mutating():
            fill(state, 2)
    assert numbers(await aiockpt.load(tmp_path)) == {1.0}


async def test_a_state_refused_after_a_wait_lets_threads_in(tmp_path: Path) -> None:
    """A deferred capture that fails ends its read."""
    inside, leave = threading.Event(), threading.Event()
    async with Saver(tmp_path) as saver:

        def train() -> None:
            with saver.mutating():
                inside.set()
                leave.wait()

        thread = threading.Thread(target=train)
        thread.start()
        await until(inside.is_set)
        task = asyncio.create_task(saver.save({"bad": object()}, step=1))
        await asyncio.sleep(0)
        leave.set()
        with pytest.raises(UnsupportedStateError):
            await task
        thread.join()
        assert in_thread(lambda: saver.mutating().__enter__()) is None
        assert saver._exclusion._reading == 0


def test_captured_states_compare_by_identity() -> None:
    """Comparing two never compares tensors."""
    one, other = capture(OrderedDict(a=torch.zeros(3)), step=1), capture({"a": torch.zeros(3)}, step=1)
    assert one != other
    assert one in (None, one)
