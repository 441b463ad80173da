"""The middleware: a version for each request, and pages about the reloader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from aiockpt import Live, Reloader
from aiockpt._serving import Use
from aiockpt.errors import CheckpointError, RequestAbortedError, UsageError

from ._access import Access
from ._held import KEY, Held
from ._pages import RETRY_AFTER, Pages
from ._wire import App, Receive, Scope, Send, encode, path_of, reply

__all__ = ["ReloaderMiddleware"]

TRY_AGAIN_LATER = 1013
"""WebSocket's own word for it."""


class ReloaderMiddleware:
    """Gives each request the version that serves when it begins, and takes it back after its last byte.

    Plain ASGI, for any framework and server. The version is `scope["state"]["aiockpt"]`, which
    `live(request)` reads; responses name it in `x-aiockpt-step` and `x-aiockpt-save-id`.
    A websocket keeps its version for its life. While nothing serves, requests wait a
    little and are then answered with 503.

    Below the prefix it answers itself: `/health`, `/ready`, the status page with `/status` and
    `/events`, and with a token `POST /reload`, `/rollback` and `/pin` (`{"step": 300}`, or null).

    Args:
        app: the application.
        reloader: entered by whoever owns it; see `lifespan`.
        prefix: of the paths that are answered here.
        token: at least 16 characters, which orders show as `Authorization: Bearer TOKEN`;
            None: there are no orders.
        clients: who may see the status page and the details of `/health`, and give orders:
            `loopback`, `any`, or networks such as `10.0.0.0/8`. Behind a proxy the server has to
            be told to believe its headers; else every client seems to be the proxy.
        page: whether there is a status page.
        needs: `needs(scope)`: whether a request needs a model; by default all do.
        wait: seconds that a request waits where nothing serves, or while an update in place
            has the gate closed.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(
        self,
        app: App,
        reloader: Reloader[Any],
        *,
        prefix: str = "/aiockpt",
        token: str | None = None,
        clients: str | Iterable[str] = "loopback",
        page: bool = True,
        needs: Callable[[Scope], bool] | None = None,
        wait: float = 10.0,
    ) -> None:
        _check(reloader, prefix, wait)
        self._app = app
        self._reloader = reloader
        self._prefix = prefix
        self._needs = needs
        self._wait = wait
        self._pages = Pages(reloader, Access(token, clients), page=page)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        kind = scope["type"]
        path = path_of(scope) if kind == "http" else ""
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            await self._pages(path.removeprefix(self._prefix), scope, receive, send)
        elif kind in ("http", "websocket") and (self._needs is None or self._needs(scope)):
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        use = self._reloader.use()
        try:
            live = await self._enter(use)
        except (CheckpointError, TimeoutError):
            # What is wrong is told by /health, and not to everybody.
            return await _later(scope, receive, send)
        held = Held(use, live)
        # Not the same dict: servers may share it between requests.
        scope["state"] = {**scope.get("state", {}), KEY: live}
        try:
            await self._app(scope, held.receiving(receive), held.sending(send))
        except BaseException as error:
            try:
                await held.let_go(error, error.__traceback__)
            except RequestAbortedError:
                if held.started or scope["type"] != "http":
                    raise  # the server cuts the connection: what came so far is not whole
                return await _later(scope, receive, send)
            raise
        await held.let_go()

    async def _enter(self, use: Use[Any]) -> Live[Any]:
        async with asyncio.timeout(self._wait):
            return await use.__aenter__()


def _check(reloader: object, prefix: object, wait: object) -> None:
    """Refuse wrong options, whatever the caller's types say."""
    if not isinstance(reloader, Reloader):
        raise UsageError(f"reloader= is a Reloader, not {reloader!r:.80}")
    if not isinstance(prefix, str) or not prefix.startswith("/") or prefix.endswith("/"):
        raise UsageError(f"prefix= begins with / and has no / at its end, not {prefix!r:.80}")
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < 1e9:
        raise UsageError(f"wait= is a number of seconds, not {wait!r:.80}")


async def _later(scope: Scope, receive: Receive, send: Send) -> None:
    """Send a client away who may come back."""
    if scope["type"] == "http":
        body = encode({"error": "no model serves at this moment"})
        return await reply(send, 503, body, headers=[RETRY_AFTER])
    message = await receive()
    if message["type"] == "websocket.connect":
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": "no model serves now"})
