"""What a worker process and its parent say to each other: whole messages, now and then with memory."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import traceback
from dataclasses import dataclass

from .._parcel import Row

__all__ = ["Order", "Reply", "describe", "receive", "receive_async", "restore", "send", "send_async"]

HEADER = struct.Struct("!QB")
"""Bytes of the message; whether a descriptor comes with it."""
PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """One call of a savefun."""

    path: str
    call: bytes
    """The pickled `Call`."""
    skeleton: bytes
    rows: list[Row]
    arena: int
    """Number of the memory; its descriptor comes with the message the first time."""
    nbytes: int
    forget: list[int]
    """Numbers of memory that is gone."""
    main: dict[str, str] | None
    """Where the parent's main module is, if anything pickled names it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How it went."""

    kept: bool = False
    """Something in the process still refers to the memory."""
    pickled: bytes | None = None
    """The error, if it survives pickling."""
    kind: str | None = None
    """The error's type; None: there was none."""
    text: str = ""
    trace: str = ""


def describe(error: BaseException) -> Reply:
    """Say what was raised, as faithfully as it can be."""
    kind = type(error)
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        if type(pickle.loads(pickled)) is not kind or not isinstance(error, Exception):
            pickled = None
    except Exception:
        pickled = None
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Reply(False, pickled, name, text, "".join(traceback.format_exception(error)))


def restore(reply: Reply) -> Exception:
    """The error that a reply tells of, with the other process's traceback as a note."""
    error: Exception = RuntimeError(f"{reply.kind}: {reply.text}")
    if reply.pickled is not None:
        try:
            error = pickle.loads(reply.pickled)
        except Exception as why:
            error.add_note(f"The error itself cannot be unpickled here: {why!r}")
    error.add_note(f"In the worker process:\n{reply.trace}")
    return error


# The child's side blocks


def send(sock: socket.socket, message: object) -> None:
    """Send a message."""
    data = pickle.dumps(message)
    sock.sendall(HEADER.pack(len(data), 0) + data)


def receive(sock: socket.socket) -> tuple[object, int | None]:
    """Wait for a message, and the descriptor that came with it.

    Raises:
        EOFError: the other side is gone.
    """
    header, fds, _, _ = socket.recv_fds(sock, HEADER.size, 1)
    header += _exactly(sock, HEADER.size - len(header))
    return pickle.loads(_exactly(sock, HEADER.unpack(header)[0])), fds[0] if fds else None


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        part = sock.recv(min(nbytes - len(found), PART_BYTES))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


# The parent's side waits on its loop


async def send_async(sock: socket.socket, data: bytes, fd: int | None) -> None:
    """Send a pickled message; the socket does not block."""
    header = HEADER.pack(len(data), fd is not None)
    # Nothing else is under way on this socket, so its buffer takes a few bytes at once.
    if fd is None:
        sock.send(header)
    else:
        socket.send_fds(sock, [header], [fd])
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def receive_async(sock: socket.socket) -> object:
    """Wait for a message.

    Raises:
        EOFError: the other side is gone.
    """
    nbytes, _ = HEADER.unpack(await _exactly_async(sock, HEADER.size))
    return pickle.loads(await _exactly_async(sock, nbytes))


async def _exactly_async(sock: socket.socket, nbytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    found = bytearray()
    while len(found) < nbytes:
        part = await loop.sock_recv(sock, min(nbytes - len(found), PART_BYTES))
        if not part:
            raise EOFError
        found += part
    return bytes(found)
