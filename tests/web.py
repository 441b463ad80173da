"""What the tests over HTTP share: a real server on loopback, and an application that tells its versions."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from aiockpt import Reloader
from aiockpt.integrations.asgi import ReloaderMiddleware, lifespan, live
from tests.serving import POLL, Net

TOKEN = "a token of some length"
ORDER = {"authorization": f"Bearer {TOKEN}"}


def reloader_of(run: Path, **options: Any) -> Reloader[Net]:
    """A quick one."""
    return Reloader(run, Net, **{"poll": POLL, "retry": 3600, "drain_timeout": 5, **options})


class Taps:
    """Lets a test hold the streams of an application open, and say when they go on."""

    def __init__(self) -> None:
        self.flow = asyncio.Event()
        self.ended = 0


async def told(request: Request) -> Response:
    """Which version it is, by the middleware and by the weights."""
    found = live(request)
    return JSONResponse({"step": found.step, "versions": sorted(found.model.versions())})


async def streamed(request: Request) -> Response:
    """The same, line by line; the last one after the tap was opened."""
    found, taps = live(request), request.app.state.taps

    async def lines() -> AsyncIterator[str]:
        try:
            yield json.dumps({"step": found.step, "versions": sorted(found.model.versions())}) + "\n"
            await taps.flow.wait()
            yield json.dumps({"step": found.step, "versions": sorted(found.model.versions())}) + "\n"
        finally:
            taps.ended += 1

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def broken(request: Request) -> Response:
    """A handler with a mistake."""
    raise RuntimeError(f"a mistake on step {live(request).step}")


async def socketed(websocket: WebSocket) -> None:
    """The version again and again, over a websocket."""
    await websocket.accept()
    async for _ in websocket.iter_text():
        found = live(websocket)
        await websocket.send_json({"step": found.step, "versions": sorted(found.model.versions())})


def app_of(reloader: Reloader[Net], **options: Any) -> Starlette:
    """A small application around a reloader."""
    inner = options.pop("inner", None)
    app = Starlette(
        routes=[
            Route("/told", told),
            Route("/streamed", streamed),
            Route("/broken", broken),
            WebSocketRoute("/socketed", socketed),
        ],
        middleware=[Middleware(ReloaderMiddleware, reloader=reloader, **{"token": TOKEN, **options})],
        lifespan=lifespan(reloader, inner),
    )
    app.state.taps = Taps()
    return app


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[str]:
    """A real server on this loop; gives its address."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="on", ws="websockets-sansio", **options)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert server.started
        host, port = sock.getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def talking(app: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real server."""
    async with (
        serving(app, **options) as url,
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client,
    ):
        yield client


def users(reloader: Reloader[Any]) -> int:
    """Requests that hold a version now, of whatever age."""
    status = reloader.status()
    here = 0 if status["serving"] is None else int(status["serving"]["users"])
    return here + sum(int(version["users"]) for version in status["draining"])
