"""aiockpt.sync gives loops that are not async the same verbs, blocking."""

from __future__ import annotations

import contextvars
import inspect
import logging
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt.sync
from aiockpt import catalog, saver
from aiockpt.errors import (
    BusyError,
    CorruptCheckpointError,
    PreviousSaveError,
    StepError,
    StepExistsError,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from aiockpt.pending import Phase
from aiockpt.policies.when import EverySteps
from tests.stalling import Disk, before_commit, before_staged, in_thread, store_on

BIG = 100_000
"""Numbers in a tensor that is too large to be copied at the call."""


def make_state() -> dict[str, Any]:
    """A model with its optimizer, after one step."""
    model = torch.nn.Linear(400, 300)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 400)).sum().backward()
    optim.step()
    return {"model": model, "optim": optim, "lr": 0.5}


def same(one: Any, other: Any) -> bool:
    """Whether two models have the same weights."""
    pairs = zip(one["model"].state_dict().values(), other["model"].state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# ------------------------------------------------------------------ the verbs


def test_each_verb_saves(tmp_path: Path) -> None:
    """Every way to save ends in a checkpoint, and the phases are as promised on return."""
    state = make_state()
    with aiockpt.sync.Saver(tmp_path) as saver:
        assert saver.restore(state) is None
        staged = saver.stage(state, step=1)
        assert staged.phase >= Phase.STAGED
        saved = saver.save(state, step=2, metrics={"loss": 0.25})
        assert saved.done()
        assert saved.result().metrics == {"loss": 0.25}
        copied = saver.save_nowait(state, step=3)
        assert copied.result(60).step == 3
        with saver.staging(state, step=4) as pending:
            assert not state["model"](torch.ones(1, 400)).isnan().any()
        assert pending.phase >= Phase.STAGED
        saver.drain()
        assert saver.pending == ()
    fresh = make_state()
    with aiockpt.sync.Saver(tmp_path) as saver:
        restored = saver.restore(fresh)
        assert saver.run_id == saved.result().run_id
    assert restored is not None
    assert (restored.step, restored.values["lr"]) == (4, 0.5)
    assert same(fresh, state)
    assert aiockpt.sync.Catalog(tmp_path).steps() == (1, 2, 3, 4)


def test_the_state_may_change_after_stage(tmp_path: Path) -> None:
    """What is done to the state after `stage`, or `save_nowait`, is not in the checkpoint."""
    disk = Disk(before_commit)
    state = {"w": torch.zeros(BIG)}
    with aiockpt.sync.Saver(store_on(disk, tmp_path), max_pending=2) as saver:
        disk.arm()
        one = saver.stage(state, step=1)
        state["w"] += 1
        two = saver.save_nowait(state, step=2)
        state["w"] += 1
        disk.heal()
        assert (one.result().step, two.result().step) == (1, 2)
    for step, value in ((1, 0.0), (2, 1.0)):
        assert bool((aiockpt.sync.load(tmp_path, step)["w"] == value).all())


def test_capture_is_at_the_call_on_the_thread_that_calls(tmp_path: Path) -> None:
    """A state dict is asked for by the calling thread, in its context; so are staging's and save_nowait's."""
    name = contextvars.ContextVar("name", default="")
    seen: list[tuple[int, str]] = []

    class Stateful:
        def state_dict(self) -> dict[str, Any]:
            seen.append((threading.get_ident(), name.get()))
            return {"w": torch.zeros(3)}

    name.set("trainer")
    with aiockpt.sync.Saver(tmp_path) as saver:
        saver.save({"s": Stateful()}, step=1)
        saver.save_nowait({"s": Stateful()}, step=2).result()
        staging = saver.staging({"s": Stateful()}, step=3)
        assert len(seen) == 3
        with staging:
            pass
    assert seen == [(threading.get_ident(), "trainer")] * 3


def test_options_are_those_of_the_async_saver(tmp_path: Path) -> None:
    """Every option and argument exists here, too, and a wrong one is refused when it is made."""
    for ours, theirs in ((aiockpt.sync.Saver, saver.Saver), (aiockpt.sync.Catalog, catalog.Catalog)):
        assert inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()
    for verb in ("save", "stage", "staging", "save_nowait", "restore", "drain"):
        ours_, theirs_ = getattr(aiockpt.sync.Saver, verb), getattr(saver.Saver, verb)
        assert inspect.signature(ours_).parameters.keys() == inspect.signature(theirs_).parameters.keys()
    with pytest.raises(UsageError, match="max_pending"):
        aiockpt.sync.Saver(tmp_path, max_pending=0)
    with aiockpt.sync.Saver(tmp_path, on_overlap="error", step_format="s{}", meta={"a": 1}) as entered:
        assert entered.save({"a": 1}, step=1, files={"note.txt": b"hello"}).result().name == "s1"


def test_life_of_a_saver(tmp_path: Path) -> None:
    """Used before it is entered, after it was closed, or entered twice: a clear word, and no thread."""
    saver = aiockpt.sync.Saver(tmp_path / "run")
    with pytest.raises(UsageError, match="enter the saver first"):
        saver.save({"a": 1}, step=1)
    assert saver.pending == saver.failures == ()
    with saver:
        handle = saver.stage({"a": 1}, step=1)
        with pytest.raises(UsageError, match="entered once"), saver:
            pass
    saver.close()
    saver.drain()
    assert handle.done()
    assert handle.result().step == 1
    assert handle.exception() is None
    assert not handle.cancel()
    for call in (lambda: saver.stage({"a": 1}, step=2), saver.restore, saver.mutating):
        with pytest.raises(UsageError, match="the saver is closed"):
            call()
    with pytest.raises(UsageError, match="entered once"), saver:
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), aiockpt.sync.Saver(tmp_path / "file"):
        pass


