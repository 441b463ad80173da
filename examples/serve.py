"""Serve a digit classifier over HTTP while another process trains it.

A trainer process commits checkpoints, one of them broken on purpose; this process serves the
newest good one with Starlette and uvicorn, and clients ask all the time. Then it is rolled back
by HTTP. The exit status is 1 if a single request failed.

    python examples/serve.py                 # the demo: ends by itself in less than a minute
    python examples/serve.py --keep-running  # go on until Ctrl-C; look at the status page meanwhile

Needs: pip install 'aiockpt[examples]'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
import uvicorn
from sklearn.datasets import load_digits
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiockpt
from aiockpt.integrations.asgi import ReloaderMiddleware, lifespan, live
from aiockpt.policies.keep import KeepLast

EVERY, BATCH, TRAINED_ON = 10, 64, 1500
BROKEN = 5
"""Which checkpoint is broken."""


def build() -> torch.nn.Module:
    """The model; its weights come from checkpoints."""
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images as rows of 64 numbers, and what they show."""
    bunch = load_digits()
    return torch.tensor(bunch.data / 16.0, dtype=torch.float32), torch.tensor(bunch.target)


# ---------------------------------------------------------------- the trainer


async def train(run: Path, checkpoints: int, pause: float) -> None:
    """Train, and commit a checkpoint now and then; 0 checkpoints: for ever."""
    torch.manual_seed(0)
    images, labels = digits()
    model = build()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    number = 0
    async with aiockpt.Saver(run, keep=KeepLast(4)) as saver:
        while checkpoints == 0 or number < checkpoints:
            number += 1
            for _ in range(EVERY):
                rows = torch.randint(TRAINED_ON, (BATCH,))
                loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
                optim.zero_grad()
                loss.backward()
                optim.step()
            state = model.state_dict()
            if number == BROKEN:
                state = {name: torch.full_like(tensor, math.nan) for name, tensor in state.items()}
            metrics = {"loss": loss.item()}
            # Retention is at work, too; it leaves alone what the server has leased.
            await saver.save({"model": state, "optim": optim}, step=number * EVERY, metrics=metrics)
            await asyncio.sleep(pause)


# ---------------------------------------------------------------- the server


async def classify(request: Request) -> JSONResponse:
    """Which digit it is, by the version that serves when the request begins."""
    version = live(request)
    pixels = torch.tensor((await request.json())["pixels"])
    with torch.inference_mode():
        digit = int(version.model(pixels).argmax())
    return JSONResponse({"digit": digit, "step": version.step})


def application(run: Path, token: str) -> Starlette:
    """The web application."""
    reloader = aiockpt.Reloader(run, build, poll=0.2)
    return Starlette(
        routes=[Route("/classify", classify, methods=["POST"])],
        middleware=[Middleware(ReloaderMiddleware, reloader=reloader, token=token)],
        lifespan=lifespan(reloader),
    )


@contextlib.asynccontextmanager
async def serving(app: Starlette, port: int) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Serve while the body runs; gives the address, and the server's task."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started and not task.done():  # noqa: ASYNC110  (it has no event for that)
        await asyncio.sleep(0.02)
    try:
        if not task.done():
            number = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{number}", task
    finally:
        server.should_exit = True
        await task


# ---------------------------------------------------------------- the clients


