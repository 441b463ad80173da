"""One version, held for one request from its start to its last message."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

from aiockpt import Live
from aiockpt._serving import Use

from ._wire import Message, Receive, Send

__all__ = ["KEY", "Held"]

KEY: Final = "aiockpt"
"""Where in `scope["state"]` the version is."""
_STARTS: Final = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_BODIES: Final = ("http.response.body", "websocket.http.response.body")
_ENDS: Final = ("websocket.close", "http.response.pathsend")
_GONE: Final = ("http.disconnect", "websocket.disconnect")


class Held:
    """Lets go once, at whatever comes first: the last message, the client's leave, the end of the call.

    A framework may tear down its dependencies before a streamed body is sent, and may go
    on after it with background work: only the messages tell when the answer is over.

    Args:
        use: entered.
        live: what it gave.
    """

    def __init__(self, use: Use[Any], live: Live[Any]) -> None:
        self._use: Use[Any] | None = use
        self._headers = [
            (b"x-aiockpt-step", str(live.step).encode()),
            (b"x-aiockpt-save-id", live.save_id.encode()),
        ]
        self.started = False
        """Whether the client has been told anything."""

    async def let_go(self, error: BaseException | None = None, trace: TracebackType | None = None) -> None:
        """The request needs the version no more.

        Raises:
            RequestAbortedError: as `Reloader.use`.
        """
        use, self._use = self._use, None
        if use is not None:
            await use.__aexit__(None if error is None else type(error), error, trace)

    def sending(self, send: Send) -> Send:
        """Name the version in the first message, and let go after the last."""

        async def wrapped(message: Message) -> None:
            kind = message["type"]
            if kind in _STARTS:
                self.started = True
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            try:
                await send(message)
            except OSError:  # the client has left
                await self.let_go()
                raise
            if kind in _ENDS or (kind in _BODIES and not message.get("more_body", False)):
                await self.let_go()

        return wrapped

    def receiving(self, receive: Receive) -> Receive:
        """Let go when the client has left."""

        async def wrapped() -> Message:
            message = await receive()
            if message["type"] in _GONE:
                await self.let_go()
            return message

        return wrapped
