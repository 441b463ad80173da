"""FileSaver: savefuns and names that nobody expects."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiockpt import FileSaver, PublishError, SaveError
from tests.filesavers import names


@pytest.mark.parametrize("make", [os.mkfifo, partial(os.symlink, "other")], ids=["pipe", "link"])
async def test_a_savefun_that_makes_no_file(make: Any, tmp_path: Path) -> None:
    """A pipe, which would be waited for without end, or a link: told, and removed."""
    async with FileSaver(lambda path, _: make(path)) as saver:
        with pytest.raises(SaveError, match="no file or folder"):
            await saver.save(1, tmp_path / "a")
    assert names(tmp_path) == []


class _WordlessError(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError


async def test_an_error_without_words_is_an_error(tmp_path: Path) -> None:
    """Of a savefun and of a hook: told by its type, nothing is left."""

    def raises(*_: object) -> None:
        raise _WordlessError

    async with FileSaver(raises) as saver:
        with pytest.raises(SaveError, match="_WordlessError") as caught:
            await saver.save(1, tmp_path / "a")
        assert isinstance(caught.value.__cause__, _WordlessError)
    assert names(tmp_path) == []
    with pytest.raises(PublishError, match="_WordlessError"):
        async with FileSaver(lambda path, _: Path(path).touch()) as saver:
            saver.add_after_save(raises)
            await saver.save(1, tmp_path / "a")


async def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    """Its hidden folder has a shorter one: counted in bytes, as file systems do."""
    async with FileSaver(lambda path, _: Path(path).touch()) as saver:
        await saver.save(1, tmp_path / ("\u540d" * 84))
    assert names(tmp_path) == ["\u540d" * 84]
