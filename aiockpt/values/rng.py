"""The process's random number generators as one entry of a state."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["RngState"]


class RngState:
    """The global generators of torch, its CUDA devices, numpy and Python.

    Put one into the state, `{"rng": aiockpt.RngState(), ...}`: a save reads the generators
    at the call, loading into it sets them. numpy's is included if numpy is loaded, CUDA's
    if CUDA is in use.
    """

    def state_dict(self) -> dict[str, Any]:
        """Read the generators; nothing is drawn from them.

        Returns:
            `torch` (uint8 tensor), `cuda` (one such tensor a device), `numpy` (what
            `numpy.random.get_state()` returns, or None), `python` (`random.getstate()`).
        """
        numpy: Any = sys.modules.get("numpy")
        cuda: Any = torch.cuda
        return {
            "torch": torch.get_rng_state(),
            "cuda": cuda.get_rng_state_all() if cuda.is_available() and cuda.is_initialized() else [],
            "numpy": None if numpy is None else numpy.random.get_state(),
            "python": random.getstate(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators; what is not in `state`, or not on this machine, is left alone.

        Args:
            state: what `state_dict` returned, here or on another machine.
        """
        numpy: Any = sys.modules.get("numpy")
        if state.get("torch") is not None:
            torch.set_rng_state(state["torch"].cpu())
        if torch.cuda.is_available():
            # A run may go on with fewer or more devices than it had.
            for device, one in zip(range(torch.cuda.device_count()), state.get("cuda", ()), strict=False):
                torch.cuda.set_rng_state(one.cpu(), device)
        if state.get("numpy") is not None and numpy is not None:
            numpy.random.set_state(state["numpy"])
        if state.get("python") is not None:
            random.setstate(state["python"])
