"""What the ranks of a data-parallel run tell each other about checkpoints."""

from __future__ import annotations

import torch.distributed as dist

from aiockpt.errors import RanksFailedError, SaveError

__all__ = ["everywhere", "together"]


def everywhere(errors: list[Exception], *, distributed: bool) -> list[Exception]:
    """The errors of this rank; where it has none, one that tells of the others'. All ranks call it."""
    if not distributed or not dist.is_initialized():
        return errors
    told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, [str(error) for error in errors])
    failures: dict[int, BaseException] = {
        rank: SaveError("; ".join(texts)) for rank, texts in enumerate(told) if texts
    }
    return errors or ([RanksFailedError("saving a checkpoint", failures)] if failures else [])


def together(*, distributed: bool) -> None:
    """Wait until every rank has come this far."""
    if distributed and dist.is_initialized():
        dist.barrier()
