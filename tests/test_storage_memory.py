"""A store in memory keeps the contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiockpt.storage import Store
from aiockpt.storage.memory import MemoryStore
from aiockpt.testing import StoreContract


class TestMemoryStore(StoreContract):
    """A bucket in memory passes the contract."""

    def make_store(self, tmp_path: Path) -> Store:
        return MemoryStore(str(tmp_path))

    def raw_files(self, store: Store) -> Mapping[str, bytes]:
        assert isinstance(store, MemoryStore)
        return {key: bytes(data) for key, data in store._bucket.files.items()}
