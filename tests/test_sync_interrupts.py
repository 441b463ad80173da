"""aiockpt.sync among threads and signals: who waits for whom, and what Ctrl-C leaves behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import aiockpt.sync
from aiockpt.errors import UsageError
from aiockpt.pending import Phase
from tests.stalling import (
    Disk,
    SlowCopy,
    before_commit,
    draining,
    in_thread,
    interrupt,
    interrupt_when,
    store_on,
)

BIG = 100_000


def interrupted(saver: aiockpt.sync.Saver) -> threading.Event:
    """Set once a blocked verb has noticed the first interrupt."""
    bridge, noticed = saver._bridge, threading.Event()
    assert bridge is not None
    original = bridge._end

    def end(*args: Any, **options: Any) -> None:
        noticed.set()
        original(*args, **options)

    bridge._end = end  # type: ignore[method-assign]
    return noticed


@contextmanager
def handler(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Have a signal handled by `act` while the body runs."""

    def handle(_: int, frame: FrameType | None) -> None:
        del frame
        act()

    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


# ------------------------------------------------------------------ Ctrl-C


@pytest.mark.parametrize("verb", ["stage", "save", "staging"])
def test_interrupted_before_staged(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is cancelled, and the interrupt goes on only when no thread reads the state any more."""
    slow = SlowCopy(monkeypatch)
    returned = threading.Event()
    too_early: list[bool] = []

    def let_go() -> None:
        # A second Ctrl-C must not hurry it. Whoever returns while the thread is inside is caught here.
        interrupt()
        too_early.append(returned.wait(0.3))
        slow.go.set()

    interrupt_when(slow.inside, let_go)
    with aiockpt.sync.Saver(tmp_path) as saver:
        state = {"w": torch.zeros(BIG)}
        with pytest.raises(KeyboardInterrupt):
            if verb == "staging":
                with saver.staging(state, step=1):
                    pass
            else:
                getattr(saver, verb)(state, step=1)
        returned.set()
        assert slow.left
        assert (saver.pending, too_early) == ((), [False])
        with saver.mutating():
            state["w"] += 1
        assert saver.save(state, step=1).done()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "step-00000001"]
    assert bool((aiockpt.sync.load(tmp_path)["w"] == 1).all())


def test_interrupted_after_staged(tmp_path: Path) -> None:
    """Only the wait ends: the save goes on and commits."""
    disk = Disk(before_commit)
    interrupt_when(disk.stalled, lambda: None)
    with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        with pytest.raises(KeyboardInterrupt):
            saver.save({"w": torch.zeros(BIG)}, step=1)
        (pending,) = saver.pending
        assert pending.phase >= Phase.STAGED
        with pytest.raises(KeyboardInterrupt):
            interrupt_when(disk.stalled, lambda: None)
            pending.result()
        disk.heal()
        assert pending.result().step == 1


@pytest.mark.leaks(reason="a thread that stays stuck until the test lets it go")
@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_while_it_closes(times: int, tmp_path: Path) -> None:
    """The drain goes on to its end, then the interrupt does. A second Ctrl-C ends the drain, too."""
    disk = Disk(before_commit)
    saver = aiockpt.sync.Saver(store_on(disk, tmp_path)).__enter__()
    disk.arm()
    handle = saver.stage({"w": torch.zeros(BIG)}, step=1)
    noticed = interrupted(saver)

    def then() -> None:
        assert noticed.wait(60)
        if times == 1:
            disk.heal()
        else:
            interrupt()

    interrupt_when(draining(saver), then)
    with pytest.raises(KeyboardInterrupt):
        saver.close()
    if times == 1:
        assert handle.result(0).step == 1
    else:
        assert not handle.done()
    with pytest.raises(UsageError, match="closed"):
        saver.stage({"w": torch.zeros(BIG)}, step=2)
    disk.heal()


def test_interrupted_body(tmp_path: Path) -> None:
    """Ctrl-C in the body: staged saves are drained, and the interrupt goes through."""
    disk = Disk(before_commit)
    with pytest.raises(KeyboardInterrupt):
        with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
            disk.arm()
            saver.stage({"w": torch.zeros(BIG)}, step=1)
            assert disk.stalled.wait(60)
            in_thread(disk.heal)
            raise KeyboardInterrupt
    newest = aiockpt.sync.latest(tmp_path)
    assert newest is not None
    assert newest.step == 1


def test_interrupt_of_the_capture(tmp_path: Path) -> None:
    """Raised from a state dict it leaves nothing held: threads may mutate, the next save works."""

    class Stateful:
        def state_dict(self) -> dict[str, Any]:
            raise KeyboardInterrupt

    with aiockpt.sync.Saver(tmp_path) as saver:
        with pytest.raises(KeyboardInterrupt):
            saver.stage({"w": torch.zeros(BIG), "s": Stateful()}, step=1)
        with saver.mutating():
            pass
        saver.save({"w": torch.zeros(BIG)}, step=1)


def test_a_signal_handler_may_save(tmp_path: Path) -> None:
    """As on preemption: the handler saves while its own thread is blocked in a save."""
    disk = Disk(before_commit)
    steps: list[int] = []
    with aiockpt.sync.Saver(store_on(disk, tmp_path), max_pending=2) as saver:

        def preempt() -> None:
            disk.heal()
            steps.append(saver.save({"w": torch.ones(BIG)}, step=2).step)

        with handler(signal.SIGUSR1, preempt):
            interrupt_when(disk.stalled, lambda: None, signal.SIGUSR1)
            disk.arm()
            steps.append(saver.save({"w": torch.zeros(BIG)}, step=1).step)
    assert steps == [2, 1]
    assert aiockpt.sync.Catalog(tmp_path).steps() == (1, 2)
