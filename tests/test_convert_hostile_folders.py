"""Hostile and damaged folders, headers, transforms, and chance: a typed error, nothing written."""

from __future__ import annotations

import io
import json
import pickle
import random
import sys
import types
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.filesystem import _StorageInfo

import aiockpt
from aiockpt import ForeignFormatError, UnsafeFileError
from tests.formats import edited, tensor_file, torch_bytes
from tests.refusal import dcp_folder, refused

# ---------------------------------------------------------------- folders of DCP


def _described(
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], size: tuple[int, ...], **info: Any
) -> tuple[bytes, bytes]:
    """(metadata, data) of a folder with one tensor in these chunks."""
    data, stored, boxes = b"", {}, []
    for offsets, extent in chunks:
        item = torch_bytes(torch.ones(extent))
        box = meta.ChunkStorageMetadata(torch.Size(offsets), torch.Size(extent))
        facts: dict[str, Any] = {"relative_path": "a.distcp", "offset": len(data), "length": len(item)} | info
        stored[meta.MetadataIndex("w", box.offsets)] = _StorageInfo(**facts)
        boxes.append(box)
        data += item
    entry = meta.TensorStorageMetadata(meta.TensorProperties(torch.float32), torch.Size(size), boxes)
    return pickle.dumps(meta.Metadata({"w": entry}, storage_data=stored)), data


def _endless() -> object:
    """A value whose text, or hash, would not end."""
    value: object = ()
    for _ in range(100):
        value = (value, value)
    return value


FOLDERS: dict[str, tuple[dict[str, Any], type[aiockpt.CheckpointError], str]] = {
    "up": ({"relative_path": "../secret"}, UnsafeFileError, "leads out"),
    "absolute": ({"relative_path": "/etc/passwd"}, UnsafeFileError, "leads out"),
    "link": ({"relative_path": "link"}, UnsafeFileError, "links resolved"),
    "backslash": ({"relative_path": "..\\x"}, UnsafeFileError, "leads out"),
    "missing": ({"relative_path": "b.distcp"}, ForeignFormatError, "no such file"),
    "beyond": ({"offset": 1 << 40}, ForeignFormatError, "outside"),
    "long": ({"length": 1 << 40}, ForeignFormatError, "outside"),
    "negative": ({"offset": -1}, ForeignFormatError, "a place is none"),
    "text": ({"offset": "0"}, ForeignFormatError, "a place is none"),
    "transformed": ({"transform_descriptors": ["stream.zstd"]}, ForeignFormatError, "stream.zstd"),
    "endless transform": ({"transform_descriptors": [_endless()]}, ForeignFormatError, "transforms"),
    "one transform": ({"transform_descriptors": 7}, ForeignFormatError, "transforms"),
    "short": ({"length": 20}, ForeignFormatError, "not a whole zip"),
}


@pytest.mark.parametrize("name", FOLDERS)
async def test_a_place_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """Paths out of the folder, bytes beyond a file, transforms that are not known."""
    info, kind, match = FOLDERS[name]
    (tmp_path / "secret").write_bytes(b"secret")
    metadata, data = _described([((0, 0), (4, 3))], (4, 3), **info)
    folder = dcp_folder(tmp_path, metadata, data)
    (folder / "link").symlink_to(tmp_path / "secret")
    await refused(folder, kind, match)


CHUNKS: dict[str, tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], str]] = {
    "hole": ([((0, 0), (2, 3)), ((3, 0), (1, 3))], "hole"),
    "overlap": ([((0, 0), (3, 3)), ((2, 0), (2, 3))], "overlap"),
    "hole and overlap": ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
    "outside": ([((0, 0), (5, 3))], "reaches out"),
    "dimensions": ([((0,), (12,))], "dimensions"),
}


@pytest.mark.parametrize("name", CHUNKS)
async def test_chunks_must_cover_a_tensor_exactly(tmp_path: Path, name: str) -> None:
    """What stock `dcp.load` would fill with what was there before is damage here."""
    chunks, match = CHUNKS[name]
    await refused(dcp_folder(tmp_path, *_described(chunks, (4, 3))), ForeignFormatError, match)


@pytest.mark.parametrize("dtype", [_endless(), [], "float32"], ids=["endless", "list", "text"])
async def test_a_dtype_that_is_none_is_damage(tmp_path: Path, dtype: Any) -> None:
    """Whatever stands in its place is neither hashed nor put in words."""
    entry = meta.TensorStorageMetadata(meta.TensorProperties(torch.float32), torch.Size(()), [])
    entry.properties.dtype = dtype
    metadata = pickle.dumps(meta.Metadata({"w": entry}, storage_data={}))
    await refused(dcp_folder(tmp_path, metadata), ForeignFormatError, "a dtype that is not read")


async def test_a_chunk_of_another_shape_is_damage(tmp_path: Path) -> None:
    """The archive holds another tensor than the metadata says."""
    metadata, _ = _described([((0, 0), (4, 3))], (4, 3))
    other = torch_bytes(torch.ones(3, 4))
    size = len(torch_bytes(torch.ones(4, 3)))
    assert len(other) == size
    await refused(dcp_folder(tmp_path, metadata, other), ForeignFormatError, "not the tensor")


