"""Conversion, for code that is not async."""

from __future__ import annotations

from ..convert import convert as _convert
from ._door import once

__all__ = ["convert"]

convert = once(_convert)
