"""What the tests of saving share: states, quiet, and a driver that strikes at the n-th suspension."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import torch

from aiockpt import Saver, _threads
from aiockpt._gate import _Gate
from aiockpt.testing import FaultyFiles
from tests.proof import leftovers, poisoned

LARGE = 70_000
"""float32 elements that are more than a capture copies at the call."""


def large(number: float, *, leaves: int = 3, items: int = 2) -> dict[str, Any]:
    """A state whose tensors are read while the save is unstaged; each tells its number."""
    return {
        f"item{i}": {f"w{k}": torch.full((LARGE + k,), float(number)) for k in range(leaves)}
        for i in range(items)
    } | {"n": int(number)}


def fill(state: dict[str, Any], number: float) -> None:
    """Change every tensor of a `large` state in place, past every version counter."""
    for item in state.values():
        if isinstance(item, dict):
            for tensor in item.values():
                tensor.data.fill_(number)


def numbers(state: Mapping[str, Any]) -> set[float]:
    """All values that the tensors of a `large` state hold."""
    return {
        float(v)
        for item in state.values()
        if isinstance(item, dict)
        for t in item.values()
        for v in t.unique()
    }


def busy_threads() -> list[str]:
    """Lane threads that are inside a call."""
    return [
        f"{lane.name}-{worker.number}"
        for lane in list(_threads._lanes.values())
        for worker in list(lane._workers.values())
        if worker.job is not None and not worker.job.done()
    ]


def assert_quiet(saver: Saver) -> None:
    """Right now nothing of a save is under way: no thread, task, block, gate, temporary entry."""
    assert saver.pending == ()
    assert busy_threads() == []
    assert [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("aiockpt save")] == []
    pool = saver._saving.reserve._pool
    assert pool is None or not pool._out, "blocks are out"
    assert pool is None or pool.budget.waiting == 0
    assert _Gate.holds() == []
    assert saver._exclusion._reading == 0
    assert leftovers(saver.store) == []


@contextmanager
def small_blocks() -> Iterator[None]:
    """Poisoned blocks of 1 MiB; in the end all are home and the gate is open.

    Disks that stand still are healed first: a test that fails must not hang.
    """
    disks: list[FaultyFiles] = []
    make = FaultyFiles.__init__

    def note(files: FaultyFiles, *args: Any, **options: Any) -> None:
        make(files, *args, **options)
        disks.append(files)

    with pytest.MonkeyPatch.context() as patch, poisoned():
        patch.setattr(FaultyFiles, "__init__", note)
        try:
            yield
        finally:
            for disk in disks:
                disk.heal()
    assert _Gate.holds() == []
    assert _Gate._handle is None


class Striker:
    """Counts the suspensions of all tasks made meanwhile; acts at the one of your choice.

    A task factory: every step of every task, the package's own included, ends in a
    suspension or the end, so each await that really waits is a place to strike at.
    """

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self.at = at
        self.act = act
        self.count = 0

    def suspended(self) -> None:
        """A task has come to a wait."""
        self.count += 1
        if self.count == self.at + 1:
            self.act()

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Counted(coro, self), loop=loop, **options)


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine whose suspensions are counted."""

    def __init__(self, inner: Any, striker: Striker) -> None:
        self._inner = inner
        self._striker = striker

    def __getattr__(self, name: str) -> Any:  # cr_frame and the like, for anyio
        return getattr(self._inner, name)

    def __await__(self) -> Any:
        raise AssertionError("tasks step coroutines")

    def send(self, value: Any) -> Any:
        result = self._inner.send(value)
        self._striker.suspended()
        return result

    def throw(self, *error: Any) -> Any:
        result = self._inner.throw(*error)
        self._striker.suspended()
        return result

    def close(self) -> None:
        self._inner.close()


async def strike(at: int, make: Callable[[], Coroutine[Any, Any, Any]], how: str) -> tuple[bool, object]:
    """Run `make()` as a task and cancel it at suspension `at`, in one of several ways.

    Returns:
        Whether there were so many suspensions; the result or the error of the task.
    """
    loop = asyncio.get_running_loop()
    blows: list[Callable[[], object]] = []
    struck: list[bool] = []

    def act() -> None:
        if not task.done():
            struck.append(True)
            for blow in blows:
                blow()

    striker = Striker(at, act)
    loop.set_task_factory(striker)
    task = loop.create_task(WAYS[how](make, blows))
    if how in ("native", "twice"):
        blows.append(task.cancel)
    if how == "twice":
        blows.append(lambda: loop.call_soon(task.cancel))
    try:
        await asyncio.wait([task])
    finally:
        loop.set_task_factory(None)
    if task.cancelled():
        return bool(struck), asyncio.CancelledError()
    error = task.exception()
    return bool(struck), task.result() if error is None else error


async def _plain(make: Callable[[], Coroutine[Any, Any, Any]], _: list[Callable[[], object]]) -> Any:
    return await make()


async def _timeout(make: Callable[[], Coroutine[Any, Any, Any]], blows: list[Callable[[], object]]) -> Any:
    async with asyncio.timeout(None) as limit:
        blows.append(lambda: limit.reschedule(asyncio.get_running_loop().time()))
        return await make()


async def _scope(make: Callable[[], Coroutine[Any, Any, Any]], blows: list[Callable[[], object]]) -> Any:
    with anyio.CancelScope() as scope:
        blows.append(scope.cancel)
        return await make()
    raise asyncio.CancelledError  # for the caller: it was cut short


async def _sibling(make: Callable[[], Coroutine[Any, Any, Any]], blows: list[Callable[[], object]]) -> Any:
    fail = asyncio.Event()
    blows.append(fail.set)

    async def sibling() -> None:
        await fail.wait()
        raise ValueError("the sibling")

    async with asyncio.TaskGroup() as group:
        other = group.create_task(sibling())
        try:
            return await make()
        finally:
            if not fail.is_set():
                other.cancel()


WAYS: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    "native": _plain,
    "twice": _plain,
    "timeout": _timeout,
    "scope": _scope,
    "sibling": _sibling,
}

CANCELLATIONS = ["native", *(pytest.param(how, marks=pytest.mark.slow) for how in WAYS if how != "native")]
"""As parameters: the plainest one is quick, all are in the whole suite."""


def in_thread(call: Callable[[], Any]) -> Any:
    """The result or error of a call made in another thread."""
    box: list[Any] = []

    def body() -> None:
        try:
            box.append(call())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return box[0]


async def until(done: Callable[[], bool]) -> None:
    """Until something has happened in a thread or another task, which no event tells."""
    while not done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
