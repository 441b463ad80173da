"""Programs that crash, race and hold: `python -m tests.crash_child COMMAND ARGUMENTS`.

Loading torch takes seconds, so one interpreter plays many processes: it forks each of
them before anything of it has started a thread.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt import CheckpointWriter, Saver, StepError, StepExistsError, Store
from aiockpt._threads import Lane, offload
from aiockpt.errors import RunLockedError
from aiockpt.publish.latest_link import LatestLink
from aiockpt.publish.tracker_file import TrackerFile
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles, FaultyStore
from tests.proof import number_in, outside, save, state_of, writes_seen

ROOT = Path(__file__).resolve().parent.parent
OLD, NEW = 1, 2
TOO_LATE = (StepError, StepExistsError, RunLockedError)
"""What a save is told when another process was faster."""
NOBODY = 65534


def big_state(number: int) -> dict[str, Any]:
    """Two files of some megabytes, all of one number."""
    return {name: torch.full((1 << 19,), float(number)) for name in ("model", "optim")}


# ---------------------------------------------------------------- processes


def say(word: object) -> None:
    """Tell the parent something: in one piece, for several processes share the pipe."""
    os.write(1, f"{word}\n".encode())


def forked(make: Callable[[], Coroutine[Any, Any, object]]) -> int:
    """Run a coroutine in a forked child; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        asyncio.run(make())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a child; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(*args: object) -> list[str]:
    """The command line of a program of this file."""
    return [sys.executable, "-m", "tests.crash_child", *map(str, args)]