async def test_paths_of_names_are_checked(tmp_path: Path) -> None:
    """A list index that would take all memory, names under names, a path that is none."""
    entry = meta.BytesStorageMetadata()
    item = torch_bytes(3)
    for number, (paths, match) in enumerate(
        (
            ({"a": ("a", 1 << 60), "b": ("b",)}, "path of a name"),
            ({"a": ("x",), "b": ("x", "y")}, "lies under"),
            ({"a": ("x",)}, "no path"),
            ({"a": 3, "b": ("b",)}, "path of a name"),
        )
    ):
        whole = meta.Metadata({"a": entry, "b": entry}, planner_data=paths)
        info = _StorageInfo("a.distcp", 0, len(item))
        whole.storage_data = {meta.MetadataIndex("a"): info, meta.MetadataIndex("b"): info}
        (tmp_path / str(number)).mkdir()
        folder = dcp_folder(tmp_path / str(number), pickle.dumps(whole), item)
        with pytest.raises((ForeignFormatError, aiockpt.UsageError), match=match):
            await aiockpt.convert(folder, tmp_path / "out", to="torch")


# ---------------------------------------------------------------- safetensors

ONE = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
TENSORS: dict[str, tuple[bytes, str]] = {
    "long header": (tensor_file(ONE, bytes(8), 1 << 60), "header of"),
    "cut header": (tensor_file(ONE, b"", 1000), "header of"),
    "a key twice": (tensor_file(ONE[:-1] + b"," + ONE[1:], bytes(8)), "stands there twice"),
    "hole": (tensor_file(ONE.replace(b"[0,8]", b"[4,12]"), bytes(12)), "hole"),
    "behind": (tensor_file(ONE, bytes(9)), "no tensor"),
    "outside": (tensor_file(ONE, bytes(7)), "outside"),
    "overlap": (
        tensor_file(ONE[:-1] + b',"v":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', bytes(12)),
        "overlap",
    ),
    "shape": (tensor_file(ONE.replace(b"[2]", b"[3]"), bytes(8)), "do not fit"),
    "negative": (tensor_file(ONE.replace(b"[2]", b"[-2]"), bytes(8)), "damaged"),
    "dtype": (tensor_file(ONE.replace(b"F32", b"F13"), bytes(8)), "F13"),
    "not json": (tensor_file(b"{nonsense", bytes(8)), "JSON"),
    "deep": (tensor_file(b'{"w":' * 100_000, b""), "JSON"),
    "no object": (tensor_file(b'{"w":3}', b""), "damaged"),
    "metadata": (tensor_file(b'{"__metadata__":{"a":1}}', b""), "more than text"),
    "shards of DCP": (tensor_file(b'{"__metadata__":{"DCP_SHARDING_INFO":"{}"}}'), "consolidate"),
}


@pytest.mark.parametrize("name", TENSORS)
async def test_a_header_that_breaks_a_rule_is_damage(tmp_path: Path, name: str) -> None:
    """Oversized headers, keys that occur twice, bytes that overlap or belong to nobody."""
    data, match = TENSORS[name]
    (tmp_path / "w.safetensors").write_bytes(data)
    await refused(tmp_path / "w.safetensors", ForeignFormatError, match)


INDICES: dict[str, tuple[dict[str, Any], type[aiockpt.CheckpointError], str]] = {
    "up": ({"w": "../../etc/passwd"}, UnsafeFileError, "leads out"),
    "absolute": ({"w": "/etc/passwd"}, UnsafeFileError, "leads out"),
    "link": ({"w": "link.safetensors"}, UnsafeFileError, "links resolved"),
    "missing file": ({"w": "x.safetensors"}, ForeignFormatError, "no such file"),
    "missing tensor": ({"w": "a.safetensors", "v": "a.safetensors"}, ForeignFormatError, "lacks v"),
    "unlisted": ({}, ForeignFormatError, "weight_map|does not list"),
    "no text": ({"w": 3}, ForeignFormatError, "no weight_map"),
}


@pytest.mark.parametrize("name", INDICES)
async def test_an_index_is_not_believed(tmp_path: Path, name: str) -> None:
    """Files outside of the folder, tensors that are not where it says, or that it does not list."""
    listed, kind, match = INDICES[name]
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(tensor_file(ONE, bytes(8)))
    (tmp_path / "other.safetensors").write_bytes(tensor_file(ONE, bytes(8)))
    (folder / "link.safetensors").symlink_to(tmp_path / "other.safetensors")
    if name == "unlisted":
        both = ONE[:-1] + b',"v":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}'
        (folder / "a.safetensors").write_bytes(tensor_file(both, bytes(16)))
        listed = {"w": "a.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    await refused(folder, kind, match)


# ---------------------------------------------------------------- what is no source


async def test_what_is_of_no_known_format_is_said_so(tmp_path: Path) -> None:
    """Bare pickles, other files, empty folders, a save of DCP that did not finish."""
    (tmp_path / "a").write_bytes(pickle.dumps(OrderedDict(a=1)))
    (tmp_path / "b").write_bytes(b"hello")
    (tmp_path / "c").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "__0_0.distcp").write_bytes(b"")
    for name, match in (
        ("a", "bare pickle"),
        ("b", "no format"),
        ("c", "no format"),
        ("d", "did not finish"),
    ):
        with pytest.raises(ForeignFormatError, match=match):
            await aiockpt.convert(tmp_path / name, tmp_path / "out", to="torch")


