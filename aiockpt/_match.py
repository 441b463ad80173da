"""A checkpoint compared with a target, all of it, before anything is read or touched.

`match` says what goes where: tensors to fill in place, paths to restore as new values,
and every difference. Pure: it looks at shapes and names, never at bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ._dtypes import NAME
from ._hints import hint_for
from ._optim import optimizer_problems
from ._plain import Json
from ._saved import Outline, Saved
from ._targets import is_plain_tensor, target_problem
from ._tree import find as find_in
from ._tree import join, rebuild
from ._wants import Want, WantBox, WantModule, WantObject, WantTensor, WantValue, is_array
from .errors import CorruptCheckpointError, StateMismatchError
from .values import Unsupported, codec_for

__all__ = ["Match", "match"]


@dataclass(slots=True)
class Match:
    """How a checkpoint and a target fit together."""

    want: Want
    fills: list[tuple[int, str, torch.Tensor]] = field(default_factory=list)
    """(row, path, living tensor)."""
    fresh: dict[str, None] = field(default_factory=dict)
    """Paths that are restored as new values, for what is not filled in place."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, str]] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    skip: set[str] = field(default_factory=set)
    """Paths of the target that stay as they are."""


def match(saved: Saved, outline: Outline, want: Want, *, strict: bool, cast: bool) -> Match:
    """Compare; with `strict`, any difference is an error.

    Raises:
        StateMismatchError: listing every difference; without `strict`, if nothing fits.
    """
    matcher = _Matcher(saved, outline, cast)
    matcher.visit(want)
    fit = matcher.fit
    lost = matcher.lost_items()
    if (strict and (fit.missing or fit.unexpected or fit.mismatched)) or lost:
        raise StateMismatchError(
            missing=fit.missing or ([] if strict else lost),
            unexpected=fit.unexpected,
            mismatched=fit.mismatched,
            hint=hint_for(outline, want, fit.missing, fit.unexpected),
            step=saved.manifest.step,
        )
    return fit


