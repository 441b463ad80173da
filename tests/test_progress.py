"""`progress=True` on a real terminal, by each of the packages that may draw, and its silence elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt import progress
from aiockpt.errors import CheckpointError, StorageError
from aiockpt.storage import open_store
from aiockpt.testing import FaultyStore

PROGRAM = """
import asyncio, sys
for name in sys.argv[2:]:
    sys.modules[name] = None  # not installed
import torch
import aiockpt

async def main():
    state = {"w": torch.ones(1 << 20)}
    async with aiockpt.Saver(sys.argv[1], progress=True) as saver:
        await saver.save(state, step=1)
        await saver.save(state, step=2)
    await aiockpt.load(sys.argv[1], progress=True)
    print("done")

asyncio.run(main())
"""


def on_a_terminal(run: Path, *missing: str, **env: str) -> str:
    """What the program shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    settings = os.environ | {"TERM": "xterm"} | env
    command = [sys.executable, "-c", PROGRAM, str(run), *missing]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings) as process:
        os.close(theirs)
        seen = bytearray()
        while True:
            try:
                got = os.read(ours, 65536)
            except OSError:  # the last process that had the terminal has ended
                break
            if not got:
                break
            seen += got
        os.close(ours)
        assert process.wait(30) == 0, seen.decode()
    text = seen.decode()
    assert "done" in text
    return text


@pytest.mark.parametrize("other", ["rich", "tqdm"])
def test_a_bar_for_each_save_and_load(tmp_path: Path, other: str) -> None:
    """Whichever package is there draws: the step, the bytes, how it ended."""
    text = on_a_terminal(tmp_path, other)
    for words in ("step 1", "step 2", "load step 2", "committed", "loaded"):
        assert words in text, text
    assert "4.2/4.2 MB" in text or "4.00M" in text, text


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    """One process of a job draws."""
    text = on_a_terminal(tmp_path, RANK="1")
    assert text.split() == ["done"]


def test_without_either_package_it_is_said_once(tmp_path: Path) -> None:
    """No reason to end a training run."""
    text = on_a_terminal(tmp_path, "rich", "tqdm")
    assert text.count("neither is installed") == 1


def test_off_a_terminal_nothing_is_drawn(tmp_path: Path) -> None:
    """A log file is no terminal."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (b"done\n", b"")


class Recorded:
    """Bars that write down what they are told."""

    def __init__(self) -> None:
        self.lines: dict[str, list[tuple[int, int, str]]] = {}

    def open(self, title: str) -> Line:
        return Line(self.lines.setdefault(title, []))


class Line:
    def __init__(self, told: list[tuple[int, int, str]]) -> None:
        self.told = told

    def update(self, done: int, total: int, note: str) -> None:
        self.told.append((done, total, note))

    def close(self, note: str) -> None:
        self.told.append((-1, -1, note))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Bars of the test's own, on what passes for a terminal."""
    bars = Recorded()
    monkeypatch.setattr(progress, "shown", lambda: True)
    monkeypatch.setattr(progress, "_drawer", lambda: bars)
    return bars


async def test_the_last_numbers_are_whole(tmp_path: Path, recorded: Recorded) -> None:
    """All bytes, in the end, of saves and loads; the user's own function still works."""
    state = {"w": torch.ones(1 << 20)}
    async with aiockpt.Saver(tmp_path, progress=True) as saver:
        handle = await saver.stage(state, step=1)
        await handle
    total = handle.progress.total
    assert recorded.lines["step 1"][-2:] == [(total, total, "committed"), (-1, -1, "committed")]
    await aiockpt.load(tmp_path, progress=True)
    done, whole, note = recorded.lines["load step 1"][-2]
    assert (done, note) == (whole, "loaded")
    assert whole >= 4 << 20
    told: list[int] = []
    await aiockpt.load(tmp_path, progress=lambda now: told.append(now.read))
    assert told[-1] == whole


async def test_a_failed_save_says_so(tmp_path: Path, recorded: Recorded) -> None:
    """The line does not stay half-way without a word."""
    store = FaultyStore(open_store(tmp_path), kind="full")
    async with aiockpt.Saver(store, progress=True) as saver:
        store.faults.fail_at = len(store.operations) + 5
        with pytest.raises(StorageError):
            await saver.save({"w": torch.ones(1 << 18)}, step=1)
        store.faults.heal()
    assert recorded.lines["step 1"][-1] == (-1, -1, "failed")


async def test_a_failed_load_says_so(tmp_path: Path, recorded: Recorded) -> None:
    """A flipped byte."""
    async with aiockpt.Saver(tmp_path) as saver:
        checkpoint = await saver.save({"w": torch.ones(1 << 18)}, step=1)
    (file,) = Path(checkpoint.url).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        await aiockpt.load(tmp_path, 1, progress=True)
    assert recorded.lines["load step 1"][-1] == (-1, -1, "failed")


async def test_a_terminal_that_fails_costs_no_save(
    tmp_path: Path, recorded: Recorded, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged, once."""

    def broken(title: str) -> Line:
        raise OSError(5, "the terminal is gone")

    monkeypatch.setattr(recorded, "open", broken)
    async with aiockpt.Saver(tmp_path, progress=True) as saver:
        await saver.save({"w": torch.ones(4)}, step=1)
    assert "the progress bar was given up" in caplog.text
