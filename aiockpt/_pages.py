"""A captured state's tables to the pages of a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ._manifest import FORMAT, PAGE_ROWS, NodePage, Part, ShardRecord, ValuePage, encode_page
from ._table import TensorTable, encode_table
from ._tree import Flat


def build_part(
    table: TensorTable, flat: Flat, shards: Sequence[ShardRecord], *, rank: int, world: int, save_id: str
) -> Part:
    """One rank's share of the manifest. Pure, linear in the leaves; call it in a thread."""
    dtypes, tensors = encode_table(table)
    return Part(
        format=FORMAT,
        rank=rank,
        world=world,
        save_id=save_id,
        dtypes=dtypes,
        shards=list(shards),
        tensors=tensors,
        values=_value_pages(flat),
        nodes=_node_pages(flat),
    )


def _value_pages(flat: Flat) -> list[msgspec.Raw]:
    pages = []
    for at in range(0, len(flat.value_paths), PAGE_ROWS):
        cut = slice(at, at + PAGE_ROWS)
        page = ValuePage(flat.value_seq[cut], flat.value_paths[cut], flat.values[cut])
        pages.append(encode_page(page))
    return pages


def _node_pages(flat: Flat) -> list[msgspec.Raw]:
    pages = []
    for at in range(0, len(flat.node_paths), PAGE_ROWS):
        cut = slice(at, at + PAGE_ROWS)
        metas: list[Any] = flat.node_metas[cut]
        page = NodePage(flat.node_seq[cut], flat.node_paths[cut], flat.node_tags[cut], metas)
        pages.append(encode_page(page))
    return pages
