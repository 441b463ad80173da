"""torch's own values beside plain tensors: sparse tensors, sizes, dtypes, devices, generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .._plain import Json
from . import Absent, Atom, Children, Codec, Decoding, Encoding, Exploded, register

Get = Callable[[torch.Tensor], torch.Tensor]

_ROWS: Final[tuple[str, str]] = ("crow_indices", "col_indices")
_COLUMNS: Final[tuple[str, str]] = ("ccol_indices", "row_indices")
_COMPRESSED: Final[dict[torch.layout, tuple[str, str]]] = {
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
_LAYOUTS: Final = {str(layout): layout for layout in (torch.sparse_coo, *_COMPRESSED)}


class Sparse(Codec):
    """Sparse tensors, by their component tensors."""

    tag = "sparse"

    def match(self, value: object) -> bool:
        kind = type(value)
        return isinstance(value, torch.Tensor) and kind in _PLAIN and str(value.layout) in _LAYOUTS

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        flags = 2 if type(value) is torch.nn.Parameter else 0
        flags |= 1 if value.requires_grad and value.is_leaf else 0
        data = value.detach()
        meta: dict[str, Json] = {"layout": str(data.layout), "shape": list(data.shape), "flags": flags}
        if data.layout is torch.sparse_coo:
            # _indices(), not indices(): those refuse a tensor that is not coalesced.
            meta["coalesced"] = data.is_coalesced()
            return meta, [("indices", data._indices()), ("values", data._values())]
        names = _COMPRESSED[data.layout]
        return meta, [(name, getattr(data, name)()) for name in (*names, "values")]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        if not isinstance(meta, dict):
            raise TypeError("no meta")
        layout, shape = _LAYOUTS[str(meta["layout"])], sizes(meta["shape"])
        if layout is torch.sparse_coo:
            parts = (children["indices"], children["values"])
            coalesced = meta["coalesced"] is True
            made = torch.sparse_coo_tensor(*parts, shape, is_coalesced=coalesced, check_invariants=True)
        else:
            parts = tuple(children[name] for name in _COMPRESSED[layout])
            made = torch.sparse_compressed_tensor(
                *parts, children["values"], shape, layout=layout, check_invariants=True
            )
        return flagged(made, meta["flags"])


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def flagged(tensor: torch.Tensor, flags: object) -> torch.Tensor:
    """Make a tensor what it was: 1 requires grad, 2 is a Parameter; shares its memory."""
    if type(flags) is not int or not 0 <= flags <= 3:
        raise ValueError("wrong flags")
    if flags & 2:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & 1))
    return tensor.detach().requires_grad_() if flags else tensor


def sizes(meta: Json) -> tuple[int, ...]:
    """A shape out of JSON."""
    if not isinstance(meta, list):
        raise TypeError("no shape")
    shape = tuple(size for size in meta if type(size) is int and size >= 0)
    if len(shape) != len(meta):
        raise ValueError("no shape")
    return shape


class _Generator(Codec):
    """A torch.Generator, by device and state."""

    tag = "torch.Generator"
    types = (torch.Generator,)
    host = True

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        return str(value.device), [("state", value.get_state())]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        device = torch.device(str(meta))
        try:
            made = torch.Generator(device)
        except (RuntimeError, AssertionError) as error:
            raise Absent(f"torch.Generator on {device}") from error
        made.set_state(children["state"])
        return made


def _named(kind: type) -> Callable[[Any], Any]:
    """Look a constant of torch up by name, and only one of that kind."""

    def decode(meta: Any) -> Any:
        found = vars(torch).get(str(meta).removeprefix("torch."))
        if not isinstance(found, kind):
            raise Absent(str(meta))
        return found

    return decode


def _size(meta: Json) -> torch.Size:
    return torch.Size(sizes(meta))


register(Sparse())
register(_Generator())
register(Atom("torch.Size", torch.Size, list, _size))
register(Atom("torch.device", torch.device, str, torch.device))
for _kind in (torch.dtype, torch.layout, torch.memory_format):
    register(Atom(f"torch.{_kind.__name__}", _kind, str, _named(_kind)))
