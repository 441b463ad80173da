"""A disk that says no: for tests of single answers of the system."""

from __future__ import annotations

import os

from aiockpt._files import FileSystem


class Refusing(FileSystem):
    """A disk that answers chosen calls with an error, each as often as it is listed."""

    def __init__(self, *refusals: tuple[str, str, int]) -> None:
        self.refusals = list(refusals)

    def _check(self, call: str, path: str) -> None:
        for refusal in self.refusals:
            if refusal[0] == call and path.endswith(refusal[1]):
                self.refusals.remove(refusal)
                raise OSError(refusal[2], os.strerror(refusal[2]), path)

    def mkdir(self, path: str) -> None:
        self._check("mkdir", path)
        super().mkdir(path)

    def create(self, path: str, data: bytes) -> None:
        self._check("create", path)
        super().create(path, data)

    def link(self, src: str, dst: str) -> None:
        self._check("link", dst)
        super().link(src, dst)

    def unlink(self, path: str) -> None:
        self._check("unlink", path)
        super().unlink(path)

    def scandir(self, path: str) -> list[tuple[str, bool, int, float]]:
        self._check("scandir", path)
        return super().scandir(path)

    def read(self, path: str, limit: int) -> bytes:
        self._check("read", path)
        return super().read(path, limit)

    def sync_dir(self, path: str) -> None:
        self._check("sync_dir", path)
        super().sync_dir(path)