# ------------------------------------------------------------------ errors


def test_errors_come_as_they_are(tmp_path: Path) -> None:
    """Errors keep their types, facts and tracebacks, whichever thread they were raised in."""
    with aiockpt.sync.Saver(tmp_path) as saver:
        with pytest.raises(UnsupportedStateError) as unsupported:
            saver.stage({"a": {"b": object()}}, step=1)
        assert unsupported.value.problems[0][0] == "a/b"
        with pytest.raises(StepError):
            saver.save({}, step=-1)
        saver.save({"w": torch.zeros(3)}, step=1)
        with pytest.raises(StepExistsError) as exists:
            saver.save({"w": torch.zeros(3)}, step=1)
        assert exists.value.step == 1
        frames = {frame.name for frame in traceback.extract_tb(exists.value.__traceback__)}
        assert {"test_errors_come_as_they_are", "save", "find"} <= frames
        saver.save({"w": torch.zeros(3)}, step=2)
    assert aiockpt.sync.Catalog(tmp_path).steps() == (1, 2)


def test_an_error_that_was_asked_for_is_not_raised_again(tmp_path: Path) -> None:
    """`result` raises the save's error as often as it is asked; the saver then keeps quiet."""
    disk = Disk(before_commit, "error")
    with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        handle = saver.stage({"w": torch.zeros(3)}, step=1)
        for _ in range(2):
            with pytest.raises(StorageError, match="injected"):
                handle.result()
        assert isinstance(handle.exception(), StorageError)
        assert saver.failures == (handle.exception(),)
        handle.staged()
        handle.written()  # it was; a phase once reached never turns into an error
        saver.save({"w": torch.zeros(3)}, step=2)
    with pytest.raises(StorageError):
        handle.result()


