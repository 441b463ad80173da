"""Child processes of the store tests: `python -m tests.store_child COMMAND PATH ...`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiockpt.storage import MANIFEST, Sink, Store
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles, FaultyStore
from aiockpt.testing._steps import new_id, write_step

ROOT = Path(__file__).resolve().parent.parent
DATA = bytes(range(256)) * 48
NAME = "step-00000007"
FILES = ("model", "part", MANIFEST)


async def scripted(store: Store) -> None:
    """One save, with the clean-up that a writer does when it fails."""
    attempt = await store.begin(NAME, new_id())
    sink: Sink | None = None
    try:
        sink = await attempt.create("model", len(DATA))
        for offset in range(0, len(DATA), 4096):
            await sink.write(offset, memoryview(DATA)[offset : offset + 4096])
        await sink.finish(len(DATA))
        await attempt.put("part", DATA[:100])
        await attempt.commit(attempt.save_id.encode())
    except BaseException:
        if sink is not None:
            await sink.discard()
        with contextlib.suppress(OSError):
            await attempt.abort()
        raise


def say(word: object) -> None:
    """Tell the parent something."""
    print(word, flush=True)


def die(base: str, *places: str) -> None:
    """For each `name=n` save to `base/name` in a fork that is killed at its n-th call; `n!`: of the store."""
    for place in places:
        name, _, point = place.partition("=")
        path, n = f"{base}/{name}", int(point.rstrip("!"))
        dying = LocalStore(path, files=FaultyFiles(n, "kill")) if point.isdigit() else None
        child = os.fork()  # not a process each: what takes long is the import
        if child == 0:
            asyncio.run(scripted(dying or FaultyStore(LocalStore(path), n, "kill")))
            os._exit(0)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


async def race(path: str, number: str) -> None:
    """Save one step against others who start at the same moment."""
    store = LocalStore(path)
    say("ready")
    sys.stdin.readline()
    await store.prepare()
    data = number.encode() * 500_000
    try:
        await write_step(store, NAME, {"a": data, "b": data})
    except FileExistsError:
        say("lost")
    else:
        say("won")
    await store.put(f"done-{number}", b"")


async def hold(path: str) -> None:
    """Hold an attempt until the end of the input, with a forked child that lives on."""
    attempt = await LocalStore(path).begin(NAME, new_id())
    await attempt.put("part", DATA)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    say(child)
    sys.stdin.readline()


async def fork(path: str) -> None:
    """Fork with an attempt open; whatever the child does with it, it goes on here."""
    store = LocalStore(path)
    attempt = await store.begin(NAME, new_id())
    child = os.fork()
    if child == 0:
        os._exit(_in_thread(lambda: _meddle(store, path, attempt)))
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222  # nothing else runs in this process
    assert os.waitstatus_to_exitcode(status) == 0
    with start("sweep", path) as other:
        assert other.communicate()[0] == "[]\n"
    await attempt.put("part", DATA)
    await attempt.commit(b"m")
    say("committed")


async def _meddle(store: LocalStore, path: str, attempt: Any) -> None:
    for end in (attempt.put("late", b""), attempt.commit(b"m"), attempt.create("late", 0)):
        try:
            await end
        except RuntimeError:
            continue
        raise AssertionError("an inherited attempt was used")
    await attempt.abort()
    assert await LocalStore(path).sweep() == []
    assert await store.sweep() == []
    await store.aclose()


def _in_thread(make: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a coroutine in a forked child, whose parent's loop is running in this very thread."""
    asyncio.events._set_running_loop(None)
    try:
        asyncio.run(make())
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        return 1
    return 0


async def sweep(path: str) -> None:
    """Sweep, and say what went."""
    say(await LocalStore(path).sweep())


async def sweep_on(path: str) -> None:
    """Sweep again and again until told that it is enough, then say what went."""
    store, parent = LocalStore(path), os.getppid()
    swept: list[str] = []
    say("ready")
    enough = Path(path, "enough")
    while os.getppid() == parent and enough.parent.exists() and not enough.exists():
        swept += await store.sweep()
        await asyncio.sleep(0.002)  # without it the kernel's journal hardly ever gets to a flush
    say(swept)


def command(*args: object) -> list[str]:
    """The command line of a child."""
    return [sys.executable, "-m", "tests.store_child", *map(str, args)]


def start(*args: object) -> subprocess.Popen[str]:
    """Start a child with pipes; use it in a `with`."""
    return subprocess.Popen(
        command(*args), cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def main() -> None:
    """Run one command."""
    if sys.argv[1] == "die":
        die(*sys.argv[2:])
        return
    commands = {f.__name__.replace("_", "-"): f for f in (race, hold, fork, sweep, sweep_on)}
    run: Callable[..., Coroutine[Any, Any, None]] = commands[sys.argv[1]]
    asyncio.run(run(*sys.argv[2:]))


if __name__ == "__main__":
    main()
