"""A local store keeps the contract, and the promises only a folder can make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiockpt.storage import Store
from aiockpt.storage.local import LocalStore
from aiockpt.testing import FaultyFiles, FaultyStore, StoreContract
from aiockpt.testing._steps import raw_tree


class TestLocalStore(StoreContract):
    """A folder passes the contract."""

    def make_store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "a" / "run")

    def raw_files(self, store: Store) -> Mapping[str, bytes]:
        return raw_tree(Path(store.url))
