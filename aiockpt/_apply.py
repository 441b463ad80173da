"""Hand restored values to the objects of a target, after all bytes were read and verified.

Runs on the caller's thread: `load_state_dict` and its kin are the caller's code. When
one of them fails, tensors filled in place and the entries before it hold the
checkpoint's values already; the error says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ._match import Match
from ._tree import find, join
from ._wants import Want, WantBox, WantModule, WantObject, WantTensor, WantValue, is_array
from .errors import CheckpointError

__all__ = ["hand_over"]


def hand_over(fit: Match, restored: Any, *, strict: bool, step: int) -> dict[Any, Any]:
    """Finish a load into a target.

    Args:
        fit: the comparison that planned it.
        restored: the state that holds the paths of `fit.fresh`.
        strict: passed on to modules that load themselves.
        step: for errors.

    Returns:
        The values of the target's top-level entries that are no tensors and did not load
        themselves, by the target's own keys.

    Raises:
        CheckpointError: an object refused its state; the entries before it are done.
    """
    giver = _Giver(fit, restored, strict, step)
    want = fit.want
    result = giver.give(want)
    if not isinstance(want, WantBox):
        return {} if _holds_its_own(want) or want.path in fit.skip else {"": result}
    plain = [*want.plain, *(text for text, child in want.children.items() if not _holds_its_own(child))]
    names = [text for text in plain if join(want.path, text) not in fit.skip]
    return {key: result[key] for key in map(want.key, names)}


def _holds_its_own(want: Want) -> bool:
    """Whether the target's object itself is where the restored values are."""
    return isinstance(want, (WantModule, WantObject, WantTensor))


class _Giver:
    """One pass over the target."""

    def __init__(self, fit: Match, restored: Any, strict: bool, step: int) -> None:
        self.fit = fit
        self.restored = restored
        self.strict = strict
        self.step = step
        self.done: list[str] = []

    def give(self, want: Want) -> Any:
        """Bring one object up to date; returns what is to stand in its place."""
        if want.path in self.fit.skip or isinstance(want, WantTensor):
            return want.obj
        if isinstance(want, WantModule):
            for text, module in want.extras.items():
                path = f"{want.path}/{text}" if want.path else text
                if path in self.fit.fresh:
                    self._call(path, module.set_extra_state, find(self.restored, path))
            return want.obj
        if isinstance(want, WantBox) and want.path not in self.fit.fresh:
            return self._box(want)
        value = find(self.restored, want.path)
        if isinstance(want, WantObject):
            return self._load(want, value)
        if isinstance(want, WantValue):
            self._call(want.path, _take_over, want.obj, value)
            return want.obj
        return _replace_inside(want.obj, value) if isinstance(want, WantBox) else value

    def _load(self, want: WantObject, value: Any) -> Any:
        if isinstance(want.obj, nn.Module):
            self._call(want.path, want.obj.load_state_dict, value, strict=self.strict)
        else:
            self._call(want.path, want.obj.load_state_dict, value)
        return want.obj

    def _box(self, want: WantBox) -> Any:
        """Descend; put new children in place, or make a new tuple around them."""
        new = {want.key(text): self.give(child) for text, child in want.children.items()}
        for text in want.plain:
            path = join(want.path, text)
            if path in self.fit.fresh:
                new[want.key(text)] = find(self.restored, path)
        box = want.obj
        if isinstance(box, tuple):
            made = (new.get(i, child) for i, child in enumerate(box))
            return tuple(made) if type(box) is tuple else tuple.__new__(type(box), made)
        for key, value in new.items():
            if box[key] is not value:
                box[key] = value
        return box

    def _call(self, path: str, function: Any, *args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except CheckpointError:
            raise
        except Exception as error:
            done = f"loaded before it: {', '.join(self.done[-20:]) or 'no object'}"
            raise CheckpointError(
                f"step {self.step}: {path or 'the target'} refused its state: "
                f"{type(error).__name__}: {error}\n"
                f"Tensors filled in place hold the checkpoint's values; {done}.",
                step=self.step,
                path=path,
            ) from error
        self.done.append(path)


def _replace_inside(old: Any, new: Any) -> Any:
    """Give a dict or list new content and keep it the same object, where kinds agree."""
    if isinstance(old, dict) and isinstance(new, Mapping):
        old.clear()
        for key, value in new.items():
            old[key] = value
        return old
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
        return old
    return new


def _take_over(target: Any, value: Any) -> None:
    """Make an array or generator what the restored one is."""
    if is_array(target):
        target[...] = value
    elif hasattr(target, "set_state"):
        target.set_state(value.get_state())
    else:
        target.bit_generator.state = value.bit_generator.state