class _Matcher:
    """One comparison; `visit` dispatches on the kind of want."""

    def __init__(self, saved: Saved, outline: Outline, cast: bool) -> None:
        self.saved = saved
        self.outline = outline
        self.cast = cast
        self.fit: Match
        self._tensors: dict[str, list[int]] = {}
        """Top-level entry of the target: tensors it wants, tensors that fit."""
        self._used = 0

    def visit(self, want: Want) -> None:
        """Compare the whole target."""
        self.fit = Match(want)
        self._visit(want)

    def lost_items(self) -> list[str]:
        """Entries of which nothing fits although the checkpoint has them; or all, if nothing at all does."""
        lost = [
            item
            for item, (wanted, found) in self._tensors.items()
            if wanted and not found and self._has(item)
        ]
        if not self._used and not lost and (self.fit.missing or self.fit.mismatched or self.fit.unexpected):
            return (
                list(self.fit.missing)
                or [path for path, _ in self.fit.mismatched]
                or list(self.fit.unexpected)
            )
        return lost

    def _has(self, item: str) -> bool:
        return self.outline.kind(item) is not None

    def _item(self, path: str) -> str:
        """The entry of the target that a path belongs to; the target itself if it has no entries."""
        return path.partition("/")[0] if isinstance(self.fit.want, WantBox) else ""

    def _visit(self, want: Want) -> None:
        if self.outline.kind(want.path) is None:
            self._missing(want.path)
            if isinstance(want, WantTensor):
                self._count(want.path, found=False)
        elif isinstance(want, WantTensor):
            self._tensor(want.path, want.obj)
        elif isinstance(want, WantModule):
            self._module(want)
        elif isinstance(want, WantObject):
            self._object(want)
        elif isinstance(want, WantValue):
            self._value(want)
        elif isinstance(want, WantBox):
            self._box(want)
        else:
            self._plain(want.path, want.obj)

    # ------------------------------------------------------------ outcomes

    def _missing(self, path: str) -> None:
        self.fit.missing.append(path)
        self.fit.skip.add(path)

    def _mismatch(self, path: str, why: str, at: str | None = None) -> None:
        self.fit.mismatched.append((path, why))
        self.fit.skip.add(path if at is None else at)

    def _restore(self, path: str) -> None:
        self.fit.fresh[path] = None
        self._used += 1

    def _count(self, path: str, *, found: bool) -> None:
        counts = self._tensors.setdefault(self._item(path), [0, 0])
        counts[0] += 1
        counts[1] += found
        self._used += found

    # ------------------------------------------------------------ kinds

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        row = self.outline.row(path)
        if row is None and self.outline.kind(path) is None:
            self._count(path, found=False)
            self._missing(path)
            return
        if row is None:
            why = f"saved is a {self.outline.tag(path)}, the target a tensor"
        elif not is_plain_tensor(tensor):
            why = f"the target is a {type(tensor).__name__}, which cannot be filled in place"
        else:
            dtype, shape = self.saved.table.dtype[row], self.saved.table.shape[row]
            why = target_problem(tensor, dtype, shape, cast=self.cast) or ""
        self._count(path, found=not why)
        if why or row is None:
            self._mismatch(path, why)
            return
        self.fit.fills.append((self.saved.base(row), path, tensor))
        if NAME.get(tensor.dtype) != self.saved.table.dtype[row]:
            self.fit.cast.append(path)

    def _module(self, want: WantModule) -> None:
        if self.outline.kind(want.path) == "tensor":
            self._mismatch(want.path, f"saved is a tensor, the target a {type(want.obj).__name__}")
            return
        there = dict.fromkeys(self.outline.children(want.path))
        for text, tensor in want.tensors.items():
            self._tensor(join(want.path, text), tensor)
        for text in want.extras:
            path = join(want.path, text)
            if text in there:
                self._restore(path)
            else:
                self._missing(path)
        self._unexpected(want.path, (t for t in there if t not in want.tensors and t not in want.extras))

    def _unexpected(self, path: str, texts: Iterable[str]) -> None:
        self.fit.unexpected += [join(path, text) for text in texts]

    def _object(self, want: WantObject) -> None:
        found = len(self.fit.mismatched)
        for text, tensor in want.tensors.items():
            row = self.outline.row(join(want.path, text))
            if row is not None and self.saved.table.shape[row] != tuple(tensor.shape):
                shapes = f"saved shape {list(self.saved.table.shape[row])}, target shape {list(tensor.shape)}"
                self._mismatch(join(want.path, text), shapes, at=want.path)
        if isinstance(want.obj, torch.optim.Optimizer):
            for where, why in self._optimizer_problems(want):
                self._mismatch(join(want.path, where) if where else want.path, why, at=want.path)
        if len(self.fit.mismatched) == found:
            self._restore(want.path)

    def _optimizer_problems(self, want: WantObject) -> list[tuple[str, str]]:
        """Checked on tensors without memory: shapes are all it takes."""
        table = self.saved.table
        prefix = f"{want.path}/" if want.path else ""
        rows = {self.saved.base(i) for i, path in enumerate(table.path) if path.startswith(prefix)}
        bare = {i: _bare(table.dtype[i], table.shape[i]) for i in rows}
        try:
            state = rebuild(self.saved, bare, select=[want.path], allow_pickle=True).state
            return optimizer_problems(want.obj, find_in(state, want.path))
        except (CorruptCheckpointError, KeyError):
            return []  # holds values that need their bytes: the optimizer itself will have to tell

    def _value(self, want: WantValue) -> None:
        if not is_array(want.obj):
            self._same_kind(want, "Generator")
            return
        codec = codec_for(want.obj)
        meta = self.outline.meta(want.path)
        try:
            mine = codec.explode(want.obj, _NO_CONTEXT)[0] if codec else None
        except Unsupported as error:
            self._mismatch(want.path, f"the target is {error}")
            return
        problem = _array_problem(meta, mine, self.outline.tag(want.path))
        if problem is None and not want.obj.flags.writeable:
            problem = "the target array is read-only"
        if problem:
            self._mismatch(want.path, problem)
        else:
            self._restore(want.path)

    def _same_kind(self, want: Want, ending: str) -> None:
        tag = self.outline.tag(want.path)
        if tag.endswith(ending):
            self._restore(want.path)
        else:
            self._mismatch(want.path, f"saved is a {tag}, the target a {type(want.obj).__name__}")

    def _box(self, want: WantBox) -> None:
        kind = self.outline.kind(want.path)
        if kind == "plain" and not want.living and not want.lenient:
            self._restore(want.path)  # whole, whatever the target held
            return
        if kind == "tensor":
            self._mismatch(want.path, f"saved is a tensor, the target a {type(want.obj).__name__}")
            return
        for text, tensor in want.tensors.items():
            self._tensor(join(want.path, text), tensor)
        for text in want.plain:
            self._plain(join(want.path, text), want.obj[want.key(text)])
        for child in want.children.values():
            self._visit(child)
        if not want.lenient:
            known = set(want.texts())
            self._unexpected(want.path, (t for t in self.outline.children(want.path) if t not in known))

    def _plain(self, path: str, target: Any) -> None:
        kind = self.outline.kind(path)
        if kind == "plain":
            self._restore(path)
        elif kind is None:
            self._missing(path)
        else:
            what = "a tensor" if kind == "tensor" else f"a {self.outline.tag(path)} with tensors"
            self._mismatch(path, f"saved is {what}, the target a {type(target).__name__}")


class _NoContext:
    """For codecs that ask nothing of it."""

    allow_pickle = False

    def plain(self, value: object) -> Json:
        """No codec of arrays calls it."""
        raise Unsupported(f"a value of type {type(value).__name__}")


_NO_CONTEXT = _NoContext()


def _array_problem(saved: Any, mine: Any, tag: str) -> str | None:
    """Why an array cannot take the saved one; its order in memory is its own affair."""
    if not isinstance(saved, dict) or not isinstance(mine, dict) or not tag.endswith("ndarray"):
        return f"saved is a {tag}, the target a numpy array"
    for what in ("shape", "dtype"):
        if saved.get(what) != mine[what]:
            return f"saved {what} {saved.get(what)}, target {what} {mine[what]}"
    return None


def _bare(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
