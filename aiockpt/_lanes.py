"""Executors of a few daemon threads that start on demand and end when idle.

`ThreadPoolExecutor` joins its threads at interpreter exit, so that one thread stuck in
the kernel keeps the process for ever; the loop's default executor belongs to everybody
else (name resolution, for one). `aiockpt._threads` makes the lanes and is the door to
them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from aiockpt.errors import DrainTimeoutError

__all__ = ["EXIT_SECONDS", "IDLE_SECONDS", "LaneExecutor"]

P = ParamSpec("P")
T = TypeVar("T")

IDLE_SECONDS = 0.5
"""How long a thread without work waits for more before it ends."""

EXIT_SECONDS = 1.0
"""How long the interpreter's exit waits for calls that are running."""


OWNER: ContextVar[object] = ContextVar("OWNER", default=None)
"""On whose behalf calls are submitted; one owner's stuck calls are written off, not another's."""


class _Job(Future[T]):
    """A call and, at the same time, the future of its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call: Callable[[], T] | None = call
        self.owner = OWNER.get()

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._call = None  # it may lie in the queue for long: let its arguments go now
        return cancelled

    def run(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        call, self._call = self._call, None
        assert call is not None, "a job runs once"
        try:
            try:
                result = call()
            finally:
                del call  # a traceback holds this frame, a done callback may run long: keep no arguments
        except BaseException as error:
            self.fail(error)
            # Or else: error -> traceback -> this frame -> the job -> error, kept until a collection.
            del self
        else:
            with contextlib.suppress(InvalidStateError):  # abandoned: nobody waits for it any more
                self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Let the waiters go with an error, unless there is an outcome already."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)


class _Worker:
    """What a lane knows about one of its threads; guarded by the lane's condition."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.thread: threading.Thread | None = None
        self.job: _Job[Any] | None = None
        self.since = 0.0  # when that began
        self.trims = 0  # how many trims the lane had seen when its last call began


class LaneExecutor(Executor):
    """A few daemon threads, started on demand, that end when idle.

    Differs from `ThreadPoolExecutor` in that nothing waits for its threads at exit, and
    in that a forked child finds it empty and usable.
    """

    def __init__(self, name: str, size: int, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self.name = name
        self.size = size
        self._idle_seconds = idle_seconds
        self._shut = False
        self._reset()
        _all.add(self)
        _hook()

    def _reset(self) -> None:
        """Begin without threads and jobs; in a forked child nobody else can hold the old lock."""
        self._changed = threading.Condition()
        self._jobs: deque[_Job[Any]] = deque()
        self._workers: dict[int, _Worker] = {}
        self._idle = 0
        self._trims = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue the call; a thread is started unless one is idle or the lane is full."""
        job = _Job(functools.partial(fn, *args, **kwargs) if args or kwargs else fn)
        with self._changed:
            if self._shut:
                raise RuntimeError(f"cannot submit to the {self.name} lane after shutdown")
            self._jobs.append(job)
            try:
                self._staff()
            except BaseException:
                self._jobs.remove(job)
                raise
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; queued ones still run unless `cancel_futures`."""
        with self._changed:
            self._shut = True
            dropped = list(self._jobs) if cancel_futures else []
            if cancel_futures:
                self._jobs.clear()
            threads = [worker.thread for worker in self._workers.values()]
            self._changed.notify_all()
        for job in dropped:
            job.cancel()
        for thread in threads:
            if wait and thread is not None:
                thread.join()

    def trim(self) -> None:
        """Let idle threads end now, and busy ones as soon as they find no more work."""
        with self._changed:
            self._trims += 1
            self._changed.notify_all()

    def abandon(self, busy_for: float = 0.0, *, owner: object = None) -> list[str]:
        """Write off threads whose call has run for `busy_for` seconds; returns their names.

        With `owner` only those calls count that were submitted while `OWNER` was that object.

        Their callers get a `DrainTimeoutError` now, although the threads are still inside
        the calls; the lane has its full size again. Such a thread ends after its call.
        """
        gone: list[tuple[str, _Job[Any]]] = []
        with self._changed:
            limit = time.monotonic() - busy_for
            for worker in list(self._workers.values()):
                job = worker.job
                if job is not None and worker.since <= limit and owner in (None, job.owner):
                    del self._workers[worker.number]
                    gone.append((f"{self.name}-{worker.number}", job))
            self._staff()
        for name, job in gone:
            job.fail(DrainTimeoutError(f"thread {name} is stuck in a call: what the call uses is leaked"))
        return [name for name, _ in gone]

    def threads(self) -> list[threading.Thread]:
        """The lane's threads, idle and busy, without abandoned ones."""
        with self._changed:
            return [worker.thread for worker in self._workers.values() if worker.thread is not None]

    def _staff(self) -> None:
        """See that somebody takes up the queued jobs; called with the lock held."""
        # An idle thread counts as idle until it holds the lock again, and a job as queued
        # until then: comparing the two is exact, a notified thread is never counted twice.
        self._changed.notify(len(self._jobs))
        while len(self._jobs) > self._idle and len(self._workers) < self.size:
            number = next(n for n in range(self.size) if n not in self._workers)
            worker = _Worker(number)
            worker.trims = self._trims
            name = f"{self.name}-{number}"
            worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            self._workers[number] = worker
            self._idle += 1  # it will look for work first thing
            try:
                worker.thread.start()
            except BaseException:
                del self._workers[number]
                self._idle -= 1
                if not self._workers:  # others will get to the job in the end
                    raise
                return

    def _work(self, worker: _Worker) -> None:
        """The life of one thread. `_staff` has counted it as idle already."""
        while (job := self._next(worker)) is not None:
            job.run()
            del job  # while it waits for work, a thread must not keep the last result alive
            with self._changed:
                worker.job = None
                if self._workers.get(worker.number) is not worker:  # abandoned meanwhile
                    return
                self._idle += 1

    def _next(self, worker: _Worker) -> _Job[Any] | None:
        """The next job, or None when this thread should end."""
        with self._changed:
            timely = True
            while not self._jobs:
                # Decided with the lock held: a later `submit` no longer counts on this thread.
                if not timely or self._shut or worker.trims != self._trims:
                    self._idle -= 1
                    del self._workers[worker.number]
                    return None
                timely = self._changed.wait(self._idle_seconds)
            self._idle -= 1
            worker.since = time.monotonic()
            worker.trims = self._trims
            worker.job = self._jobs.popleft()
            return worker.job


_all: weakref.WeakSet[LaneExecutor] = weakref.WeakSet()


@functools.cache
def _hook() -> None:
    """Prepare for forks and for the end; on first use, so that an import changes nothing."""
    os.register_at_fork(after_in_child=_forked)
    atexit.register(_leave)


def _forked() -> None:
    """In a forked child no thread of ours runs: begin anew, in place, for those who hold a lane."""
    for lane in list(_all):
        lane._reset()


def _leave() -> None:
    """Let running calls end, for a moment: the exit of the interpreter kills daemon threads mid-call."""
    deadline = time.monotonic() + EXIT_SECONDS
    lanes = list(_all)
    for lane in lanes:
        lane.shutdown(wait=False, cancel_futures=True)
    for lane in lanes:
        for thread in lane.threads():
            thread.join(max(0.0, deadline - time.monotonic()))
