"""Which version a request has: read from the request, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiockpt import Live
from aiockpt.errors import UsageError

from ._held import KEY

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection
else:
    try:
        from starlette.requests import HTTPConnection
    except ImportError:  # a plain ASGI application has scopes only
        HTTPConnection = Any

__all__ = ["live", "live_version"]


def live(connection: HTTPConnection) -> Live[Any]:
    """The version that answers this request: `live(request).model`.

    It is the middleware's: nothing has to be given back, and it stays the same until the
    last byte of the answer, a streamed one included. In background work that follows the
    answer it is gone.

    Args:
        connection: a Request or WebSocket of Starlette or FastAPI, or an ASGI scope.

    Raises:
        UsageError: there is no `ReloaderMiddleware` around, or it was told to leave this path alone.
    """
    scope: Mapping[str, Any] = getattr(connection, "scope", connection)
    if KEY not in scope.get("state", {}):
        raise UsageError(
            "this request has no model: add ReloaderMiddleware to the application, and see needs="
        )
    found: Live[Any] = scope["state"][KEY]
    return found


async def live_version(connection: HTTPConnection) -> Live[Any]:
    """The same for `Depends(live_version)`: FastAPI calls a coroutine function without a thread."""
    return live(connection)
