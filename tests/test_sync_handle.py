"""The handles of aiockpt.sync: waits, cancelling, callbacks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import aiockpt.sync
from aiockpt.errors import DrainTimeoutError, SaveCancelledError, UsageError
from aiockpt.pending import Phase
from tests.stalling import Disk, a_write, before_commit, draining, in_thread, store_on

BIG = 100_000


def test_a_wait_that_times_out_leaves_the_save_alone(tmp_path: Path) -> None:
    """Every wait takes a timeout; late is TimeoutError, and the save commits all the same."""
    disk = Disk(before_commit)
    with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        handle = saver.stage({"w": torch.zeros(BIG)}, step=1)
        assert disk.stalled.wait(60)
        handle.planned(0)
        handle.staged(0)
        handle.written(60)
        for wait in (handle.result, handle.committed, handle.exception):
            with pytest.raises(TimeoutError):
                wait(0)
            with pytest.raises(TimeoutError):
                wait(0.01)
        with pytest.raises(TimeoutError):
            saver.drain(timeout=0.01)
        assert (handle.phase, handle.done()) == (Phase.WRITTEN, False)
        assert saver.pending == (handle,)
        assert handle in {handle}
        assert handle.progress.written == handle.progress.total == 4 * BIG
        assert Phase.STAGED in handle.seconds
        assert f"{handle.save_id[:8]} written" in repr(handle)
        disk.heal()
        assert handle.committed().step == handle.step == 1


def test_cancel(tmp_path: Path) -> None:
    """A save that is not committing yet can be cancelled; whoever waits is told."""
    disk = Disk(a_write)
    with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        handle = saver.stage({"w": torch.zeros(BIG)}, step=1)
        assert disk.stalled.wait(60)
        assert handle.cancel()
        disk.heal()
        with pytest.raises(SaveCancelledError):
            handle.result()
        assert isinstance(handle.exception(), SaveCancelledError)
        assert not handle.cancel()
        saver.save({"w": torch.zeros(BIG)}, step=1)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_abort_cancels_and_closes(tmp_path: Path) -> None:
    """`abort` ends what is under way without an error."""
    disk = Disk(a_write)
    saver = aiockpt.sync.Saver(store_on(disk, tmp_path)).__enter__()
    disk.arm()
    handle = saver.stage({"w": torch.zeros(BIG)}, step=1)
    assert disk.stalled.wait(60)
    begun = draining(saver)

    def go_on() -> None:
        begun.wait(60)
        disk.heal()

    in_thread(go_on)
    saver.abort()
    assert isinstance(handle.exception(), SaveCancelledError)
    assert aiockpt.sync.latest(tmp_path) is None


def test_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A callback gets the handle once, may ask it, may not use the saver; its errors are logged."""
    got: list[object] = []
    called = threading.Event()

    def callback(handle: aiockpt.sync.PendingSave) -> None:
        got.append(handle)
        got.append(handle.result().step)
        for call in (lambda: saver.stage({}, step=9), lambda: later.staged(), saver.close, saver.drain):
            try:
                call()
            except UsageError as error:
                got.append(str(error))
        called.set()
        raise ZeroDivisionError("of the callback")

    disk = Disk(before_commit)
    with aiockpt.sync.Saver(store_on(disk, tmp_path), max_pending=2) as saver:
        disk.arm()
        handle = saver.save_nowait({"a": 1}, step=1)
        assert disk.stalled.wait(60)
        later = aiockpt.sync.PendingSave(saver._inner._saving.ledger.active[0].pending, saver._bridge)  # type: ignore[arg-type]
        handle.add_done_callback(callback)
        assert got == []
        disk.heal()
        assert called.wait(60)
        handle.add_done_callback(got.append)
        assert got[:2] == [handle, 1]
        assert got[-1] is handle
        assert len([g for g in got if isinstance(g, str) and "would wait for itself" in g]) == 3
    assert "of the callback" in caplog.text


@pytest.mark.leaks(reason="a thread that stays stuck until the test lets it go")
def test_a_stuck_disk_ends_the_wait_for_it(tmp_path: Path) -> None:
    """Past `drain_timeout` closing raises; handles say what is known."""
    disk = Disk(a_write)
    with pytest.raises(DrainTimeoutError, match="step 1"):
        with aiockpt.sync.Saver(store_on(disk, tmp_path), drain_timeout=0.2) as saver:
            disk.arm()
            handle = saver.stage({"w": torch.zeros(BIG)}, step=1)
            assert disk.stalled.wait(60)
    with pytest.raises((SaveCancelledError, DrainTimeoutError)):
        handle.result(60)
    disk.heal()
