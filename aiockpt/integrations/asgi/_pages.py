"""What the middleware answers itself, below its prefix: health, readiness, the status page, orders."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, Final

from aiockpt import Reloader

from ._access import Access
from ._board import Board, health
from ._orders import ORDERS, obey
from ._stream import Streams
from ._wire import Receive, Scope, Send, encode, reply

__all__ = ["RETRY_AFTER", "Pages"]

RETRY_AFTER: Final = (b"retry-after", b"1")
PAGE: Final = files(__package__).joinpath("status.html").read_bytes()  # at import: never on a loop


def _policy(page: bytes) -> bytes:
    """A policy that lets exactly the page's own script and style be used, and nothing from elsewhere."""

    def hashes(tag: bytes) -> str:
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part).digest()).decode() for part in found]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ).encode()


HEADERS: Final = [
    (b"content-security-policy", _policy(PAGE)),
    (b"referrer-policy", b"no-referrer"),
]


class Pages:
    """The answers below one prefix.

    Args:
        reloader: whose.
        access: who may see what.
        page: whether there is a status page.
    """

    def __init__(self, reloader: Reloader[Any], access: Access, *, page: bool) -> None:
        self._reloader = reloader
        self._access = access
        self._page = page
        self._board = Board(reloader)
        self._streams = Streams(reloader, self._board)

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; `path` is what follows the prefix."""
        if path in ORDERS:
            return await obey(ORDERS[path], self._reloader, self._access, scope, receive, send)
        known = ("/health", "/ready", *(("", "/", "/status", "/events") if self._page else ()))
        if path not in known:
            return await self._no(send, 404, "there is no such page")
        if scope["method"] not in ("GET", "HEAD"):
            return await self._no(send, 405, "this page is only read", [(b"allow", b"GET, HEAD")])
        head = scope["method"] == "HEAD"
        if path in ("/health", "/ready"):
            return await self._health(path, scope, send, head)
        if not self._access.near(scope):
            return await self._no(send, 403, "the status page is not shown to this address")
        if path == "/events" and not head:
            return await self._streams(receive, send)
        if path == "/status":
            return await reply(send, 200, encode(await self._board.facts()), head=head)
        await reply(send, 200, PAGE, kind=b"text/html; charset=utf-8", headers=HEADERS, head=head)

    async def _health(self, path: str, scope: Scope, send: Send, head: bool) -> None:
        """Alive as long as it serves or may serve; ready once it serves.

        The reasons name files and hosts: they are for those who may see the page.
        """
        facts = health(self._reloader, details=self._access.near(scope))
        # A reloader that has ended by an error still serves what it has: that is alive, and ready.
        alive = facts["ready"] or facts["state"] == "starting"
        good = facts["ready"] if path == "/ready" else alive
        headers = [] if good else [RETRY_AFTER]
        await reply(send, 200 if good else 503, encode(facts), headers=headers, head=head)

    async def _no(
        self, send: Send, status: int, why: str, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        await reply(send, status, encode({"error": why}), headers=headers)
