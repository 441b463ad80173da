"""aiockpt.sync among training threads: who waits for whom."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt.sync
from aiockpt.errors import SaveCancelledError, StateMutatedError, UsageError
from tests.stalling import Disk, SlowCopy, before_commit, before_staged, in_thread, interrupt_when, store_on

BIG = 100_000


def trained() -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """A state, and its optimizer with gradients at hand."""
    model = torch.nn.Linear(400, 300)
    optim = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 400)).sum().backward()
    return {"model": model, "optim": optim}, optim


@pytest.mark.parametrize("where", ["body", "thread"])
def test_a_step_waits_until_staged(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another training thread as in a `staging` body: nobody steps on a state that is read."""
    slow = SlowCopy(monkeypatch)
    state, optim = trained()
    before = state["model"].weight.detach().clone()
    after: list[bool] = []

    def train() -> None:
        slow.inside.wait(60)
        threading.Timer(0.1, slow.go.set).start()
        optim.step()
        after.append(slow.left)

    with aiockpt.sync.Saver(tmp_path) as saver:
        if where == "body":
            with saver.staging(state, step=1):
                train()
        else:
            thread = in_thread(train)
            saver.stage(state, step=1)
            thread.join(60)
        assert after == [True]
        assert saver.stage(state, step=2).result().step == 2
    assert torch.equal(aiockpt.sync.load(tmp_path, 1)["model"]["weight"], before)
    assert torch.equal(aiockpt.sync.load(tmp_path, 2)["model"]["weight"], state["model"].weight)
    assert not torch.equal(before, state["model"].weight)


def test_mutating_and_saving_exclude_each_other(tmp_path: Path) -> None:
    """A save waits for a mutating thread; on that thread itself it is refused, not a deadlock."""
    state = {"w": torch.zeros(BIG)}
    entered, leave = threading.Event(), threading.Event()

    def train() -> None:
        with saver.mutating():
            entered.set()
            leave.wait(60)
            state["w"] += 1

    with aiockpt.sync.Saver(tmp_path) as saver:
        with saver.mutating():
            for verb in (saver.save, saver.stage, saver.staging, saver.save_nowait):
                with pytest.raises(UsageError, match="mutating"):
                    verb(state, step=1)
        thread = in_thread(train)
        assert entered.wait(60)
        threading.Timer(0.05, leave.set).start()
        saver.save(state, step=1)
        thread.join()
    assert bool((aiockpt.sync.load(tmp_path)["w"] == 1).all())


def test_interrupted_while_it_waits_for_a_mutating_thread(tmp_path: Path) -> None:
    """Nothing has begun then, and nothing is left."""
    entered, leave = threading.Event(), threading.Event()

    def train() -> None:
        with saver.mutating():
            entered.set()
            leave.wait(60)

    with aiockpt.sync.Saver(tmp_path) as saver:
        thread = in_thread(train)
        assert entered.wait(60)
        with pytest.raises(KeyboardInterrupt):
            interrupt_when(entered, lambda: None)
            saver.stage({"w": torch.zeros(BIG)}, step=1)
        leave.set()
        thread.join()
        saver.save({"w": torch.zeros(BIG)}, step=1)


def test_many_threads_save(tmp_path: Path) -> None:
    """One saver serves many threads; every handle comes to its own end."""
    order = threading.Lock()
    steps = iter(range(1, 100))
    done: list[int] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(3):
                with order:
                    step = next(steps)
                    handle = saver.stage({"w": torch.full((BIG,), float(step))}, step=step, meta=number)
                checkpoint = handle.result(60)
                assert (checkpoint.step, checkpoint.meta) == (step, number)
                done.append(step)
        except BaseException as error:
            errors.append(error)

    with aiockpt.sync.Saver(tmp_path, max_pending=4) as saver:
        threads = [in_thread(lambda number=number: work(number)) for number in range(6)]  # type: ignore[misc]
        for thread in threads:
            thread.join(60)
    assert errors == []
    assert sorted(done) == list(range(1, 19))
    assert aiockpt.sync.Catalog(tmp_path).steps() == tuple(range(1, 19))
    assert float(aiockpt.sync.load(tmp_path, 9)["w"][0]) == 9


def test_close_while_others_wait(tmp_path: Path) -> None:
    """Closing drains; whoever waits in another thread gets the outcome, whoever comes later a clear word."""
    disk = Disk(before_commit)
    got: list[object] = []
    saver = aiockpt.sync.Saver(store_on(disk, tmp_path)).__enter__()
    disk.arm()
    handle = saver.stage({"w": torch.zeros(BIG)}, step=1)
    threads = [in_thread(lambda: got.append(handle.result())) for _ in range(3)]
    threads += [in_thread(saver.close) for _ in range(2)]
    assert disk.stalled.wait(60)
    disk.heal()
    for thread in threads:
        thread.join(60)
    saver.close()
    assert got == [handle.result()] * 3
    with pytest.raises(UsageError, match="closed"):
        saver.stage({"w": torch.zeros(BIG)}, step=2)


def test_a_call_that_hangs_does_not_keep_it_open(tmp_path: Path) -> None:
    """A save that waits for a mutating thread when the saver closes is refused, and lets go."""
    got: list[BaseException] = []
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def mutate() -> None:
        with saver.mutating():
            entered.set()
            leave.wait(60)

    def save() -> None:
        try:
            saver.save({"w": torch.zeros(BIG)}, step=1)
        except UsageError as error:
            got.append(error)
        left.set()

    with aiockpt.sync.Saver(tmp_path) as saver:
        mutating = in_thread(mutate)
        assert entered.wait(60)
        saving = in_thread(save)
    assert left.wait(60)
    assert "closed" in str(got[0])
    leave.set()
    mutating.join()
    saving.join()


def test_exit_of_the_interpreter_from_a_state_dict(tmp_path: Path) -> None:
    """SystemExit from a capture on the loop's thread reaches the caller, and the loop lives on."""
    entered, leave = threading.Event(), threading.Event()

    class Stateful:
        def state_dict(self) -> dict[str, Any]:
            raise SystemExit(3)

    def mutate() -> None:
        with saver.mutating():
            entered.set()
            leave.wait(60)

    with aiockpt.sync.Saver(tmp_path) as saver:
        thread = in_thread(mutate)
        assert entered.wait(60)
        threading.Timer(0.05, leave.set).start()
        with pytest.raises(SystemExit):
            saver.save({"s": Stateful()}, step=1)
        thread.join()
        saver.save({"a": 1}, step=1)


def test_mutated_state_is_an_error_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state changed by a thread that asks nobody makes `stage` fail, as in the async saver."""
    slow = SlowCopy(monkeypatch)
    state = {"w": torch.zeros(BIG)}

    def meddle() -> None:
        slow.inside.wait(60)
        state["w"] += 1
        slow.go.set()

    with aiockpt.sync.Saver(tmp_path) as saver:
        in_thread(meddle)
        with pytest.raises(StateMutatedError):
            saver.stage(state, step=1)


def test_cancel_from_another_thread(tmp_path: Path) -> None:
    """A thread blocked in `stage` hears of it when another one cancels the save."""
    disk = Disk(before_staged)
    with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()

        def cancel() -> None:
            disk.stalled.wait(60)
            (pending,) = saver.pending
            pending.cancel()
            disk.heal()

        thread = in_thread(cancel)
        with pytest.raises(SaveCancelledError):
            saver.stage({"w": torch.zeros(BIG)}, step=1)
        thread.join()
