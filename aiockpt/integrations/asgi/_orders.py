"""Orders by HTTP: reload, roll back, pin. For those who show the token."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiockpt import Checkpoint, Reloader
from aiockpt._log import log
from aiockpt.errors import CheckpointError, StepNotFoundError, StorageError

from ._access import Access
from ._wire import BodyError, Receive, Scope, Send, encode, read_body, reply

__all__ = ["ORDERS", "obey"]

LIMIT: Final = 4096
"""Bytes of an order."""
Order = Callable[[Reloader[Any], bytes], Awaitable[dict[str, Any]]]


async def obey(
    order: Order, reloader: Reloader[Any], access: Access, scope: Scope, receive: Receive, send: Send
) -> None:
    """Check who gives the order, carry it out, and say what came of it.

    An order that fails leaves everything as it was, and its reason in the answer.
    """
    refusal = _refusal(access, scope)
    if refusal is not None:
        status, why, headers = refusal
        return await reply(send, status, encode({"error": why}), headers=headers)
    try:
        answer = await order(reloader, await read_body(receive, LIMIT))
    except BodyError as error:
        return await reply(send, 400, encode({"error": str(error)}))
    except CheckpointError as error:
        log.warning("%s: an order failed: %s", reloader.catalog.store.url, error)
        body = {"error": str(error), "kind": type(error).__name__}
        return await reply(send, _status(error), encode(body))
    await reply(send, 200, encode(answer))


def _refusal(access: Access, scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
    if not access.orders:
        return 404, "no orders are taken: there is no token", []
    if not access.near(scope):
        return 403, "orders are not taken from this address", []
    if scope["method"] != "POST":
        return 405, "an order is a POST", [(b"allow", b"POST")]
    if not access.knows(scope):
        return 401, "the token is missing or wrong", [(b"www-authenticate", b'Bearer realm="aiockpt"')]
    return None


def _status(error: CheckpointError) -> int:
    if isinstance(error, StepNotFoundError):
        return 404
    return 503 if isinstance(error, StorageError) else 409


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"step": checkpoint.step, "save_id": checkpoint.save_id}


async def _reload(reloader: Reloader[Any], body: bytes) -> dict[str, Any]:
    return {"changed": await reloader.reload(), "serving": reloader.status()["serving"]}


async def _roll_back(reloader: Reloader[Any], body: bytes) -> dict[str, Any]:
    return _facts(await reloader.rollback())


async def _pin(reloader: Reloader[Any], body: bytes) -> dict[str, Any]:
    try:
        step = json.loads(body)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        step = False
    if step is not None and type(step) is not int:
        raise BodyError('the body is {"step": NUMBER}, or {"step": null} to follow the run again')
    if step is None:
        await reloader.unpin()
        return {"pinned": None}
    found = await reloader.pin(step)
    return {"pinned": found.step, **_facts(found)}


ORDERS: Final[dict[str, Order]] = {"/reload": _reload, "/rollback": _roll_back, "/pin": _pin}
"""By the path below the prefix."""
