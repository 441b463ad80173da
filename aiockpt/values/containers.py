"""Containers: dict, list, tuple, set and their relatives in `collections`."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from .._paths import key_text
from .._plain import Json
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
        meta = {"metadata": ctx.plain(extra["_metadata"])} if extra else None
        return meta, list(value.items())

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        made: Any = OrderedDict(children)
        if isinstance(meta, dict) and "metadata" in meta:
            made._metadata = ctx.plain(meta["metadata"])
        return made


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


for _codec in (_Dict(), _Sequence(list), _Sequence(tuple), _Set(set), _Set(frozenset)):
    register(_codec)
for _codec in (_OrderedDict(), _DefaultDict(), _Counter(), _Deque()):
    register(_codec)
