"""Whether an optimizer can take a saved state, found out before anything is touched. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

__all__ = ["optimizer_problems"]

_LIKE_PARAMETER: Final = frozenset(
    {
        "acc_delta",
        "ax",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "prev",
        "square_avg",
        "sum",
    }
)
"""State of torch's own optimizers that has its parameter's shape."""

Problems = list[tuple[str, str]]


def optimizer_problems(optimizer: torch.optim.Optimizer, state: Any) -> Problems:
    """Compare groups, parameters and shapes.

    Args:
        optimizer: the target; one that never stepped is fine.
        state: its saved state dict; tensors may be on the meta device.

    Returns:
        (path below the state, what differs); empty if it fits as far as can be told.
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return [("", "the checkpoint holds no optimizer state here")]
    mine = optimizer.param_groups
    if len(groups) != len(mine):
        return [("param_groups", f"saved {len(groups)} parameter groups, target has {len(mine)}")]
    problems: Problems = []
    owners: dict[Any, torch.Tensor] = {}
    for i, (saved, group) in enumerate(zip(groups, mine, strict=True)):
        ids, params = saved.get("params"), group["params"]
        if not isinstance(ids, list) or len(ids) != len(params):
            count = len(ids) if isinstance(ids, list) else "no"
            problems.append((f"param_groups/{i}", f"saved {count} parameters, target has {len(params)}"))
            continue
        owners.update(zip(ids, params, strict=True))
    return problems or _shape_problems(optimizer, state.get("state"), owners)


def _shape_problems(
    optimizer: torch.optim.Optimizer, state: Any, owners: dict[Any, torch.Tensor]
) -> Problems:
    problems: Problems = []
    for number, entry in state.items() if isinstance(state, Mapping) else ():
        param = owners.get(number)
        if param is None or not isinstance(entry, Mapping):
            continue
        live = optimizer.state.get(param, {})
        for key, value in entry.items():
            wanted = _shape(key, param, live.get(key))
            if isinstance(value, torch.Tensor) and wanted is not None and tuple(value.shape) != wanted:
                why = f"saved shape {list(value.shape)}, target shape {list(wanted)}"
                problems.append((f"state/{number}/{key}", why))
    return problems


def _shape(key: Any, param: torch.Tensor, live: Any) -> tuple[int, ...] | None:
    """The shape a piece of state must have, or None where only the optimizer knows."""
    if isinstance(live, torch.Tensor):
        return tuple(live.shape)
    return tuple(param.shape) if key in _LIKE_PARAMETER else None
