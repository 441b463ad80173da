"""ASGI's own words, and short answers in them."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

__all__ = [
    "App",
    "BodyError",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "encode",
    "path_of",
    "read_body",
    "reply",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON: Final = b"application/json"


class BodyError(Exception):
    """The body of a request is too long, or cut off."""


def path_of(scope: Scope) -> str:
    """The path below where the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = root and (path == root or path.startswith(f"{root}/"))
    return path[len(root) :] if below else path


async def reply(
    send: Send, status: int, body: bytes, *, kind: bytes = JSON, headers: Headers = (), head: bool = False
) -> None:
    """A whole response; with `head` its headers only."""
    fixed = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": b"" if head else body, "more_body": False})


async def read_body(receive: Receive, limit: int) -> bytes:
    """The body of a request.

    Raises:
        BodyError: it is longer than `limit`, or the client left.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise BodyError("the client left")
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyError(f"the body is longer than {limit} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def encode(value: Any) -> bytes:
    """Strict JSON on one line: what JSON has no word for becomes text."""
    return json.dumps(_plain(value), allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return f"{value!r:.200}"
