"""What a caller's `into=` asks for: its objects, by the path they would be saved under.

Runs on the caller's thread, since it looks at the caller's objects; what it returns is a
tree of small records that a thread can compare with a checkpoint.

A module is taken apart into its parameters and buffers, which are then filled in place,
if its class leaves that to torch. One with hooks or methods of its own for loading gets
a whole state dict instead: only it knows what it does with that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ._targets import is_plain_tensor
from ._tree import MAX_DEPTH, Key, join, key_text
from .errors import UsageError
from .values import codec_for

_ATOMS: Final = frozenset({str, int, float, bool, type(None)})

__all__ = ["Want", "WantBox", "WantModule", "WantObject", "WantPlain", "WantTensor", "WantValue", "gather"]


@dataclass(slots=True)
class Want:
    """One object of the target."""

    path: str
    obj: Any


class WantPlain(Want):
    """Something that is replaced, not filled."""


class WantTensor(Want):
    """A tensor to fill in place."""


class WantValue(Want):
    """An array or generator: takes over what was restored, in place."""


@dataclass(slots=True)
class WantObject(Want):
    """Something with `load_state_dict`, which gets its state whole."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Component to tensor, where it is known how they correspond (for checks only)."""


@dataclass(slots=True)
class WantModule(Want):
    """A module to fill in place."""

    tensors: dict[str, torch.Tensor]
    """Component to parameter or buffer."""
    extras: dict[str, nn.Module]
    """Component to the submodule that takes this extra state."""


@dataclass(slots=True)
class WantBox(Want):
    """A dict, list, tuple or namedtuple; leaves that are common have no record of their own."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Component to tensor, of children to be filled in place."""
    plain: dict[str, None] = field(default_factory=dict)
    """Components of children that are replaced."""
    children: dict[str, Want] = field(default_factory=dict)
    """The others, by component."""
    odd_keys: dict[str, Key] = field(default_factory=dict)
    """Component to the key or index in `obj`, where they differ."""
    lenient: bool = False
    """Whether the checkpoint may have more children."""

    def key(self, text: str) -> Key:
        """The key or index of a component in `obj`."""
        return self.odd_keys.get(text, text)

    def texts(self) -> list[str]:
        """All components, in no particular order."""
        return [*self.tensors, *self.plain, *self.children]

    @property
    def living(self) -> bool:
        """Whether anything in it is filled in place."""
        return bool(self.tensors) or any(
            not isinstance(c, WantBox) or c.living for c in self.children.values()
        )


def gather(into: Any) -> Want:
    """Take a target apart.

    Raises:
        UsageError: it contains itself, or has a key that no state can have.
    """
    if isinstance(into, Mapping) and not isinstance(into, dict) and not _loads(into):
        into = dict(into)
    want = _gather(into, "", 0)
    if isinstance(want, WantBox) and isinstance(into, dict):
        want.lenient = True
    return want


def _loads(value: Any) -> bool:
    return callable(getattr(value, "load_state_dict", None)) and not isinstance(value, type)


def _gather(value: Any, path: str, depth: int) -> Want:
    if isinstance(value, torch.Tensor):
        return WantTensor(path, value)
    if isinstance(value, nn.Module):
        return _module(value, path)
    if _loads(value):
        return WantObject(path, value)
    if is_array(value) or is_generator(value):
        return WantValue(path, value)
    if isinstance(value, (dict, list)) or type(value) is tuple or _is_namedtuple(value):
        return _box(value, path, depth)
    return WantPlain(path, value)


def is_array(value: Any) -> bool:
    """Whether it is a numpy array that can be written to in place."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_generator(value: Any) -> bool:
    """Whether it is a random generator of torch or numpy."""
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, torch.Generator) or (numpy is not None and type(value) is numpy.random.Generator)


def _is_namedtuple(value: Any) -> bool:
    codec = codec_for(value) if isinstance(value, tuple) else None
    return codec is not None and codec.tag == "namedtuple"


def _box(value: Any, path: str, depth: int) -> WantBox:
    if depth > MAX_DEPTH:
        why = f"into= is nested deeper than {MAX_DEPTH} levels, or contains itself"
        raise UsageError(why, path=path[:200])
    box = WantBox(path, value)
    for name, key, child in _items(value):
        try:
            text = key_text(name)
        except (TypeError, ValueError) as error:
            raise UsageError(f"into= has a key that no state can have: {error}", path=path) from error
        if text != key or type(key) is not str:
            box.odd_keys[text] = key
        if type(child) in _ATOMS:
            box.plain[text] = None
        elif isinstance(child, torch.Tensor):
            box.tensors[text] = child
        else:
            _put(box, text, _gather(child, join(path, text), depth + 1))
    return box


def _put(box: WantBox, text: str, want: Want) -> None:
    if isinstance(want, WantPlain):
        box.plain[text] = None
    else:
        box.children[text] = want


def _items(value: Any) -> Iterable[tuple[Any, Any, Any]]:
    """(name in a path, key or index, child) of a container."""
    if isinstance(value, dict):
        return zip(value, value, value.values(), strict=True)
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    return [
        (name, i, child)
        for i, (name, child) in enumerate(zip(names or range(len(value)), value, strict=True))
    ]


# -------------------------------------------------------------------- modules

_METHODS: Final = ("state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict")
_HOOKS: Final = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_NORMS: Final = (nn.modules.batchnorm._NormBase, nn.modules.instancenorm._InstanceNorm)
"""Their own loading only serves checkpoints of torch before 1.0."""


def _module(module: nn.Module, path: str) -> Want:
    tensors: dict[str, torch.Tensor] = {}
    extras: dict[str, nn.Module] = {}
    plain = _walk(module, "", tensors, extras)
    named = {key_text(name): tensor for name, tensor in tensors.items()}
    if plain and all(is_plain_tensor(t) and t.layout is torch.strided for t in named.values()):
        return WantModule(path, module, named, {key_text(name): sub for name, sub in extras.items()})
    return WantObject(path, module, {text: t for text, t in named.items() if is_plain_tensor(t)})


def _walk(
    module: nn.Module, prefix: str, tensors: dict[str, torch.Tensor], extras: dict[str, nn.Module]
) -> bool:
    """Collect what the module's state dict would hold; False if a part of it does so in its own way."""
    if not _leaves_it_to_torch(module):
        return False
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            tensors[prefix + name] = tensor
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        extras[f"{prefix}_extra_state"] = module
    plain = True
    for name, child in module._modules.items():
        if child is not None:
            plain = _walk(child, f"{prefix}{name}.", tensors, extras) and plain
    return plain


def _leaves_it_to_torch(module: nn.Module) -> bool:
    if any(getattr(module, hooks, None) for hooks in _HOOKS) or any(
        name in vars(module) for name in _METHODS
    ):
        return False
    return all(_is_torchs(type(module), name) for name in _METHODS)


def _is_torchs(kind: type[nn.Module], name: str) -> bool:
    known = [getattr(base, name) for base in (nn.Module, *_NORMS)]
    return getattr(kind, name) in known
