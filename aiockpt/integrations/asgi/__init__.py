"""Serve a `Reloader`'s model over HTTP: every request keeps the version it began with, to its last byte.

    reloader = aiockpt.Reloader("runs/digits", build=Model)
    app = FastAPI(lifespan=lifespan(reloader))
    app.add_middleware(ReloaderMiddleware, reloader=reloader)


    @app.post("/answer")
    async def answer(question: Question, live: Annotated[Live[Model], Depends(live_version)]) -> Answer: ...

The middleware is plain ASGI and needs no package; `live` and `live_version` are made for
Starlette and what is built on it. The status page lies at `/aiockpt`.
"""

from __future__ import annotations

from ._lifespan import lifespan
from ._live import live, live_version
from ._middleware import ReloaderMiddleware

__all__ = ["ReloaderMiddleware", "lifespan", "live", "live_version"]
