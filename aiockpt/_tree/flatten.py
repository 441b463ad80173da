"""A state to columns, in one pass.

It runs on the event loop at the call of a save: per tensor it makes a path and a few
numbers, and no object that the garbage collector would have to visit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .._paths import Key, key_text, split
from .._plain import MAX_DEPTH, Json, all_native, is_native, pack, pack_dict
from ..errors import UnsupportedStateError
from ..values import Codec, Unsupported, class_name, codec_for, codec_of
from ..values.pickled import PICKLE_TAG
from .tensors import PLAIN_TENSORS, Aliases, refusal

REQUIRES_GRAD: Final = 1
PARAMETER: Final = 2

_ATOMS: Final = frozenset({str, int, float, bool, type(None)})


@dataclass(slots=True)
class Flat:
    """A state as columns; rows of one table share an index. `seq` is the number in pre-order."""

    tensor_seq: list[int] = field(default_factory=list)
    tensor_paths: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """The live tensors, detached where they required grad; conj and neg bits are still on."""
    tensor_flags: list[int] = field(default_factory=list)
    """1: a leaf that requires grad; 2: a Parameter."""
    tensor_alias: list[int] = field(default_factory=list)
    """The row of the first identical view, or -1."""
    value_seq: list[int] = field(default_factory=list)
    value_paths: list[str] = field(default_factory=list)
    values: list[Json] = field(default_factory=list)
    node_seq: list[int] = field(default_factory=list)
    node_paths: list[str] = field(default_factory=list)
    node_tags: list[str] = field(default_factory=list)
    node_metas: list[Json] = field(default_factory=list)
    stateful: list[Any] = field(default_factory=list)
    """The objects that were asked for their `state_dict()`, in order."""
    pickled: list[str] = field(default_factory=list)
    """Paths of values that had to be pickled."""


def flatten(state: object, *, allow_pickle: bool = False) -> Flat:
    """Turn a state into columns; nothing of it is copied but containers and plain values.

    Args:
        state: nested containers of leaves; what has a `state_dict()` is asked for it.
        allow_pickle: pickle what nothing else can store.

    Raises:
        UnsupportedStateError: listing every path that cannot be stored.
    """
    walk = Walk(allow_pickle)
    walk.visit(state, "", 0)
    if walk.problems:
        raise UnsupportedStateError(walk.problems) from walk.cause
    return walk.flat


def encode_value(value: object, path: str = "", *, allow_pickle: bool = False) -> Json:
    """Turn a value without tensors into the JSON of one value row.

    Raises:
        UnsupportedStateError: it holds a tensor, or something that cannot be stored.
    """
    walk = Walk(allow_pickle)
    walk.visit(value, path, len(split(path)))
    return walk.only_value()


class Walk:
    """One pass over a state; also the context that codecs see."""

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.flat = Flat()
        self.problems: list[tuple[str, str]] = []
        self.cause: Exception | None = None
        self.seq = 0
        self.open: set[int] = set()
        self.path = ""
        self.depth = 0
        self.aliases = Aliases(self.flat.tensors)

    def visit(self, value: Any, path: str, depth: int) -> None:
        """Write the rows of `value`; whatever happens, at least one row or problem comes of it."""
        kind = type(value)
        if kind in PLAIN_TENSORS and value.layout is torch.strided:
            self.tensor(value, path, kind)
        elif kind in _ATOMS and is_native(value):
            self.value(value, path)
        elif depth > MAX_DEPTH:
            self.problem(path, f"nested deeper than {MAX_DEPTH} levels")
        elif id(value) in self.open:
            self.problem(path, "contains itself")
        else:
            self.open.add(id(value))
            try:
                self._take_apart(value, path, depth)
            finally:
                self.open.discard(id(value))

    def plain(self, value: object) -> Json:
        """Write a value without tensors as JSON, for a codec's meta."""
        inner = Walk(self.allow_pickle)
        inner.open = self.open
        inner.visit(value, "", self.depth + 1)
        self.flat.stateful += inner.flat.stateful
        self.flat.pickled += [self.path] * len(inner.flat.pickled)
        try:
            return inner.only_value()
        except UnsupportedStateError as error:
            where, why = error.problems[0]
            raise Unsupported(f"what hangs on it holds, at {where or 'its top'}: {why}") from error

    def only_value(self) -> Json:
        """The JSON, if all that was visited came to one plain value."""
        problems = self.problems + [(place, "a tensor is no plain value") for place in self.flat.tensor_paths]
        if problems:
            raise UnsupportedStateError(problems) from self.cause
        return self.flat.values[0]

    # ---------------------------------------------------------------- rows

    def value(self, json: Json, path: str) -> None:
        """Append a row of plain JSON."""
        flat = self.flat
        flat.value_seq.append(self.seq)
        flat.value_paths.append(path)
        flat.values.append(json)
        self.seq += 1

    def problem(self, path: str, why: str) -> None:
        """Note an offence; the row keeps the columns of its parents in step."""
        self.problems.append((path, why))
        self.value(None, path)

    def tensor(self, tensor: torch.Tensor, path: str, kind: type) -> None:
        """Append a row of the tensor, or note why it cannot be stored."""
        try:
            why = refusal(tensor)
            alias = -1 if why else self.aliases.find(tensor)
        except RuntimeError as error:
            # Wrapped by a function transform, or of a device without addresses.
            why, alias = f"a tensor whose memory cannot be reached: {error}", -1
        if why:
            self._pickle_or_problem(tensor, path, why)
            return
        flags = PARAMETER if kind is torch.nn.Parameter else 0
        if tensor.requires_grad:
            flags |= REQUIRES_GRAD if tensor.is_leaf else 0
            # The graph behind a result must not live as long as the save.
            tensor = tensor.detach()
        flat = self.flat
        flat.tensor_seq.append(self.seq)
        flat.tensor_paths.append(path)
        flat.tensors.append(tensor)
        flat.tensor_flags.append(flags)
        flat.tensor_alias.append(alias)
        self.seq += 1

    # ---------------------------------------------------------------- containers

    def _take_apart(self, value: Any, path: str, depth: int) -> None:
        kind = type(value)
        if kind in (list, tuple) and all_native(value):
            self.value(pack(kind.__name__, None, None, list(value)), path)
        elif kind is dict:
            self._container(value, "dict", None, list(value.items()), path, depth)
        else:
            self._by_codec(value, path, depth)

    def _by_codec(self, value: Any, path: str, depth: int) -> None:
        codec = codec_for(value)
        if codec is None or codec.tag in _BY_FIELDS:
            # An object's own idea of its state comes before its fields.
            ask = getattr(value, "state_dict", None)
            if callable(ask) and not isinstance(value, (type, torch.Tensor)):
                self._ask(value, ask, path, depth)
                return
        if codec is None:
            self._pickle_or_problem(value, path, _describe(value))
        else:
            self._explode(codec, value, path, depth)

    def _ask(self, value: Any, ask: Callable[[], Any], path: str, depth: int) -> None:
        self.flat.stateful.append(value)
        try:
            state = ask()
        except Exception as error:
            self.cause = self.cause or error
            self.problem(path, f"its state_dict() raised {type(error).__name__}: {error}")
            return
        self.visit(state, path, depth + 1)

    def _explode(self, codec: Codec, value: Any, path: str, depth: int) -> None:
        self.path, self.depth = path, depth
        try:
            meta, children = codec.explode(value, self)
        except Unsupported as verdict:
            self._refused(codec, value, path, str(verdict))
        except Exception as error:
            # A property, a user's encode function: their errors name the place too.
            self.cause = self.cause or error
            self.problem(path, f"{_describe(value)} raised {type(error).__name__}: {error}")
        else:
            if codec.tag == PICKLE_TAG:
                self.flat.pickled.append(path)
            self._container(value, codec.tag, meta, children, path, depth)

    def _refused(self, codec: Codec, value: Any, path: str, why: str) -> None:
        if codec.tag == PICKLE_TAG:
            self.problem(path, f"{_describe(value)}: {why}")
        else:
            self._pickle_or_problem(value, path, why)

    def _pickle_or_problem(self, value: Any, path: str, why: str) -> None:
        codec = codec_of(PICKLE_TAG)
        if self.allow_pickle and codec is not None:
            self._explode(codec, value, path, path.count("/"))
        else:
            self.problem(path, why)

    def _container(
        self, value: Any, tag: str, meta: Json, children: list[tuple[Key, Any]], path: str, depth: int
    ) -> None:
        """Write the rows of a container; one row if there are no tensors inside."""
        keys = [key for key, _ in children]
        texts = self._texts(keys)
        if isinstance(texts, str):
            self._pickle_or_problem(value, path, texts)
            return
        flat, seq, tensors, values, nodes = self.flat, self.seq, *self._marks()
        if tag != "dict":
            flat.node_seq.append(seq)
            flat.node_paths.append(path)
            flat.node_tags.append(tag)
            flat.node_metas.append(meta)
            self.seq += 1
        prefix = f"{path}/" if path else ""
        for text, (_, child) in zip(texts, children, strict=True):
            kind = type(child)
            if kind in PLAIN_TENSORS and child.layout is torch.strided:
                self.tensor(child, prefix + text, kind)
            else:
                self.visit(child, prefix + text, depth + 1)
        if len(flat.tensors) == tensors:
            self._collapse(tag, meta, keys, texts, path, (seq, values, nodes))

    def _marks(self) -> tuple[int, int, int]:
        flat = self.flat
        return len(flat.tensors), len(flat.values), len(flat.node_seq)

    def _texts(self, keys: list[Key]) -> list[str] | str:
        """The keys as components, or why they cannot be."""
        try:
            texts = [key_text(key) for key in keys]
        except TypeError as error:
            return str(error)
        except ValueError as error:
            return f"a key cannot be written: {error}"
        # NaN is not equal to itself: a dict may hold it twice.
        return texts if len(set(texts)) == len(texts) else "two keys that read the same"

    def _collapse(
        self, tag: str, meta: Json, keys: list[Key], texts: list[str], path: str, marks: tuple[int, int, int]
    ) -> None:
        """Replace the rows since `marks`, one a child, by a single one."""
        flat = self.flat
        self.seq, values, nodes = marks
        children = flat.values[values:]
        for column in (flat.value_seq, flat.value_paths, flat.values):
            del column[values:]
        for nodes_column in (flat.node_seq, flat.node_paths, flat.node_tags, flat.node_metas):
            del nodes_column[nodes:]
        self.value(
            pack_dict(keys, texts, children) if tag == "dict" else pack(tag, meta, texts, children), path
        )


def _describe(value: object) -> str:
    name = class_name(type(value)).replace(":", ".")
    if not isinstance(value, torch.Tensor):
        return f"a value of type {name}"
    if type(value) in PLAIN_TENSORS:
        return f"a tensor of layout {value.layout}"
    return f"a tensor of type {name}"


_BY_FIELDS: Final = frozenset({"dataclass"})
"""Codecs that look at an object's insides."""
