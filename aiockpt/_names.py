"""Names of things in a run: steps, generations, shards, save ids.

Pure text. A step's folder is `step_format.format(step)`, with `.1`, `.2`, ... behind
it for later generations of the same step. Numbers decide order, never the text: a
step that outgrows its zero padding still sorts where it belongs.
"""

from __future__ import annotations

import os
import re
import string
import uuid
from typing import Final

from .errors import UsageError

STEP_FORMAT: Final = "step-{:08d}"
RUN_FILE: Final = "run.json"
RESERVED: Final = frozenset({"run.json", "leases", "aliases", "lock", "files"})
"""Names in a run's folder that no step may have."""
_DIGITS: Final = 19
"""A step has at most this many digits: it fits in 64 bits everywhere."""
_STEM: Final = 96
"""The longest readable part of a shard's name; file systems stop at 255 bytes."""


def new_save_id() -> str:
    """A name for one save, for ever: 32 hex digits."""
    return uuid.uuid4().hex


def stem(name: str) -> str:
    """The beginning of a name, short enough in bytes for another name to be made of it."""
    return os.fsencode(name)[:_STEM].decode("utf-8", "ignore")


class StepNames:
    """Folder names of one run's steps, both ways.

    Args:
        step_format: a format string with exactly one field for an int, such as
            `step-{:08d}` or `checkpoint-{}`.

    Raises:
        UsageError: the format has no field or several, or gives a name that cannot
            be told apart from others (dots at the front, slashes, a reserved name).
    """

    def __init__(self, step_format: str = STEP_FORMAT) -> None:
        self.step_format = step_format
        try:
            parts = list(string.Formatter().parse(step_format))
            fields = [p for p in parts if p[1] is not None]
            sample = step_format.format(7)
        except (ValueError, KeyError, IndexError) as error:
            raise UsageError(f"step_format {step_format!r} is not a format for one int: {error}") from error
        if len(fields) != 1 or fields[0][1] not in ("", "0"):
            raise UsageError(
                f"step_format {step_format!r} must have exactly one field for the step, as 'step-{{:08d}}'"
            )
        head, _, tail = self._split(parts)
        if not sample or sample.startswith(".") or set(sample) & set("/\\\0") or len(sample) > 120:
            raise UsageError(
                f"step_format {step_format!r} gives the folder name {sample!r}, which is not usable"
            )
        self._pattern = re.compile(
            re.escape(head) + rf"0*(\d{{1,{_DIGITS}}})" + re.escape(tail) + r"(?:\.([1-9]\d{0,5}))?"
        )
        if self.parse(sample) != (7, 0) or self.parse(step_format.format(123456789)) != (123456789, 0):
            raise UsageError(f"step_format {step_format!r} must write the step in plain decimal digits")

    @staticmethod
    def _split(parts: list[tuple[str, str | None, str | None, str | None]]) -> tuple[str, None, str]:
        at = next(i for i, p in enumerate(parts) if p[1] is not None)
        head = "".join(p[0] for p in parts[: at + 1])
        return head, None, "".join(p[0] for p in parts[at + 1 :])

    def folder(self, step: int, generation: int = 0) -> str:
        """The folder name of a step's generation."""
        name = self.step_format.format(step)
        return f"{name}.{generation}" if generation else name

    def parse(self, name: str) -> tuple[int, int] | None:
        """(step, generation) of a folder name, or None for somebody else's folder."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        step, generation = int(match[1]), int(match[2] or 0)
        # Only the very name we would write: "step-7" is not ours when "step-00000007" is.
        return (step, generation) if self.folder(step, generation) == name else None


def shard_stem(item: str) -> str:
    """A file name for an item: readable where it can be, safe and unique always.

    Letters, digits, `_` and `-` stay; anything else, upper case on file systems that
    fold it included, is told apart by the digest that is then appended.
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", item)[:_STEM]
    if plain == item and item and item == item.lower():
        return item
    tail = uuid.uuid5(uuid.NAMESPACE_OID, item.encode("utf-8", "surrogatepass").hex()).hex[:12]
    return f"{plain or 'item'}.{tail}"


def shard_name(stem: str, rank: int, number: int) -> str:
    """The name of a data file: item, rank, number."""
    return f"{stem}-{rank:05d}-{number:05d}.safetensors"


def part_name(rank: int) -> str:
    """The name of a rank's part."""
    return f"part-{rank:05d}.json"
