"""Instances of classes: dataclasses, enum members, namedtuples, and records of absent ones.

A class is found only among the loaded modules, by walking plain attributes, and must be
of the right kind. A dataclass instance is made without calling anything of the class.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from types import ModuleType
from typing import Any, Final

from .._plain import Json, all_native, is_native
from . import (
    Absent,
    Children,
    Codec,
    Decoding,
    Encoding,
    Exploded,
    Record,
    Unsupported,
    class_name,
    codec_of,
    register,
)

_BUILTIN: Final = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    BaseException,
)
"""Bases that hold data of their own, which no field shows."""


def find_class(name: Json) -> type:
    """The loaded class called `module:qualname`.

    Raises:
        Absent: there is none; nothing was imported or called to find out.
    """
    if not isinstance(name, str):
        raise TypeError("the class has no name")
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = _attributes(found).get(part)
    if not isinstance(found, type):
        raise Absent(name)
    return found


def _attributes(owner: object) -> Any:
    """What a module or class holds, without asking it: __getattr__ may import, a proxy may call."""
    if issubclass(type(owner), ModuleType):
        return object.__getattribute__(owner, "__dict__")
    return type.__getattribute__(owner, "__dict__") if isinstance(owner, type) else {}


class _Dataclass(Codec):
    """Fields and whatever else the instance's dict holds."""

    tag = "dataclass"

    def match(self, value: object) -> bool:
        return dataclasses.is_dataclass(value) and not isinstance(value, (type, *_BUILTIN))

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        names = dict.fromkeys(field.name for field in dataclasses.fields(value))
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return class_name(type(value)), list((held | getattr(value, "__dict__", {})).items())

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        cls: Any = find_class(meta)
        if not _is_dataclass(cls):
            raise Absent(str(meta))
        names = {field.name for field in dataclasses.fields(cls)}
        if not all(type(name) is str for name in children):
            raise TypeError("a field's name is no text")
        made = object.__new__(cls)
        extra = getattr(made, "__dict__", None)
        strangers = children.keys() - names
        if (strangers and extra is None) or not all(
            _has_default(cls, name) for name in names - children.keys()
        ):
            # The class has changed: better everything as a record than half an instance.
            raise Absent(str(meta))
        for name in names & children.keys():
            object.__setattr__(made, str(name), children[name])
        if extra is not None:
            # In the saved order, and never through setattr: __class__ must stay a mere name.
            held = {name: children[name] for name in children if name in strangers or name in extra}
            extra.clear()
            extra.update(held)
        return made


def _is_dataclass(cls: type) -> bool:
    # One that acts when it is thrown away is not for strangers to make.
    if hasattr(cls, "__del__"):
        return False
    return dataclasses.is_dataclass(cls) and not issubclass(cls, _BUILTIN)


def _has_default(cls: Any, name: str) -> bool:
    """Whether a field that was not saved is there all the same, as a class attribute."""
    field = cls.__dataclass_fields__[name]
    return field.default is not dataclasses.MISSING and "__slots__" not in vars(cls)


class _Enum(Codec):
    """Members by name; combined flags by value."""

    tag = "enum"

    def match(self, value: object) -> bool:
        return isinstance(value, enum.Enum)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        children: list[tuple[Any, Any]] = [("name", value.name)]
        if is_native(value.value) or type(value.value) is int:
            children.append(("value", value.value))
        return class_name(type(value)), children

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        name = children["name"]
        cls = find_class(meta)
        if not issubclass(cls, enum.Enum):
            raise Absent(str(meta))
        member = cls.__members__.get(name) if isinstance(name, str) else None
        return _combined(cls, children.get("value"), str(meta)) if member is None else member


def _combined(cls: type[enum.Enum], value: object, name: str) -> object:
    """A combination of flags, which is no member by name."""
    missing: Any = getattr(cls._missing_, "__func__", None)
    own = not issubclass(cls, enum.Flag) or missing is not enum.Flag.__dict__["_missing_"].__func__
    if own or type(value) is not int:
        raise Absent(name)
    try:
        combined = cls(value)
    except ValueError as error:
        raise Absent(name) from error
    if combined.value != value:  # some Pythons drop the bits that are no flags
        raise Absent(name)
    return combined


class _NamedTuple(Codec):
    """Tuples with named fields; made by tuple's own constructor."""

    tag = "namedtuple"

    def match(self, value: object) -> bool:
        return isinstance(value, tuple) and _is_namedtuple(type(value))

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        if len(value) != len(value._fields):
            raise Unsupported("a namedtuple whose length is not that of its fields")
        return class_name(type(value)), list(zip(value._fields, value, strict=True))

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        cls: Any = find_class(meta)
        if not _is_namedtuple(cls) or tuple(children) != cls._fields:
            raise Absent(str(meta))
        return tuple.__new__(cls, children.values())


def _is_namedtuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and all(type(name) is str for name in fields)


class _Record(Codec):
    """A record is saved with all it came with, and becomes the real thing where that is known."""

    tag = "record"
    types = (Record,)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        meta = {"class": value.class_name, "tag": value.tag, "meta": value.meta}
        if not all_native([value.class_name, value.tag]):
            raise Unsupported("a Record with an unspeakable name")
        return meta, list(value.fields.items())

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        if not isinstance(meta, dict):
            raise TypeError("no name")
        name, tag, inner = meta["class"], meta["tag"], meta["meta"]
        if not isinstance(name, str) or not isinstance(tag, str):
            raise TypeError("no name")
        codec = codec_of(tag) if tag != self.tag else None
        try:
            if codec is not None:
                return codec.rebuild(inner, children, ctx)
        except Absent:
            pass
        return Record(name, children, tag, inner)


for _codec in (_NamedTuple(), _Enum(), _Dataclass(), _Record()):
    register(_codec)
