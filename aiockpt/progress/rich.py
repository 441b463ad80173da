"""Bars by rich."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

__all__ = ["Bars"]


class Bars:
    """All bars in one live display: a console has room for one such display only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._display: Progress | None = None

    def open(self, title: str) -> Line:
        """Begin a line; the display starts with the first."""
        with self._lock:
            if self._display is None:
                self._display = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    DownloadColumn(),
                    TransferSpeedColumn(),
                    TextColumn("{task.fields[note]}"),
                    console=Console(stderr=True),
                )
                self._display.start()
            self._open += 1
            return Line(self, self._display, self._display.add_task(title, total=None, note=""))

    def closed(self) -> None:
        """A line was closed; the display stops with the last, and leaves all of them on the screen."""
        with self._lock:
            self._open -= 1
            if not self._open and self._display is not None:
                self._display.stop()
                self._display = None


class Line:
    """One bar."""

    def __init__(self, bars: Bars, display: Progress, task: TaskID) -> None:
        self._bars = bars
        self._display = display
        self._task = task

    def update(self, done: int, total: int, note: str) -> None:
        """Show the numbers at the display's next refresh."""
        self._display.update(self._task, completed=done, total=total or None, note=note)

    def close(self, note: str) -> None:
        """Leave the line."""
        self._display.update(self._task, note=note)
        self._display.stop_task(self._task)
        self._bars.closed()
