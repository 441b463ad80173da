"""What a reload costs requests: their latencies while checkpoints are loaded, against those without.

A server in a process of its own answers a small model's questions over HTTP; this process
asks, at a steady rate, so that a server that stands still is seen as late answers and not as
fewer questions. Each round has an idle stretch and one in which checkpoints are committed
one after the other, in turn. A figure is the median over the rounds with minimum and maximum.
Machines are noisy: compare within one run only.

    python benchmarks/serving.py --mb 64 --rounds 5 --seconds 6 --rate 100

`--rival` swaps as many web recipes do: `load_state_dict` on the loop's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiockpt
from aiockpt.integrations.asgi import ReloaderMiddleware, lifespan, live
from aiockpt.policies.keep import KeepLast

LAYER = 1024


def build(layers: int) -> torch.nn.Sequential:
    """A stack of layers of 4 MiB each."""
    return torch.nn.Sequential(*(torch.nn.Linear(LAYER, LAYER) for _ in range(layers)))


# ---------------------------------------------------------------- the server


def answer(model: torch.nn.Sequential, step: int) -> JSONResponse:
    """One answer: some milliseconds of arithmetic would hide what is measured, so two layers only."""
    with torch.inference_mode():
        result = model[1](model[0](torch.ones(1, LAYER)))
    return JSONResponse({"value": float(result[0, 0]), "step": step})


def application(run: str, layers: int) -> Starlette:
    """Served by a reloader."""

    async def ask(request: Request) -> JSONResponse:
        version = live(request)
        return answer(version.model, version.step)

    reloader = aiockpt.Reloader(run, lambda: build(layers), poll=0.05)
    return Starlette(
        routes=[Route("/ask", ask)],
        middleware=[Middleware(ReloaderMiddleware, reloader=reloader)],
        lifespan=lifespan(reloader),
    )


def rival(run: str, layers: int) -> Starlette:
    """The recipe: look for a new step in a task, read it there and then."""
    state: dict[str, Any] = {"model": build(layers), "step": 0}

    async def follow() -> None:
        async for checkpoint in aiockpt.watch(run, poll=0.05):
            folder = Path(run, checkpoint.name)
            tensors = {k: v for file in folder.glob("model*.safetensors") for k, v in load_file(file).items()}
            model = build(layers)
            model.load_state_dict({name.removeprefix("model."): value for name, value in tensors.items()})
            state.update(model=model, step=checkpoint.step)

    async def ask(request: Request) -> JSONResponse:
        return answer(state["model"], state["step"])

    async def ready(request: Request) -> JSONResponse:
        return JSONResponse({"step": state["step"]}, 200 if state["step"] else 503)

    @contextlib.asynccontextmanager
    async def around(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(follow())
        yield
        task.cancel()
        await asyncio.wait([task])

    return Starlette(routes=[Route("/ask", ask), Route("/aiockpt/ready", ready)], lifespan=around)


# ---------------------------------------------------------------- the load


async def one(client: httpx.AsyncClient, due: float, seconds: list[float], steps: set[int]) -> None:
    """One question; its time counts from when it was due."""
    answered = await client.get("/ask")
    answered.raise_for_status()
    seconds.append(time.perf_counter() - due)
    steps.add(answered.json()["step"])


async def stretch(client: httpx.AsyncClient, seconds: float, rate: float) -> tuple[list[float], set[int]]:
    """Ask at a steady rate for so long; returns the latencies and which steps answered."""
    taken: list[float] = []
    steps: set[int] = set()
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds * rate)):
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(client, due, taken, steps))
    return taken, steps


async def commits(saver: aiockpt.Saver, model: torch.nn.Module, first: int, pause: float) -> None:
    """Commit checkpoints one after the other, until cancelled."""
    step = first
    while True:
        await saver.save({"model": model}, step=step)
        step += 1
        await asyncio.sleep(pause)


def trainer(run: str, layers: int, pause: float) -> None:
    """A process that commits whenever it is told to: a line with a step begins, an empty one ends."""
    torch.manual_seed(0)
    model = build(layers)

    async def main() -> None:
        async with aiockpt.Saver(run, keep=KeepLast(2)) as saver:
            while line := (await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)):
                task = asyncio.create_task(commits(saver, model, int(line), pause))
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
                task.cancel()
                await asyncio.wait([task])
                await saver.drain()
                print("quiet", flush=True)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def child(*options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """This file in another process."""
    pipe = asyncio.subprocess.PIPE
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *options]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def told(process: asyncio.subprocess.Process, line: str = "") -> str:
    """Say a line to a child, or hear one from it."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(line.encode())
        await process.stdin.drain()
        return ""
    return (await process.stdout.readline()).decode().strip()


def percentile(values: list[float], part: float) -> float:
    """A percentile, in milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] * 1e3


def spread(values: list[float], form: str = "7.2f") -> str:
    """Median, least and most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


async def measure(args: argparse.Namespace) -> None:
    """All rounds, and the table."""
    rows: dict[str, list[float]] = {
        name: [] for name in ("idle50", "busy50", "idle99", "busy99", "ratio", "reloads")
    }
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        common = ["--run", folder, "--mb", str(args.mb), "--pause", str(args.pause)]
        server = ["--role", "rival" if args.rival else "server", *common]
        async with child("--role", "trainer", *common) as training, child(*server) as serving:
            async with httpx.AsyncClient(base_url=await told(serving), trust_env=False, timeout=60) as client:
                await told(training, "1\n")
                while (await client.get("/aiockpt/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                await told(training, "\n")
                await told(training)
                await stretch(client, 1.0, args.rate)  # warm
                for number in range(1, args.rounds + 1):
                    await asyncio.sleep(0.5)
                    idle, _ = await stretch(client, args.seconds, args.rate)
                    await told(training, f"{number * 1000}\n")
                    busy, steps = await stretch(client, args.seconds, args.rate)
                    await told(training, "\n")
                    await told(training)
                    figures = {"idle50": percentile(idle, 0.5), "busy50": percentile(busy, 0.5)}
                    figures |= {"idle99": percentile(idle, 0.99), "busy99": percentile(busy, 0.99)}
                    figures |= {"ratio": figures["busy99"] / figures["idle99"], "reloads": float(len(steps))}
                    for name, value in figures.items():
                        rows[name].append(value)
    print(f"{args.mb} MB, {args.rate:g} requests a second, {args.rounds} rounds of 2 x {args.seconds:g} s")
    for name, what in (
        ("idle50", "median latency, idle, ms"),
        ("busy50", "median latency, reloading, ms"),
        ("idle99", "p99, idle, ms"),
        ("busy99", "p99, reloading, ms"),
        ("ratio", "p99 reloading / idle"),
        ("reloads", "versions served in a stretch"),
    ):
        print(f"{what:<32} {spread(rows[name])}")


def serve(args: argparse.Namespace) -> None:
    """Be the server; the first line on stdout is its address."""
    app = (rival if args.role == "rival" else application)(args.run, max(2, args.mb // 4))

    async def main() -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
        await task

    asyncio.run(main())


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, default=64, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each stretch")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two commits")
    parser.add_argument("--dir", help="where the run is put, by default the temporary folder")
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--role", choices=("measure", "server", "rival", "trainer"), default="measure")
    parser.add_argument("--run")
    args = parser.parse_args()
    if args.role == "measure":
        asyncio.run(measure(args))
    elif args.role == "trainer":
        trainer(args.run, max(2, args.mb // 4), args.pause)
    else:
        serve(args)


if __name__ == "__main__":
    main()
