"""The optimizer gate: nobody steps while a save still reads the weights.

The version counters of tensors do not see fused optimizers, so a changed weight cannot
be noticed afterwards; it has to be stopped before. While a save is unstaged it holds
the gate, and a hook that runs before every optimizer's `step()` looks whether that
optimizer is in the state or owns memory that the save still reads. The hook raises (or
waits) before anything has changed, and it is there only while somebody holds the gate.

The hook is the global one of `torch.optim`: one registered on the optimizer object
alone would not see a state given as plain state dicts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import UsageError


class Hold:
    """One save's claim on the state it reads; `release` may be called from any thread."""

    def __init__(
        self,
        step: int | None,
        optimizers: Iterable[object],
        tensors: Iterable[torch.Tensor],
        what: str | None = None,
    ) -> None:
        self.step = step
        self.what = what or f"step {step}"
        self.thread = threading.get_ident()
        self.released = threading.Event()
        self._optimizers = {id(o): o for o in optimizers}
        self._storages = {pointer for t in tensors if (pointer := storage_of(t))}
        _Gate.enter(self)

    def covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether stepping this optimizer would change what the save still reads."""
        if id(optimizer) in self._optimizers:
            return True
        groups = optimizer.param_groups
        return any(storage_of(p) in self._storages for group in groups for p in group["params"])

    def release(self) -> None:
        """The state may change now."""
        _Gate.leave(self)
        self.released.set()
        self._optimizers.clear()
        self._storages.clear()


def storage_of(tensor: Any) -> int:
    """An address that tells memory apart, 0 when there is none; sharded tensors by their own part."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        # Not untyped_storage(): the tensor would keep that object for ever, and the garbage collector
        # would visit one more a tensor.
        return int(local.data_ptr() - local.storage_offset() * local.element_size()) if local.numel() else 0
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0


class _Gate:
    """Who holds the gate; the hook is registered while anybody does."""

    # Reentrant, and single dict operations: a collection inside may drop a call that was never awaited.
    _lock = threading.RLock()
    _holds: ClassVar[dict[int, Hold]] = {}
    _handle: Any = None

    @classmethod
    def enter(cls, hold: Hold) -> None:
        with cls._lock:
            cls._holds[id(hold)] = hold
            if cls._handle is None:
                cls._handle = register_optimizer_step_pre_hook(_before_step)

    @classmethod
    def leave(cls, hold: Hold) -> None:
        with cls._lock:
            cls._holds.pop(id(hold), None)
            if not cls._holds and cls._handle is not None:
                cls._handle.remove()
                cls._handle = None

    @classmethod
    def holds(cls) -> list[Hold]:
        with cls._lock:
            return list(cls._holds.values())


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for hold in _Gate.holds():
        if not hold.covers(optimizer):
            continue
        if threading.get_ident() == hold.thread:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called while the save of {hold.what} still "
                "reads its weights. Nothing was changed. Await the save (`await saver.stage(...)`, or leave "
                "`async with saver.staging(...)`) before you step.",
                step=hold.step,
            )
        hold.released.wait()
