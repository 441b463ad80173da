"""Programs that are told to end: `python -m tests.preempt_child PROGRAM RUN LOOP`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
import uvloop

import aiockpt
from aiockpt import Saver
from aiockpt._threads import Lane, offload
from tests.proof import state_of
from tests.stalling import Disk, a_write, store_on


def say(**facts: Any) -> None:
    """Tell the parent, in one line."""
    print(json.dumps(facts), flush=True)


async def twice(run: str) -> None:
    """SIGTERM twice while a save runs; then the same step again, and out in good order."""
    disk = Disk(a_write)
    async with aiockpt.preemption(grace=60) as notice, Saver(store_on(disk, Path(run))) as saver:
        await saver.save(state_of(1), step=1)
        disk.arm()
        pending = await saver.stage(state_of(7), step=7)
        await offload(disk.stalled.wait, lane=Lane.CONTROL)
        sent = time.perf_counter()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        await notice.wait()
        latency = time.perf_counter() - sent
        again = asyncio.ensure_future(saver.save(state_of(7), step=7))
        await asyncio.sleep(0)
        early = pending.done()
        disk.release.set()
        try:
            await again
        except aiockpt.StepExistsError as error:
            say(latency=latency, early=early, error=type(error).__name__, signal=str(notice.signal))


async def at_once(run: str) -> None:
    """Wait for the notice beside a step that takes for ever, and save then."""
    async with aiockpt.preemption(signal.SIGTERM, signal.SIGUSR1, grace=60) as notice, Saver(run) as saver:
        await saver.save(state_of(1), step=1)
        step = asyncio.create_task(asyncio.sleep(3600))
        say(ready=True, fits=notice.fits(saver.stats))
        await notice.wait()
        step.cancel()
        await saver.save(state_of(2), step=2)
        say(signal=str(notice.signal), remaining=notice.remaining)


async def worker(run: str) -> None:
    """A forked child gets the signal that its parent takes notice of."""
    async with aiockpt.preemption() as notice:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.write(theirs, b"!")  # what comes earlier gets lost in the fork, here as anywhere
            time.sleep(60)
            os._exit(0)
        os.read(ours, 1)
        os.kill(child, signal.SIGTERM)
        status = await offload(os.waitpid, child, 0, lane=Lane.CONTROL)
        say(status=os.waitstatus_to_exitcode(status[1]), told=notice.requested)


PROGRAMS: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
    f.__name__: f for f in (twice, at_once, worker)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    make = uvloop.new_event_loop if sys.argv[3] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(PROGRAMS[sys.argv[1]](sys.argv[2]))
