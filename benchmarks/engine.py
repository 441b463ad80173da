"""How long a durable save takes, against the disk's ceiling and against others, in one run.

Every round runs each contender once, in turn, on the same tensors; a figure is the
median with minimum and maximum, and every contender is also given as a ratio to the
ceiling of the same round: threads that do nothing but write ready, aligned 16 MiB blocks
with O_DIRECT and then fsync. Machines are noisy: compare within one run only.

    python benchmarks/engine.py --mb 1700 --rounds 7 --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import safetensors.torch
import torch

import aiockpt

BLOCK = 16 << 20
State = dict[str, dict[str, torch.Tensor]]


def make_state(kind: str, megabytes: int) -> State:
    """Random tensors of one shape class, touched so that they are in memory."""
    sizes = {"large": 128 << 20, "medium": 256 << 10, "small": 4 << 10}
    each = sizes[kind]
    count = max(1, (megabytes << 20) // each)
    torch.manual_seed(0)
    # In one item, as a model's state dict would be.
    return {"model": {f"layers.{i}.weight": torch.randn(each // 4) for i in range(count)}}


def bytes_of(state: State) -> int:
    """Bytes of all tensors."""
    return sum(t.nbytes for item in state.values() for t in item.values())


def ceiling(folder: Path, nbytes: int, block: mmap.mmap, threads: int = 2) -> float:
    """Seconds that bare threads need to write and flush so many bytes from ready memory."""

    def write(path: Path, blocks: int) -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o666)
        for _ in range(blocks):
            os.write(fd, block)
        os.fsync(fd)
        os.close(fd)

    blocks = -(-nbytes // BLOCK)
    shares = [blocks // threads + (i < blocks % threads) for i in range(threads)]
    workers = [
        threading.Thread(target=write, args=(folder / f"ceiling-{i}", share))
        for i, share in enumerate(shares)
    ]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def flush(path: Path) -> None:
    """Fsync a file and its folder, which most writers leave out."""
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def with_safetensors(folder: Path, state: State) -> float:
    """Stock safetensors, plus the fsync it leaves out."""
    start = time.perf_counter()
    path = folder / "stock.safetensors"
    safetensors.torch.save_file(state["model"], path)
    flush(path)
    return time.perf_counter() - start


def with_torch(folder: Path, state: State) -> float:
    """torch.save, plus the fsync it leaves out."""
    start = time.perf_counter()
    path = folder / "stock.pt"
    torch.save(state, path)
    flush(path)
    return time.perf_counter() - start


@contextlib.asynccontextmanager
async def heartbeat(gaps: list[float], every: float = 0.001) -> AsyncIterator[None]:
    """Append the longest time the loop stood still meanwhile, in seconds."""
    longest, stop = 0.0, asyncio.Event()

    async def beat() -> None:
        nonlocal longest
        while not stop.is_set():
            start = time.perf_counter()
            await asyncio.sleep(every)
            longest = max(longest, time.perf_counter() - start - every)

    task = asyncio.create_task(beat())
    await asyncio.sleep(0.01)
    try:
        yield
    finally:
        stop.set()
        await task
        gaps.append(longest)


def remove(folder: Path) -> None:
    """Empty a folder and let the disk settle, outside the measured time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()


Figures = dict[str, list[float]]


async def rounds(args: argparse.Namespace, state: State, root: Path, figures: Figures) -> None:
    """Run every contender in turn, `args.rounds` times after one to warm up."""
    nbytes = bytes_of(state)
    block = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:] = os.urandom(1 << 20) * (BLOCK >> 20)
    others: dict[str, Callable[[Path, State], float]] = {
        "safetensors": with_safetensors,
        "torch.save": with_torch,
    }
    budget = int(args.budget * (1 << 20)) if args.budget else None
    async with aiockpt.Saver(root / "run", budget=budget) as saver:
        for number in range(args.rounds + 1):
            row = {}
            gaps: list[float] = []
            async with heartbeat(gaps):
                pass
            idle = gaps.pop()
            async with heartbeat(gaps):
                pending = await saver.stage(state, step=number)
                await pending
            seconds = pending.seconds
            row["aiockpt"] = seconds[aiockpt.Phase.COMMITTED]
            row["aiockpt staged"] = seconds[aiockpt.Phase.STAGED]
            row["capture"] = pending.capture_seconds
            row["loop gap"] = gaps.pop() - pending.capture_seconds
            row["loop gap idle"] = idle
            await asyncio.to_thread(shutil.rmtree, root / "run" / f"step-{number:08d}")
            work = root / "work"
            await asyncio.to_thread(remove, work)
            row["ceiling"] = await asyncio.to_thread(ceiling, work, nbytes, block)
            for name, save in others.items():
                await asyncio.to_thread(remove, work)
                row[name] = await asyncio.to_thread(save, work, state)
            await asyncio.to_thread(remove, work)
            if number:  # the first round warms the memory up
                for key, value in row.items():
                    figures.setdefault(key, []).append(value)


def report(figures: Figures, nbytes: int) -> None:
    """Print medians with their spread, and ratios to the ceiling of the same round."""
    print(
        f"{'':>15} {'median s':>9} {'min':>8} {'max':>8} {'GB/s':>6}  share of the ceiling (median, min, max)"
    )
    for name in ("ceiling", "aiockpt", "aiockpt staged", "safetensors", "torch.save"):
        values = figures[name]
        shares = [c / v for c, v in zip(figures["ceiling"], values, strict=True)]
        median = statistics.median(values)
        share = f"{statistics.median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}]"
        line = (
            f"{name:>15} {median:>9.3f} {min(values):>8.3f} {max(values):>8.3f} {nbytes / median / 1e9:>6.2f}"
        )
        print(f"{line}  {share}")
    for name in ("capture", "loop gap", "loop gap idle"):
        ms = [value * 1e3 for value in figures[name]]
        print(f"{name:>15} {statistics.median(ms):.2f} ms [{min(ms):.2f}, {max(ms):.2f}]")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{'peak memory':>15} {peak / 1e6:.0f} MB, of which the state is {nbytes / 1e6:.0f} MB")


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, default=1700, help="size of the state")
    parser.add_argument(
        "--kind", choices=("large", "medium", "small"), default="large", help="of the tensors"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, help="host memory for staging, MB (default: the saver's)")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="write the raw figures there")
    args = parser.parse_args()
    state = make_state(args.kind, args.mb)
    nbytes = bytes_of(state)
    print(
        f"{len(state['model'])} tensors ({args.kind}), {nbytes / 1e6:.0f} MB, {args.rounds} rounds",
        flush=True,
    )
    figures: Figures = {}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="aiockpt-bench-") as folder:
        asyncio.run(rounds(args, state, Path(folder), figures))
    report(figures, nbytes)
    if args.json:
        args.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
