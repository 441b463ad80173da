"""Host memory stays within the budget, as the kernel counts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, json, sys
import torch, aiockpt

MB = 1 << 20

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

async def main(run):
    state = {"model": {f"w{i}": torch.full((8 * MB,), i, dtype=torch.uint8) for i in range(24)}}
    async with aiockpt.Saver(run, budget=64 * MB) as saver:
        await saver.save({"model": {"w": torch.ones(MB, dtype=torch.uint8)}}, step=0)  # to warm up
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # the peak is counted from here
        before = status("VmRSS")
        await saver.save(state, step=1)
        print(json.dumps({"grown": status("VmHWM") - before}))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel's peak cannot be reset"
)
def test_a_state_three_times_the_budget_needs_no_more_than_the_budget(tmp_path: Path) -> None:
    """192 MiB through a budget of 64: the peak grows by the budget, two blocks and 24 MiB at most."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    grown = json.loads(done.stdout)["grown"]
    assert 16 << 20 < grown < (64 + 32 + 24) << 20
