"""The library's logger: every record carries the step and the run it is about.

`%(step)s` and `%(run)s` may stand in any formatter, and in structured logs the two are
fields of their own. A call's own `extra=` goes first, then what the save under way set
for everything that happens on its behalf; None where neither knows.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Final

__all__ = ["ABOUT", "log"]

ABOUT: Final[ContextVar[tuple[str | None, int | None]]] = ContextVar("ABOUT", default=(None, None))
"""(run, step) that the current task or thread works for."""


class _Facts(logging.Filter):
    """Adds the facts; lets everything pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        run, step = ABOUT.get()
        if not hasattr(record, "run"):
            record.run = run
        if not hasattr(record, "step"):
            record.step = step
        return True


log: Final = logging.getLogger("aiockpt")
log.addFilter(_Facts())
