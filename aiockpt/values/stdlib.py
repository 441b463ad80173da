"""Values of Python's own library: dates, paths, numbers, ranges, namespaces."""

from __future__ import annotations

import argparse
import random
import re
import uuid
import zoneinfo
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import SimpleNamespace
from typing import Any, Final

from .._plain import Json
from . import (
    Absent,
    Atom,
    Children,
    Codec,
    Decoding,
    Encoding,
    Exploded,
    Parts,
    Unsupported,
    positional,
    register,
)

_PATHS: Final[dict[str, Any]] = {
    kind.__name__: kind for kind in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)
}


_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*\Z")


class _Path(Codec):
    """Paths keep their kind; another system's real paths come back as pure ones."""

    tag = "path"
    types = tuple(_PATHS.values())

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        # As a child, not in the meta: file names may hold surrogates.
        return type(value).__name__, [(0, str(value))]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        (text,) = positional(children)
        if type(text) is not str:
            raise TypeError("its path is no text")
        try:
            return _PATHS[str(meta)](text)
        except NotImplementedError:
            return _PATHS[f"Pure{meta}"](text)


class _Namespace(Codec):
    """argparse.Namespace and SimpleNamespace: attributes and nothing else."""

    def __init__(self, kind: type) -> None:
        self.tag, self.types, self._make = kind.__name__, (kind,), kind

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return None, list(vars(value).items())

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        if not all(type(name) is str for name in children):
            raise TypeError("an attribute's name is no text")
        made = self._make()
        # Not setattr: a name like __class__ must stay a mere name.
        vars(made).update(children)
        return made


class _ZoneInfo(Codec):
    tag = "ZoneInfo"
    types = (zoneinfo.ZoneInfo,)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        if value.key is None or not _ZONE.match(value.key):
            raise Unsupported("a ZoneInfo without a usual key")
        return value.key, []

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        # The name becomes part of a file's and a package's name.
        if not isinstance(meta, str) or not _ZONE.match(meta):
            raise ValueError("not the name of a time zone")
        try:
            return zoneinfo.ZoneInfo(meta)
        except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:
            raise Absent(f"zoneinfo:{meta}") from error


def _datetime(*parts: Any) -> datetime:
    *day, hour, minute, second, micro, fold, zone = parts
    year, month, number = day
    return datetime(year, month, number, hour, minute, second, micro, _zone(zone), fold=fold)


def _time(*parts: Any) -> time:
    hour, minute, second, micro, fold, zone = parts
    return time(hour, minute, second, micro, _zone(zone), fold=fold)


def _offset(value: Any) -> tuple[Any, ...]:
    # The offset, and the name if it has one of its own.
    return tuple(value.__getinitargs__())


def _zone(zone: Any) -> tzinfo | None:
    if zone is not None and type(zone) not in (timezone, zoneinfo.ZoneInfo):
        raise TypeError("not a time zone")
    return zone  # type: ignore[no-any-return]


def _random(state: Any) -> random.Random:
    made = random.Random(0)
    made.setstate(state)
    return made


def _span(value: timedelta) -> tuple[int, int, int]:
    return value.days, value.seconds, value.microseconds


def _day(value: date) -> tuple[int, int, int]:
    return value.year, value.month, value.day


def _clock(value: Any) -> tuple[Any, ...]:
    return value.hour, value.minute, value.second, value.microsecond, value.fold, value.tzinfo


register(_Path())
register(_Namespace(SimpleNamespace))
register(_Namespace(argparse.Namespace))
register(_ZoneInfo())
register(Parts("range", range, lambda value: (value.start, value.stop, value.step), range))
register(Parts("slice", slice, lambda value: (value.start, value.stop, value.step), slice))
register(Parts("timedelta", timedelta, _span, timedelta))
register(Parts("date", date, _day, date))
register(Parts("time", time, _clock, _time))
register(Parts("datetime", datetime, lambda value: (*_day(value), *_clock(value)), _datetime))
register(Parts("timezone", timezone, _offset, timezone))
register(Parts("Fraction", Fraction, lambda value: (value.numerator, value.denominator), Fraction))
register(Parts("Random", random.Random, lambda value: (value.getstate(),), _random))
register(Atom("Decimal", Decimal, str, Decimal))
register(Atom("UUID", uuid.UUID, lambda value: value.hex, lambda meta: uuid.UUID(hex=meta)))
register(Atom("Ellipsis", type(...), lambda value: None, lambda meta: ...))