# ---------------------------------------------------------------- transforms


class _Zstd(types.ModuleType):
    """Stands for the module zstandard: the same calls around another compression."""

    class ZstdError(Exception): ...

    class ZstdDecompressor:
        def __init__(self, max_window_size: int) -> None:
            assert 0 < max_window_size <= 8 << 20

        def stream_reader(self, source: io.RawIOBase) -> Any:
            return _Zstd.Reader(source)

    class Reader:
        def __init__(self, source: io.RawIOBase) -> None:
            self.source, self.state = source, zlib.decompressobj()

        def read(self, n: int) -> bytes:
            while not self.state.eof:
                try:
                    data = self.state.decompress(
                        self.state.unconsumed_tail or self.source.read(4096) or b"", n
                    )
                except zlib.error as error:
                    raise _Zstd.ZstdError("no stream") from error
                if data:
                    return data
            return b""


def _packed(data: bytes, transform: str = "stream.zstd/1") -> tuple[bytes, bytes]:
    """(metadata, data) of a folder with one compressed tensor of a million elements."""
    box = meta.ChunkStorageMetadata(torch.Size([0]), torch.Size([1 << 20]))
    entry = meta.TensorStorageMetadata(meta.TensorProperties(torch.uint8), torch.Size([1 << 20]), [box])
    info = _StorageInfo("a.distcp", 0, len(data), [transform])
    place = {meta.MetadataIndex("w", box.offsets): info}
    return pickle.dumps(meta.Metadata({"w": entry}, storage_data=place)), data


async def test_a_compressed_folder_is_read_where_its_module_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked to its size; without the module the error says what to install."""
    tensor = torch.arange(1 << 20).to(torch.uint8)
    folder = dcp_folder(tmp_path, *_packed(zlib.compress(torch_bytes(tensor))))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    await refused(folder, aiockpt.UsageError, "install zstandard")
    monkeypatch.setitem(sys.modules, "zstandard", _Zstd("zstandard"))
    await aiockpt.convert(folder, tmp_path / "w.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "w.pt", weights_only=True)["w"], tensor)


async def test_a_compressed_bomb_ends_at_the_size_of_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that unpacks to more, that is none, and a transform that nobody knows."""
    monkeypatch.setitem(sys.modules, "zstandard", _Zstd("zstandard"))
    for name, data, transform, match in (
        ("bomb", zlib.compress(bytes(64 << 20)), "stream.zstd/1", "unpacks to more"),
        ("damaged", b"hello" * 1000, "stream.zstd/1", "no stream"),
        ("version", b"hello" * 1000, "stream.zstd/2", "not known"),
        ("other", b"hello" * 1000, "stream.rot13/1", "rot13"),
    ):
        (tmp_path / name).mkdir()
        folder = dcp_folder(tmp_path / name, *_packed(data, transform))
        await refused(folder, ForeignFormatError, match)


# ---------------------------------------------------------------- chance

SMALL = {"a": torch.arange(5.0), "b": {"c": torch.ones(2, 2).t(), "e": [1, "x", None, (1, 2)]}, "s": {1, 2}}


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_bytes_become_is_an_error_of_ours(tmp_path: Path, seed: int) -> None:
    """Files with some bytes changed at random are read, or refused by one of two errors."""
    chance = random.Random(seed)
    good = torch_bytes(SMALL)
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        code = archive.read("archive/data.pkl")
    old = torch_bytes(SMALL, legacy=True)
    tensors = safetensors.torch.save({"a": torch.arange(5.0), "b": torch.ones(2, 2)})
    outcomes = set()
    for number in range(60):
        spoiled = [
            _spoiled(good, chance),
            edited(good, data_pkl=_spoiled(code, chance)),
            _spoiled(old, chance),
            _spoiled(tensors, chance),
        ][number % 4]
        source = tmp_path / ("w.safetensors" if number % 4 == 3 else "w.pt")
        source.write_bytes(spoiled)
        try:
            await aiockpt.convert(source, tmp_path / "out", to="safetensors", drop=True, overwrite=True)
            outcomes.add("read")
        except (ForeignFormatError, UnsafeFileError, aiockpt.UnsupportedStateError) as error:
            outcomes.add(type(error).__name__)
    assert "ForeignFormatError" in outcomes


def _spoiled(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few changes."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(found))
        kind = chance.randrange(4)
        if kind == 0:
            del found[at : at + chance.randint(1, 9)]
        elif kind == 1:
            found[at : at + 4] = chance.choice([b"\xff\xff\xff\xff", bytes(4), b"\xff\xff\xff\x7f"])
        else:
            found[at] = chance.randrange(256)
    return bytes(found)
