"""Folders of checkpoints as the Trainer has them: where one is made, what is left over, which ones go."""

from __future__ import annotations

import logging
import os
import re
from typing import Final

from .._replacing import move_folder, remove, replaced

__all__ = ["Staging", "rotate", "steps_in", "sweep"]

log = logging.getLogger("aiockpt")

PREFIX: Final = "checkpoint"
STEP: Final = re.compile(rf"{PREFIX}-(\d+)")
LEFT_OVER: Final = re.compile(rf"\.aiockpt-{PREFIX}-\d+|\.({PREFIX}-\d+)\.replaced")


class Staging:
    """One checkpoint on its way: a hidden folder, in which the Trainer finds its usual names.

    The hidden folder's name follows from the step, so that all ranks write to the same one.

    Args:
        run_dir: the folder of all checkpoints.
        step: completed steps.
    """

    def __init__(self, run_dir: str, step: int) -> None:
        self.step = step
        self.run_dir = run_dir
        self.root = os.path.join(run_dir, f".aiockpt-{PREFIX}-{step}")
        """Passes for the run's folder while the Trainer saves."""
        self.folder = os.path.join(self.root, f"{PREFIX}-{step}")
        self.final = os.path.join(run_dir, f"{PREFIX}-{step}")
        self.parts: dict[str, object] = {}
        """States to copy before the Trainer goes on, by what they are for."""
        self.small: dict[str, bytes] = {}
        """Files that are ready, by name."""

    def commit(self) -> None:
        """Make the finished folder durable, and visible under its name."""
        for name, content in self.small.items():
            with open(os.path.join(self.folder, name), "wb") as file:
                file.write(content)
        move_folder(self.folder, self.final)
        self.discard()

    def discard(self) -> None:
        """Remove the hidden folder and what is in it."""
        remove(self.root)


def steps_in(run_dir: str) -> list[int]:
    """The steps that have a checkpoint, in order."""
    names = os.listdir(run_dir) if os.path.isdir(run_dir) else []
    found = [match for name in names if (match := STEP.fullmatch(name))]
    return sorted(int(match[1]) for match in found if os.path.isdir(os.path.join(run_dir, match[0])))


def sweep(run_dir: str) -> None:
    """Clear up after a process that was killed: half-made folders go, one half replaced comes back."""
    for name in os.listdir(run_dir) if os.path.isdir(run_dir) else []:
        match, path = LEFT_OVER.fullmatch(name), os.path.join(run_dir, name)
        if match is None:
            continue
        final = os.path.join(run_dir, match[1]) if match[1] else None
        if final is not None and replaced(final) == os.path.abspath(path) and not os.path.exists(final):
            os.rename(path, final)
        else:
            remove(path)


def rotate(run_dir: str, limit: int | None, *, committed: int, best: str | None) -> None:
    """Remove the oldest checkpoints beyond `limit`, by step, once the newest is committed.

    Never removed: the one just committed, the best one, and checkpoints of a higher step, which
    an earlier run has left in the folder. A removal that fails is logged.
    """
    if limit is None or limit <= 0:
        return
    steps = [step for step in steps_in(run_dir) if step <= committed]
    paths = {step: os.path.join(run_dir, f"{PREFIX}-{step}") for step in steps}
    spared = {committed} | {step for step, path in paths.items() if best is not None and _same(path, best)}
    excess = len(steps) - max(limit, len(spared))
    for step in [step for step in steps if step not in spared][: max(0, excess)]:
        try:
            remove(paths[step])
        except OSError as error:
            log.warning("cannot remove %s: %s", paths[step], error)


def _same(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)
