"""The plans of all ranks to what each one writes: identity, places in the state, refusals. Pure.

DCP names a leaf by one flat text, and its planner remembers the path behind it
(`planner_data`). With these paths the nested state comes back. The first rank knows the
plans of all, so it numbers the leaves and sends each rank its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from aiockpt._chunks import Share as Held
from aiockpt._chunks import share_problem
from aiockpt._dtypes import NAME
from aiockpt._paths import join, key_text
from aiockpt.errors import UnsupportedStateError, UsageError

__all__ = ["SPACING", "Share", "Ticket", "check_items", "held", "share_out"]

SPACING: Final = 1 << 20
"""Numbers kept for what one leaf consists of: an object may hold tensors."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What all ranks of one save must agree on."""

    asked: str
    """The folder that was asked for."""
    name: str
    """The folder that is written."""
    step: int
    generation: int
    save_id: str
    run_id: str
    world: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes; travels as `SavePlan.storage_data`."""

    ticket: Ticket
    rank: int
    places: dict[str, tuple[int, str]]
    """(number, path) of each leaf of the plan, by DCP's name."""
    lists: list[tuple[int, str]]
    """(number, path) of the lists on the way to leaves; rank 0 writes them for all."""
    holes: list[tuple[int, str]]
    """(number, path) of list elements that no leaf came of: empty containers."""


def check_items(items: Iterable[WriteItem]) -> None:
    """Refuse what cannot be stored, before anything is written.

    Raises:
        UnsupportedStateError: naming every such leaf.
    """
    problems = []
    for item in items:
        if item.tensor_data is None:
            continue
        properties = item.tensor_data.properties
        if properties.dtype not in NAME:
            problems.append((item.index.fqn, f"dtype {properties.dtype} cannot be stored"))
        elif str(properties.layout) != "torch.strided":
            problems.append(
                (item.index.fqn, f"a tensor of layout {properties.layout} is not stored in chunks")
            )
    if problems:
        raise UnsupportedStateError(problems)


def share_out(plans: Sequence[SavePlan], ticket: Ticket) -> list[SavePlan]:
    """Give each rank what it needs to know.

    Raises:
        UsageError: two leaves have one name or one place, or a tensor is not held exactly once.
    """
    paths = _paths(plans)
    texts = {fqn: _text(path) for fqn, path in paths.items()}
    places, lists, holes = _number(paths, texts)
    _refuse_uncovered(plans, texts)
    shared = []
    for rank, plan in enumerate(plans):
        mine = {item.index.fqn: places[item.index.fqn] for item in plan.items}
        share = Share(ticket, rank, mine, lists if rank == 0 else [], holes if rank == 0 else [])
        shared.append(replace(plan, storage_data=share))
    return shared


def _paths(plans: Sequence[SavePlan]) -> dict[str, Path]:
    """The path of every leaf that is written, in the order of the state."""
    wanted = {item.index.fqn for plan in plans for item in plan.items}
    found: dict[str, Path] = {}
    for plan in plans:
        known: Any = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        for fqn, path in known.items():
            if fqn in wanted and found.setdefault(fqn, tuple(path)) != tuple(path):
                raise UsageError(
                    f"two parts of the state are both called {fqn!r} once they are flattened: "
                    f"{found[fqn]} and {tuple(path)}; rename one",
                    path=fqn,
                )
    for plan in plans:
        for item in plan.items:
            found.setdefault(item.index.fqn, (item.index.fqn,))
    return found


def _text(path: Path) -> str:
    return "/".join(key_text(key) for key in path)


def held(item: WriteItem, path: str) -> Held | None:
    """What an item holds of its tensor, or None for an object."""
    data = item.tensor_data
    if data is None:
        return None
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return path, NAME[data.properties.dtype], tuple(data.size), offsets, sizes


def _refuse_uncovered(plans: Sequence[SavePlan], texts: dict[str, str]) -> None:
    items = [item for plan in plans for item in plan.items]
    objects = [item.index.fqn for item in items if item.type == WriteItemType.BYTE_IO]
    tensors = [share for item in items if (share := held(item, texts[item.index.fqn]))]
    names = {texts[fqn] for fqn in objects}
    if len(names) != len(objects) or names & {path for path, *_ in tensors}:
        raise UsageError("the plan writes one object twice; nothing was written")
    problem = share_problem(tensors)
    if problem:
        raise UsageError(
            f"the ranks that save do not hold {problem[0]} exactly once: {problem[1]}; nothing was written. "
            "All ranks that hold a shard of it must take part in the save.",
            path=problem[0],
        )


Numbered = list[tuple[int, str]]


def _number(
    paths: dict[str, Path], texts: dict[str, str]
) -> tuple[dict[str, tuple[int, str]], Numbered, Numbered]:
    """Walk over the state that the paths make up: (leaves, lists, holes in lists)."""
    leaves: dict[str, str] = {}
    for fqn, text in texts.items():
        if leaves.setdefault(text, fqn) != fqn:
            message = f"{leaves[text]!r} and {fqn!r} have one place in the state"
            raise UsageError(message, path=text)
    children = _children(paths)
    clash = leaves.keys() & children.keys()
    if clash:
        raise UsageError(f"{min(clash)} is a leaf on one rank and a container on another", path=min(clash))
    places: dict[str, tuple[int, str]] = {}
    lists: Numbered = []
    holes: Numbered = []
    number = 0
    for text, is_list in _walk(children):
        if text in leaves:
            places[leaves[text]] = (number, text)
        elif text not in children:
            holes.append((number, text))
        elif is_list:
            lists.append((number, text))
        number += SPACING
    return places, lists, holes


def _children(paths: dict[str, Path]) -> dict[str, dict[str | int, None]]:
    """The keys in each container, by its path."""
    children: dict[str, dict[str | int, None]] = {"": {}}
    for path in paths.values():
        above = ""
        for key in path:
            siblings = children.setdefault(above, {})
            siblings[key] = None
            above = join(above, key_text(key))
    for text, keys in children.items():
        if len({type(key) for key in keys}) > 1:
            raise UsageError(f"{text} is a list on one rank and a dict on another", path=text)
    return children


def _walk(children: dict[str, dict[str | int, None]]) -> Iterator[tuple[str, bool]]:
    """(path, whether it is a list), containers before what they hold, lists by index."""
    stack = [""]
    while stack:
        text = stack.pop()
        keys = children.get(text, {})
        numbers = [key for key in keys if isinstance(key, int)]
        yield text, bool(numbers)
        ordered: Iterable[str | int] = range(max(numbers) + 1) if numbers else keys
        stack += reversed([join(text, key_text(key)) for key in ordered])
