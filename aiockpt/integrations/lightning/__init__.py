"""Lightning: `AioCheckpointIO`, a `CheckpointIO` that stages a checkpoint and writes it behind the loop.

    trainer = Trainer(plugins=[AioCheckpointIO()], callbacks=[ModelCheckpoint(...)])

`AioCheckpointIO` here is made for the package that the program has imported, `lightning` or
`pytorch_lightning`, which have classes of their own (`lightning` if both or none). By name:
`aiockpt.integrations.lightning.for_lightning` and `.for_pytorch_lightning`.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .for_lightning import AioCheckpointIO

__all__ = ["AioCheckpointIO"]


def __getattr__(name: str) -> Any:
    if name != "AioCheckpointIO":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _older_name():
        from .for_pytorch_lightning import AioCheckpointIO as Older

        return Older
    from .for_lightning import AioCheckpointIO as Newer

    return Newer


def _older_name() -> bool:
    """Whether the program means `pytorch_lightning`."""
    if "lightning.pytorch" in sys.modules:
        return False
    return "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
