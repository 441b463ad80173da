"""Files that lie and are well sealed: headers, parts and manifests written by an enemy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt._manifest import FileRecord
from aiockpt.catalog import Catalog
from aiockpt.errors import CheckpointError, CorruptCheckpointError
from aiockpt.layouts.per_item import PerItem
from tests.make_checkpoint import Made, make_checkpoint, shard_record

STEP = 8


def reseal(made: Made, header: bytes, body: bytes | None = None) -> None:
    """Give the only shard another header; part and manifest agree with it."""
    (name,) = made.shards
    old = made.part.shards[0]
    data = header + (made.shards[name][old.header :] if body is None else body)
    made.shards[name] = data
    made.part.shards[0] = shard_record(name, data, len(header))
    made.write()


def entry(**changes: Any) -> dict[str, Any]:
    """The right entry of the test's tensor `w`, a float32 of shape (2, 3), or a wrong one."""
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}


def header(text: str | bytes, length: int | None = None) -> bytes:
    """A safetensors header of that text."""
    data = text.encode() if isinstance(text, str) else text
    return (len(data) if length is None else length).to_bytes(8, "little") + data


RIGHT = json.dumps({"w": entry()})
TWICE = f'{{"w":{json.dumps(entry(dtype="I32"))},{RIGHT[1:]}'
HOSTILE: dict[str, Callable[[], bytes]] = {
    "length of 2**63": lambda: header(RIGHT, 2**63),
    "length of 2**33": lambda: header(RIGHT, 2**33),
    "length too long": lambda: header(RIGHT, len(RIGHT) + 1),
    "length 0": lambda: header(RIGHT, 0),
    "key twice": lambda: header(TWICE),
    "key twice, escaped": lambda: header(TWICE.replace('"w"', '"\\u0077"', 1)),
    "inner key twice": lambda: header(RIGHT.replace('"dtype"', '"dtype": "I8", "dtype"')),
    "overlap": lambda: header(json.dumps({"w": entry(), "v": entry()})),
    "another name": lambda: header(json.dumps({"v": entry()})),
    "no tensor": lambda: header("{}"),
    "hole": lambda: header(json.dumps({"w": entry(data_offsets=[1, 25])})),
    "begin behind end": lambda: header(json.dumps({"w": entry(data_offsets=[24, 0])})),
    "end behind the file": lambda: header(json.dumps({"w": entry(data_offsets=[0, 2**62])})),
    "negative": lambda: header(json.dumps({"w": entry(data_offsets=[-24, 0])})),
    "fractions": lambda: header(json.dumps({"w": entry(data_offsets=[0.0, 24.0])})),
    "three offsets": lambda: header(json.dumps({"w": entry(data_offsets=[0, 24, 24])})),
    "negative shape": lambda: header(json.dumps({"w": entry(shape=[-2, -3])})),
    "huge shape": lambda: header(json.dumps({"w": entry(shape=[2**62, 2**62])})),
    "other shape": lambda: header(json.dumps({"w": entry(shape=[3, 2])})),
    "other dtype": lambda: header(json.dumps({"w": entry(dtype="I32")})),
    "unknown dtype": lambda: header(json.dumps({"w": entry(dtype="F99")})),
    "dtype is no text": lambda: header(json.dumps({"w": entry(dtype=[])})),
    "an unknown field": lambda: header(json.dumps({"w": entry(more=1)})),
    "entry is a number": lambda: header('{"w": 3}'),
    "metadata is no text": lambda: header(json.dumps({"__metadata__": {"a": 1}, "w": entry()})),
    "metadata is a list": lambda: header(json.dumps({"__metadata__": [], "w": entry()})),
    "deep": lambda: header("[" * 7000),
    "long and deep": lambda: header('{"w":' + "[" * 10**6),
    "long": lambda: header("[" + "[]," * 10**6 + "[]]"),
    "long numbers": lambda: header('{"w": ' + "9" * 7000 + "}"),
    "no UTF-8": lambda: header(b"\xff\xfe" + RIGHT.encode()),
    "no JSON": lambda: header("rubbish"),
    "a list": lambda: header("[]"),
    "empty text": lambda: header(""),
    "shorter than a length": lambda: b"\0\0\0",
}


@pytest.fixture
def single(tmp_path: Path) -> Made:
    """A step with one data file with one tensor."""
    return make_checkpoint(tmp_path, {"m": {"w": torch.arange(6.0).reshape(2, 3)}, "n": STEP}, STEP)


async def test_a_resealed_header_is_fine(single: Made) -> None:
    """The right header, written another way, passes: what follows fails for its own sake."""
    reseal(single, header(RIGHT))
    async with Catalog(single.folder.parent) as catalog:
        await catalog.verify()


