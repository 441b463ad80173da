"""What every test runs under: a loop of choice, the blocking guard, the leak check."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping

import hypothesis
import pytest
import uvloop

from tests import guard, leaks

pytest_plugins = ["pytester"]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

# No deadline: a shared machine is slow now and then, and no test here is about time.
hypothesis.settings.register_profile(
    # In CI always the same examples: what chance finds is for those who can look at it, not for a landing.
    "aiockpt",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("aiockpt")


def _chosen_loops() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Read AIOCKPT_TEST_LOOP: asyncio (the default), uvloop, or both."""
    choice = os.environ.get("AIOCKPT_TEST_LOOP", "asyncio")
    if choice == "both":
        return LOOPS
    if choice not in LOOPS:
        raise pytest.UsageError(f"AIOCKPT_TEST_LOOP is {choice!r}, not asyncio, uvloop or both")
    return {choice: LOOPS[choice]}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let the time limit reach a test that hangs on uvloop."""
    # uvloop hands what a signal handler raises to its exception handler and goes on waiting, so an alarm
    # cannot end an idle test there. A timer thread can: it prints all stacks and ends the whole run.
    if "uvloop" in _chosen_loops() and config.option.timeout_method is None:
        config.option.timeout_method = "thread"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tell pytest-asyncio which loops to run each async test on."""
    del config, item
    return _chosen_loops()


def pytest_report_header() -> str:
    """Say in the first lines which loop this run is about."""
    return f"event loop: {', '.join(_chosen_loops())}"


@pytest.fixture(scope="session", autouse=True)
def _warm_up() -> None:
    """Open what a process opens once and keeps, so that no test is blamed for it."""
    # libuv makes a pipe for signals with the first loop of the process.
    uvloop.new_event_loop().close()


@pytest.fixture(scope="session", autouse=True)
def _watch_blocking_calls() -> Iterator[None]:
    """Switch the guard on once: patching some eighty functions for each test would be slow."""
    with guard.watching():
        yield


@pytest.fixture(autouse=True)
def blocking_calls() -> Iterator[list[str]]:
    """Fail the test if the package blocked the loop's thread; yields the calls seen so far.

    A test about the guard empties the list when it got what it wanted.
    """
    guard.seen.clear()
    yield guard.seen
    calls = list(guard.seen)
    guard.seen.clear()
    if calls:
        pytest.fail("the event loop's thread was blocked by\n  " + "\n  ".join(calls), pytrace=False)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if descriptors or the package's threads stay behind (see the `leaks` mark)."""
    with leaks.checked() as leaked:
        yield
    if leaked and request.node.get_closest_marker("leaks") is None:
        pytest.fail("left behind:\n  " + "\n  ".join(leaked), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Free the waiters of threads that a failed test left in a call.

    The end of the loop, which comes next, would wait for such a thread for good: better one red
    test than a suite that hangs.
    """
    report = yield
    lanes = sys.modules.get("aiockpt._threads")
    if call.when == "call" and call.excinfo is not None and lanes is not None:
        lanes.abandon_busy()
    return report
