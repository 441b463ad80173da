"""Under load no request is dropped and none is answered by two versions, whatever is committed."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aiockpt import Catalog, Reloader, _waking
from aiockpt.integrations.asgi import ReloaderMiddleware, lifespan, live
from aiockpt.policies.keep import KeepLast
from tests.serving import POLL, Net, commit, served, shard, waited, weights
from tests.web import ORDER, talking

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parent.parent
WIDTH = 200_000
"""Of the model under load: some megabytes, so that one that stayed would be seen."""
RELOADS = 50


class Wide(Net):
    """A larger one, looked at quickly."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def versions(self) -> set[float]:
        """The least and the largest number of each tensor: one number, unless it is a mix."""
        return {float(v) for t in self.state_dict().values() for v in torch.aminmax(t)}


# ---------------------------------------------------------------- what is wrong with some checkpoints


def good(run: Path, step: int) -> None:
    """Nothing."""
    commit(run, step, weights(step, WIDTH))


def truncated(run: Path, step: int) -> None:
    """A file ends too early."""
    folder = commit(run.parent / "made", step, weights(step, WIDTH))
    os.truncate(shard(folder), shard(folder).stat().st_size - 1)
    folder.rename(run / folder.name)


def flipped(run: Path, step: int) -> None:
    """A bit is wrong."""
    folder = commit(run.parent / "made", step, weights(step, WIDTH))
    data = bytearray(shard(folder).read_bytes())
    data[-7] ^= 4
    shard(folder).write_bytes(data)
    folder.rename(run / folder.name)


def missing(run: Path, step: int) -> None:
    """A parameter was not saved."""
    bad = weights(step, WIDTH)
    del bad["one.bias"]
    commit(run, step, bad)


def shape(run: Path, step: int) -> None:
    """A layer is wider."""
    commit(run, step, weights(step, WIDTH + 1))


def nan(run: Path, step: int) -> None:
    """One number is none."""
    bad = weights(step, WIDTH)
    bad["two.weight"][1, 2] = math.nan
    commit(run, step, bad)


BAD: dict[int, Callable[[Path, int], None]] = {
    6: truncated,
    11: flipped,
    16: missing,
    21: shape,
    26: nan,
    31: good,  # the check says no to it
    36: good,  # deleted while it is loaded
    41: flipped,
    44: missing,
    47: truncated,
}
REFUSED, DELETED = 31, 36


# ---------------------------------------------------------------- the load


async def told(request: Request) -> Response:
    """One answer in one piece, after a while."""
    found = live(request)
    before = found.model.versions()
    await asyncio.sleep(0.002)
    return JSONResponse({"step": found.step, "versions": sorted(before | found.model.versions())})


async def streamed(request: Request) -> Response:
    """One answer in several pieces."""
    found = live(request)

    async def lines() -> AsyncIterator[str]:
        for _ in range(8):
            yield json.dumps({"step": found.step, "versions": sorted(found.model.versions())}) + "\n"
            await asyncio.sleep(0.005)

    return StreamingResponse(lines())


