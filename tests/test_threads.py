"""aiockpt never returns from a thread call while the thread is still inside it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiofiles
import anyio
import pytest
import uvloop

from aiockpt import _threads
from aiockpt._threads import Lane, executor, offload, settle
from aiockpt.errors import DrainTimeoutError

Start = Callable[[Callable[[], Any]], Awaitable[Any]]


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again: an asyncio.Event cannot be set from a thread."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it never came true")


class Call:
    """A blocking call that takes a while after the test has reached into its middle."""

    def __init__(self, result: object = "result", *, held: bool = False) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.gate = threading.Event()
        self.held = held
        self.result = result

    def __call__(self) -> object:
        self.begun.set()
        if self.held:
            assert self.gate.wait(30)
        else:
            time.sleep(0.1)
        self.ended.set()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    async def is_running(self) -> None:
        """Return once the thread is inside, without a thread of our own."""
        await until(self.begun.is_set)


def by_offload(fn: Callable[[], Any]) -> Awaitable[Any]:
    """The plain way."""
    return offload(fn)


def by_settle(fn: Callable[[], Any]) -> Awaitable[Any]:
    """The way of an aiofiles call: a coroutine that awaits the executor's future."""

    async def hop() -> Any:
        await asyncio.sleep(0)
        return await asyncio.get_running_loop().run_in_executor(executor(Lane.BULK), fn)

    return settle(hop())


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine on a fresh loop of either kind; what a loop's exception handler hears is an error."""

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        heard: list[dict[str, Any]] = []

        async def watched() -> Any:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: heard.append(context))
            try:
                return await main
            finally:
                gc.collect()  # "exception was never retrieved" is said by a finalizer
                await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=request.param) as runner:
            try:
                return runner.run(watched())
            finally:
                assert heard == []

    return run


both = pytest.mark.parametrize("start", [by_offload, by_settle])


