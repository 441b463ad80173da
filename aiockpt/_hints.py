"""A likely reason for a mismatch, in words. Pure."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from ._saved import Outline
from ._wants import Want, WantBox, WantModule, WantObject

__all__ = ["hint_for", "near"]

_WRAPPERS: Final = {"_orig_mod": "torch.compile", "module": "DistributedDataParallel or DataParallel"}


def hint_for(outline: Outline, want: Want, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What may be wrong with a target, or the empty text."""
    return _prefix_hint(outline, want, missing, unexpected) or _item_hint(outline, want)


def _prefix_hint(outline: Outline, want: Want, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Names that differ only by what a wrapper of modules puts in front."""
    have = {_bare(path): path for path in unexpected}
    for path in missing:
        other = have.get(_bare(path))
        for wrapper, what in _WRAPPERS.items() if other else ():
            side, where = _longer(path, str(other), wrapper)
            if side:
                return (
                    f"The names in the {side} carry '{wrapper}.', which {what} adds (as in {where}), "
                    "the others do not. Save and load the same of the two: wrapper, or module inside it."
                )
    return ""


def _longer(mine: str, saved: str, wrapper: str) -> tuple[str, str]:
    in_mine, in_saved = _components(mine).count(wrapper), _components(saved).count(wrapper)
    if in_saved > in_mine:
        return "checkpoint", saved
    return ("target", mine) if in_mine > in_saved else ("", "")


def _components(path: str) -> list[str]:
    return path.replace("/", ".").split(".")


def _bare(path: str) -> str:
    return ".".join(part for part in _components(path) if part not in _WRAPPERS)


def _item_hint(outline: Outline, want: Want) -> str:
    """A module given where the checkpoint has it under a name, or the other way round."""
    items = list(outline.children(""))
    if not want.path and isinstance(want, (WantModule, WantObject)):
        for item in items:
            if set(want.tensors) & set(outline.children(item)):
                return f"The checkpoint has it under {item!r}: pass into={{{item!r}: ...}}."
    if isinstance(want, WantBox):
        for child in want.children.values():
            if not isinstance(child, WantModule) or outline.kind(child.path) is not None:
                continue
            if set(child.tensors) & set(items):
                return "The checkpoint is the state dict itself, without a name: pass the module as into=."
    return ""


def near(path: str, known: Iterable[str]) -> list[str]:
    """Up to three known paths that look like `path`."""
    # The comparison is quadratic in the length and linear in their number: bounded, it is only a hint.
    return difflib.get_close_matches(
        path[:500], [p[:500] for p in itertools.islice(known, 5000)], n=3, cutoff=0.5
    )