@pytest.mark.parametrize("case", HOSTILE)
async def test_hostile_headers(single: Made, case: str) -> None:
    """A header that disagrees with the part is found by verifying; a load never believes it."""
    reseal(single, HOSTILE[case]())
    async with Catalog(single.folder.parent) as catalog:
        with pytest.raises(CorruptCheckpointError) as caught:
            await catalog.verify(STEP)
        assert (caught.value.step, caught.value.file) == (STEP, next(iter(single.shards)))
        assert torch.equal((await catalog.load(STEP))["m"]["w"], torch.arange(6.0).reshape(2, 3))


LIMITED = """
import asyncio, resource, sys
import torch
from aiockpt.catalog import Catalog
from aiockpt.errors import CorruptCheckpointError

async def main(runs):
    for run in runs:
        async with Catalog(run, budget=4 << 20) as catalog:
            try:
                await catalog.verify()
            except CorruptCheckpointError:
                continue
            raise SystemExit(f"{run}: no error")

with open("/proc/self/statm") as file:
    base = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (base + (500 << 20), base + (500 << 20)))
asyncio.run(main(sys.argv[1:]))
"""


def test_hostile_headers_cost_little(tmp_path: Path) -> None:
    """All of them are found within 500 MB of address space beyond what the imports take."""
    runs = []
    for number, case in enumerate(HOSTILE):
        run = tmp_path / str(number)
        reseal(make_checkpoint(run, {"m": {"w": torch.ones(2, 3)}}, STEP), HOSTILE[case]())
        runs.append(str(run))
    command = [sys.executable, "-c", LIMITED, *runs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


async def test_trailing_bytes(single: Made) -> None:
    """Bytes behind the last tensor belong to nobody: damage."""
    (name,) = single.shards
    kept = single.shards[name][single.part.shards[0].header :]
    reseal(single, header(RIGHT), kept + b"more")
    async with Catalog(single.folder.parent) as catalog:
        with pytest.raises(CorruptCheckpointError, match="no tensor"):
            await catalog.load(STEP)


@pytest.mark.parametrize("changes", [{"save_id": "f" * 32}, {"rank": 1}, {"world": 2}, {"format": 1}])
async def test_a_part_of_another_save(single: Made, changes: dict[str, Any]) -> None:
    """A sound part that does not belong to the manifest is refused."""
    for name, value in changes.items():
        setattr(single.part, name, value)
    single.write()
    async with Catalog(single.folder.parent) as catalog:
        with pytest.raises(CheckpointError) as caught:
            await catalog.load(STEP)
    assert (caught.value.step, caught.value.file) == (STEP, "part-00000.json")


@pytest.mark.parametrize("missing_in", ["part", "manifest"])
async def test_part_and_manifest_name_the_same_files(single: Made, missing_in: str) -> None:
    """A data file that only one of the two knows is damage."""
    single.shards["extra"] = b"x" * 8200
    record = shard_record("extra", single.shards["extra"], 8200)
    known = single.records()
    if missing_in == "manifest":
        single.part.shards.append(record)
        known = [k for k in single.records() if k.name != "extra"]
    else:
        known.append(FileRecord("extra", "shard", record.size, record.digest()))
    single.write(known)
    async with Catalog(single.folder.parent) as catalog:
        with pytest.raises(CorruptCheckpointError) as caught:
            await catalog.load(STEP)
    assert caught.value.file == "extra"


async def test_part_and_manifest_agree_on_checksums(single: Made) -> None:
    """Two sound records of one data file that differ are damage, whichever of them is true."""
    part, shard = single.records()
    single.write([part, FileRecord(shard.name, "shard", shard.size, "f" * 16)])
    async with Catalog(single.folder.parent) as catalog:
        with pytest.raises(CorruptCheckpointError, match="agree") as caught:
            await catalog.load(STEP)
    assert caught.value.file == shard.name


async def test_verify_with_many_layouts(tmp_path: Path) -> None:
    """Verifying understands every name that our own files give to tensors."""
    odd = {
        "m": {"a/b": torch.ones(1), "a": {"b": torch.ones(2)}, "a.b": torch.ones(3), "": torch.ones(4)},
        "__metadata__": torch.ones(5),
        "it's'": torch.ones(6),
        "tensors": {"x": torch.ones(7), "e1": torch.empty(0), "e2": torch.empty(0)},
        7: {(1, "a"): torch.ones(8), "ü": torch.ones(9)},
        "c": torch.ones(3, dtype=torch.complex128),
    }
    make_checkpoint(tmp_path / "a", odd, 1)
    make_checkpoint(tmp_path / "b", odd, 1, layout=PerItem(shard_bytes=16))
    make_checkpoint(tmp_path / "c", torch.ones(3), 1)
    make_checkpoint(tmp_path / "d", {"n": 1}, 1)
    for run, tensors in (("a", 12), ("b", 12), ("c", 1), ("d", 0)):
        async with Catalog(tmp_path / run) as catalog:
            assert (await catalog.verify()).tensors == tensors
