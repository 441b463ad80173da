"""Bars by tqdm."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

__all__ = ["Bars"]


class Bars:
    """Each bar on a line of its own; tqdm finds a free one."""

    def open(self, title: str) -> Line:
        """Begin a line."""
        return Line(tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr))


class Line:
    """One bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def update(self, done: int, total: int, note: str) -> None:
        """Show the numbers, at most ten times a second."""
        self._bar.total = total or None
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self, note: str) -> None:
        """Leave the line."""
        self._bar.set_postfix_str(note)
        self._bar.close()
