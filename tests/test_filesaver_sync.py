"""`aiockpt.sync.FileSaver`: the same verbs, for code that is not async."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from aiockpt import Phase, PreviousSaveError, SavedFile, SaveError, UnsupportedStateError, UsageError
from aiockpt.sync import FileSaver, PendingSave
from tests.filesavers import LARGE, Gate, fail, fill, names, number_in, read, target
from tests.stalling import in_thread


def test_the_verbs_block(tmp_path: Path) -> None:
    """save, stage, hooks, keep, pending, drain, finalize."""
    gate, told = Gate(), list[Path]()
    with FileSaver(gate, keep=2) as saver:
        assert saver.add_after_save(told.append) == told.append
        state = target(1)
        first = saver.stage(state, tmp_path / "1.pt")
        assert isinstance(first, PendingSave)
        assert first.phase == Phase.STAGED
        assert saver.pending == (first,)
        fill(state, 2)
        gate.go.set()
        saved = first.result()
        assert isinstance(saved, SavedFile)
        assert number_in(read(saved.path)) == 1
        assert saver.save(state, tmp_path / "2.pt").path == tmp_path / "2.pt"
        saver.stage(state, tmp_path / "3.pt")
        saver.drain()
        assert told == [tmp_path / f"{n}.pt" for n in (1, 2, 3)]
        saver.finalize()
    assert names(tmp_path) == ["2.pt", "3.pt"]
    with pytest.raises(UsageError, match="closed"):
        saver.save(1, tmp_path / "4.pt")


def test_errors(tmp_path: Path) -> None:
    """Awaited, unseen, of the target; a body's own goes first; an async savefun runs on the saver's loop."""
    with FileSaver(fail) as saver:
        with pytest.raises(SaveError, match="the savefun says no"):
            saver.save(1, tmp_path / "a")
        saver.stage(2, tmp_path / "b").exception()
        handle = saver.stage(3, tmp_path / "c")
        ended = threading.Event()
        handle.add_done_callback(lambda _: ended.set())
        ended.wait(10)
        with pytest.raises(PreviousSaveError) as caught:
            saver.stage(4, tmp_path / "d", how="not at all")
        assert isinstance(caught.value.pending, PendingSave)
        caught.value.pending.result()
        with pytest.raises(UnsupportedStateError):
            saver.save(lambda: 1, tmp_path / "e")
        assert [error.file for error in saver.failures] == [str(tmp_path / name) for name in "abc"]
    assert names(tmp_path) == ["d"]

    async def savefun(path: str, given: object) -> None:
        Path(path).write_text(str(given))

    with pytest.raises(KeyError), FileSaver(savefun) as saver:
        saver.stage(5, tmp_path / "f")
        raise KeyError
    assert (tmp_path / "f").read_text() == "5"
    with pytest.raises(UsageError, match=r"with aiockpt\.sync\.FileSaver"):
        FileSaver().save(1, tmp_path / "g")


def test_an_optimizer_in_another_thread_waits_until_staged(tmp_path: Path) -> None:
    """It steps once nothing reads the weights any more."""
    weight = torch.nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(LARGE)
    gate = Gate()
    with FileSaver(gate, worker="inline") as saver:
        save = in_thread(lambda: saver.save({"w": weight}, tmp_path / "a"))
        gate.inside.wait(10)
        step = in_thread(optimizer.step)
        step.join(0.05)
        assert step.is_alive()
        gate.go.set()
        step.join(10)
        save.join(10)
    assert read(tmp_path / "a")["w"].sum() == LARGE
    assert weight.sum() == 0


def test_one_that_is_dropped_says_so(tmp_path: Path) -> None:
    """With a warning; what it had staged is written."""
    saver = FileSaver()
    saver.__enter__()
    handle = saver.stage(1, tmp_path / "a")
    with pytest.warns(ResourceWarning, match="saver of files was never closed"):
        del saver
    assert handle.result(10).nbytes == (tmp_path / "a").stat().st_size


@pytest.mark.slow
def test_the_end_of_the_interpreter_drains(tmp_path: Path) -> None:
    """A saver that nobody closed loses nothing that was staged."""
    code = """
        import sys, time, warnings
        import torch, aiockpt.sync
        warnings.simplefilter("ignore")
        def savefun(path, target):
            time.sleep(0.3)
            torch.save(target, path)
        saver = aiockpt.sync.FileSaver(savefun)
        saver.__enter__()
        saver.stage([1], sys.argv[1])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "a.pt")]
    subprocess.run(command, timeout=50, check=True)
    assert names(tmp_path) == ["a.pt"]
    assert torch.load(tmp_path / "a.pt") == [1]