def test_an_error_nobody_asked_for_is_raised_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, raised by the next save (which goes on), and not again by close."""
    disk = Disk(before_commit, "error")
    failed = threading.Event()
    with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        saver.stage({"w": torch.zeros(3)}, step=1).add_done_callback(lambda _: failed.set())
        assert failed.wait(60)
        with pytest.raises(PreviousSaveError) as previous:
            saver.stage({"w": torch.zeros(3)}, step=2)
        pending = previous.value.pending
        assert isinstance(pending, aiockpt.sync.PendingSave)
        assert pending.result().step == 2
    assert [r.levelno for r in caplog.records if r.name == "aiockpt"] == [logging.ERROR]


def test_an_error_nobody_asked_for_is_raised_by_the_end(tmp_path: Path) -> None:
    """Leaving raises it; if the body raised, that goes through with a note."""
    disk = Disk(before_commit, "error")
    with pytest.raises(StorageError):
        with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
            disk.arm()
            saver.stage({"w": torch.zeros(3)}, step=1)
    with pytest.raises(ZeroDivisionError) as body:
        with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
            disk.arm()
            saver.stage({"w": torch.zeros(3)}, step=1)
            raise ZeroDivisionError
    assert "StorageError" in body.value.__notes__[0]
    with aiockpt.sync.Saver(tmp_path) as saver:
        saver.save({"w": torch.zeros(3)}, step=1)


# ------------------------------------------------------------------ short forms


def test_catalog_has_the_methods_of_the_async_one(tmp_path: Path) -> None:
    """Listing, loading and verifying, with or without `with`, from several threads."""
    state = make_state()
    with aiockpt.sync.Saver(tmp_path) as saver:
        for step in (1, 2):
            saver.save(state, step=step, files={"note.txt": b"hello"})
    with aiockpt.sync.Catalog(tmp_path) as runs:
        assert runs.steps() == (1, 2)
        assert [c.step for c in runs.checkpoints()] == [1, 2]
        newest = runs.latest("full")
        assert newest is not None
        assert runs.get(2) == newest
        assert runs.verify(newest) is not None
        assert runs.read_file(newest, "note.txt") == b"hello"
        fresh = make_state()
        assert runs.load(1, into=fresh).step == 1
        assert same(fresh, state)
        loaded: list[Any] = []
        threads = [in_thread(lambda: loaded.append(runs.load(paths=["lr"]))) for _ in range(4)]
        for thread in threads:
            thread.join()
        assert loaded == [{"lr": 0.5}] * 4
        data = next(p for p in newest.files or () if p == "note.txt")
        (tmp_path / newest.name / data).write_bytes(b"jello")
        with pytest.raises(CorruptCheckpointError):
            runs.read_file(2, "note.txt")
    with pytest.raises(UsageError, match="the catalog is closed"):
        runs.steps()
    runs.close()


def test_short_forms(tmp_path: Path) -> None:
    """`load` and `latest` need no object, and leave no thread behind."""
    assert aiockpt.sync.latest(tmp_path) is None
    with aiockpt.sync.Saver(tmp_path) as saver:
        saver.save({"w": torch.arange(5), "n": 3}, step=7)
    newest = aiockpt.sync.latest(tmp_path)
    assert newest is not None
    assert newest.step == 7
    assert torch.equal(aiockpt.sync.load(tmp_path)["w"], torch.arange(5))
    target: dict[str, Any] = {"w": torch.zeros(5, dtype=torch.int64), "n": 0}
    assert aiockpt.sync.load(tmp_path, into=target).values["n"] == 3
    assert torch.equal(target["w"], torch.arange(5))
    assert "aiockpt-sync" not in {t.name for t in threading.enumerate()}


def test_busy(tmp_path: Path) -> None:
    """`save_nowait` does not wait for an earlier save."""
    disk = Disk(before_staged)
    with aiockpt.sync.Saver(store_on(disk, tmp_path)) as saver:
        disk.arm()
        first = saver.save_nowait({"w": torch.zeros(BIG)}, step=1)
        with pytest.raises(BusyError):
            saver.save_nowait({"w": torch.zeros(BIG)}, step=2)
        disk.heal()
        first.result()


def test_saves_when_due_and_at_the_end(tmp_path: Path) -> None:
    """The trigger drives a plain loop too; the last step seen is saved on leaving."""
    with aiockpt.sync.Saver(tmp_path, when=EverySteps(4)) as saver:
        for step in range(1, 11):
            handle = saver.stage_if_due({"w": torch.full((3,), float(step))}, step=step, if_busy="wait")
            assert (handle is not None) == (step in (4, 8))
            assert saver.due(step + 100)
    with aiockpt.sync.Catalog(tmp_path) as catalog:
        assert catalog.steps() == (4, 8, 10)
