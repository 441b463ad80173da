"""A worker in a process of its own, started anew, never forked.

The savefun runs under an interpreter lock of its own there. Tensors reach it through
memory that both processes map; a save sends the small rest over a socket. Nothing has a
name that could be left behind: the memory is an anonymous file, the socket one of a pair.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from multiprocessing import spawn
from typing import Any

from .._threads import Lane, offload, settle
from ..errors import SaveError, UsageError
from . import Call, Job, Worker, wire

__all__ = ["ProcessWorker"]

END_SECONDS = 5.0
"""How long an idle process may take to end before it is killed."""


class ProcessWorker(Worker):
    """Runs the savefun in a process. One that died is replaced by the next save."""

    remote = True

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._ready = False
        self._begun = False
        """The process has taken up the order under way."""
        self._known: set[int] = set()
        """Numbers of the memory that the process has mapped."""
        self._forget: list[int] = []

    @property
    def pid(self) -> int | None:
        """The process's id while there is one."""
        return None if self._process is None else self._process.pid

    def check(self, call: Call) -> None:
        """Refuse what the process could not import.

        Raises:
            UsageError: says why.
        """
        name = getattr(call.plain, "__qualname__", repr(call.plain))
        try:
            data = pickle.dumps(call)
        except Exception as error:
            message = (
                f"worker='process' cannot pass {name} to its process ({type(error).__name__}: {error}): a "
                "savefun must be a function that can be imported from a module, no lambda and none defined "
                "inside another, and its keywords must be picklable"
            )
            raise UsageError(message) from error
        if b"__main__" in data and not _main_module():
            message = f"worker='process' cannot import {name}: it was typed in, its module has no file"
            raise UsageError(message)

    def prepare(self, job: Job) -> None:
        """Pickle the keywords of one save, at its call."""
        try:
            job.notes["call"] = pickle.dumps(job.call)
        except Exception as error:
            message = f"the keywords of a save must be picklable for worker='process': {error}"
            raise UsageError(message) from error

    async def start(self, call: Call) -> None:
        """Start the process; it is ready when the first save is."""
        await offload(self._spawn, lane=Lane.CONTROL)

    def forget(self, arenas: list[int]) -> None:
        """Tell the process with the next order."""
        self._forget += arenas
        arenas.clear()

    async def run(self, job: Job) -> None:
        """Have the savefun called there.

        Raises:
            SaveError: the process died.
            Exception: what the savefun raised, with its traceback as a note.
        """
        try:
            reply = await self._try_twice(job)
        except (EOFError, ConnectionError):
            error = await settle(self._died(job))
            raise error  # noqa: B904  # its cause is how the process ended
        except BaseException:
            # Cancelled: the process must not go on writing, and it cannot be asked to stop.
            await settle(self._end(0.0))
            raise
        job.kept = reply.kept
        if reply.kind is not None:
            raise wire.restore(reply)

    async def stop(self) -> None:
        """End the process, if there is one, and wait until it is gone."""
        await settle(self._end(END_SECONDS if self._ready else 0.0))

    # The process

    async def _try_twice(self, job: Job) -> wire.Reply:
        if self._process is None:
            await offload(self._spawn, lane=Lane.CONTROL)
        self._begun, idle = False, self._ready
        try:
            return await self._ask(job)
        except (EOFError, ConnectionError):
            if self._begun or not idle:
                raise
        # It had died before, with nothing to do: no save is to suffer from that.
        await self._end(END_SECONDS)
        await offload(self._spawn, lane=Lane.CONTROL)
        return await self._ask(job)

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from aiockpt._workers.child import main; main({theirs.fileno()}, {os.getpid()})"
            )
            command = [os.fsdecode(spawn.get_executable()), "-c", code]
            fds = [theirs.fileno()]
            try:
                self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._line, self._ready = ours, False
        self._known.clear()

    async def _end(self, seconds: float) -> None:
        process, self._process = self._process, None
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # felt also where a forked child has the line open
            line.close()
        if process is not None:
            await offload(_reap, process, seconds, lane=Lane.CONTROL)

    async def _died(self, job: Job) -> SaveError:
        """What to raise when the line broke."""
        process, was_begun = self._process, self._begun
        await self._end(END_SECONDS)
        code = None if process is None else process.returncode
        who = "the worker process" if process is None else f"the worker process {process.pid}"
        when = "while it wrote" if was_begun else "before it was ready to write"
        name = os.path.basename(job.path)
        error = SaveError(f"{who} {_how(code)} {when} {name}; what it had written is removed")
        error.__cause__ = ChildProcessError(f"{who} {_how(code)}")
        return error

    async def _ask(self, job: Job) -> wire.Reply:
        line, arena = self._line, job.arena
        assert line is not None
        assert arena is not None
        if not self._ready:
            await wire.receive_async(line)
            self._ready = True
        new = arena.number not in self._known
        forget, self._forget = self._forget, []
        data = await offload(self._order, job, forget)
        await wire.send_async(line, data, arena.fd if new else None)
        self._known.add(arena.number)
        self._known.difference_update(forget)
        await wire.receive_async(line)
        self._begun = True
        reply: Any = await wire.receive_async(line)
        assert isinstance(reply, wire.Reply)
        return reply

    def _order(self, job: Job, forget: list[int]) -> bytes:
        call, parcel, arena = job.notes["call"], job.parcel, job.arena
        assert arena is not None
        main = _main_module() if b"__main__" in call or b"__main__" in parcel.skeleton else {}
        order = wire.Order(
            path=job.path,
            call=call,
            skeleton=parcel.skeleton,
            rows=parcel.rows,
            arena=arena.number,
            nbytes=arena.nbytes,
            forget=forget,
            main=main or None,
        )
        return pickle.dumps(order)


def _reap(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how(code: int | None) -> str:
    if code is None:
        return "went away"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _main_module() -> dict[str, str]:
    """How to import this process's main module in another one; empty if it cannot be."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    file = getattr(main, "__file__", None)
    return {} if file is None else {"init_main_from_path": os.path.abspath(file)}
