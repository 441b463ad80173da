"""How much a save and a training loop that never lets go of the GIL cost each other.

The loop does Python work of about 10 ms at a time (no torch call that would release the
GIL) on the event loop's thread and gives way once in between, as an asyncio trainer does.
Measured in turns, so that a busy machine hits all alike: the loop alone, the loop beside
back-to-back saves, a save alone, a save beside the loop; and the same with `torch.save`
and fsync in a thread, for comparison. Asks whether a worker process for saves would pay.

    python benchmarks/hungry.py --mb 200 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.policies.keep import KeepLast

Save = Callable[[dict[str, Any], int], Awaitable[object]]


def think(n: int) -> int:
    """Pure Python."""
    total = 0
    for i in range(n):
        total += i * i % 7
    return total


async def hungry(until: asyncio.Event, n: int) -> float:
    """Turns a second until told to end."""
    turns, began = 0, time.perf_counter()
    while not until.is_set():
        think(n)
        turns += 1
        await asyncio.sleep(0)
    return turns / (time.perf_counter() - began)


async def alone(seconds: float, n: int) -> float:
    """The loop's speed without saves."""
    until = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, until.set)
    return await hungry(until, n)


async def timed(save: Save, state: dict[str, Any], step: int) -> float:
    """Seconds of a save alone."""
    began = time.perf_counter()
    await save(state, step)
    return time.perf_counter() - began


async def beside(save: Save, state: dict[str, Any], step: int, n: int) -> tuple[float, float]:
    """Both at once: seconds of a save, and the loop's speed meanwhile."""
    until = asyncio.Event()
    loop = asyncio.create_task(hungry(until, n))
    seconds = statistics.mean([await timed(save, state, step + k) for k in range(3)])
    until.set()
    return seconds, await loop


def told(name: str, values: list[float], unit: str) -> None:
    """One line: the median and the extremes."""
    print(f"{name:44} {statistics.median(values):8.3f} [{min(values):.3f}, {max(values):.3f}] {unit}")


async def main(mb: int, rounds: int) -> None:
    """Play the rounds and print."""
    state = {f"w{k}": torch.randn(mb * 1024 * 1024 // 4 // 8) for k in range(8)}
    n = 20_000
    while (began := time.perf_counter(), think(n), time.perf_counter() - began)[2] < 0.01:
        n = int(n * 1.3)
    with tempfile.TemporaryDirectory(dir=".") as folder:

        def by_torch(step: int) -> None:
            with open(Path(folder, f"{step % 2}.pt"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        async with aiockpt.Saver(Path(folder, "run"), keep=KeepLast(1)) as saver:

            async def ours(state: dict[str, Any], step: int) -> None:
                await saver.save(state, step=step)

            async def theirs(state: dict[str, Any], step: int) -> None:
                await asyncio.to_thread(by_torch, step)

            results: dict[str, list[float]] = {}
            await timed(ours, state, 0)  # first touch of the blocks
            step = 1
            for _ in range(rounds):
                speed = await alone(1.5, n)
                for name, save in (("aiockpt", ours), ("torch.save in a thread", theirs)):
                    own = await timed(save, state, step)
                    seconds, meanwhile = await beside(save, state, step + 1, n)
                    step += 5
                    results.setdefault(f"{name}: save alone, s", []).append(own)
                    results.setdefault(f"{name}: save beside the loop, s", []).append(seconds)
                    results.setdefault(f"{name}: the loop keeps", []).append(meanwhile / speed)
    print(f"{mb} MiB, {rounds} rounds, {n} iterations of pure Python a turn")
    for name, values in results.items():
        told(name, values, "of its speed" if "keeps" in name else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(main(**vars(parser.parse_args())))
