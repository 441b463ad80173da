"""How much memory a saver may take: what host and control group leave, and the default budget.

A trainer in a container sees the whole machine's memory in /proc/meminfo and is killed
at the group's limit. Page cache that the kernel can drop is charged to the group too,
and after a save there is much of it: it counts as left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from aiockpt._block import BLOCK_BYTES, MIN_BLOCKS

__all__ = ["budget_warning", "default_budget", "memory_left"]

BUDGET_SHARE = 0.4
"""Of the memory that is left; the rest is the training's."""


def default_budget(
    state_bytes: int,
    *,
    block_bytes: int = BLOCK_BYTES,
    left: int | None = None,
    local_ranks: int | None = None,
) -> int:
    """How many bytes of blocks a saver of such a state gets when nobody says; blocking.

    The state's size in whole blocks, but at most 40 % of the memory that machine and control group leave,
    split over the ranks on this machine, and never less than `MIN_BLOCKS` blocks.

    Args:
        state_bytes: size of the state.
        block_bytes: size of a block.
        left: memory that is left; asked of the system by default.
        local_ranks: processes that share it; LOCAL_WORLD_SIZE by default.
    """
    left = memory_left() if left is None else left
    share = int(left * BUDGET_SHARE) // max(1, local_ranks or _local_world_size())
    blocks = min(-(-state_bytes // block_bytes), share // block_bytes)
    return max(MIN_BLOCKS, blocks) * block_bytes


def budget_warning(state_bytes: int, budget: int, *, bytes_per_second: float = 1e9) -> str | None:
    """What to warn of once when a state does not fit into its budget, else None; pure.

    Args:
        state_bytes: size of the state.
        budget: bytes of blocks.
        bytes_per_second: how fast the store takes bytes; what was measured, or a guess.
    """
    if state_bytes <= budget:
        return None
    seconds = (state_bytes - budget) / bytes_per_second
    return (
        f"the state has {_gib(state_bytes)} and the budget of host memory is {_gib(budget)}: staging waits "
        f"until the store has taken the rest, about {seconds:.1f} s at {bytes_per_second / 1e9:.1f} GB/s. "
        f"Pass budget= to allow more memory."
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def _local_world_size() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1


def memory_left(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> int:
    """Bytes this process may still take, the tightest of all limits; blocking.

    Args:
        proc: where procfs is mounted.
        groups: where the control groups are mounted.
    """
    limits = [_meminfo(f"{proc}/meminfo")]
    for line in _text(f"{proc}/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            limits += _left_v2(groups, path)
        elif "memory" in controllers.split(","):
            limits += _left_v1(f"{groups}/memory", path)
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else 0


def _left_v2(root: str, path: str) -> Iterator[int | None]:
    for folder in _upwards(root, path):
        current = _number(f"{folder}/memory.current")
        for name in ("memory.max", "memory.high"):
            yield _left(_number(f"{folder}/{name}"), current, _droppable(folder, "inactive_file"))


def _left_v1(root: str, path: str) -> Iterator[int | None]:
    for folder in _upwards(root, path):
        limit, used = _number(f"{folder}/memory.limit_in_bytes"), _number(f"{folder}/memory.usage_in_bytes")
        yield _left(limit, used, _droppable(folder, "total_inactive_file"))


def _left(limit: int | None, used: int | None, droppable: int) -> int | None:
    return None if limit is None or used is None else limit - max(0, used - droppable)


def _upwards(root: str, path: str) -> Iterator[str]:
    """The group's folder and those above: a limit of any of them holds."""
    # In a container the path may be one of the host's, which is not mounted here; the root then is our group.
    while path.strip("/"):
        yield f"{root}/{path.strip('/')}"
        path = os.path.dirname(path.rstrip("/"))
    yield root


def _meminfo(file: str) -> int | None:
    for line in _text(file).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _droppable(folder: str, field: str) -> int:
    for line in _text(f"{folder}/memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == field and value.strip().isdigit():
            return int(value)
    return 0


def _number(file: str) -> int | None:
    """The number in a file; None where there is no file, or no limit ("max")."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: str) -> str:
    try:
        with open(file, encoding="ascii", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
