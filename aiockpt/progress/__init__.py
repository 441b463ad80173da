"""`progress=True`: one bar a save or load, drawn by rich or tqdm, whichever is there.

Nothing is drawn where nobody looks: off a terminal, and on ranks other than 0. Each
member is one file of this folder with a class `Bars` that keeps the contract below; the
first one whose package is installed draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch.distributed as dist

from .._log import log
from .._threads import Lane, offload

__all__ = ["Bar", "Bars", "SaveBars", "look_at_load", "shown"]

MEMBERS: Final = ("rich", "tqdm")
SECONDS: Final = 0.1
"""Between two looks at the numbers."""


class Bar(Protocol):
    """One line on the terminal. Its methods write there, so they are called in a thread."""

    def update(self, done: int, total: int, note: str) -> None:
        """Show `done` of `total` bytes (0: not known yet) and a word on what is going on."""

    def close(self, note: str) -> None:
        """Leave the line as it is, with a last word."""


class Bars(Protocol):
    """Draws bars, several at a time if need be; one a process."""

    def open(self, title: str) -> Bar:
        """Begin a line."""


def shown() -> bool:
    """Whether somebody looks: standard error is a terminal, and this is rank 0."""
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    else:
        rank = int(os.environ.get("RANK", "0") or 0)
    return rank == 0 and sys.stderr is not None and sys.stderr.isatty()


@functools.cache
def _drawer() -> Bars | None:
    """Whoever can draw; None, said once, where neither package is installed."""
    for name in MEMBERS:
        try:
            bars: Bars = importlib.import_module(f"{__name__}.{name}").Bars()
        except ModuleNotFoundError:
            continue
        return bars
    log.warning("progress=True draws with rich or tqdm, and neither is installed: pip install rich")
    return None


def _open(title: str) -> Bar | None:
    if not shown():
        return None
    bars = _drawer()
    return None if bars is None else bars.open(title)


@dataclass(slots=True)
class _State:
    """What a bar shows: bytes, and a word."""

    done: int = 0
    total: int = 0
    note: str = ""


async def _follow(title: str, look: Callable[[], _State], ended: asyncio.Event) -> None:
    """Draw until it has ended. A terminal that fails is no reason for a save to."""
    try:
        bar = await offload(_open, title, lane=Lane.CONTROL)
        if bar is None:
            return
        while not ended.is_set():
            state = look()
            await offload(bar.update, state.done, state.total, state.note, lane=Lane.CONTROL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await ended.wait()
        state = look()
        await offload(bar.update, state.done, state.total, state.note, lane=Lane.CONTROL)
        await offload(bar.close, state.note, lane=Lane.CONTROL)
    except Exception as error:
        log.warning("the progress bar was given up: %s: %s", type(error).__name__, error)


@dataclass(slots=True)
class SaveBars:
    """A listener that shows the saves of one saver."""

    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _ended: dict[str, asyncio.Event] = field(default_factory=dict)

    def before_save(self, pending: Any) -> None:
        """Begin a bar for this save."""
        ended = self._ended[pending.save_id] = asyncio.Event()

        def look() -> _State:
            progress = pending.progress
            word = "failed" if pending.done() and pending.exception() else pending.phase.name.lower()
            return _State(progress.written, progress.total, word)

        task = asyncio.get_running_loop().create_task(_follow(f"step {pending.step}", look, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def after_commit(self, checkpoint: Any) -> None:
        """End it."""
        self._end(checkpoint.save_id)

    def after_failure(self, failure: Any) -> None:
        """End it."""
        self._end(failure.save_id)

    def _end(self, save_id: str) -> None:
        ended = self._ended.pop(save_id, None)
        if ended is not None:
            ended.set()

    async def end(self, saver: Any) -> None:
        """Leave no bar behind."""
        for ended in self._ended.values():
            ended.set()
        if self._tasks:
            await asyncio.wait(self._tasks)


@contextlib.asynccontextmanager
async def look_at_load(step: int, progress: bool | Callable[[Any], object] | None) -> AsyncIterator[Any]:
    """What a reader's `progress=` gets while the body runs: the user's function, or a bar's."""
    if progress is None or progress is False or callable(progress):
        yield progress or None
        return
    state, ended = _State(note="loading"), asyncio.Event()

    def told(now: Any) -> None:
        state.done, state.total = now.read, now.total

    task = asyncio.get_running_loop().create_task(_follow(f"load step {step}", lambda: state, ended))
    try:
        yield told
        state.note = "loaded"
    except BaseException:
        state.note = "failed"
        raise
    finally:
        ended.set()
        await asyncio.wait({task})
