"""Hostile and damaged foreign files: a typed error, nothing run, nothing written."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import sys
import types
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import _StorageInfo

import aiockpt
from aiockpt import ForeignFormatError, UnsafeFileError
from tests.formats import Payload, edited, old_file, tensor_file, torch_bytes, zipped

quiet_dcp = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*no_dist")


async def refused(
    source: Path, kind: type[aiockpt.CheckpointError], match: str, *, mark: Path | None = None
) -> aiockpt.CheckpointError:
    """Convert it to everything: each time that error, and nothing is left or made."""
    before = sorted(os.listdir(source.parent))
    error: aiockpt.CheckpointError | None = None
    for to in ("aiockpt", "torch"):
        with pytest.raises(kind, match=match) as caught:
            await aiockpt.convert(source, source.parent / "out", to=to)
        error = caught.value
        assert type(error) is kind
    assert sorted(os.listdir(source.parent)) == before
    assert mark is None or not mark.exists()
    assert error is not None
    return error


# ---------------------------------------------------------------- code in pickles

GETATTR = b"\x80\x02cbuiltins\ngetattr\n"
CODE: dict[str, bytes] = {
    "reduce": b"cos\nsystem\n(Vtrue\ntR.",
    "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "inst": b"(Vtrue\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nVtrue\no.",
    "newobj_ex": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93)}\x92.",
    "extension": b"\x80\x02\x82\x01.",
    "getattr": GETATTR + b"(cos\nsystem\nVx\ntR.",
    "eval": b"cbuiltins\neval\n(V1\ntR.",
    "import": b"cimportlib\nimport_module\n(Vantigravity\ntR.",
    "attribute of torch": b"ctorch\nload\n(Vx\ntR.",
    "hub": b"ctorch.hub\nload\n(Vx\ntR.",
    "build on a name": b"ccollections\nOrderedDict\n}Vmove_to_end\nI1\nsb.",
    "build on a dict": b"}}V__class__\nI1\nsb.",
    "module attribute": b"\x80\x04\x8c\x0bcollections\x8c\x11abc.sys.modules.x\x93.",
    "persistent": b"Pstorage\n.",
    "call of a call": b"(I1\nI2\nt(I3\ntR.",
}


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("where", ["zip", "legacy", "metadata", "value of DCP"])
async def test_a_pickle_that_is_more_than_data_is_refused(tmp_path: Path, name: str, where: str) -> None:
    """In each place that holds a pickle: refused by name before anything came of it."""
    code = CODE[name]
    if where == "zip":
        (tmp_path / "w.pt").write_bytes(edited(torch_bytes({}), data_pkl=code))
        source = tmp_path / "w.pt"
    elif where == "legacy":
        (tmp_path / "w.pt").write_bytes(old_file(code))
        source = tmp_path / "w.pt"
    elif where == "metadata":
        source = _folder(tmp_path, code)
    else:
        item = edited(torch_bytes({}), data_pkl=code)
        whole = meta.Metadata({"v": meta.BytesStorageMetadata()})
        whole.storage_data = {meta.MetadataIndex("v"): _StorageInfo("a.distcp", 0, len(item))}
        source = _folder(tmp_path, pickle.dumps(whole), item)
    await refused(source, UnsafeFileError, "nothing of it was run")


@pytest.mark.parametrize("legacy", [False, True])
async def test_a_payload_never_runs(tmp_path: Path, legacy: bool) -> None:
    """The classic: an object whose unpickling runs a command, saved by torch itself."""
    mark = tmp_path / "ran"
    (tmp_path / "w.pt").write_bytes(torch_bytes({"w": torch.ones(2), "x": Payload(mark)}, legacy=legacy))
    error = await refused(tmp_path / "w.pt", UnsafeFileError, r"posix\.system|os\.system", mark=mark)
    assert error.file == str(tmp_path / "w.pt")


@quiet_dcp
async def test_a_payload_in_a_folder_of_dcp_never_runs(tmp_path: Path) -> None:
    """In `.metadata`, and in a value that stock `dcp.load` would unpickle."""
    mark = tmp_path / "ran"
    state_dict_saver.save(
        {"x": Payload(mark), "w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    await refused(tmp_path / "dcp", UnsafeFileError, "system", mark=mark)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    await refused(tmp_path / "dcp", UnsafeFileError, "system", mark=mark)


async def test_torchscript_holds_code(tmp_path: Path) -> None:
    """An archive of TorchScript is refused for what it is."""
    data = zipped({"a/data.pkl": b"}.", "a/constants.pkl": b").", "a/code/x.py": b"1", "a/version": b"3"})
    (tmp_path / "w.pt").write_bytes(data)
    await refused(tmp_path / "w.pt", UnsafeFileError, "TorchScript")


# ---------------------------------------------------------------- pickles of torch that lie

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI3\ntQ"
END = b"ccollections\nOrderedDict\n)RtR."

LIES: dict[str, tuple[bytes, str]] = {
    "outside": (TENSOR + b"I0\n(I4\nt(I1\ntI00\n" + END, "outside of its storage"),
    "offset": (TENSOR + b"I2\n(I2\nt(I1\ntI00\n" + END, "outside of its storage"),
    "negative": (TENSOR + b"I-1\n(I2\nt(I1\ntI00\n" + END, "before its storage"),
    "negative stride": (TENSOR + b"I2\n(I2\nt(I-1\ntI00\n" + END, "no sound shape"),
    "unfolds": (TENSOR + b"I0\n(I1099511627776\nt(I0\ntI00\n" + END, "far more bytes"),
    "dims": (TENSOR + b"I0\n(" + b"I1\n" * 65 + b"t(" + b"I1\n" * 65 + b"tI00\n" + END, "no sound shape"),
    "missing storage": (TENSOR.replace(b"V0", b"V7") + b"I0\n(I1\nt(I1\ntI00\n" + END, "missing"),
    "other size": (TENSOR.replace(b"I3", b"I4") + b"I0\n(I1\nt(I1\ntI00\n" + END, "not 16 bytes"),
    "storage elsewhere": (TENSOR.replace(b"V0", b"V../version") + b"I0\n(I1\nt(I1\ntI00\n" + END, "missing"),
    "conjugate": (
        TENSOR + b"I0\n(I2\nt(I1\ntI00\nccollections\nOrderedDict\n)R}Vconj\nI01\nstR.",
        "resolve and save",
    ),
    "sharing": (b"(lq\x00(lq\x01" + b"(h\x00h\x00h\x00lq\x00" * 60 + b".", "without end"),
    "contains itself": (b"]q\x00h\x00a.", "contains itself"),
    "deep": (b"]" * 3000 + b"a" * 2999 + b".", "contains itself"),
    "deep key": (b"}" + b")" + b"\x85" * 100_000 + b"Ns.", "key is too large"),
    "wide key": (b"})" + b"2\x86" * 100 + b"Ns.", "key is too large"),
    "list as key": (b"}]Ns.", "unhashable"),
    "not a pickle": (b"hello", "not a pickle"),
    "cut": (b"}(V", "not a pickle"),
    "empty": (b"", "not a pickle"),
    "long string": (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "not a pickle"),
    "stack": (b"0.", "not a pickle"),
    "memo": (b"h\x05.", "not a pickle"),
    "mark left": (b"(.", "not a pickle"),
    "copies": (
        b"]q\x00("
        + b"I1\n" * 20_000
        + b"eccollections\nOrderedDict\nq\x01"
        + b"h\x01(h\x00tR0" * 1000
        + b".",
        "not a pickle|unfolds",
    ),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_pickle_that_lies_is_damage(tmp_path: Path, name: str) -> None:
    """Numbers that do not fit, endless values, and what is no pickle at all."""
    code, match = LIES[name]
    (tmp_path / "w.pt").write_bytes(edited(torch_bytes({"w": torch.ones(3)}), data_pkl=code))
    await refused(tmp_path / "w.pt", ForeignFormatError, match)


# ---------------------------------------------------------------- archives


def _bomb() -> bytes:
    return zipped({"a/data.pkl": b"}.", "a/data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)


def _doubled() -> bytes:
    return zipped({"a/data.pkl": b"}.", "a/data.pkk": b"]."}).replace(b"data.pkk", b"data.pkl")


def _overlapping() -> bytes:
    """Two entries of the directory point at one record."""
    data = bytearray(zipped({"a/data.pkl": b"}.", "a/data/0": b"0123", "a/data/1": b"0123"}))
    entry = data.rindex(b"PK\1\2")
    data[entry + 42 : entry + 46] = struct.pack("<I", data.index(b"PK\3\4", 1))
    return bytes(data)


def _changed(at: int, value: bytes) -> bytes:
    """The first entry of the directory with some bytes replaced."""
    data = bytearray(zipped({"a/data.pkl": b"}.", "a/byteorder": b"little"}))
    entry = data.index(b"PK\1\2")
    data[entry + at : entry + at + len(value)] = value
    return bytes(data)


def _flipped() -> bytes:
    data = bytearray(torch_bytes({"w": torch.full((500,), 1.5)}))
    data[data.index(struct.pack("<f", 1.5) * 400) + 30] ^= 1
    return bytes(data)


ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "compressed": (_bomb, "compressed"),
    "a name twice": (_doubled, "two have it"),
    "overlap": (_overlapping, "overlap"),
    "traversal": (lambda: zipped({"a/data.pkl": b"}.", "a/../../x": b""}), "has the name"),
    "absolute": (lambda: zipped({"/a/data.pkl": b"}."}), "has the name"),
    "two roots": (lambda: zipped({"a/data.pkl": b"}.", "b/x": b""}), "one folder"),
    "nothing": (lambda: zipped({"a/x": b"}."}), "no data.pkl"),
    "size": (lambda: _changed(24, b"\xff\xff\xff\x7f"), "overlap|disagree"),
    "both sizes": (lambda: _changed(20, b"\xff\xff\xff\x7f" * 2), "overlap"),
    "offset": (lambda: _changed(42, b"\xff\xff\xff\x7f"), "overlap|outside"),
    "encrypted": (lambda: _changed(8, b"\1\0"), "encrypted"),
    "cut": (lambda: torch_bytes({"w": torch.ones(99)})[:-10], "not a whole zip"),
    "behind": (lambda: torch_bytes({}) + b"x", "not a whole zip"),
    "before": (lambda: b"PK\3\4" + torch_bytes({}), "directory"),
    "flipped": (_flipped, "CRC"),
    "big endian": (lambda: edited(torch_bytes({}), byteorder=b"big"), "little-endian"),
    "only a begin": (lambda: b"PK\3\4", "not a whole zip"),
}


@pytest.mark.parametrize("name", ARCHIVES)
async def test_an_archive_that_torch_does_not_write_is_damage(tmp_path: Path, name: str) -> None:
    """Bombs, overlaps, names that lead elsewhere, sizes that lie, flipped bits."""
    make, match = ARCHIVES[name]
    (tmp_path / "w.pt").write_bytes(make())
    await refused(tmp_path / "w.pt", ForeignFormatError, match)


async def test_damage_in_the_old_format_is_noticed(tmp_path: Path) -> None:
    """Cut, prolonged, and with a size that lies."""
    good = torch_bytes({"w": torch.ones(50)}, legacy=True)
    for data in (good[:-1], good + b"x", good[:-208] + struct.pack("<Q", 49) + good[-200:], good[:60]):
        (tmp_path / "w.pt").write_bytes(data)
        with pytest.raises(ForeignFormatError):
            await aiockpt.convert(tmp_path / "w.pt", tmp_path / "out", to="torch")


# ---------------------------------------------------------------- folders of DCP


def _folder(tmp_path: Path, metadata: bytes, data: bytes = b"") -> Path:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(metadata)
    (folder / "a.distcp").write_bytes(data)
    return folder


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
    "short": ({"length": 20}, ForeignFormatError, "not a whole zip"),
}


@pytest.mark.parametrize("name", FOLDERS)
async def test_a_place_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """Paths out of the folder, bytes beyond a file, transforms that are not known."""
    info, kind, match = FOLDERS[name]
    (tmp_path / "secret").write_bytes(b"secret")
    metadata, data = _described([((0, 0), (4, 3))], (4, 3), **info)
    folder = _folder(tmp_path, metadata, data)
    (folder / "link").symlink_to(tmp_path / "secret")
    await refused(folder, kind, match)


CHUNKS: dict[str, tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], str]] = {
    "hole": ([((0, 0), (2, 3)), ((3, 0), (1, 3))], "hole"),
    "overlap": ([((0, 0), (3, 3)), ((2, 0), (2, 3))], "hole, or overlap"),
    "hole and overlap": ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
    "outside": ([((0, 0), (5, 3))], "reaches out"),
    "dimensions": ([((0,), (12,))], "dimensions"),
}


@pytest.mark.parametrize("name", CHUNKS)
async def test_chunks_must_cover_a_tensor_exactly(tmp_path: Path, name: str) -> None:
    """What stock `dcp.load` would fill with what was there before is damage here."""
    chunks, match = CHUNKS[name]
    await refused(_folder(tmp_path, *_described(chunks, (4, 3))), ForeignFormatError, match)


async def test_a_chunk_of_another_shape_is_damage(tmp_path: Path) -> None:
    """The archive holds another tensor than the metadata says."""
    metadata, _ = _described([((0, 0), (4, 3))], (4, 3))
    other = torch_bytes(torch.ones(3, 4))
    size = len(torch_bytes(torch.ones(4, 3)))
    assert len(other) == size
    await refused(_folder(tmp_path, metadata, other), ForeignFormatError, "not the tensor")


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
        folder = _folder(tmp_path / str(number), pickle.dumps(whole), item)
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
    folder = _folder(tmp_path, *_packed(zlib.compress(torch_bytes(tensor))))
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
        folder = _folder(tmp_path / name, *_packed(data, transform))
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