@both
def test_gives_the_result_and_the_exception(run: Any, start: Start) -> None:
    """What the call returned or raised comes through."""

    async def main() -> None:
        assert await start(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await start(lambda: 1 // 0)

    run(main())


@both
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_native_cancel_waits_for_the_thread(run: Any, start: Start, times: int) -> None:
    """However often the task is cancelled, it ends after the thread and as cancelled."""

    async def main() -> None:
        call = Call(held=True)
        task = asyncio.ensure_future(start(call))
        await call.is_running()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        call.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.ended.is_set()

    run(main())


@both
def test_a_timeout_waits_for_the_thread(run: Any, start: Start) -> None:
    """`asyncio.timeout` and `wait_for` become TimeoutError, after the thread."""

    async def main() -> None:
        call = Call()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await start(call)
        assert call.ended.is_set()
        again = Call()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start(again), 0.01)
        assert again.ended.is_set()

    run(main())


@both
def test_an_anyio_scope_waits_for_the_thread_without_spinning(run: Any, start: Start) -> None:
    """A cancelled anyio scope ends after the thread; the loop is idle meanwhile."""

    async def main() -> None:
        call = Call()
        before = time.thread_time()
        with anyio.move_on_after(0.01) as scope:
            await start(call)
        assert scope.cancelled_caught
        assert call.ended.is_set()
        assert time.thread_time() - before < 0.08  # a loop over `shield` burns all of the 0.1 s

    run(main())


@both
def test_a_native_cancel_within_a_cancelled_scope(run: Any, start: Start) -> None:
    """Both at once: the task is cancelled, the scope does not swallow that."""

    async def main() -> None:
        call = Call(held=True)

        async def scoped() -> None:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await start(call)
            await asyncio.sleep(30)

        task = asyncio.ensure_future(scoped())
        await call.is_running()
        task.cancel()
        await asyncio.sleep(0.01)
        call.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.ended.is_set()

    run(main())


@both
def test_a_failing_sibling_in_nested_groups_waits_for_the_thread(run: Any, start: Start) -> None:
    """The group of groups is left after the thread, with the sibling's error alone."""

    async def main() -> None:
        call = Call()

        async def fail() -> None:
            await call.is_running()
            raise LookupError

        with pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.TaskGroup() as outer:
                outer.create_task(fail())
                async with asyncio.TaskGroup() as inner, anyio.create_task_group() as innermost:
                    inner.create_task(_quiet(start(call)))
                    innermost.start_soon(_quiet, start(Call()))
        assert call.ended.is_set()
        assert caught.group_contains(LookupError, depth=1)
        assert len(caught.value.exceptions) == 1

    run(main())


async def _quiet(call: Awaitable[Any]) -> None:
    await call


@both
def test_the_end_of_asyncio_run_waits_for_the_thread(start: Start) -> None:
    """`asyncio.run` cancels every task, also inner ones: the thread has ended all the same."""
    call = Call()
    seen = []

    async def work() -> None:
        try:
            await start(call)
        finally:
            seen.append(call.ended.is_set())

    async def main() -> None:
        work_task = asyncio.create_task(work())
        await call.is_running()
        assert not work_task.done()

    asyncio.run(main())
    assert seen == [True]


@both
def test_the_calls_own_failure_is_a_note_on_the_cancellation(run: Any, start: Start) -> None:
    """An error that nobody can receive is neither lost nor reported as never retrieved."""

    async def main() -> None:
        call = Call(OSError(28, "No space"), held=True)
        task = asyncio.ensure_future(start(call))
        await call.is_running()
        task.cancel()
        await asyncio.sleep(0)
        call.gate.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert "No space" in caught.value.__notes__[0]

    run(main())


@both
def test_a_call_cancelled_while_queued_still_runs_once(run: Any, start: Start) -> None:
    """With the lane full, clean-up handed over by a dying task is done nevertheless."""

    async def main() -> None:
        jam = [Call(held=True) for _ in range(4)]
        tasks = [asyncio.ensure_future(offload(call)) for call in jam]
        for call in jam:
            await call.is_running()
        ran: list[int] = []
        late = asyncio.ensure_future(start(lambda: ran.append(1)))
        await asyncio.sleep(0.01)
        late.cancel()
        await asyncio.sleep(0.01)
        assert not late.done()
        for call in jam:
            call.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert ran == [1]
        await asyncio.gather(*tasks)

    run(main())


def test_undo_gets_a_result_that_cannot_be_delivered(run: Any) -> None:
    """What a cancelled call had opened is closed; a delivered result is not touched."""

    async def main() -> None:
        undone: list[object] = []

        async def undo(result: object) -> None:
            await offload(undone.append, result)

        for settled in (False, True):
            call = Call("opened")
            ways = settle(by_offload(call), undo=undo) if settled else offload(call, undo=undone.append)
            task = asyncio.ensure_future(ways)
            await call.is_running()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert undone == ["opened", "opened"]
        assert await offload(str, "kept", undo=undone.append) == "kept"
        assert await settle(by_offload(lambda: "kept"), undo=undo) == "kept"
        assert undone == ["opened", "opened"]

    run(main())


def test_a_failing_undo_does_not_hide_the_cancellation(run: Any) -> None:
    """The cancellation goes on, with a note."""

    async def main() -> None:
        call = Call()
        task = asyncio.ensure_future(offload(call, undo=lambda _: 1 // 0))
        await call.is_running()
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert "ZeroDivisionError" in caught.value.__notes__[0]

    run(main())


def test_an_undo_is_finished_under_a_second_cancel(run: Any) -> None:
    """A cancellation during undo waits for that as well."""

    async def main() -> None:
        call, undo = Call(), Call()
        task = asyncio.ensure_future(offload(call, undo=lambda _: undo()))
        await call.is_running()
        task.cancel()
        await undo.is_running()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert undo.ended.is_set()

    run(main())


def test_aiofiles_calls_are_waited_for(run: Any, tmp_path: Path) -> None:
    """A cancelled aiofiles write has ended, in its file, when the await returns."""

    async def main() -> None:
        gate, begun = threading.Event(), threading.Event()
        async with aiofiles.open(tmp_path / "f", "wb", buffering=0, executor=executor(Lane.BULK)) as file:
            inner: Any = file
            raw_write = inner._file.write

            def slow(data: bytes) -> int:
                begun.set()
                assert gate.wait(30)
                return int(raw_write(data))

            inner._file = Fake(inner._file, write=slow)
            task = asyncio.ensure_future(settle(file.write(b"x" * 100)))
            await until(begun.is_set)
            task.cancel()
            await asyncio.sleep(0.01)
            assert (tmp_path / "f").stat().st_size == 0
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (tmp_path / "f").stat().st_size == 100

    run(main())


class Fake:
    """A file with some methods replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        self._real = real
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __exit__(self, *args: object) -> None:
        self._real.__exit__(*args)


def test_settle_passes_on_a_cancelled_future_and_bare_yields(run: Any) -> None:
    """A future that somebody else cancelled is a cancellation; a pause is just a pause."""

    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settle(future)

        async def pauses() -> int:
            for _ in range(3):
                await asyncio.sleep(0)
            return 3

        task = asyncio.ensure_future(settle(pauses()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_context_variables_reach_the_thread_as_a_copy(run: Any) -> None:
    """The call sees the caller's values; what it sets stays its own."""
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    async def main() -> None:
        name.set("mine")

        def look() -> str:
            seen = name.get()
            name.set("theirs")
            return seen

        assert await offload(look) == "mine"
        assert name.get() == "mine"

    run(main())


def test_stop_iteration_does_not_hang_the_caller(run: Any) -> None:
    """A future refuses StopIteration; the caller gets a RuntimeError instead of waiting for ever."""

    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(offload(next, iter(())), 10)

    run(main())


@both
@pytest.mark.parametrize("outcome", ["result", "error", "cancel"])
def test_keeps_no_argument_alive(run: Any, start: Start, outcome: str) -> None:
    """Once the await has ended nothing holds the call's arguments, without a collection."""

    class Thing:
        pass

    async def main() -> weakref.ref[Thing]:
        thing = Thing()
        begun = threading.Event()

        def work(thing: Thing = thing) -> None:
            begun.set()
            if outcome == "cancel":
                time.sleep(0.05)
            if outcome == "error":
                del thing
                raise ValueError

        task = asyncio.ensure_future(start(work))
        await until(begun.is_set)
        if outcome == "cancel":
            task.cancel()
        del work
        await asyncio.wait([task])
        task.cancelled() or task.exception()
        return weakref.ref(thing)

    async def watched() -> None:
        await start(lambda: None)
        gc.collect()
        gc.disable()
        try:
            watch = await main()
            for _ in range(500):  # the thread may still be on its way out of the call
                if watch() is None:
                    break
                await asyncio.sleep(0.005)
            assert watch() is None
        finally:
            gc.enable()

    run(watched())


def test_lanes_do_not_wait_for_each_other(run: Any) -> None:
    """With the bulk lane jammed, control and stage calls still run, each on threads of its own name."""

    async def main() -> None:
        jam = [Call(held=True) for _ in range(12)]
        tasks = [asyncio.ensure_future(offload(call)) for call in jam]
        for call in jam[:4]:
            await call.is_running()
        name = lambda: threading.current_thread().name  # noqa: E731
        assert (await offload(name, lane=Lane.CONTROL)).startswith("aiockpt-control-")
        assert await offload(name, lane=Lane.STAGE) == "aiockpt-stage-0"
        assert sum(call.begun.is_set() for call in jam) == 4
        for call in jam:
            call.gate.set()
        await asyncio.gather(*tasks)

    run(main())


@both
@pytest.mark.parametrize("cancelled", [False, True])
def test_abandoning_stuck_threads_lets_their_callers_go(run: Any, start: Start, cancelled: bool) -> None:
    """After a drain ran out of time the callers get a typed error, cancelled or not, and the lane works."""

    async def main() -> None:
        jam = [Call(held=True) for _ in range(4)]
        tasks = [asyncio.ensure_future(start(call)) for call in jam]
        for call in jam:
            await call.is_running()
        if cancelled:
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0.01)
        assert _threads.abandon_busy(busy_for=1000) == []
        assert len(_threads.abandon_busy()) == 4
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert [type(outcome) for outcome in outcomes] == [DrainTimeoutError] * 4
        assert await asyncio.wait_for(offload(int), 10) == 0
        assert not any(call.ended.is_set() for call in jam)
        for call in jam:
            call.gate.set()

    run(main())


def test_the_default_executor_is_left_alone() -> None:
    """Aiockpt works with the default executor jammed, and never makes one itself."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await offload(int) == 0
        assert getattr(loop, "_default_executor") is None  # noqa: B009
        gate = threading.Event()
        with ThreadPoolExecutor(1) as theirs:
            loop.set_default_executor(theirs)
            jams = [loop.run_in_executor(None, gate.wait) for _ in range(20)]
            assert await asyncio.wait_for(asyncio.gather(*(offload(int, n) for n in range(50))), 30)
            gate.set()
            await asyncio.gather(*jams)
        jam = Call(held=True)
        stuck = asyncio.ensure_future(offload(jam))
        with ThreadPoolExecutor(1) as theirs:
            loop.set_default_executor(theirs)
            assert await asyncio.wait_for(loop.run_in_executor(None, int), 10) == 0
            jam.gate.set()
            await stuck

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_can_offload() -> None:
    """A child forked while the lanes are busy runs calls on a loop of its own."""

    async def main() -> None:
        jam = [Call(held=True) for _ in range(6)]
        tasks = [asyncio.ensure_future(offload(call)) for call in jam]
        await jam[0].is_running()
        pid = os.fork()
        if pid == 0:
            _child()
        assert (await offload(os.waitpid, pid, 0, lane=Lane.CONTROL))[1] == 0
        for call in jam:
            call.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def _child() -> None:
    code = 1
    try:
        signal.alarm(20)
        asyncio._set_running_loop(None)
        loop = asyncio.new_event_loop()
        if loop.run_until_complete(offload(int, "5")) == 5:
            code = 0
    finally:
        os._exit(code)
