"""After a power loss at any moment the newest step is the old or the new one; once committed, the new one."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiockpt import Catalog, CheckpointError, Saver
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles
from tests.crash_child import NEW, OLD, ROOT, command
from tests.power import Effect, Recording, fingerprint, read_tree, subsets, write_tree
from tests.proof import in_own_loop, litter, number_in, save, state_of

pytestmark = pytest.mark.timeout(300)
EXHAUSTIVE = 6
"""Up to so many open effects all subsets are tried."""
Act = Callable[[Saver], Awaitable[object]]


@dataclass
class Judge:
    """Materializes what a power loss left and says which state is the newest."""

    tmp_path: Path
    run: str
    """The run's folder below the base."""
    seen: dict[str, int | None] = field(default_factory=dict)
    number: itertools.count[int] = field(default_factory=itertools.count)

    async def newest(self, recording: Recording, effects: list[Effect]) -> int | None:
        """The number of the newest state in what is left; None when there is no checkpoint.

        Raises:
            AssertionError: a damaged step is visible, or a state is neither old nor new.
            CheckpointError: nothing can be loaded.
        """
        tree = recording.tree(effects)
        key = fingerprint(tree)
        if key not in self.seen:
            self.seen[key] = await self._look(tree, restart=len(self.seen) % 10 == 0)
        return self.seen[key]

    async def _look(self, tree: dict[str, bytes | None], *, restart: bool) -> int | None:
        base = self.tmp_path / f"disk-{next(self.number)}"
        write_tree(tree, base)
        async with Catalog(base / self.run) as catalog:
            found = await catalog.restore()
        number = None if found is None else number_in(found.values)
        assert found is None or found.skipped == (), "a damaged step is visible"
        if restart:
            async with Saver(base / self.run) as saver:
                assert litter(base / self.run) == []
                await saver.save(state_of(7), step=7)
        shutil.rmtree(base)
        return number


async def record(base: Path, run: str, act: Act, files: FaultyFiles | None = None) -> Recording:
    """Enter a saver, act, and keep all of it."""
    files = files or FaultyFiles(keep_data=True)
    tree = read_tree(base)
    async with Saver(LocalStore(base / run, files=files)) as saver:
        await act(saver)
        await saver.drain()
        log = list(files.log)
    return Recording(base, tree, log)


def commit_time(recording: Recording) -> int:
    """When the flush after the last step's rename had ended: from here on it cannot be lost."""
    step = re.compile(r"\.step-\d+(\.\d+)?\.[0-9a-f]{32}")
    rename = next(e for e in reversed(recording.effects) if step.fullmatch(e.was))
    return next(f.ended for f in recording.flushes if f.of is rename.of and f.began > rename.ended)


async def check_all(
    recording: Recording, judge: Judge, before: int | None, after: int | None, done: int
) -> Counter[int | None]:
    """Lose the power at every moment; returns how often which state was the newest."""
    found: Counter[int | None] = Counter()
    for time in range(-1, recording.end + 1):
        kept, open_ = recording.at(time)
        for some in subsets(open_, EXHAUSTIVE):
            number = await judge.newest(recording, [*kept, *some])
            assert number in ((after,) if time >= done else (before, after)), f"at {time}"
            found[number] += 1
    return found


async def save_new(saver: Saver) -> None:
    """The act of most tests."""
    await saver.save(state_of(NEW), step=NEW)


@pytest.mark.slow
async def test_the_power_may_go_in_a_save(tmp_path: Path) -> None:
    """At every moment, for every subset of what was not flushed (few) or many of them (many)."""
    base = tmp_path / "base"
    await save(base / "run", state_of(OLD), OLD)
    recording = await record(base, "run", save_new)
    found = await check_all(recording, Judge(tmp_path, "run"), OLD, NEW, commit_time(recording))
    assert found[OLD] > 100
    assert found[NEW] > 5


@pytest.mark.slow
async def test_the_power_may_go_in_the_first_save_of_all(tmp_path: Path) -> None:
    """With folders that had to be made: once committed, the names of all of them are durable."""
    base = tmp_path / "base"
    base.mkdir()
    recording = await record(base, "a/b/run", save_new)
    found = await check_all(recording, Judge(tmp_path, "a/b/run"), None, NEW, commit_time(recording))
    assert found[None] > 100
    assert found[NEW] > 5


