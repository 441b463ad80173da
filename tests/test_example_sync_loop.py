"""The example of a plain training loop does what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

import aiockpt.sync

EXAMPLE = Path(__file__).parent.parent / "examples" / "sync_loop.py"


def example(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the example to its end, on one core's worth of threads."""
    command = [sys.executable, str(EXAMPLE), "--run", str(run), *options]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_trains_and_resumes_exactly(tmp_path: Path) -> None:
    """Stopped half-way and run again it ends with the very weights of a run in one go."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    done = example(whole, "--steps", "60", "--every", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("started anew\n")
    assert re.findall(r"step (\d+): durable", done.stdout) == ["20", "40", "60"]
    assert example(halves, "--steps", "30", "--every", "20").returncode == 0
    resumed = example(halves, "--steps", "60", "--every", "20")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert resumed.stdout.startswith("resumed from step 30\n")
    assert "trained 30 steps, accuracy 0.9" in resumed.stdout
    assert aiockpt.sync.Catalog(halves).steps() == (20, 30, 40, 60)
    one, two = (aiockpt.sync.load(run, 60, paths=["model"])["model"] for run in (whole, halves))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_nothing_left_to_do(tmp_path: Path) -> None:
    """A run that has its steps already is left alone."""
    assert example(tmp_path, "--steps", "5").returncode == 0
    again = example(tmp_path, "--steps", "5")
    assert again.returncode == 0
    assert "resumed from step 5" in again.stdout
    assert "trained 0 steps" in again.stdout
    assert aiockpt.sync.Catalog(tmp_path).steps() == (5,)


def test_exit_status(tmp_path: Path) -> None:
    """What goes wrong shows in the exit status, in one line and without a traceback."""
    (tmp_path / "file").write_text("")
    refused = example(tmp_path / "file", "--steps", "5")
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert example(tmp_path / "run", "--steps", "0").returncode == 2


def test_interrupted(tmp_path: Path) -> None:
    """After Ctrl-C everything that was staged is there."""
    command = [
        sys.executable,
        "-u",
        str(EXAMPLE),
        "--run",
        str(tmp_path),
        "--steps",
        "1000000",
        "--every",
        "5",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 10:"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    staged = [int(step) for step in re.findall(r"step (\d+): .*staged", out)]
    newest = aiockpt.sync.latest(tmp_path)
    assert newest is not None
    assert newest.step >= max(staged, default=10)
