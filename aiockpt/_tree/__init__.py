"""A nested state to columns of leaves, and back.

`flatten` walks a state once and writes three tables, column by column: its tensors, its
plain values (JSON) and its containers that are not plain dicts. A part of the state
without any tensor is one plain value, however large. Each row has its path and its
number in pre-order, so that the tables merge back into the order of the state, which
`rebuild` does.
"""

from __future__ import annotations

from .._paths import Key, Selection, ancestors, in_order, item_of, join, key_text, parse_key, selects, split
from .._plain import MAX_DEPTH, Json
from .columns import Columns, find, host_tensors, wanted_tensors
from .decode import decode_value
from .flatten import Flat, Walk, encode_value, flatten
from .rebuild import Rebuilt, rebuild

__all__ = [
    "MAX_DEPTH",
    "Columns",
    "Flat",
    "Json",
    "Key",
    "Rebuilt",
    "Selection",
    "Walk",
    "ancestors",
    "decode_value",
    "encode_value",
    "find",
    "flatten",
    "host_tensors",
    "in_order",
    "item_of",
    "join",
    "key_text",
    "parse_key",
    "rebuild",
    "selects",
    "split",
    "wanted_tensors",
]
