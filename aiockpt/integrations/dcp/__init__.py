"""torch.distributed.checkpoint (DCP): adapters to its storage interface, and coroutines over any storage."""

from ._coroutines import drain, load, save, stage
from ._handle import PendingDcpSave
from ._reader import AioStorageReader
from ._writer import AioStorageWriter

__all__ = ["AioStorageReader", "AioStorageWriter", "PendingDcpSave", "drain", "load", "save", "stage"]