class Load:
    """Requests in flight all the time; whatever is wrong with an answer ends the test."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.answers = 0
        self.newest = 0
        self.floor = True
        """Whether a version below one that was seen before is wrong."""

    async def ask(self, path: str) -> None:
        """Ask again and again."""
        while True:
            newest = self.newest
            async with self.client.stream("GET", path) as answer:
                assert answer.status_code == 200, answer.status_code
                told = [json.loads(line) async for line in answer.aiter_lines()]
            assert len(told) == (8 if path == "/streamed" else 1)
            step = int(answer.headers["x-aiockpt-step"])
            assert all(line == {"step": step, "versions": [float(step)]} for line in told), (step, told)
            # Begun after another one had ended, it must not be older than that one.
            assert not self.floor or step >= newest, (step, newest)
            self.newest = max(step, newest, self.newest if self.floor else 0)
            self.answers += 1

    async def some(self) -> None:
        """Wait for a few more answers."""
        goal = self.answers + 6
        await waited(lambda: self.answers >= goal)


@asynccontextmanager
async def under_load(client: httpx.AsyncClient) -> AsyncIterator[Load]:
    """Six requests are in flight, two of them streams."""
    load = Load(client)
    tasks = [asyncio.create_task(load.ask(path)) for path in ["/told"] * 4 + ["/streamed"] * 2]
    try:
        yield load
        assert not [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}, outcomes


def models() -> int:
    """Models that are in memory."""
    gc.collect()
    return sum(type(thing) is Wide for thing in gc.get_objects())


async def test_fifty_reloads_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten of them bad: every request is answered by one version that it names, and none goes backwards."""
    monkeypatch.setattr(_waking, "_plug", lambda: None)
    run = tmp_path / "run"
    good(run, 1)
    doomed: list[Path] = []

    def build() -> Wide:
        for folder in doomed:
            shutil.rmtree(folder)
        doomed.clear()
        return Wide()

    def validate(model: Wide) -> bool:
        return model.versions() != {float(REFUSED)}

    reloader = Reloader(run, build, validate=validate, poll=POLL, retry=3600)
    app = Starlette(routes=[Route("/told", told), Route("/streamed", streamed)], lifespan=lifespan(reloader))
    app.add_middleware(ReloaderMiddleware, reloader=reloader)
    async with talking(app) as client:
        await reloader.ready()
        baseline = 0
        async with under_load(client) as load:
            for step in range(2, RELOADS + 2):
                failures = reloader.status()["failures"]
                if step == DELETED:
                    doomed.append(run / f"step-{step:08d}")
                BAD.get(step, good)(run, step)
                if BAD.get(step) is truncated:  # seen by its size, and not even tried
                    await asyncio.sleep(10 * POLL)
                elif step in BAD:
                    await waited(lambda before=failures: reloader.status()["failures"] > before)  # type: ignore[misc]
                else:
                    await reloader.wait_for(step)
                await load.some()
                shutil.rmtree(run / f"step-{step - 1:08d}", ignore_errors=True)
                baseline = baseline or psutil.Process().memory_info().rss
            assert served(reloader) == RELOADS + 1
            load.floor = False
            assert (await reloader.catalog.steps())[-1] == RELOADS + 1
            good(run, RELOADS + 2)
            await reloader.wait_for(RELOADS + 2)
            assert (await reloader.rollback()).step == RELOADS + 1
            await load.some()
        status = reloader.status()
        assert status["failures"] == len([bad for bad in BAD.values() if bad is not truncated])
        assert {h["stage"] for h in status["history"] if h["outcome"] == "failed"} == {
            "load",
            "cover",
            "finite",
            "validate",
        }
        assert load.answers >= 6 * RELOADS
        await waited(lambda: not reloader.status()["draining"])
        assert models() <= 2
        grown = psutil.Process().memory_info().rss - baseline
        assert grown < RELOADS // 2 * WIDTH * 3 * 4, f"{grown:,} bytes more than after the first reload"


# ---------------------------------------------------------------- servers in processes of their own


@asynccontextmanager
async def workers(run: Path, number: int) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A server with so many workers; gives its address. Killed in the end, all of it."""
    command = [sys.executable, "-m", "uvicorn", "--factory", "tests.serve_child:application"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--port", "0", "--workers", str(number), "--no-access-log"),
        cwd=ROOT,
        env={**os.environ, "AIOCKPT_TEST_RUN": str(run), "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = ""
    try:
        async with asyncio.timeout(30):
            while (found := re.search(r"running on (http://\S+)", said)) is None:
                line = (await process.stderr.readline()).decode()
                assert line, said
                said += line
        draining = asyncio.create_task(process.stderr.read())
        yield found[1], process
        kill(process)
        await draining
    finally:
        kill(process)
        await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
    """End a server and its workers at once, as a machine that goes down does."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)


async def followed(url: str, step: int, pids: set[int]) -> None:
    """Wait until each worker has answered with a version; none drops a request meanwhile."""
    left = set(pids)
    async with asyncio.timeout(30):
        while left or not pids:
            # A connection each: either worker may take it.
            async with httpx.AsyncClient(trust_env=False) as client:
                answer = await client.get(url + "/told")
            assert answer.status_code == 200, answer.text
            told = answer.json()
            assert told["versions"] == [float(told["step"])]
            if told["step"] == step:
                left.discard(told["pid"])
                await asyncio.sleep(0.01)


async def test_two_workers_follow_one_promote_and_a_dead_server_lets_go(tmp_path: Path) -> None:
    """And one rollback; their leases keep what they serve for as long as they live, and no longer."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        commit(run, step)
    async with Catalog(run) as catalog:

        async def serving_now() -> list[Any]:
            return [
                lease for lease in await catalog.leases() if lease.purpose == "serving" and not lease.expired
            ]

        await catalog.promote(1)
        async with workers(run, 2) as (url, process):
            async with asyncio.timeout(40):
                while len({lease.pid for lease in await serving_now()}) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            pids = {lease.pid for lease in await serving_now() if lease.pid is not None}
            assert len(pids) == 2
            assert process.pid not in pids
            await followed(url, 1, pids)
            await catalog.promote(2)
            await followed(url, 2, pids)
            assert {lease.step for lease in await serving_now()} == {2}
            async with httpx.AsyncClient(trust_env=False) as client:
                rolled: Any = (await client.post(url + "/aiockpt/rollback", headers=ORDER)).json()
            assert rolled["step"] == 1
            await followed(url, 1, pids)
            await catalog.demote()  # from here on it is the leases alone that keep it
            assert 1 not in await catalog.prune(KeepLast(1), dry_run=False)
            kill(process)
            await process.wait()
            assert 1 not in await catalog.prune(KeepLast(1), dry_run=False)
            async with asyncio.timeout(20):
                while await catalog.steps() != (3,):
                    await asyncio.sleep(0.1)
                    await catalog.prune(KeepLast(1), dry_run=False)
