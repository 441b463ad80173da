"""The demo: train, be killed in a save, resume, and end bit-identical, or say that it did not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a few steps only."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "12", "--every", "3", *arguments],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def module() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["train_demo"] = found
    spec.loader.exec_module(found)
    return found


def test_three_acts_and_nothing_lost() -> None:
    """It trains, is killed with SIGKILL in the middle of a save, resumes from an older step, and says so."""
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert re.search(r"SIGKILL in the save of step 9: \d+ of \d+ bytes were written", out)
    assert "resumed from step 6" in out or "resumed from step 3" in out
    assert "bit-identical: nothing was lost" in out
    # The table: a line for each save of the whole run, and for those after the resumption.
    rows = re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +\d+$", out, re.MULTILINE)
    assert rows[:4] == ["3", "6", "9", "12"]
    assert rows[-1] == "12"


def test_something_lost_is_status_one(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The proof can fail: a run that forgets a part of its state ends with status 1."""
    whole_state = module.Digits.state

    def forgetful(run: Any) -> dict[str, Any]:
        return {name: part for name, part in whole_state(run).items() if name != "optim"}

    def act(title: str, out: Path, *extra: str) -> int:
        out.mkdir(exist_ok=True)
        asyncio.run(module.train(out, 12, 3, None))
        if "--die" not in extra:
            return 0
        for step in (9, 12):  # as if it had been killed
            shutil.rmtree(out / "ckpt" / f"step-{step:08d}")
        return -signal.SIGKILL

    monkeypatch.setattr(module, "act", act)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert module.demo(12, 3) == 0
        monkeypatch.setattr(module.Digits, "state", forgetful)
        assert module.demo(12, 3) == 1
    finally:
        torch.set_num_threads(threads)
    assert "NOT IDENTICAL" in capsys.readouterr().out


def test_a_second_act_that_is_not_killed_is_no_proof(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each act has to end as it should, else the demo says which did not and fails."""
    statuses = {"whole": 0, "crashed": 0}
    monkeypatch.setattr(module, "act", lambda title, out, *extra: statuses[out.name])
    assert module.demo(12, 3) == 1
    assert "was to be killed" in capsys.readouterr().out
    statuses["whole"] = 2
    assert module.demo(12, 3) == 1


def test_training_alone_goes_on_where_it_was(tmp_path: Path) -> None:
    """`--out` trains in a folder; a second call has nothing left to do but to resume."""
    first = run_demo("--out", str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert "starting fresh" in first.stdout
    result = json.loads((tmp_path / "final.json").read_text())
    assert result["step"] == 12
    longer = run_demo("--out", str(tmp_path), "--steps", "15")
    assert longer.returncode == 0, longer.stderr
    assert "resumed from step 12" in longer.stdout
