"""Containers: dict, list, tuple, set and their relatives in `collections`."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from .._paths import key_text
from .._plain import Json, all_native
from . import Children, Codec, Decoding, Encoding, Exploded, Unsupported, positional, register

_FACTORIES: Final[dict[str, Callable[[], Any]]] = {
    kind.__name__: kind
    for kind in (
        bool,
        bytearray,
        bytes,
        complex,
        dict,
        float,
        frozenset,
        int,
        list,
        set,
        str,
        tuple,
        Counter,
        OrderedDict,
        deque,
    )
}
"""What a stored defaultdict may call for a missing key."""


class _Sequence(Codec):
    """list, tuple, set, frozenset: made from their members."""

    def __init__(self, kind: Callable[[list[Any]], Any]) -> None:
        assert isinstance(kind, type)
        self.tag, self.types, self._make = kind.__name__, (kind,), kind

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return None, list(enumerate(value))

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        return self._make(positional(children))


class _Set(_Sequence):
    """Sets have no order of their own; the stored order must not hang on the hash seed."""

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return None, list(enumerate(sorted(value, key=_rank)))

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        made = self._make(positional(children))
        if len(made) != len(children):
            raise ValueError("a member occurs twice")
        return made


def _rank(member: object) -> tuple[str, str]:
    kind = type(member)
    try:
        return kind.__qualname__, key_text(member)
    except (TypeError, ValueError):
        return kind.__qualname__, ""


class _Dict(Codec):
    tag = "dict"
    types = (dict,)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return None, list(value.items())

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        return children


class _OrderedDict(Codec):
    """Keeps the `_metadata` that torch hangs on a module's state dict."""

    tag = "OrderedDict"
    types = (OrderedDict,)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        extra = vars(value)
        if extra.keys() - {"_metadata"}:
            raise Unsupported(f"an OrderedDict with attributes {sorted(extra)}")
        if not extra:
            return None, list(value.items())
        metadata = extra["_metadata"]
        packed = _pack_metadata(metadata)
        meta: Json = {"metadata": ctx.plain(metadata)} if packed is None else {"modules": packed}
        return meta, list(value.items())

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        made: Any = OrderedDict(children)
        if isinstance(meta, dict) and "modules" in meta:
            made._metadata = _unpack_metadata(meta["modules"])
        elif isinstance(meta, dict):
            made._metadata = ctx.plain(meta["metadata"])
        return made


def _pack_metadata(metadata: Any) -> Json:
    """torch's metadata, thousands of dicts of few kinds: the kinds once, then one number a module.

    None when it is anything more than `{module: {name: number}}`.
    """
    if type(metadata) is not OrderedDict or vars(metadata) or not _are_names(metadata):
        return None
    kinds: list[Json] = []
    numbers: dict[str, int] = {}
    which: list[Json] = []
    for facts in metadata.values():
        text = repr(facts) if type(facts) is dict and set(map(type, facts.values())) <= {int} else ""
        number = numbers.get(text)
        if number is None:
            if not text or not _are_names(facts) or not all_native(facts.values()):
                return None
            number = numbers[text] = len(kinds)
            kinds.append(dict(facts))
        which.append(number)
    return [list(metadata), kinds, which]


def _are_names(keys: Any) -> bool:
    return set(map(type, keys)) <= {str} and all_native(keys)


def _unpack_metadata(packed: Any) -> OrderedDict[str, Any]:
    names, kinds, which = packed
    # A dict of its own for each: torch may write into one.
    return OrderedDict((str(name), dict(kinds[number])) for name, number in zip(names, which, strict=True))


class _DefaultDict(Codec):
    tag = "defaultdict"
    types = (defaultdict,)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        factory = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and _FACTORIES.get(name) is not factory:
            raise Unsupported(f"a defaultdict whose factory is {factory!r}, none of {', '.join(_FACTORIES)}")
        return None if factory is None else name, list(value.items())

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        factory = None if meta is None else _FACTORIES[str(meta)]
        return defaultdict(factory, children)


class _Counter(Codec):
    tag = "Counter"
    types = (Counter,)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return None, list(value.items())

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        made: Counter[Any] = Counter()
        # Not through the constructor: that would count, and want numbers to add up.
        dict.update(made, children)
        return made


class _Deque(Codec):
    tag = "deque"
    types = (deque,)

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return value.maxlen, list(enumerate(value))

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        if meta is not None and (type(meta) is not int or meta < len(children)):
            raise ValueError("it holds more than its length")
        return deque(positional(children), maxlen=meta)


_CODECS: Final[tuple[Codec, ...]] = (
    _Dict(),
    _Sequence(list),
    _Sequence(tuple),
    _Set(set),
    _Set(frozenset),
    _OrderedDict(),
    _DefaultDict(),
    _Counter(),
    _Deque(),
)
for _codec in _CODECS:
    register(_codec)
