"""The choices of a reloader, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ._ttl import check_ttl
from ._waking import as_poll
from .errors import UsageError

__all__ = ["Choices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How a reloader behaves; see `Reloader`."""

    strategy: Literal["swap", "inplace"] = "swap"
    follow: str = "latest"
    poll: float = 1.0
    on_busy: Literal["defer", "proceed", "abort"] = "defer"
    gate_timeout: float = 5.0
    drain_timeout: float = 30.0
    retry: float = 30.0
    ttl: float = 60.0

    def __post_init__(self) -> None:
        as_poll(self.poll)
        check_ttl(self.ttl)
        if self.strategy not in ("swap", "inplace"):
            raise UsageError(f"strategy= is 'swap' or 'inplace', not {self.strategy!r:.80}")
        if self.on_busy not in ("defer", "proceed", "abort"):
            raise UsageError(f"on_busy= is 'defer', 'proceed' or 'abort', not {self.on_busy!r:.80}")
        for name in ("gate_timeout", "drain_timeout", "retry"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
                raise UsageError(f"{name}= is a number of seconds, not {value!r:.80}")
