"""The facts of the status page as server-sent events, for so long and for so many.

A server waits for open responses before it tells the application that it is to end. So
no stream lasts long: the browser asks again at once, and a server that ends is not there
any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import anyio

from aiockpt import Reloader
from aiockpt._reloadlog import Events

from ._board import Board
from ._wire import Receive, Send, encode, reply

__all__ = ["Streams"]

LIFE: Final = 5.0
"""Seconds that one stream lasts."""
PAUSE: Final = 1.0
"""Seconds between two looks when nothing is heard."""
LULL: Final = 0.1
"""Seconds in which what happens is told together."""
MOST: Final = 16
"""Streams at a time."""
BEGIN: Final = b"retry: 100\n\n"


class Streams:
    """All streams of one reloader."""

    def __init__(self, reloader: Reloader[Any], board: Board) -> None:
        self._reloader = reloader
        self._board = board
        self._open = 0

    async def __call__(self, receive: Receive, send: Send) -> None:
        """Serve one stream, until it has lasted long enough, the client leaves or the reloader ends."""
        if self._open >= MOST:
            body = encode({"error": f"{MOST} streams are open"})
            return await reply(send, 503, body, headers=[(b"retry-after", b"10")])
        self._open += 1
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_until_gone, receive, group.cancel_scope)
                await self._tell(send)
                group.cancel_scope.cancel()
        except* OSError:
            pass  # the client has left
        finally:
            self._open -= 1

    async def _tell(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": BEGIN, "more_body": True})
        told = b""
        loop = asyncio.get_running_loop()
        ends = loop.time() + LIFE
        while loop.time() < ends:
            events = self._reloader.events()  # anew: what came until now is in the facts
            facts = await self._board.facts()
            now = facts.pop("now")
            body = encode(facts)
            if body != told:
                told = body
                line = b'data: {"now":%s,"facts":%s}\n\n' % (encode(now), body)
                await send({"type": "http.response.body", "body": line, "more_body": True})
            if not await _heard(events):
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _heard(events: Events) -> bool:
    """Wait until something happens, or for a while; returns False when nothing more will."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PAUSE):
            try:
                await anext(events)
            except StopAsyncIteration:
                return False
        await asyncio.sleep(LULL)
    return True


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
