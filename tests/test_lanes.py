"""aiockpt's lanes are a well-behaved Executor whose threads nobody has to wait for."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from aiockpt._lanes import LaneExecutor
from aiockpt.errors import DrainTimeoutError


class Thing:
    """Something that a weak reference can watch."""


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


@pytest.fixture
def lane() -> Iterator[LaneExecutor]:
    """A lane of three threads that would idle for long."""
    lane = LaneExecutor("aiockpt-test", 3, idle_seconds=60)
    yield lane
    lane.shutdown()


class Jam:
    """Calls that block until they are let go."""

    def __init__(self, lane: LaneExecutor, count: int) -> None:
        self.gate = threading.Event()
        self.running = threading.Semaphore(0)
        self.futures = [lane.submit(self._block) for _ in range(count)]
        for _ in range(count):
            assert self.running.acquire(timeout=10)

    def _block(self) -> str:
        self.running.release()
        assert self.gate.wait(30)
        return "done"


def test_runs_calls_and_delivers_results(lane: LaneExecutor) -> None:
    """Positional and keyword arguments arrive, results come back, map keeps order."""
    assert lane.submit(int, "ff", base=16).result(10) == 255
    assert list(lane.map(str, range(50))) == [str(n) for n in range(50)]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_delivers_every_kind_of_exception(lane: LaneExecutor, kind: type[BaseException]) -> None:
    """A call that raises, even what is no Exception, neither kills a thread nor is lost."""

    def fail() -> None:
        raise kind("why")

    with pytest.raises(kind, match="why"):
        lane.submit(fail).result(10)
    assert lane.submit(int).result(10) == 0


def test_starts_no_more_threads_than_its_size(lane: LaneExecutor) -> None:
    """Two hundred queued calls run on three threads, all of them daemons with the lane's name."""
    seen = set()
    lock = threading.Lock()

    def note() -> None:
        with lock:
            seen.add(threading.current_thread())
        time.sleep(0.001)

    concurrent.futures.wait([lane.submit(note) for _ in range(200)], timeout=30)
    assert 1 <= len(seen) <= 3
    assert all(thread.daemon and thread.name.startswith("aiockpt-test-") for thread in seen)


def test_an_idle_thread_is_used_before_another_is_started(lane: LaneExecutor) -> None:
    """Calls one after another need one thread."""
    for _ in range(20):
        lane.submit(int).result(10)
        eventually(lambda: lane._idle == len(lane.threads()))
    assert len(lane.threads()) == 1


def test_a_queued_call_can_be_cancelled_and_lets_its_arguments_go(lane: LaneExecutor) -> None:
    """Cancelling works until a thread has begun; the arguments are free at once, not when the queue moves."""
    jam = Jam(lane, 3)
    thing = Thing()
    watch = weakref.ref(thing)
    ran: list[object] = []
    queued = lane.submit(ran.append, thing)
    del thing
    assert watch() is not None
    assert queued.cancel()
    assert watch() is None
    assert not jam.futures[0].cancel()
    jam.gate.set()
    assert jam.futures[0].result(10) == "done"
    lane.submit(int).result(10)
    assert ran == []


@pytest.mark.parametrize("fails", [False, True])
def test_keeps_nothing_of_a_call_that_ran(lane: LaneExecutor, fails: bool) -> None:
    """Arguments, result and exception die with their last user, without a collection."""

    def work(thing: Thing) -> Thing:
        if fails:
            raise ValueError
        return thing

    gc.collect()
    gc.disable()
    try:
        thing = Thing()
        watch = weakref.ref(thing)
        future = lane.submit(work, thing)
        del thing
        concurrent.futures.wait([future], timeout=10)
        assert watch() is not None  # held by the result, or by the traceback's frame of `work`
        del future
        eventually(lambda: watch() is None)
    finally:
        gc.enable()


def test_a_traceback_shows_no_arguments_of_the_lane(lane: LaneExecutor) -> None:
    """The lane's own frames in a traceback hold no reference to the call or the future."""
    future = lane.submit(int, "x")
    error = future.exception(10)
    assert error is not None
    trace = error.__traceback__
    while trace is not None:
        kept = [value for value in trace.tb_frame.f_locals.values() if value is not error]
        assert kept == []
        trace = trace.tb_next


def test_threads_end_when_idle_and_come_back() -> None:
    """After the idle time no thread is left; the next call starts one."""
    lane = LaneExecutor("aiockpt-short", 2, idle_seconds=0.05)
    first = lane.submit(threading.current_thread).result(10)
    eventually(lambda: not first.is_alive())
    assert lane.threads() == []
    assert lane.submit(threading.current_thread).result(10) is not first
    lane.shutdown()


def test_no_call_is_lost_between_idle_end_and_submit() -> None:
    """Submitting just when threads time out always finds or starts one."""
    lane = LaneExecutor("aiockpt-race", 2, idle_seconds=0.0005)
    for n in range(400):
        assert lane.submit(int, n).result(10) == n
        time.sleep(0.0005 * (n % 3))
    lane.shutdown()