@pytest.mark.slow
async def test_the_power_may_go_while_a_step_is_written_anew(tmp_path: Path) -> None:
    """The older generation is removed only when the newer one cannot be lost any more."""
    base = tmp_path / "base"
    await save(base / "run", state_of(OLD), OLD)

    async def act(saver: Saver) -> None:
        await saver.save(state_of(NEW), step=OLD, overwrite=True)

    recording = await record(base, "run", act)
    done = commit_time(recording)
    assert done < recording.end - 5
    found = await check_all(recording, Judge(tmp_path, "run"), OLD, NEW, done)
    assert found[OLD] > 100
    assert found[NEW] > 20


@pytest.mark.slow
async def test_the_power_may_go_while_a_run_is_rewound(tmp_path: Path) -> None:
    """The later step is there whole or not at all; once told, it is gone for good."""
    base = tmp_path / "base"
    for number in (OLD, NEW):
        await save(base / "run", state_of(number), number)

    async def act(saver: Saver) -> None:
        await saver.restore(step=OLD, rewind=True)

    recording = await record(base, "run", act)
    found = await check_all(recording, Judge(tmp_path, "run"), NEW, OLD, recording.end)
    assert found[NEW] > 20
    assert found[OLD] > 20


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Judge, int]:
    """A save after an older one."""
    folder = tmp_path_factory.mktemp("power")
    made: list[Recording] = []

    async def make() -> None:
        await save(folder / "base" / "run", state_of(OLD), OLD)
        made.append(await record(folder / "base", "run", save_new))

    in_own_loop(make)
    return made[0], Judge(folder, "run"), commit_time(made[0])


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_subset_may_be_lost(recorded: tuple[Recording, Judge, int], data: st.DataObject) -> None:
    """Any moment, any subset."""
    recording, judge, done = recorded
    time = data.draw(st.integers(0, recording.end))
    kept, open_ = recording.at(time)
    some = data.draw(st.sets(st.integers(0, len(open_) - 1))) if open_ else set()
    found: list[int | None] = []

    async def look() -> None:
        found.append(await judge.newest(recording, [*kept, *(open_[i] for i in some)]))

    in_own_loop(look)
    assert found[0] in ((NEW,) if time >= done else (OLD, NEW))


async def losses(recording: Recording, judge: Judge) -> list[str]:
    """What goes wrong when the power is lost right after the end."""
    kept, open_ = recording.at(recording.end)
    found = []
    for some in subsets(open_, EXHAUSTIVE):
        try:
            number = await judge.newest(recording, [*kept, *some])
        except (AssertionError, CheckpointError) as error:
            found.append(repr(error))
        else:
            found += [] if number == NEW else [f"the newest is {number}"]
    return found


@pytest.mark.slow
async def test_each_flush_of_a_save_is_needed(tmp_path: Path) -> None:
    """The simulator can fail: without any one of a save's flushes something would be lost."""
    base = tmp_path / "base"
    await save(base / "run", state_of(OLD), OLD)
    recording = await record(base, "run", save_new)
    judge = Judge(tmp_path, "run")
    assert await losses(recording, judge) == []
    first = next(e.began for e in recording.effects if e.name.startswith(".step-"))
    needed = [flush for flush in recording.flushes if flush.began > first]
    assert len(needed) == 6  # two data files, the part, the manifest, the step's folder, the run's folder
    for flush in needed:
        assert await losses(recording.without(flush), judge), f"nothing is lost without {flush}"


async def test_a_disk_that_does_not_flush_a_folder_is_found_out(tmp_path: Path) -> None:
    """The same with a file system that forgets: the save succeeds, the simulator knows better."""

    class Forgetful(FaultyFiles):
        def sync_dir(self, path: str) -> None:
            if os.path.basename(path) != "run":
                super().sync_dir(path)

    base = tmp_path / "base"
    await save(base / "run", state_of(OLD), OLD)
    recording = await record(base, "run", save_new, Forgetful(keep_data=True))
    assert "the newest is 1" in await losses(recording, Judge(tmp_path, "run"))


