"""torch.distributed.checkpoint (DCP): coroutines over any of its writers and readers."""

from ._coroutines import drain, load, save, stage
from ._handle import PendingDcpSave

__all__ = ["PendingDcpSave", "drain", "load", "save", "stage"]
