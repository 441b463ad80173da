"""The worker process: takes orders from its parent until that closes the line, or is gone."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Awaitable
from dataclasses import replace
from multiprocessing import spawn

from .._arena import Arena
from .._parcel import rebuild_from
from . import Call, wire

__all__ = ["main"]

LOOK_SECONDS = 0.5
"""How often it looks whether its parent lives."""


def main(fd: int, parent: int) -> None:
    """The life of the process.

    Args:
        fd: of the line.
        parent: its process id.
    """
    # Ctrl-C and the scheduler's notice go to the whole group. The parent decides what becomes of its
    # saves; when it is done, or gone, so is this process.
    signal.signal(signal.SIGINT, _nothing)
    signal.signal(signal.SIGTERM, _nothing)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    arenas: dict[int, Arena] = {}
    with socket.socket(fileno=fd) as line:
        try:
            wire.send(line, wire.Reply())
            while True:
                order, memory = wire.receive(line)
                assert isinstance(order, wire.Order)
                wire.send(line, wire.Reply())  # begun: from here on its death is this order's
                wire.send(line, _serve(order, memory, arenas))
        except (EOFError, ConnectionError):
            return


def _nothing(*_: object) -> None:
    """A handler of its own: what the savefun starts would inherit that a signal is ignored."""


def _watch(parent: int) -> None:
    """End with the parent, even in the middle of a savefun, and whoever else has the line open."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _serve(order: wire.Order, memory: int | None, arenas: dict[int, Arena]) -> wire.Reply:
    for number in order.forget:
        if number in arenas:
            arenas.pop(number).close()
    if memory is not None:
        arenas[order.arena] = Arena(order.nbytes, fd=memory)
    arena = arenas[order.arena]
    try:
        _call(order, arena)
        reply = wire.Reply()
    except BaseException as error:
        reply = wire.describe(error)
    if arena.in_use():
        gc.collect()
    if arena.in_use():
        # The savefun has kept something: its memory stays as it is, and is not used again.
        arenas.pop(order.arena).close()
        reply = replace(reply, kept=True)
    return reply


def _call(order: wire.Order, arena: Arena) -> None:
    if order.main is not None:
        # As for any process that multiprocessing spawns; a second time it does nothing.
        spawn.prepare(order.main)
    call: Call = pickle.loads(order.call)
    outcome = call(order.path, rebuild_from(arena, order.skeleton, order.rows))
    if inspect.isawaitable(outcome):
        asyncio.run(_finish(outcome))


async def _finish(outcome: Awaitable[object]) -> None:
    await outcome
