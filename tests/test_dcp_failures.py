"""A rank fails or dies in any phase of a save: all are told, nothing is visible, the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest

import aiockpt
from tests import dcp_failures, dcp_ranks, dcp_states

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    dcp_ranks.start_server()


def hidden(run: Path) -> list[str]:
    """Attempts and their locks."""
    return sorted(p.name for p in run.iterdir() if p.name.startswith("."))


async def test_one_rank_fails_in_each_phase(tmp_path: Path) -> None:
    """Every rank gets every failed rank's error, and the same writer then saves the step."""
    run = tmp_path / "run"
    stories = dcp_ranks.run(2, dcp_failures.fail_everywhere, run)
    assert stories[0] == stories[1]
    for phase, rank, failures, seen in stories[0][:-1]:
        assert failures is not None, phase
        assert rank in failures, phase
        expected = "SaveError" if phase == "resolve_data" else "ValueError"
        assert failures[rank] == expected, phase
        assert seen == ["step-00000001"], phase
    assert stories[0][-1][2][1] == "SaveError"
    assert dcp_ranks.visible(run) == ["step-00000001", "step-00000002"]
    assert hidden(run) == []
    async with aiockpt.Catalog(run) as catalog:
        await catalog.verify(await catalog.latest())


def test_the_commit_fails(tmp_path: Path) -> None:
    """A name that somebody takes in the last moment stays theirs, and every rank hears of it."""
    run = tmp_path / "run"
    failures = dcp_ranks.run(2, dcp_failures.lose_the_name, run)
    assert failures == [{0: "StepExistsError"}] * 2
    assert [p.name for p in (run / "step-00000001").iterdir()] == ["theirs"]
    assert hidden(run) == []


@pytest.mark.parametrize(
    ("phase", "who"),
    [("create_local_plan", 1), ("finish_plan", 1), ("resolve_data", 1), ("written", 1), ("finish", 0)],
)
def test_one_rank_dies(phase: str, who: int, tmp_path: Path) -> None:
    """The others get an error in bounded time; a new group saves the same step."""
    run = tmp_path / "run"
    told = dcp_ranks.run(2, dcp_failures.die_at, run, 1, phase, who, may_die=(who,))
    assert told[who] is None
    assert told[1 - who] not in ("nothing", None)
    assert dcp_ranks.visible(run) == []
    dcp_ranks.run(2, dcp_states.save_mixed, run, 1)
    assert dcp_ranks.visible(run) == ["step-00000001"]
    assert hidden(run) == []


def test_one_rank_fails_to_load(tmp_path: Path) -> None:
    """All ranks get the error, and can load afterwards."""
    run = tmp_path / "run"
    dcp_ranks.run(1, dcp_states.save_mixed, run, 1)
    assert dcp_ranks.run(2, dcp_failures.fail_to_load, run, 1) == [{1: "ValueError"}] * 2


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_async_save_of_torch(kind: str, tmp_path: Path) -> None:
    """In a thread and in a process of torch's own: what was staged is what is written."""
    assert dcp_ranks.run(2, dcp_failures.save_in_background, tmp_path / "run", kind) == [[], []]
    assert dcp_ranks.visible(tmp_path / "run") == ["step-00000001", "step-00000002"]
