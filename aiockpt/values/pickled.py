"""Pickle, for what nothing else stores; only where it was asked for, at save and at load."""

from __future__ import annotations

import pickle
from typing import Any

from .._plain import Json
from ..errors import PickleRefusedError
from . import Children, Codec, Decoding, Encoding, Exploded, Unsupported, class_name, register

PICKLE_TAG = "pickle"


class _Pickled(Codec):
    tag = PICKLE_TAG
    host = True

    def explode(self, value: Any, ctx: Encoding) -> Exploded:
        try:
            data = pickle.dumps(value, protocol=5)
        except Exception as error:
            # Pickling runs the value's own code: it may raise anything.
            raise Unsupported(f"it cannot be pickled: {type(error).__name__}: {error}") from error
        return class_name(type(value)), [("data", data)]

    def rebuild(self, meta: Json, children: Children, ctx: Decoding) -> object:
        if not ctx.allow_pickle:
            what = str(meta)[:80]
            message = (
                f"{ctx.path or 'the state itself'}: a pickled {what}; say allow_pickle=True if you trust it"
            )
            raise PickleRefusedError(message, path=ctx.path)
        data = children["data"]
        if type(data) is not bytes:
            raise TypeError("its data are no bytes")
        return pickle.loads(data)


register(_Pickled())
