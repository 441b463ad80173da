"""Write checkpoints by hand, from the format's pure parts: an oracle beside the real writer.

Nothing here goes through the pipeline or a store: plain files in a plain folder, as the
format's page describes them. What a reader makes of them says that format and code agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from aiockpt import _tree
from aiockpt._dtypes import NAME
from aiockpt._manifest import (
    FORMAT,
    MANIFEST,
    FileRecord,
    Manifest,
    NodePage,
    Part,
    ShardRecord,
    ValuePage,
    digest,
    encode_manifest,
    encode_page,
    encode_part,
    piece_digests,
)
from aiockpt._names import StepNames, new_save_id, part_name
from aiockpt._plan import ShardPlan, plan_shards
from aiockpt._table import TensorTable, encode_table
from aiockpt.layouts.per_item import PerItem

RUN_ID = "0123456789abcdef0123456789abcdef"


@dataclass
class Made:
    """A checkpoint on disk and what went into it; change a record and `write` it again."""

    folder: Path
    step: int
    save_id: str
    part: Part
    shards: dict[str, bytes]
    user: dict[str, bytes] = field(default_factory=dict)
    metrics: Any = field(default_factory=dict)
    meta: Any = None
    format: Any = FORMAT
    parts: int = 1
    prefix: str = ""

    def records(self) -> list[FileRecord]:
        """What the manifest says of the files."""
        part = encode_part(self.part)
        found = [
            FileRecord(self.prefix + part_name(rank), "part", len(part), digest(part))
            for rank in range(self.parts)
        ]
        found += [FileRecord(s.name, "shard", s.size, s.digest()) for s in self.part.shards]
        return found + [FileRecord(name, "user", len(data), digest(data)) for name, data in self.user.items()]

    def manifest(self, records: list[FileRecord] | None = None) -> bytes:
        """The manifest's bytes, sealed."""
        return encode_manifest(
            Manifest(
                format=self.format,
                step=self.step,
                save_id=self.save_id,
                run_id=RUN_ID,
                time=1.5,
                metrics=self.metrics,
                meta=self.meta,
                items=[],
                files=records or self.records(),
            )
        )

    def write(self, records: list[FileRecord] | None = None) -> Path:
        """Put all files on disk, with a manifest that names them (or `records`)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.parts):
            (self.folder / (self.prefix + part_name(rank))).write_bytes(encode_part(self.part))
        for name, data in {**self.shards, **self.user}.items():
            (self.folder / name).write_bytes(data)
        (self.folder / MANIFEST).write_bytes(self.manifest(records))
        return self.folder


def make_checkpoint(
    run: Path,
    state: Any,
    step: int,
    *,
    name: str | None = None,
    user: Mapping[str, bytes] | None = None,
    layout: PerItem | None = None,
    allow_pickle: bool = False,
    prefix: bool = False,
    **facts: Any,
) -> Made:
    """Write a state as a committed step of the run.

    Args:
        run: the run's folder.
        state: anything that can be stored.
        step: the step.
        name: the folder, by default what the step is called.
        user: the user's own files.
        layout: which tensor goes where.
        allow_pickle: pickle what nothing else can store.
        prefix: put the save id in front of files' names, as on stores without folders.
        **facts: `metrics`, `meta`, `format` of the manifest.
    """
    flat = _tree.flatten(state, allow_pickle=allow_pickle)
    table = TensorTable()
    for i, tensor in enumerate(flat.tensors):
        alias = flat.tensor_alias[i]
        dtype, shape = NAME[tensor.dtype], tuple(tensor.shape)
        table.add(flat.tensor_seq[i], flat.tensor_paths[i], dtype, shape, flat.tensor_flags[i], alias)
    save_id = new_save_id()
    front = f"{save_id[:8]}-" if prefix else ""
    plans = plan_shards(table, layout or PerItem(), prefix=front)
    data = {plan.name: plan.header + _data(table, flat, plan) for plan in plans}
    dtypes, pages = encode_table(table)
    part = Part(
        format=FORMAT,
        rank=0,
        world=1,
        save_id=save_id,
        dtypes=dtypes,
        shards=[shard_record(plan.name, data[plan.name], len(plan.header)) for plan in plans],
        tensors=pages,
        values=[encode_page(ValuePage(flat.value_seq, flat.value_paths, flat.values))],
        nodes=[encode_page(NodePage(flat.node_seq, flat.node_paths, flat.node_tags, flat.node_metas))],
    )
    folder = run / (name or StepNames().folder(step))
    made = Made(folder, step, save_id, part, data, dict(user or {}), prefix=front, **facts)
    made.write()
    return made


def shard_record(name: str, data: bytes, header: int) -> ShardRecord:
    """What a part says of a data file with that content."""
    body = memoryview(data)[header:]
    return ShardRecord(name, header, len(body), digest(data[:header]), piece_digests(body))


def _data(table: TensorTable, flat: _tree.Flat, plan: ShardPlan) -> bytes:
    return b"".join(raw(flat.tensors[row]) for row in plan.rows)


def raw(tensor: torch.Tensor) -> bytes:
    """The logical content of a tensor, row by row."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def write_run(run: Path, step_format: str = "step-{:08d}") -> None:
    """Write `run.json`."""
    run.mkdir(parents=True, exist_ok=True)
    facts = {"format": 0, "run_id": RUN_ID, "created": 1.0, "step_format": step_format, "meta": None}
    (run / "run.json").write_text(json.dumps(facts))


def edit_page(part: Part, column: str, number: int, **changes: Any) -> None:
    """Change columns of a page of a part in place, as an enemy would."""
    pages: list[msgspec.Raw] = getattr(part, column)
    page = msgspec.json.decode(pages[number])
    page.update(changes)
    pages[number] = msgspec.Raw(msgspec.json.encode(page))


def alike(one: Any, other: Any) -> bool:
    """Equal in types, order, bits and ties; quick for large tensors, for containers of torch's kind only."""
    left: list[int] = []
    right: list[int] = []
    return _alike(one, other, left, right) and _first(left) == _first(right)


def _alike(one: Any, other: Any, left: list[int], right: list[int]) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        left.append(one.data_ptr() if one.numel() else id(one))
        right.append(other.data_ptr() if other.numel() else id(other))
        facts = (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        return facts and raw(one) == raw(other)
    if isinstance(one, dict):
        same_keys = [(k, type(k)) for k in one] == [(k, type(k)) for k in other]
        return same_keys and all(_alike(one[key], other[key], left, right) for key in one)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_alike(a, b, left, right) for a, b in pairs)
    return bool(one == other) or repr(one) == repr(other) == "nan"


def _first(places: list[int]) -> list[int]:
    return [places.index(place) for place in places]
