"""How long a lease holds without being renewed."""

from __future__ import annotations

from typing import Final

from .errors import UsageError

__all__ = ["DEFAULT_TTL", "LONGEST_TTL", "check_ttl", "is_ttl"]

DEFAULT_TTL: Final = 60.0
"""Counts for a lease whose content cannot be read."""
LONGEST_TTL: Final = 7 * 86400.0


def check_ttl(ttl: object) -> None:
    """Refuse what is no time to live.

    Raises:
        UsageError: it is none.
    """
    if not is_ttl(ttl):
        raise UsageError(f"ttl is a number of seconds above 0 and at most {LONGEST_TTL:g}, not {ttl!r}")


def is_ttl(ttl: object) -> bool:
    """Whether it is a time to live, in seconds."""
    return isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl <= LONGEST_TTL