# ---------------------------------------------------------------- is the recording true?

CALLS = (
    "openat,mkdir,rename,renameat2,link,linkat,unlink,unlinkat,rmdir,fsync,fdatasync,ftruncate,write,pwrite64"
)
LINE = re.compile(r"(?P<call>\w+)\((?P<args>.*)\)\s+= (?P<result>-?\d+)")
OPS = {"renameat2": "rename", "linkat": "link", "unlinkat": "unlink", "ftruncate": "truncate",
       "fdatasync": "fsync", "pwrite64": "write"}  # fmt: skip


def complete_lines(text: str) -> list[str]:
    """The calls of a trace in the order they ended, interrupted lines put together."""
    begun: dict[str, str] = {}
    found = []
    for line in text.splitlines():
        pid, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[pid] = call.removesuffix("<unfinished ...>")
        elif call.startswith("<..."):
            found.append(begun.pop(pid) + call.partition("resumed>")[2])
        else:
            found.append(call)
    return found


def traced(text: str, run: str) -> list[tuple[str, str, int]]:
    """(operation, path, bytes) of every successful call below the run."""
    found = []
    for line in complete_lines(text):
        match = LINE.match(line)
        if match is None or match["result"].startswith("-"):
            continue
        call, args = OPS.get(match["call"], match["call"]), match["args"]
        path = (re.search(r"^\d+<([^>]*)>", args) or re.search(r'"([^"]*)"', args) or ["", ""])[1]
        # The run's lock is written through its own descriptor; no checkpoint rests on what it says.
        if not path.startswith(run) or path == f"{run}/lock":
            continue
        if call == "openat":
            if "O_CREAT" in args:
                found.append(("create", path, 0))
            continue
        if call == "fsync" and not os.path.splitext(path)[1].startswith((".json", ".safetensors", ".tmp")):
            call = "sync_dir"
        nbytes = int(match["result"]) if call == "write" else 0
        if call == "truncate":
            nbytes = int(args.rsplit(",", 1)[1])
        found.append((call, path, nbytes))
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
async def test_the_recording_is_what_the_kernel_sees(tmp_path: Path) -> None:
    """Every call that changes the disk is in the log, with its path and length, and no other."""
    run, out = tmp_path / "run", tmp_path / "trace"
    strace = ["strace", "-f", "-y", "-qq", "-s", "0", "-e", f"trace={CALLS}", "-o", str(out)]
    child = await asyncio.create_subprocess_exec(
        *strace, *command("record", run), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    told, complaints = await child.communicate()
    if b"ptrace" in complaints.lower() and child.returncode:
        pytest.skip(f"strace may not trace here: {complaints.decode()[:200]}")
    assert child.returncode == 0, complaints.decode()
    log = [event for event in json.loads(told) if event[4]]
    changes = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "sync_dir", "create", "write", "lock",
               "truncate", "fsync")  # fmt: skip
    ours = [
        (
            {"lock": "create", "replace": "rename"}.get(op, op),
            path,
            nbytes if op in ("write", "truncate") else 0,
        )
        for op, path, _, nbytes, _ in log
        if op in changes and path.startswith(str(run)) and path != str(run / "lock")
    ]
    theirs = traced(out.read_text(), str(run))

    def counted(calls: list[tuple[str, str, int]]) -> Counter[tuple[str, str, int]]:
        return Counter(call for call in calls if call[0] != "write")

    def written(calls: list[tuple[str, str, int]]) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for op, path, nbytes in calls:
            if op == "write":
                sums[path] += nbytes
        return {path: total for path, total in sums.items() if total}

    assert counted(theirs) == counted(ours)
    assert written(theirs) == written(ours)
    assert sum(written(ours).values()) > 100_000
    # What the commit rests on comes in the same order.
    order = [call[:2] for call in ours if call[0] in ("rename", "sync_dir")]
    assert [call[:2] for call in theirs if call[0] in ("rename", "sync_dir")] == order
    assert len(order) > 8
