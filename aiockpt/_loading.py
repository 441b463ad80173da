"""What a load reads and where it goes: planned whole, before any byte of data is read.

Blocking and free of I/O; it runs in a thread. New tensors are allocated here, nothing that
lives is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._devices import Devices
from ._hints import near
from ._match import Match, match
from ._plain import MARK, Json
from ._reads import Run, plan_reads
from ._saved import Outline, Saved, located
from ._targets import Targets, make_fresh
from ._tree import host_tensors, rebuild, selects, wanted_tensors
from ._wants import Want
from .checkpoint import LoadReport
from .errors import CorruptCheckpointError, PickleRefusedError, UsageError
from .values.pickled import PICKLE_TAG

__all__ = ["LoadPlan", "as_paths", "plan_load", "rebuild_state"]


@dataclass(slots=True)
class LoadPlan:
    """What one load will read, and where it goes. Used once."""

    targets: Targets
    runs: list[Run]
    fit: Match | None
    """The comparison with `into=`, if there is one."""
    strict: bool
    select: list[str] | None
    """Paths restored as new values; None: all."""
    report: LoadReport

    @property
    def nbytes(self) -> int:
        """Bytes that will be read."""
        return sum(run.nbytes for run in self.runs)

    def living(self) -> list[Run]:
        """The reads that fill something that lives."""
        rows = self.targets.living_rows()
        return [run for run in self.runs if any(part[0] in rows for part in run.parts)]


def plan_load(
    saved: Saved,
    want: Want | None,
    chosen: list[str] | None,
    devices: Devices,
    *,
    strict: bool,
    cast: bool,
    allow_pickle: bool,
    block_bytes: int,
) -> LoadPlan:
    """Compare, refuse, allocate.

    Args:
        saved: the checkpoint.
        want: the target, or None.
        chosen: the paths asked for, or None for all.
        devices: where new tensors go.
        strict: whether a difference between checkpoint and target is an error.
        cast: whether dtypes may differ.
        allow_pickle: whether pickled values may be unpickled.
        block_bytes: the most bytes of one read.

    Raises:
        As `CheckpointReader.plan`.
    """
    outline = Outline(saved)
    fit = None if want is None else match(saved, outline, want, strict=strict, cast=cast)
    select = chosen if fit is None else list(fit.fresh)
    _refuse_unknown(outline, saved, chosen)
    if not allow_pickle:
        _refuse_pickles(saved, outline, select)
    try:
        targets = Targets(saved.table, _allocate(saved, select, devices), spread=saved.spread)
    except CorruptCheckpointError as error:
        raise located(error, saved.manifest.step, _part_file(saved)) from error
    for row, path, tensor in fit.fills if fit else ():
        targets.add_living(row, path, tensor)
    runs = plan_reads(saved.stored, saved.shards, targets.rows(), targets.direct(), block_bytes)
    return LoadPlan(targets, runs, fit, strict, select, _report(fit, targets))


def _report(fit: Match | None, targets: Targets) -> LoadReport:
    if fit is None:
        return LoadReport(matched=len(targets.fresh))
    return LoadReport(
        matched=len(fit.fills) + len(targets.fresh),
        missing=tuple(fit.missing),
        unexpected=tuple(fit.unexpected),
        mismatched=tuple(fit.mismatched),
        cast=tuple(fit.cast),
    )


def _allocate(saved: Saved, select: Sequence[str] | None, devices: Devices) -> dict[int, torch.Tensor]:
    """Make the new tensors."""
    hosts = host_tensors(saved)
    table = saved.table
    fresh: dict[int, torch.Tensor] = {}
    for row in wanted_tensors(saved, select):
        path, dtype, shape = table.path[row], table.dtype[row], table.shape[row]
        fresh[row] = make_fresh(path, dtype, shape, devices.of(path, dtype, shape, host=row in hosts))
    return fresh


def _refuse_unknown(outline: Outline, saved: Saved, chosen: Sequence[str] | None) -> None:
    for path in chosen or ():
        if path and outline.kind(path) is None:
            known = dict.fromkeys((*outline.children(""), *saved.table.path, *saved.value_paths))
            close = near(path, known)
            hint = f"; near: {', '.join(close)}" if close else f"; there are: {', '.join(list(known)[:10])}"
            raise UsageError(
                f"paths= selects nothing with {path!r}{hint}", step=saved.manifest.step, path=path
            )


def _refuse_pickles(saved: Saved, outline: Outline, select: Sequence[str] | None) -> None:
    """Before anything is read: a pickle found at the end would have cost the whole read."""
    chosen = None if select is None else frozenset(select)
    rows = zip(saved.value_paths, saved.values, strict=True)
    found = [path for path, json in rows if _selected(chosen, path) and _has_pickle(json)]
    nodes = zip(saved.node_paths, saved.node_tags, strict=True)
    found += [path for path, tag in nodes if tag == PICKLE_TAG and _selected(chosen, path)]
    found += [path for path in select or () if _has_pickle(outline.inside(path))]
    if found:
        raise PickleRefusedError(
            f"{found[0]}: it is pickled, and unpickling runs code from the file; pass allow_pickle=True "
            "if you trust it",
            step=saved.manifest.step,
            path=found[0],
        )


def _selected(chosen: frozenset[str] | None, path: str) -> bool:
    return chosen is None or selects(chosen, path)


def _has_pickle(json: Json) -> bool:
    """Whether a plain value holds a pickle anywhere; a stack, since its depth is the file's choice."""
    stack: list[Any] = [json]
    while stack:
        top = stack.pop()
        if isinstance(top, dict):
            if top.get(MARK) == PICKLE_TAG:
                return True
            stack += top.values()
        elif isinstance(top, list):
            stack += top
    return False


def _part_file(saved: Saved) -> str:
    return next(record.name for record in saved.manifest.files if record.kind == "part")


def rebuild_state(saved: Saved, plan: LoadPlan, allow_pickle: bool) -> Any:
    """The state, or its selected parts, of the tensors the plan holds.

    Raises:
        CorruptCheckpointError: it cannot be put together.
    """
    step, file = saved.manifest.step, _part_file(saved)
    try:
        return rebuild(saved, plan.targets.fresh, select=plan.select, allow_pickle=allow_pickle).state
    except CorruptCheckpointError as error:
        raise located(error, step, file) from error
    except PickleRefusedError as error:
        raise error.at(step) from error.__cause__
    except RecursionError as error:
        raise CorruptCheckpointError("the state is nested too deeply", step=step, file=file) from error


def as_paths(paths: Iterable[str]) -> list[str]:
    """The value of `paths=` as a list.

    Raises:
        UsageError: it is empty, or holds something that is no path.
    """
    chosen = [paths] if isinstance(paths, str) else list(paths)
    if not all(isinstance(path, str) for path in chosen):
        raise UsageError("paths= takes paths as text, such as 'model' or 'optim/state/0'")
    if not chosen:
        raise UsageError("paths= is empty: it would load nothing")
    return [path.strip("/") for path in chosen]
