"""The test kit: for those who write a store, and for those who test what uses one.

* `StoreContract`: the tests any store must pass, as a class to subclass;
* `FaultyStore`: a store around another that fails at the n-th operation;
* `FaultyFiles`: the same one floor below, at the calls to the disk, with a log of them.

Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

from ._faults import Faults, Kind
from ._filelog import FileOp
from .contract import StoreContract
from .faulty_files import FaultyFiles
from .faulty_store import FaultyStore

__all__ = ["Faults", "FaultyFiles", "FaultyStore", "FileOp", "Kind", "StoreContract"]
