"""The `AioCheckpointIO` of the package `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO

from ._io import AioCheckpoints

__all__ = ["AioCheckpointIO"]


class AioCheckpointIO(AioCheckpoints, _WrappingCheckpointIO):  # noqa: D101  # inherits its words
    __doc__ = AioCheckpoints.__doc__
    stock = TorchCheckpointIO
