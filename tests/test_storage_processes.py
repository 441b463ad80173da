"""Several processes on one folder: races, locks, forks and kills."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from aiockpt.storage import MANIFEST
from aiockpt.storage.local import LocalStore
from aiockpt.testing._steps import raw_tree, read_step, write_step
from tests.store_child import NAME, start


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that exists."""
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.slow
async def test_four_processes_and_one_name(tmp_path: Path) -> None:
    """Of several processes that save one step exactly one wins, whole; no litter stays."""
    run = tmp_path / "not" / "there"
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(start("race", run, number)) for number in range(4)]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = [child.communicate()[0].strip() for child in children]
    assert sorted(answers) == ["lost", "lost", "lost", "won"]
    winner = str(answers.index("won")).encode() * 500_000
    assert await read_step(LocalStore(run), NAME) == [winner] * 2
    assert sorted(p.name for p in run.iterdir()) == ["done-0", "done-1", "done-2", "done-3", NAME]


async def test_attempts_of_other_processes(run: Path) -> None:
    """A living process keeps its attempt; a killed one does not, though its forked child lives."""
    store = LocalStore(run)
    with start("hold", run) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            before = raw_tree(run)
            assert await store.sweep() == []
            assert raw_tree(run) == before
            child.kill()
            child.wait()
            os.kill(grandchild, 0)
            assert await store.sweep() == [NAME]
        finally:
            os.kill(grandchild, 9)
    assert raw_tree(run) == {}


async def test_a_forked_child_cannot_end_an_attempt(run: Path) -> None:
    """An inherited attempt is inert in a forked child, and lives on in its parent."""
    with start("fork", run) as child:
        assert child.stdout is not None
        assert child.stdout.read() == "committed\n"
    assert child.returncode == 0
    assert sorted(raw_tree(run)) == [f"{NAME}/{MANIFEST}", f"{NAME}/part"]


async def test_sweeps_elsewhere_never_hit_a_living_save(run: Path) -> None:
    """while another process sweeps again and again, every save and every put goes through."""
    store = LocalStore(run)
    with start("sweep-on", run) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            for number in range(15):
                await write_step(store, f"step-{number}", {"a": b"%d" % number})
                await store.put("alias", b"%d" % number)
        finally:
            (run / "enough").touch()
        assert child.stdout.read() == "[]\n"
    assert sorted(p.name for p in run.iterdir()) == sorted(
        ["alias", "enough", *(f"step-{n}" for n in range(15))]
    )
    for number in range(15):
        assert await read_step(store, f"step-{number}") == [b"%d" % number]
