"""How the tests of conversions see that a hostile file was refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import aiockpt


async def refused(
    source: Path, kind: type[aiockpt.CheckpointError], match: str, *, mark: Path | None = None
) -> aiockpt.CheckpointError:
    """Convert it to everything: each time that error, and nothing is left or made."""
    before = sorted(os.listdir(source.parent))
    error: aiockpt.CheckpointError | None = None
    for to in ("aiockpt", "torch"):
        with pytest.raises(kind, match=match) as caught:
            await aiockpt.convert(source, source.parent / "out", to=to)
        error = caught.value
        assert type(error) is kind
    assert sorted(os.listdir(source.parent)) == before
    assert mark is None or not mark.exists()
    assert error is not None
    return error


def dcp_folder(tmp_path: Path, metadata: bytes, data: bytes = b"") -> Path:
    """Make a folder of DCP of this metadata and data."""
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(metadata)
    (folder / "a.distcp").write_bytes(data)
    return folder