def test_trim_ends_idle_threads_now_and_busy_ones_after_their_call(lane: LaneExecutor) -> None:
    """After `trim` no thread waits out its idle time, whatever it was doing."""
    jam = Jam(lane, 2)
    lane.submit(int).result(10)
    busy = lane.threads()
    lane.trim()
    eventually(lambda: len(lane.threads()) == 2)
    jam.gate.set()
    eventually(lambda: not any(thread.is_alive() for thread in busy))
    assert lane.submit(int).result(10) == 0


def test_an_abandoned_thread_gives_its_place_to_another(lane: LaneExecutor) -> None:
    """With all threads stuck, abandoning them lets queued calls run; the stuck ones end later, uncounted."""
    jam = Jam(lane, 3)
    stuck = lane.threads()
    queued = lane.submit(threading.current_thread)
    assert lane.abandon(busy_for=1000) == []
    assert not queued.done()
    assert sorted(lane.abandon()) == ["aiockpt-test-0", "aiockpt-test-1", "aiockpt-test-2"]
    assert queued.result(10) not in stuck
    second = Jam(lane, 3)  # the lane has its whole size back
    assert len(lane.threads()) == 3
    jam.gate.set()
    eventually(lambda: not any(thread.is_alive() for thread in stuck))
    for future in jam.futures:  # their callers were let go; what came later is dropped
        with pytest.raises(DrainTimeoutError, match="stuck"):
            future.result(10)
    second.gate.set()


def test_shutdown_runs_what_is_queued_or_drops_it() -> None:
    """Like every Executor: queued calls run unless `cancel_futures`, later ones are refused."""
    for drop in (False, True):
        lane = LaneExecutor("aiockpt-end", 1)
        jam = Jam(lane, 1)
        queued = lane.submit(int)
        lane.shutdown(wait=False, cancel_futures=drop)
        with pytest.raises(RuntimeError, match="after shutdown"):
            lane.submit(int)
        jam.gate.set()
        lane.shutdown(wait=True)
        assert lane.threads() == []
        assert queued.cancelled() is drop
        if not drop:
            assert queued.result(10) == 0


def test_a_call_is_taken_back_when_no_thread_can_start(
    lane: LaneExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any thread `submit` raises; with one at work the call just waits for it."""
    jam = Jam(lane, 1)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        queued = lane.submit(int)
        empty = LaneExecutor("aiockpt-none", 1)
        with pytest.raises(RuntimeError, match="start new thread"):
            empty.submit(int)
    assert empty.submit(int).result(10) == 0  # and it has forgotten the refused one
    jam.gate.set()
    assert queued.result(10) == 0
    empty.shutdown()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_finds_an_empty_lane_that_works(lane: LaneExecutor) -> None:
    """Forked while all threads are busy, calls are queued and the lock is taken: the child's calls run."""
    jam = Jam(lane, 3)
    lane.submit(int)
    with lane._changed:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(20)
                if lane.threads() == [] and lane.submit(int, "7").result(10) == 7:
                    code = 0
            finally:
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    jam.gate.set()


def _python(code: str) -> tuple[int, str, float]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


STUCK = """
import asyncio, threading
from aiockpt._threads import offload
async def main():
    begun = threading.Event()
    task = asyncio.ensure_future(offload(lambda: begun.set() or threading.Event().wait()))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    print("leaving", flush=True)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
import logging; logging.disable(logging.CRITICAL)
"""


def test_a_stuck_thread_lets_the_process_end() -> None:
    """The interpreter exits within its bound although a call never returns."""
    code, output, seconds = _python(STUCK)
    assert (code, output.splitlines()[0]) == (0, "leaving")
    assert seconds < 10


def test_the_exit_waits_a_moment_for_a_running_call_and_drops_queued_ones() -> None:
    """A short call that runs at exit ends in full; nothing new begins."""
    code, output, _ = _python(
        "import time, threading\n"
        "from aiockpt._lanes import LaneExecutor\n"
        "lane = LaneExecutor('aiockpt-x', 1); begun = threading.Event()\n"
        "lane.submit(lambda: (begun.set(), time.sleep(0.3), print('ended', flush=True)))\n"
        "lane.submit(print, 'never')\n"
        "begun.wait()\n"
    )
    assert (code, output) == (0, "ended\n")


def test_importing_changes_nothing_and_loads_no_torch() -> None:
    """The import starts no thread, sets no hook and is cheap."""
    code, output, _ = _python(
        "import sys, threading, types, importlib.util as util\n"
        "where = util.find_spec('aiockpt').submodule_search_locations\n"
        "package = sys.modules['aiockpt'] = types.ModuleType('aiockpt')\n"  # without its front door
        "package.__path__ = where\n"
        "import aiockpt._threads, aiockpt._lanes\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
        "assert not aiockpt._lanes._hook.cache_info().currsize\n"
    )
    assert (code, output) == (0, "")
