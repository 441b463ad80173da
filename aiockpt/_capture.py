"""State to captured leaves: what is taken at the call, before anything is awaited.

Captured at once: the state dicts of everything that has one, containers, plain values,
the buffers of modules (a forward changes them), and tensors of up to 64 KiB as long as
they come to no more than 4 MiB. What is larger is only referred to, and read until the
save is staged; until then the gate is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from . import _tree
from ._dtypes import NAME
from ._gate import Hold, storage_of
from ._table import TensorTable
from .errors import StateMutatedError

SMALL_BYTES: Final = 64 << 10
SMALL_TOTAL: Final = 4 << 20


class Ranged(ABC):
    """A tensor that is nowhere whole: any stretch of its bytes can be had, in a thread."""

    @abstractmethod
    def read(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8) with the row-major content from byte `first` on."""


Source = torch.Tensor | Callable[[], torch.Tensor] | Ranged
"""Where a row's bytes come from: a tensor, or something that makes it, or parts of it, when needed."""


@dataclass(slots=True, eq=False)
class Captured:
    """A state at one instant, as far as it had to be copied."""

    table: TensorTable
    sources: list[Source | None]
    """One a row; None for tied rows."""
    flat: _tree.Flat
    hold: Hold | None = None
    on_release: Callable[[], None] | None = None
    """Called once, when the state is no longer read."""
    versions: list[tuple[int, torch.Tensor, int]] = field(default_factory=list)
    """(row, tensor, version) of what is still referred to."""

    def check_unchanged(self, step: int) -> None:
        """An extra alarm, after the last copy: raise if a version counter moved.

        Raises:
            StateMutatedError: naming the first path that changed.
        """
        changed = self.changed()
        if changed is not None:
            path = self.table.path[changed[0]]
            message = (
                f"step {step}: {path} changed while it was being copied; the save was dropped. "
                "Do not touch the state before `staged`."
            )
            raise StateMutatedError(message, step=step, path=path)

    def changed(self) -> tuple[int, torch.Tensor] | None:
        """The first row, and its tensor, whose version counter moved."""
        moved = ((row, tensor) for row, tensor, version in self.versions if _version(tensor) != version)
        return next(moved, None)

    def release(self) -> None:
        """The state may change: drop every reference to it and open the gate."""
        if self.hold is not None:
            self.hold.release()
            self.hold = None
        if self.on_release is not None:
            self.on_release()
            self.on_release = None
        self.versions.clear()
        self.sources.clear()
        self.flat.tensors.clear()
        self.flat.stateful.clear()


def capture(state: Any, *, step: int, allow_pickle: bool = False) -> Captured:
    """Take the state as it is now; runs on the caller's thread, linear in its leaves.

    Raises:
        UnsupportedStateError: listing every path that cannot be stored.
    """
    return take(_tree.flatten(state, allow_pickle=allow_pickle), step)


def take(flat: _tree.Flat, step: int | None, what: str | None = None) -> Captured:
    """Take what a walk over a state has found: small leaves copied, the gate held for the others.

    Args:
        flat: the columns of its tensors, and the objects that were asked.
        step: of the save.
        what: is saved, for the gate's message, when it is no step.
    """
    table = TensorTable()
    sources: list[Source | None] = []
    with torch.no_grad():
        for i, tensor in enumerate(flat.tensors):
            alias = flat.tensor_alias[i]
            shape = tuple(tensor.shape)
            table.add(
                flat.tensor_seq[i],
                flat.tensor_paths[i],
                NAME[tensor.dtype],
                shape,
                flat.tensor_flags[i],
                alias,
            )
            sources.append(tensor if alias < 0 else None)
        live = _copy_small(table, sources, flat.stateful)
    tensors = [flat.tensors[row] for row in live]
    optimizers = [o for o in flat.stateful if isinstance(o, torch.optim.Optimizer)]
    hold = Hold(step, optimizers, tensors, what) if live or optimizers else None
    versions = [(row, flat.tensors[row], _version(flat.tensors[row])) for row in live]
    return Captured(table, sources, flat, hold, versions=versions)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have no counter
        return -1


def _copy_small(table: TensorTable, sources: list[Source | None], stateful: Sequence[object]) -> list[int]:
    """Copy buffers and small leaves in place of `sources`; returns the rows left as references."""
    modules = [m for m in stateful if isinstance(m, torch.nn.Module)]
    buffers = {storage_of(b) for m in modules for b in m.buffers()} - {0}
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    live: list[int] = []
    budget = SMALL_TOTAL
    for row, source in enumerate(sources):
        if not isinstance(source, torch.Tensor):
            continue
        nbytes = table.nbytes[row]
        if nbytes <= SMALL_BYTES and nbytes <= budget:
            budget -= nbytes
        elif storage_of(source) not in buffers:
            live.append(row)
            continue
        groups.setdefault((source.dtype, source.device), []).append(row)
    for rows in groups.values():
        for row, copy in zip(rows, _copies([_tensor(sources[row]) for row in rows]), strict=True):
            sources[row] = copy
    return live


def _tensor(source: Source | None) -> torch.Tensor:
    assert isinstance(source, torch.Tensor)
    return source


def _copies(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Independent flat copies; one `cat` for all of them where torch can."""
    flat = [bits(t).reshape(-1) for t in tensors]
    yield from torch.split(torch.cat(flat), [t.numel() for t in flat])


_MOVABLE: Final = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The logical values as a dtype that every torch operation can move."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # A view costs a microsecond, which counts when there are thousands of leaves.
    return tensor if tensor.dtype in _MOVABLE else tensor.view(_BITS[tensor.element_size()])
