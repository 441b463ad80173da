"""Who may use an object: the process, thread and event loop that entered it, until it is closed."""

from __future__ import annotations

import asyncio
import os
import threading

from .errors import UsageError


class Owner:
    """The life of a saver: made, entered once, closed."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = 0
        self.closed = False
        self._pid = 0

    @property
    def open(self) -> bool:
        """Entered in this process, and not closed."""
        return self.loop is not None and not self.closed and os.getpid() == self._pid

    def enter(self) -> None:
        """Belong to the running loop and its thread from now on.

        Raises:
            UsageError: it was entered before.
        """
        if self.loop is not None:
            raise UsageError("a saver is entered once; make another one for another `async with`")
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self._pid = os.getpid()

    def check(self, *, closed_too: bool = False) -> asyncio.AbstractEventLoop:
        """The loop, if the caller may use the object.

        Args:
            closed_too: closing again is fine.

        Raises:
            UsageError: not entered, closed, or used from elsewhere.
        """
        if self.loop is None:
            raise UsageError("enter the saver first: `async with Saver(...) as saver:`")
        if self.closed and not closed_too:
            raise UsageError("the saver is closed")
        if os.getpid() != self._pid:
            raise UsageError("this saver belongs to the parent process; make another one in the child")
        if threading.get_ident() != self.thread or asyncio._get_running_loop() is not self.loop:
            message = "this saver belongs to another thread or event loop; use aiockpt.sync from there"
            raise UsageError(message)
        return self.loop
