"""Child processes of the tests of locks, leases and aliases: `python -m tests.lock_child COMMAND RUN ...`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from aiockpt import Catalog, CheckpointError, RunLockedError, Saver
from tests.crash_child import ROOT
from tests.proof import state_of
from tests.store_child import say


async def hold(run: str) -> None:
    """Write the run; says the process id of a forked child that lives on; then saves the steps it is told."""
    async with Saver(run) as saver:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say(child)
        for line in iter(sys.stdin.readline, ""):
            try:
                await saver.save(state_of(int(line)), step=int(line))
            except CheckpointError as error:
                say(type(error).__name__)
            else:
                say("committed")
        os.kill(child, 9)


async def enter(run: str) -> None:
    """Enter a saver and leave it; says how that went."""
    start = time.monotonic()
    try:
        async with Saver(run):
            say("entered")
    except RunLockedError as error:
        recent = time.time() - 3600 < (error.since or 0) <= time.time()
        say(f"locked by {error.holder['pid']}" if error.holder and recent else error)
    assert time.monotonic() - start < 20, "this was to be quick"


async def lease(run: str, ttl: str) -> None:
    """Lease the newest checkpoint until the end of the input."""
    async with Catalog(run) as catalog, catalog.lease(ttl=float(ttl)) as held:
        say(held.checkpoint.step)
        await asyncio.to_thread(sys.stdin.readline)


async def promote(run: str, *steps: str) -> None:
    """Promote one step after the other, again and again."""
    async with Catalog(run) as catalog:
        say("ready")
        sys.stdin.readline()
        for _ in range(20):
            for step in steps:
                await catalog.promote(int(step), alias="production")
    say("done")


def start(*args: object) -> subprocess.Popen[str]:
    """Start a child with pipes; use it in a `with`."""
    command = [sys.executable, "-m", "tests.lock_child", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def heard(child: subprocess.Popen[str]) -> str:
    """The next word of a child."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def tell(child: subprocess.Popen[str], word: object) -> str:
    """Tell a child something, and return its answer."""
    assert child.stdin is not None
    child.stdin.write(f"{word}\n")
    child.stdin.flush()
    return heard(child)


def main() -> None:
    """Run one command."""
    commands: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
        f.__name__: f for f in (hold, enter, lease, promote)
    }
    asyncio.run(commands[sys.argv[1]](*sys.argv[2:]))


if __name__ == "__main__":
    main()
