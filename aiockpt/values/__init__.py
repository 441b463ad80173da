"""Kinds of plain values: one file per family, found by being in this folder.

A codec takes one kind of value apart into a JSON meta and named children, and puts it
together again. Children may be anything that can be stored, tensors included. A new
kind is a new file here that calls `register`; a kind of your own needs no file:
`register_leaf(type, encode, decode)`.

Decoding never imports a module a checkpoint names, and never calls what it names: a
class is looked up among the loaded modules and must be of the expected kind, else the
value comes back as a `Record`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from .._paths import Key
from .._plain import Json
from ..errors import CheckpointError, CorruptCheckpointError, UsageError

__all__ = [
    "Absent",
    "Atom",
    "Codec",
    "Decoding",
    "Encoding",
    "Parts",
    "Record",
    "Unsupported",
    "class_name",
    "codec_for",
    "codec_of",
    "register",
    "register_leaf",
    "restore",
]

T = TypeVar("T")
Children = dict[Key, Any]
Exploded = tuple[Json, list[tuple[Key, Any]]]


class Unsupported(Exception):  # noqa: N818 (a verdict on a value, turned into UnsupportedStateError at the door)
    """Raised by `explode`: this value cannot be stored; the message says why."""


class Absent(Exception):  # noqa: N818 (likewise)
    """Raised by `rebuild`: what the value needs is not loaded here; the message names it."""


class Encoding(Protocol):
    """What a codec may ask for while it takes a value apart."""

    allow_pickle: bool

    def plain(self, value: object) -> Json:
        """Write a value without tensors as JSON, for use within the meta."""
        ...


class Decoding(Protocol):
    """What a codec may ask for while it puts a value together."""

    allow_pickle: bool
    path: str

    def plain(self, json: Json) -> Any:
        """Read what `Encoding.plain` wrote."""
        ...


class Codec:
    """One kind of value. Subclass it, or use `Atom` or `Parts`, and `register` an instance.

    Attributes:
        tag: names the kind on disk, for ever.
        types: the exact types it takes; subclasses are somebody else's.
        host: its tensors are read into host memory, whatever `map_location` says.
    """

    tag: str = ""
    types: tuple[type, ...] = ()
    host: bool = False

    def match(self, value: object) -> bool:
        """Whether it takes `value`; asked only when no codec names its exact type."""
        return False

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        """Take a value apart into meta and children.

        Raises:
            Unsupported: this one cannot be stored.
        """
        raise NotImplementedError

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        """Put a value together; meta and children may be anything an attacker likes.

        Raises:
            Absent: a class or package it needs is not loaded.
            Exception: any other means damage.
        """
        raise NotImplementedError


class Atom(Codec, Generic[T]):
    """A kind without children: all of it is in the meta."""

    def __init__(
        self, tag: str, kind: type[T], encode: Callable[[T], Json], decode: Callable[[Any], T]
    ) -> None:
        self.tag, self.types, self._encode, self._decode = tag, (kind,), encode, decode

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        """The meta is all there is."""
        return self._encode(value), []

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        """Decode the meta."""
        return self._decode(meta)


class Parts(Codec, Generic[T]):
    """A kind made of a fixed row of values, each of which any codec may hold."""

    def __init__(
        self, tag: str, kind: type[T], encode: Callable[[T], tuple[Any, ...]], decode: Callable[..., T]
    ) -> None:
        self.tag, self.types, self._encode, self._decode = tag, (kind,), encode, decode

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        """The parts, numbered."""
        return None, list(enumerate(self._encode(value)))

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        """Call the maker with the parts."""
        return self._decode(*positional(children))


@dataclasses.dataclass(slots=True)
class Record:
    """A value whose class is not loaded here: its name and fields. Saving it keeps it whole."""

    class_name: str
    """`module:qualname` as saved."""
    fields: dict[Key, Any]
    """The children by key; the field values for a dataclass."""
    tag: str = "record"
    """The codec that wrote it."""
    meta: Json = None
    """What that codec remembered."""


def positional(children: Children) -> list[Any]:
    """The children in order, if their keys are 0, 1, 2, ..."""
    if any(type(key) is not int or key != i for i, key in enumerate(children)):
        raise ValueError("its parts are not numbered")
    return list(children.values())


def class_name(cls: type) -> str:
    """The name a class is stored under."""
    return f"{cls.__module__}:{cls.__qualname__}"


_BY_TAG: dict[str, Codec] = {}
_BY_TYPE: dict[type, Codec] = {}
_FAMILIES: list[Codec] = []
_LEAVES: dict[str, _Leaf] = {}
_NATIVE = frozenset({str, int, float, bool, type(None), torch.Tensor, torch.nn.Parameter})
"""Types the tree stores by itself."""


def register(codec: Codec) -> Codec:
    """Make a codec known; returns it.

    Raises:
        ValueError: its tag or one of its types is taken.
    """
    taken = codec.tag in _BY_TAG or any(kind in _BY_TYPE for kind in codec.types)
    if taken or not codec.tag:
        raise ValueError(f"tag {codec.tag!r} or a type of it is taken")
    _BY_TAG[codec.tag] = codec
    _BY_TYPE.update(dict.fromkeys(codec.types, codec))
    if type(codec).match is not Codec.match:
        _FAMILIES.append(codec)
    return codec


def codec_for(value: object) -> Codec | None:
    """The codec that takes `value`, if any."""
    found = _BY_TYPE.get(type(value))
    if found is None:
        found = next((codec for codec in _FAMILIES if codec.match(value)), None)
    return found


def codec_of(tag: str) -> Codec | None:
    """The codec with that tag, if any."""
    return _BY_TAG.get(tag)


def restore(tag: str, meta: Json, children: Children, ctx: Decoding) -> object:
    """Put together what the codec `tag` took apart.

    Returns:
        The value; a `Record` when the codec or the class is not known here.

    Raises:
        CorruptCheckpointError: meta or children are none of this codec's.
        PickleRefusedError: it is pickled and that was not allowed.
    """
    codec = _BY_TAG.get(tag)
    if codec is None:
        return Record(tag, children, tag, meta)
    try:
        return codec.rebuild(meta, children, ctx)
    except Absent as absent:
        return Record(str(absent), children, tag, meta)
    except (CheckpointError, Warning):
        # A warning is an error only where the user said so: the checkpoint is sound.
        raise
    except Exception as error:
        # Whatever a damaged meta makes a constructor say, the caller hears one thing.
        why = f"not a {tag[:80]}: {type(error).__name__}: {str(error)[:200]}"
        raise CorruptCheckpointError(why, path=ctx.path) from error


class _Leaf(Codec):
    """A kind registered by the user; stored as whatever its `encode` returns."""

    def __init__(
        self, kind: type, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
    ) -> None:
        self.tag, self.types, self.name, self._encode, self.decode = "leaf", (kind,), name, encode, decode

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return self.name, [("value", self._encode(value))]


class _LeafDecoder(Codec):
    """Reads every kind registered by a user."""

    tag = "leaf"

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        if not isinstance(meta, str) or list(children) != ["value"]:
            raise ValueError("no name or no value")
        leaf = _LEAVES.get(meta)
        if leaf is None:
            raise Absent(meta)
        return leaf.decode(children["value"])


def register_leaf(
    kind: type[T], encode: Callable[[T], Any], decode: Callable[[Any], T], *, name: str | None = None
) -> None:
    """Teach aiockpt to store values of one more type.

    Call it before saving and before loading, in every process that does either; a second
    call for the same type replaces the first. Where it was not called, loading gives a
    `Record` with the name and what `encode` returned.

    Args:
        kind: the exact type; its subclasses are not meant.
        encode: turns a value into anything that can be stored, tensors included. It runs
            at the call of `save`, on the caller's thread.
        decode: turns that back into a value.
        name: what it is called on disk, for ever; default `module:qualname`.

    Raises:
        UsageError: aiockpt stores this type by itself, or the name belongs to another type.
    """
    if not isinstance(kind, type):
        raise UsageError(f"register_leaf wants a type, not {kind!r}")
    name = name or class_name(kind)
    old = _BY_TYPE.get(kind)
    if kind in _NATIVE or (old is not None and not isinstance(old, _Leaf)):
        raise UsageError(f"{class_name(kind)} is stored by aiockpt itself")
    if name in _LEAVES and kind not in _LEAVES[name].types:
        raise UsageError(f"the name {name!r} belongs to {class_name(_LEAVES[name].types[0])}")
    _LEAVES[name] = _BY_TYPE[kind] = _Leaf(kind, name, encode, decode)


def _discover() -> None:
    """Load every file of this folder; each registers what it knows."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


register(_LeafDecoder())
# At import, not on first use: loading modules reads files, and first use is on the event loop.
_discover()
