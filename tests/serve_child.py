"""An application for servers in processes of their own: `uvicorn --factory tests.serve_child:application`."""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from aiockpt import Reloader
from aiockpt.integrations.asgi import ReloaderMiddleware, lifespan, live
from tests.serving import Net
from tests.web import TOKEN


async def told(request: Request) -> Response:
    """Which version it is, and which process says so."""
    found = live(request)
    versions = sorted(found.model.versions())
    return JSONResponse({"step": found.step, "versions": versions, "pid": os.getpid()})


def application() -> Starlette:
    """A replica that follows an alias of the run in the environment."""
    reloader = Reloader(os.environ["AIOCKPT_TEST_RUN"], Net, follow="alias:production", poll=0.1, ttl=2.0)
    app = Starlette(routes=[Route("/told", told)], lifespan=lifespan(reloader))
    app.add_middleware(ReloaderMiddleware, reloader=reloader, token=TOKEN)
    return app
