"""The `AioCheckpointIO` of the package `lightning`."""

from __future__ import annotations

from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from ._io import AioCheckpoints

__all__ = ["AioCheckpointIO"]


class AioCheckpointIO(AioCheckpoints, _WrappingCheckpointIO):  # noqa: D101  # inherits its words
    __doc__ = AioCheckpoints.__doc__
    stock = TorchCheckpointIO
