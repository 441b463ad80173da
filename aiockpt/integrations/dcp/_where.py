"""Which checkpoint a DCP id names: the run it lies in, and the folder of its step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from aiockpt._keys import check_name
from aiockpt.errors import UsageError
from aiockpt.storage import open_store

__all__ = ["Where", "is_id", "where"]


@dataclass(frozen=True, slots=True)
class Where:
    """A step's folder; nothing is known yet about what is there."""

    run: str
    """The run, as `open_store` takes it."""
    name: str
    """The folder's name."""

    @property
    def id(self) -> str:
        """The two together, as DCP shows them."""
        return f"{self.run}/{self.name}"


def where(checkpoint_id: Any) -> Where:
    """Take an id apart; touches no file.

    Args:
        checkpoint_id: path or URL of a step's folder, such as `runs/a/step-00000100`.

    Raises:
        UsageError: it cannot be one.
    """
    if not isinstance(checkpoint_id, str | os.PathLike):
        raise UsageError(
            "name the checkpoint: checkpoint_id= is the path of a step's folder, such as "
            f"'runs/a/step-00000100', not {checkpoint_id!r:.80}"
        )
    text = os.fspath(checkpoint_id).rstrip("/")
    run, slash, name = text.rpartition("/")
    run = run or ("/" if slash else ".")
    if not name or run.endswith(":/") or name.startswith("."):
        raise UsageError(
            f"checkpoint_id {text!r:.200} does not end in a step's folder, as 'runs/a/step-00000100' does"
        )
    if not isinstance(checkpoint_id, str) and "://" in run:
        run = os.path.join(".", run)  # a pathlib path is a path, whatever it looks like
    check_name(name)
    return Where(run, name)


def is_id(checkpoint_id: Any) -> bool:
    """Whether it could be one of ours: a store knows the scheme, and there is a run and a name."""
    try:
        open_store(where(checkpoint_id).run)
    except UsageError:
        return False
    return True
