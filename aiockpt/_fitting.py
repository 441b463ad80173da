"""Fresh models and loaded weights put together, with proof that nothing was left out. Blocking; for a lane.

A model is built on the meta device where that loses nothing: it then costs no time and no
memory, and the loaded tensors become its parameters as they are. Where a model keeps
tensors that no checkpoint brings back (buffers that are not persistent, tensors in plain
attributes) it is built for real.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from ._log import log
from .errors import ReloadError, StateMismatchError

__all__ = ["compare", "fresh", "not_finite", "put_in", "tensors_of", "unwrapped"]

CHUNK: Final = 1 << 22
"""Elements that are checked at a time."""
LOOKED_AT: Final = 10_000
"""Objects of a model that are searched for hidden tensors, at most."""


def fresh(build: Callable[[], Any], *, meta: bool) -> Any:
    """A new model, on the meta device if that loses nothing."""
    if meta:
        model = _on_meta(build)
        if inspect.isawaitable(model) or (isinstance(model, nn.Module) and not _loses(model)):
            return model
    return build()


def _on_meta(build: Callable[[], Any]) -> Any:
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # it looks at values while it is built
        log.debug("the model cannot be built on the meta device: %s", error)
        return None


def _loses(model: nn.Module) -> bool:
    """Whether a tensor without content is kept where no checkpoint reaches it."""
    saved = {id(t) for t in model.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)}
    return any(tensor.is_meta and id(tensor) not in saved for tensor in _all_tensors(model))


def _all_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor of a model, those in plain attributes and containers included."""
    stack: list[Any] = [model]
    seen: set[int] = set()
    while stack and len(seen) < LOOKED_AT:
        top = stack.pop()
        if id(top) in seen:
            continue
        seen.add(id(top))
        if isinstance(top, torch.Tensor):
            yield top
        elif isinstance(top, Mapping):
            stack += top.values()
        elif isinstance(top, (list, tuple, set)):
            stack += top
        elif (
            hasattr(top, "__dict__")
            and not isinstance(top, type)
            and not callable(getattr(top, "__code__", None))
        ):
            stack += vars(top).values()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that a compiled one runs: its state has the names that were saved."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def put_in(model: nn.Module, state: Any, *, cast: bool, step: int) -> None:
    """Make loaded tensors a fresh model's parameters and buffers; it is in evaluation mode then.

    Raises:
        StateMismatchError: names, shapes or dtypes differ; the model is not to be used.
        ReloadError: something of the model did not come from the checkpoint.
    """
    module = unwrapped(model)
    given = compare(module, state, cast=cast, step=step)
    try:
        module.load_state_dict(given, strict=True, assign=True)
    except Exception as error:
        message = f"step {step}: the model refused its state: {type(error).__name__}: {error}"
        raise ReloadError(message, step=step, stage="cover") from error
    left = _left_out(module, given)
    if left:
        message = f"step {step}: not everything in the model came from the checkpoint: {', '.join(left[:20])}"
        raise ReloadError(message, step=step, stage="cover", path=left[0])
    model.eval()


def compare(module: nn.Module, state: Any, *, cast: bool, step: int) -> dict[str, Any]:
    """The loaded state by the model's names, dtypes converted if that is allowed.

    Raises:
        StateMismatchError: listing every difference.
    """
    if not isinstance(state, Mapping):
        why = f"saved is a {type(state).__name__}, the target a {type(module).__name__}"
        raise StateMismatchError(mismatched=[("", why)], step=step)
    expected = module.state_dict()
    given = {str(name): value for name, value in state.items()}
    wrong = [
        (name, why)
        for name in expected
        if name in given
        for why in _problem(expected[name], given[name], cast)
    ]
    missing = [name for name in expected if name not in given]
    unexpected = [name for name in given if name not in expected]
    if missing or unexpected or wrong:
        raise StateMismatchError(missing=missing, unexpected=unexpected, mismatched=wrong, step=step)
    if cast:
        given = {name: _as(expected[name], value) for name, value in given.items()}
    return given


def _problem(mine: Any, saved: Any, cast: bool) -> Iterator[str]:
    if not isinstance(mine, torch.Tensor):
        return
    if not isinstance(saved, torch.Tensor):
        yield f"saved is a {type(saved).__name__}, the target a tensor"
    elif saved.shape != mine.shape:
        yield f"saved shape {list(saved.shape)}, target shape {list(mine.shape)}"
    elif saved.dtype != mine.dtype and not cast:
        yield f"saved dtype {saved.dtype}, target dtype {mine.dtype} (cast=True converts)"


def _as(mine: Any, saved: Any) -> Any:
    tensors = isinstance(mine, torch.Tensor) and isinstance(saved, torch.Tensor)
    return saved.to(mine.dtype) if tensors else saved


def _left_out(module: nn.Module, given: Mapping[str, Any]) -> list[str]:
    """Parameters and buffers whose content is not the checkpoint's (or, if not persistent, their own)."""
    loaded = {_memory(t) for t in given.values() if isinstance(t, torch.Tensor)}
    own = {
        f"{prefix}.{name}" if prefix else name
        for prefix, sub in module.named_modules(remove_duplicate=False)
        for name in sub._non_persistent_buffers_set
    }
    return [
        name
        for name, tensor in tensors_of(module)
        if tensor.is_meta or not (name in given or name in own or _memory(tensor) in loaded)
    ]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() and not tensor.is_meta else -1


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, tied ones under each of their names."""
    yield from chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the floating tensors that hold NaN or an infinity."""
    return [name for name, tensor in tensors if not _is_finite(tensor)]


def _is_finite(tensor: torch.Tensor) -> bool:
    checkable = tensor.layout == torch.strided and not tensor.is_meta and tensor.numel()
    if not checkable or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
    for chunk in flat.split(CHUNK):
        wide = chunk.float() if chunk.dtype.itemsize < 2 else chunk
        # A sum shows any NaN or infinity, fifteen times as fast; only an overflow makes one of its own.
        total = wide.sum(dtype=torch.float64 if wide.dtype == torch.float64 else torch.float32)
        if not bool(torch.isfinite(total)) and not bool(torch.isfinite(wide).all()):
            return False
    return True
