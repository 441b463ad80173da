"""AioTrainer on two ranks: one checkpoint with the random state of each, one outcome for both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run_ranks(folder: Path) -> list[dict[str, Any]]:
    """Run two ranks over gloo; returns what each told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in (0, 1):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.trainer_child", str(folder)]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        said = [child.communicate(timeout=150)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_make_one_checkpoint_and_share_its_fate(tmp_path: Path) -> None:
    """Each rank's random state is in it, a resumed run is the uninterrupted one, both hear of a failure."""
    first, second = run_ranks(tmp_path)
    assert first["stopped"]["listing"] == ["checkpoint-2"]
    names = os.listdir(tmp_path / "run" / "checkpoint-2")
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"} <= set(names)
    assert first["resumed"]["losses"] == first["straight"]["losses"]
    assert second["resumed"]["losses"] == second["straight"]["losses"]
    assert first["resumed"]["listing"] == ["checkpoint-2", "checkpoint-4"]
    assert first["failed"]["error"] == second["failed"]["error"] == "PreviousSaveError"
    assert first["failed at the end"]["error"] == "StorageError"
    assert second["failed at the end"]["error"] == "RanksFailedError"
    for outcome in (first, second):
        assert "No space left" in outcome["failed"]["says"]
        assert "No space left" in outcome["failed at the end"]["says"]
