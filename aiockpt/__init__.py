"""Asyncio-native checkpoints for PyTorch.

`await saver.stage(state, step=n)` returns when the weights may change;
`await saver.save(state, step=n)` returns when a crash cannot lose them.

    async with aiockpt.Saver("runs/digits") as saver:
        restored = await saver.restore({"model": model, "optim": optim})
        for step in range(restored.step + 1 if restored else 1, 1001):
            train_one(model, optim)
            if step % 100 == 0:
                await saver.stage({"model": model, "optim": optim}, step=step)
"""

from __future__ import annotations

from . import sync
from ._leaselist import LeaseInfo
from ._leases import Lease
from ._memory import ByteBudget
from ._preemption import Preemption, preemption
from ._serving import Live
from ._short import latest, load, watch
from ._version import __version__
from ._watching import Watch, Watched
from .catalog import Catalog
from .checkpoint import Checkpoint, LoadReport
from .convert import Conversion, convert
from .errors import (
    BusyError,
    CheckpointError,
    CommitUnknownError,
    CorruptCheckpointError,
    DrainTimeoutError,
    ForeignFormatError,
    MemoryShortError,
    PickleRefusedError,
    PreviousSaveError,
    PublishError,
    RanksFailedError,
    ReloadError,
    RequestAbortedError,
    RunLockedError,
    SaveCancelledError,
    SaveError,
    SaveErrors,
    StateMismatchError,
    StateMutatedError,
    StepError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UnsafeFileError,
    UnsupportedFormatError,
    UnsupportedStateError,
    UsageError,
)
from .filesaver import FileSaver, PendingFile, SavedFile
from .layouts.per_item import PerItem
from .listeners import Failure, Listener
from .pending import Event, PendingSave, Phase
from .reader import CheckpointReader
from .reloader import Reloader
from .saver import Saver
from .stats import SaverStats
from .storage import Store, open_store
from .values import Record, register_leaf
from .values.rng import RngState
from .writer import CheckpointWriter, ChunkSpec, SavePlan, TensorSpec

__all__ = [
    "BusyError",
    "ByteBudget",
    "Catalog",
    "Checkpoint",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "ChunkSpec",
    "CommitUnknownError",
    "Conversion",
    "CorruptCheckpointError",
    "DrainTimeoutError",
    "Event",
    "Failure",
    "FileSaver",
    "ForeignFormatError",
    "Lease",
    "LeaseInfo",
    "Listener",
    "Live",
    "LoadReport",
    "MemoryShortError",
    "PendingFile",
    "PendingSave",
    "PerItem",
    "Phase",
    "PickleRefusedError",
    "Preemption",
    "PreviousSaveError",
    "PublishError",
    "RanksFailedError",
    "Record",
    "ReloadError",
    "Reloader",
    "RequestAbortedError",
    "RngState",
    "RunLockedError",
    "SaveCancelledError",
    "SaveError",
    "SaveErrors",
    "SavePlan",
    "SavedFile",
    "Saver",
    "SaverStats",
    "StateMismatchError",
    "StateMutatedError",
    "StepError",
    "StepExistsError",
    "StepNotFoundError",
    "StorageError",
    "Store",
    "TensorSpec",
    "UnsafeFileError",
    "UnsupportedFormatError",
    "UnsupportedStateError",
    "UsageError",
    "Watch",
    "Watched",
    "__version__",
    "convert",
    "latest",
    "load",
    "open_store",
    "preemption",
    "register_leaf",
    "sync",
    "watch",
]
