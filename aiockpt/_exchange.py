"""New weights copied into the memory of the old ones, and back if that fails.

Addresses stay: captured graphs and compiled models go on working. Before a tensor is
written to, its old content is kept in host memory; only one more tensor than the staged
copy is ever held, since each old content takes the place of the staged one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["Exchange"]


class Exchange:
    """One update in place. Blocking, for a lane; used once.

    Args:
        module: the model that serves.
        staged: the new content by the names of its state; emptied on the way.
    """

    def __init__(self, module: nn.Module, staged: Mapping[str, torch.Tensor]) -> None:
        living = module.state_dict()
        self._todo = [(living[name].detach(), staged[name]) for name in staged]
        self._old: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self) -> None:
        """Put the new content in place.

        Raises:
            Exception: some of it may be in place: call `back`.
        """
        with torch.inference_mode():
            while self._todo:
                living, new = self._todo.pop()
                old = living.to("cpu", copy=True)
                self._old.append((living, old))
                living.copy_(new)
                del new, old
        _settle(self._old)

    def back(self) -> None:
        """Put the old content back, in reverse: tied tensors were kept twice, the first time rightly."""
        with torch.inference_mode():
            while self._old:
                living, old = self._old[-1]
                living.copy_(old)
                self._old.pop()

    def forget(self) -> None:
        """The new content is good: let go of the old one."""
        self._todo.clear()
        self._old.clear()


def _settle(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Wait until devices have it: requests may run on other streams."""
    if any(not living.is_cpu for living, _ in pairs):
        torch.accelerator.synchronize()
