"""Many rounds of killing a training run at random moments; nothing may be lost.

Each round starts (or resumes) the demo's training run in one folder and, after a random
time, sends it SIGKILL, SIGTERM, or SIGSTOP followed by SIGCONT. After every round the
newest step must load with every byte verified and must not be older than the newest one
seen before; whenever a run comes to its end its result must equal the undisturbed run's,
bit by bit, and a new folder is begun.

    python chaos/soak.py --rounds 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiockpt

TRAIN = Path(__file__).parent.parent / "examples" / "train.py"
HOW = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


def command(out: Path, steps: int) -> list[str]:
    """The training command for a folder."""
    return [sys.executable, str(TRAIN), "--out", str(out), "--steps", str(steps), "--every", "3"]


def disturbed(out: Path, steps: int, after: float, how: signal.Signals) -> int:
    """Run until `after` seconds, then send the signal; returns the exit status."""
    process = subprocess.Popen(command(out, steps), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.send_signal(how)
        if how is signal.SIGSTOP:
            time.sleep(random.uniform(0, 1.0))
            process.send_signal(signal.SIGCONT)
    # Against hangs; on a loaded machine a run of seconds has taken two minutes.
    _, errors = process.communicate(timeout=600)
    if process.returncode not in (0, -signal.SIGKILL, -signal.SIGTERM):
        sys.stderr.buffer.write(errors)
    return process.returncode


async def newest(run: Path) -> int:
    """The newest step whose every byte is sound, -1 for none."""
    found = await aiockpt.latest(run, "full")
    return -1 if found is None else found.step


def soak(rounds: int, steps: int, folder: Path) -> Counter[str]:
    """Play the rounds; raises AssertionError at the first loss."""
    subprocess.run(command(folder / "whole", steps), check=True, stdout=subprocess.DEVNULL)
    want = json.loads((folder / "whole" / "final.json").read_text())["digest"]
    told: Counter[str] = Counter()
    run, seen = 0, -1
    for number in range(1, rounds + 1):
        out, how = folder / f"run-{run}", random.choice(HOW)
        status = disturbed(out, steps, random.uniform(1.0, 12.0), how)
        assert status in (0, -signal.SIGKILL, -signal.SIGTERM), f"round {number}: exit status {status}"
        step = asyncio.run(newest(out / "ckpt"))
        assert step >= seen, f"round {number}: step {seen} was there, now {step} is the newest"
        seen = step
        told[f"{how.name}, {'ended' if status == 0 else 'died'}"] += 1
        if status == 0:
            got = json.loads((out / "final.json").read_text())["digest"]
            assert got == want, f"round {number}: the result differs"
            told["runs completed bit-identical"] += 1
            shutil.rmtree(out)  # two hundred runs with all their steps would fill the disk
            run, seen = run + 1, -1
        if number % 10 == 0:
            print(f"round {number}: {dict(told)}", flush=True)
    return told


def main() -> int:
    """Parse the command line and soak."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    random.seed(args.seed)
    with tempfile.TemporaryDirectory(prefix="aiockpt-soak-") as folder:
        told = soak(args.rounds, args.steps, Path(folder))
    print(f"nothing was lost in {args.rounds} rounds: {dict(told)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