def start(*args: object) -> subprocess.Popen[str]:
    """Start one with pipes; use it in a `with`."""
    return subprocess.Popen(
        command(*args), cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def finish(*args: object) -> list[str]:
    """Run one to its end; the lines it said."""
    with start(*args) as child:
        said = child.communicate(timeout=240)[0]
    assert child.returncode == 0, f"{args[0]} ended with {child.returncode}"
    return said.splitlines()


# ---------------------------------------------------------------- programs


def die(floor: str, root: str) -> None:
    """A save killed at its n-th operation, for every n, each in a copy of the run of its own."""
    for n in itertools.count():
        run = f"{root}/{floor}-{n:03d}"
        shutil.copytree(f"{root}/template", run)
        child = forked(lambda n=n, run=run: _save_and_die(floor, run, n))  # type: ignore[misc]
        status = ended(child)
        if status == 0:
            break
        assert status == -signal.SIGKILL, status


async def _save_and_die(floor: str, run: str, n: int) -> None:
    files = FaultyFiles(n if floor == "files" else None, "kill")
    store: Any = LocalStore(run, files=files)
    if floor == "store":
        store = FaultyStore(store, n, "kill")
    await save(store, state_of(NEW), NEW)
    counted = files.operations if floor == "files" else store.operations
    say(json.dumps([operation.split()[0] for operation in counted]))


def kill_on_demand(run: str) -> None:
    """For each line with a delay: a process that saves one step after the other, then killed."""
    for line in sys.stdin:
        ours, theirs = os.pipe()
        child = forked(lambda theirs=theirs: _save_on(run, theirs))  # type: ignore[misc]
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        say(ended(child))


async def _save_on(run: str, entered: int) -> None:
    async with Saver(run, publish=[LatestLink(), TrackerFile()]) as saver:
        latest = await aiockpt.latest(run)
        os.write(entered, b"!")
        for step in itertools.count(latest.step + 1 if latest else 1):
            await saver.save(big_state(step), step=step)


def hold(run: str, step: str) -> None:
    """Stay in the middle of a save until a line comes, then go on."""
    asyncio.run(_hold(run, int(step)))


async def _hold(run: str, step: int) -> None:
    files = FaultyFiles(5, "stall")
    # Not through a saver: it is the attempt that lives, whoever else writes the run.
    async with CheckpointWriter(LocalStore(run, files=files), step=step) as writer:
        await writer.plan_state(state_of(step))
        writing = asyncio.create_task(writer.write())
        await offload(files.stalled.wait, lane=Lane.CONTROL)
        say("holding")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        files.heal()
        await writer.finish([await writing])
    say("committed")


def orphan(run: str) -> None:
    """Be killed in the middle of a save, leaving behind a forked child, as data loaders have them."""
    asyncio.run(_orphan(run))


async def _orphan(run: str) -> None:
    files = FaultyFiles(None, "stall")
    async with Saver(LocalStore(run, files=files)) as saver:
        files.faults.fail_at = len(files.operations) + 8
        saver.save_nowait(state_of(NEW), step=NEW)
        await offload(files.stalled.wait, lane=Lane.CONTROL)
        grandchild = os.fork()
        if not grandchild:
            os.close(1)
            time.sleep(120)
            os._exit(0)
        say(grandchild)
        os.kill(os.getpid(), signal.SIGKILL)


def race(root: str, rounds: str, one_pid: str) -> None:
    """Four processes save one step of one run at the same moment, again and again."""
    if one_pid == "yes":  # as in containers, where everybody is process 1
        os.getpid = lambda: 1
    for number in range(int(rounds)):
        ready, go = os.pipe()
        children = [forked(lambda rank=rank: _race(f"{root}/{number}", rank, ready)) for rank in range(4)]  # type: ignore[misc] # noqa: B023
        os.write(go, b"!!!!")
        say([ended(child) for child in children])
        os.close(ready)
        os.close(go)


async def _race(run: str, rank: int, ready: int) -> None:
    os.read(ready, 1)
    try:
        await save(run, big_state(rank), 1)
    except TOO_LATE:
        say("lost")
    else:
        say(f"won {rank}")


def crowd(root: str) -> None:
    """Four processes save different steps into one run that does not exist yet."""
    ready, go = os.pipe()
    children = [forked(lambda rank=rank: _crowd(root, rank, ready)) for rank in range(4)]  # type: ignore[misc]
    os.write(go, b"!!!!")
    assert [ended(child) for child in children] == [0] * 4


async def _crowd(root: str, rank: int, ready: int) -> None:
    os.read(ready, 1)
    await save(f"{root}/own-{rank}", state_of(rank), rank)
    try:
        await save(f"{root}/shared", state_of(rank), rank)
    except TOO_LATE:
        say(f"late {rank}")
    else:
        say(f"saved {rank}")


def unwritable(root: str) -> None:
    """As a user without rights: a leaf that is ours in a folder that is not, and a run that is not."""
    # Whatever is imported on first use: the interpreter itself may be out of that user's reach.
    asyncio.run(_warm_up(Path(root, "warm")))
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    say(json.dumps(asyncio.run(_unwritable(Path(root)))))


async def _warm_up(run: Path) -> None:
    await save(run, state_of(OLD), OLD)
    await aiockpt.latest(run, "full")
    number_in(await aiockpt.load(run))


async def _unwritable(root: Path) -> dict[str, Any]:
    leaf, theirs = root / "parent" / "leaf", root / "theirs"
    with writes_seen() as seen:
        await save(leaf, state_of(NEW), NEW)
        number = number_in(await aiockpt.load(leaf))
    found: dict[str, Any] = {"leaf": number, "outside": outside(seen, leaf)}
    for name, folder in (("begin", theirs), ("make", root / "parent" / "new" / "run")):
        try:
            await save(folder, state_of(NEW), NEW)
        except aiockpt.StorageError as error:
            found[name] = [errno.errorcode[error.errno or 0], str(error.filename)]
    with writes_seen() as seen:
        async with aiockpt.Catalog(theirs) as catalog:
            found["steps"] = await catalog.steps()
            await catalog.verify()
            await catalog.latest("full")
            found["theirs"] = number_in(await catalog.load())
    found["written by reading"] = outside(seen, Path("/nowhere"))
    return found


def record(run: str) -> None:
    """Two saves with a recording of all calls to the disk, which is then told."""
    asyncio.run(_record(run))


async def _record(run: str) -> None:
    files = FaultyFiles()
    store: Store = LocalStore(run, files=files)
    async with Saver(store) as saver:
        await saver.save(state_of(OLD), step=OLD)
        await saver.save(state_of(NEW), step=OLD, overwrite=True)
    say(json.dumps([(e.op, e.path, e.target, e.nbytes, e.ended is not None) for e in files.log]))


PROGRAMS: dict[str, Callable[..., None]] = {
    f.__name__.replace("_", "-"): f
    for f in (die, kill_on_demand, hold, orphan, race, crowd, unwritable, record)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
