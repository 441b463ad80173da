"""The examples of serving do what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import aiockpt.sync

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def example(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run an example to its end, on one core's worth of threads."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)


def test_a_server_beside_its_trainer() -> None:
    """Several versions answer, the broken one never does, the last one is rolled back, no request fails."""
    done = example("serve.py", "--checkpoints", "7", "--pause", "0.4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^status page: http://127\.0\.0\.1:\d+/aiockpt$", done.stdout, re.MULTILINE)
    served = [int(step) for step in re.findall(r"^step +(\d+): +\d+ answers, ", done.stdout, re.MULTILINE)]
    assert served == sorted(served)
    assert len(served) >= 2
    assert 50 not in served
    assert "never served: step 50 (finite)" in done.stdout
    rolled = re.search(r"rolled back by HTTP to step (\d+)", done.stdout)
    assert rolled is not None
    assert int(rolled[1]) < 70
    assert "step 70 (rollback)" in done.stdout
    assert re.search(r"^\d{3,} answers by \d versions, 0 failed requests$", done.stdout, re.MULTILINE)


def test_it_goes_on_until_it_is_interrupted() -> None:
    """With --keep-running: Ctrl-C ends trainer, server and clients, without a word of complaint."""
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--keep-running", "--pause", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("step"):
                    break
            process.send_signal(signal.SIGINT)
            rest, complaints = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in rest + complaints


def test_rollouts_use_the_newest_weights(tmp_path: Path) -> None:
    """Something is learned, by many versions; what is committed is what was used."""
    run = tmp_path / "policy"
    done = example("rl_weights.py", "--updates", "20", "--run", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) versions were used; mean score (\S+) at first, (\S+) in the end", done.stdout)
    assert found is not None
    assert int(found[1]) > 5
    assert float(found[3]) > float(found[2]) + 0.2
    assert aiockpt.sync.Catalog(run).steps()[-1] == 20
