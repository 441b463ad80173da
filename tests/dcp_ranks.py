"""Groups of real processes with gloo between them, for the tests of the DCP adapters.

Ranks are forked from a server that has imported torch already, so that a group costs
half a second and every test can have its own.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 50.0
"""Seconds for everything that a group does."""
GLOO_LIMIT = timedelta(seconds=25)

Case = Callable[..., Any]


class LostError(Exception):
    """A rank has died, or did not answer in time."""


def start_server() -> None:
    """Start the server that ranks are forked from; what it opens stays open for good."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dcp_preload"])
    process = context.Process(target=_nothing)
    process.start()
    process.join()
    process.close()


def _nothing() -> None:
    return


def run(world: int, case: Case, *args: Any, may_die: tuple[int, ...] = ()) -> list[Any]:
    """Run `case(*args)` on every rank of a new group; returns the ranks' results.

    Args:
        world: how many ranks.
        case: a function of a module.
        args: picklable.
        may_die: ranks that may end without a result; theirs is None then.

    Raises:
        AssertionError: a rank failed, with its traceback.
        LostError: a rank is gone or hangs; all are ended.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as meeting:
        members = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            where = f"file://{meeting}/store"
            process = context.Process(target=_rank, args=(theirs, where, rank, world, case, args))
            process.start()
            theirs.close()
            members.append((process, ours))
        try:
            replies = [_reply(rank, ours, may_die) for rank, (_, ours) in enumerate(members)]
        finally:
            for process, ours in members:
                ours.close()
                process.join(5)
                process.kill()
                process.join()
                process.close()
    errors = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(replies) if not good]
    assert not errors, "\n".join(errors)
    return [value for _, value in replies]


def _reply(rank: int, pipe: Connection, may_die: tuple[int, ...]) -> tuple[bool, Any]:
    if not wait([pipe], LIMIT):
        raise LostError(f"rank {rank} does not answer")
    try:
        good, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        if rank in may_die:
            return True, None
        raise LostError(f"rank {rank} has died") from None
    return good, value


def _rank(pipe: Connection, where: str, rank: int, world: int, case: Case, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=GLOO_LIMIT)
        pipe.send_bytes(pickle.dumps((True, case(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        os._exit(0)  # a broken group would be waited for


def visible(run_folder: Path) -> list[str]:
    """The steps that a reader could see."""
    if not run_folder.is_dir():
        return []
    return sorted(p.name for p in run_folder.iterdir() if p.name.startswith("step-"))
