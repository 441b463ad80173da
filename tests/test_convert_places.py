"""Where a conversion writes: what it never deletes, the folders above it, names of any length."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.convert import _drive


async def _run(path: Path) -> Path:
    """Make a run with one step."""
    path.parent.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(2)}, path.parent / "w.pt")
    await aiockpt.convert(path.parent / "w.pt", path, to="aiockpt")
    os.unlink(path.parent / "w.pt")
    return path


@pytest.mark.parametrize("dst", ["", ".", "..", "x/..", "./", "/", "a\0b"])
async def test_a_path_without_a_name_is_refused(
    tmp_path: Path, dst: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would mean the working folder, which `overwrite=True` does not mean to delete."""
    await _run(tmp_path / "run")
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(aiockpt.UsageError, match=r"dst"):
        await aiockpt.convert("run", dst, to="aiockpt", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["run", "x"]


@pytest.mark.parametrize("relation", ["itself", "above", "a step's run", "through a link"])
async def test_a_folder_that_holds_the_source_is_not_replaced(tmp_path: Path, relation: str) -> None:
    """`overwrite=True` replaces a result, never what is being converted and all that lies beside it."""
    run = await _run(tmp_path / "all" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "all")
    source, dst = {
        "itself": (run, run),
        "above": (run, tmp_path / "all"),
        "a step's run": (run / "step-00000000", run),
        "through a link": (tmp_path / "link" / "run", tmp_path / "all"),
    }[relation]
    with pytest.raises(aiockpt.UsageError, match="holds the source"):
        await aiockpt.convert(source, dst, to="aiockpt", overwrite=True)
    assert (await aiockpt.load(run))["w"].tolist() == [1, 1]


async def test_a_file_is_converted_in_its_place(tmp_path: Path) -> None:
    """One file for one: the old one goes when the new one is whole."""
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    await aiockpt.convert(tmp_path / "w.pt", tmp_path / "w.pt", to="torch", overwrite=True)
    assert (tmp_path / "w.pt").read_bytes().startswith(b"PK")
    assert torch.load(tmp_path / "w.pt")["w"].tolist() == [1, 1]


async def test_folders_above_it_are_made_durably_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new one is flushed in its parent; a conversion that fails leaves none."""
    with pytest.raises(aiockpt.UsageError, match="no such file"):
        await aiockpt.convert(tmp_path / "none", tmp_path / "a" / "b" / "run", to="aiockpt")
    torch.save({"w": object}, tmp_path / "w.pt")
    torch.save({"w": {1, 2}}, tmp_path / "set.pt")
    for name, kind in (("w.pt", aiockpt.UnsafeFileError), ("set.pt", aiockpt.UnsupportedStateError)):
        with pytest.raises(kind):
            await aiockpt.convert(tmp_path / name, tmp_path / "a" / "b" / "out", to="safetensors")
        assert not (tmp_path / "a").exists()
    flushed: list[str] = []
    flush = _drive.flush

    def noted(path: str) -> None:
        flushed.append(path)
        flush(path)

    monkeypatch.setattr(_drive, "flush", noted)
    await aiockpt.convert(tmp_path / "set.pt", tmp_path / "a" / "b" / "out", to="aiockpt")
    assert flushed == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


@pytest.mark.parametrize("name", ["n" * 250, "\u540d" * 84, "." + "e" * 250], ids=["ascii", "wide", "ending"])
async def test_a_name_as_long_as_names_may_be(tmp_path: Path, name: str) -> None:
    """What is made beside it has a shorter one."""
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    await aiockpt.convert(tmp_path / "w.pt", tmp_path / name, to="torch")
    assert torch.load(tmp_path / name)["w"].tolist() == [1, 1]
    assert sorted(os.listdir(tmp_path)) == sorted([name, "w.pt"])