@dataclass
class Tally:
    """What the clients were told, by step."""

    right: dict[int, list[bool]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def line(self, step: int) -> str:
        """One line about one version."""
        right, taken = self.right[step], sorted(self.seconds[step])
        p99 = taken[min(len(taken) - 1, int(len(taken) * 0.99))]
        return (
            f"step {step:>4}: {len(right):>5} answers, {sum(right) / len(right):>6.1%} right, "
            f"median {statistics.median(taken) * 1e3:5.1f} ms, p99 {p99 * 1e3:5.1f} ms"
        )


async def ask(client: httpx.AsyncClient, tally: Tally, first: int) -> None:
    """Ask about one image after the other."""
    images, labels = digits()
    order = torch.arange(TRAINED_ON, len(labels)).roll(first * 70).tolist()
    while True:
        for row in order:
            begun = time.perf_counter()
            try:
                answer = await client.post("/classify", json={"pixels": images[row].tolist()})
                answer.raise_for_status()
            except httpx.HTTPError as error:
                tally.failed.append(f"{type(error).__name__}: {error}")
                continue
            told = answer.json()
            tally.right.setdefault(told["step"], []).append(told["digit"] == int(labels[row]))
            tally.seconds.setdefault(told["step"], []).append(time.perf_counter() - begun)
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def asking(client: httpx.AsyncClient, tally: Tally) -> AsyncIterator[None]:
    """Clients at work while the body runs."""
    tasks = [asyncio.create_task(ask(client, tally, number)) for number in range(4)]
    tasks.append(asyncio.create_task(report(tally)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def report(tally: Tally) -> None:
    """Print a line about each version when the next one has taken over."""
    now: int | None = None
    while True:
        await asyncio.sleep(0.05)
        newest = next(reversed(tally.right), now)
        if now is not None and newest != now:
            print(tally.line(now), flush=True)
        now = newest


# ---------------------------------------------------------------- the demo


@contextlib.asynccontextmanager
async def training(run: Path, checkpoints: int, pause: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """A trainer in a process of its own, ended with the body."""
    options = ["--train", str(run), "--checkpoints", str(checkpoints), "--pause", str(pause)]
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, *options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def until_ready(client: httpx.AsyncClient) -> None:
    """Wait for the first version."""
    while (await client.get("/aiockpt/ready")).status_code != 200:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def finish(client: httpx.AsyncClient, token: str, last: int) -> list[str]:
    """Wait for the last checkpoint, roll it back by HTTP, and return what was quarantined."""
    while (await client.get("/aiockpt/ready")).json()["step"] != last:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    answer = await client.post("/aiockpt/rollback", headers={"authorization": f"Bearer {token}"})
    await asyncio.sleep(0.5)
    print(f"rolled back by HTTP to step {answer.json()['step']}", flush=True)
    health = (await client.get("/aiockpt/health")).json()
    return [f"step {q['step']} ({q['stage']}): {q['reason']}" for q in health["quarantined"]]


async def demo(folder: Path, checkpoints: int, pause: float, port: int, keep_running: bool) -> int:
    """Trainer, server and clients; returns the exit status."""
    token = os.environ.get("AIOCKPT_TOKEN") or secrets.token_urlsafe()
    run, tally = folder / "digits", Tally()
    async with (
        training(run, 0 if keep_running else checkpoints, pause),
        serving(application(run, token), port) as (url, server),
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client,
    ):
        print(f"status page: {url}/aiockpt", flush=True)
        await until_ready(client)
        quarantined: list[str] = []
        async with asking(client, tally):
            if keep_running:
                await server
            else:
                quarantined = await finish(client, token, checkpoints * EVERY)
    return 0 if keep_running else summary(tally, quarantined)


def summary(tally: Tally, quarantined: list[str]) -> int:
    """Say what happened; returns the exit status."""
    for line in quarantined:
        print(f"never served: {line}")
    answers = sum(map(len, tally.right.values()))
    print(f"{answers} answers by {len(tally.right)} versions, {len(tally.failed)} failed requests")
    for line in tally.failed[:5]:
        print(f"  {line}")
    return 1 if tally.failed or len(tally.right) < 2 else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep-running", action="store_true", help="train and serve until Ctrl-C")
    parser.add_argument("--checkpoints", type=int, default=10, help="how many are committed in the demo")
    parser.add_argument("--pause", type=float, default=0.8, help="seconds between two of them")
    parser.add_argument("--port", type=int, default=0, help="by default any that is free")
    parser.add_argument("--train", type=Path, metavar="RUN", help="be the trainer")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        if args.train is not None:
            asyncio.run(train(args.train, args.checkpoints, args.pause))
            return 0
        with tempfile.TemporaryDirectory(prefix="aiockpt-serve-") as folder:
            return asyncio.run(demo(Path(folder), args.checkpoints, args.pause, args.port, args.keep_running))
    return 0


if __name__ == "__main__":
    sys.exit(main())
