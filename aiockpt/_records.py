"""Small conversions between what callers give and what manifests hold. Pure."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _tree
from ._manifest import MANIFEST, FileRecord, ItemRecord, Manifest, digest, is_plain_name
from ._table import TensorTable
from .checkpoint import Checkpoint
from .errors import UsageError
from .storage import Attempt

UserFile = bytes | str | os.PathLike[str]
"""Content as bytes or text, or the path of a file to copy."""


def encode_extra(metrics: Mapping[str, float] | None, meta: Any, step: int) -> dict[str, Any]:
    """Metrics and meta as a manifest holds them: tagged JSON.

    Raises:
        UsageError: metrics is no mapping, or a metric no number.
        UnsupportedStateError: meta holds tensors, or what cannot be stored without pickle.
    """
    if not isinstance(metrics, Mapping | None):
        raise UsageError(f"metrics= maps names to numbers; this is a {type(metrics).__name__}", step=step)
    numbers_ = {str(name): as_number(name, value, step) for name, value in (metrics or {}).items()}
    return {"metrics": _tree.encode_value(numbers_, "metrics"), "meta": _tree.encode_value(meta, "meta")}


def as_number(name: object, value: Any, step: int) -> float | int:
    """A metric as a Python number; 0-d tensors and numpy scalars count.

    Raises:
        UsageError: it is none.
    """
    if isinstance(value, bool | numbers.Integral):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"metric {name!r} is not a number: {value!r:.80}", step=step) from error


def check_files(files: Mapping[str, UserFile]) -> dict[str, bytes | Path]:
    """The user's files with their content fixed now, and their names checked.

    Raises:
        UsageError: a name could leave the step's folder or is one of ours.
    """
    checked: dict[str, bytes | Path] = {}
    for name, content in files.items():
        if not is_plain_name(name) or name.startswith(".") or name == MANIFEST:
            raise UsageError(f"files= may not use the name {name!r}: a plain file name is needed")
        if isinstance(content, str):
            checked[name] = content.encode()
        elif isinstance(content, os.PathLike):
            checked[name] = Path(content)
        else:
            checked[name] = bytes(content)
    return checked


def content_of(content: bytes | Path) -> bytes:
    """The bytes to store; blocking for a path."""
    return content if isinstance(content, bytes) else content.read_bytes()


async def put_file(attempt: Attempt, name: str, data: bytes, kind: str) -> FileRecord:
    """Store a small file of an attempt; returns its record."""
    await attempt.put(name, data)
    return FileRecord(attempt.prefix + name, kind, len(data), digest(data))


def count_items(table: TensorTable) -> list[ItemRecord]:
    """Tensors and bytes by top-level entry."""
    counts: dict[str, tuple[int, int]] = {}
    for row, path in enumerate(table.path):
        item = path.partition("/")[0]
        tensors, nbytes = counts.get(item, (0, 0))
        # Of a tensor in several chunks only the first one counts.
        first = not any(table.offsets(row))
        counts[item] = (tensors + first, nbytes + (table.nbytes[row] if table.alias[row] < 0 else 0))
    return [ItemRecord(name, *count) for name, count in counts.items()]


def describe(manifest: Manifest, run: str, name: str, generation: int) -> Checkpoint:
    """The public record of a manifest."""
    extra = {key: _tree.decode_value(getattr(manifest, key)) for key in ("metrics", "meta")}
    prefix = f"{manifest.save_id[:8]}-"
    return Checkpoint(
        run=run,
        name=name,
        step=manifest.step,
        save_id=manifest.save_id,
        run_id=manifest.run_id,
        time=manifest.time,
        nbytes=sum(file.size for file in manifest.files),
        metrics=extra["metrics"],
        meta=extra["meta"],
        items=tuple(item.name for item in manifest.items),
        files=tuple(file.name.removeprefix(prefix) for file in manifest.files if file.kind == "user"),
        generation=generation,
    )


__all__ = [
    "UserFile",
    "as_number",
    "check_files",
    "content_of",
    "count_items",
    "describe",
    "encode_extra",
    "put_file",
]
