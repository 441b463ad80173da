"""Hostile pickles and archives: a typed error, nothing run, nothing written."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import _StorageInfo

import aiockpt
from aiockpt import ForeignFormatError, UnsafeFileError
from tests.formats import Payload, edited, old_file, torch_bytes, zipped
from tests.refusal import dcp_folder, refused

quiet_dcp = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*no_dist")


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
        source = dcp_folder(tmp_path, code)
    else:
        item = edited(torch_bytes({}), data_pkl=code)
        whole = meta.Metadata({"v": meta.BytesStorageMetadata()})
        whole.storage_data = {meta.MetadataIndex("v"): _StorageInfo("a.distcp", 0, len(item))}
        source = dcp_folder(tmp_path, pickle.dumps(whole), item)
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

DEEP = b")" + b"\x85" * 300_000
WIDE = b")" + b"2\x86" * 100

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
    "deep member": (b"cbuiltins\nset\n]" + DEEP + b"a\x85R.", "key is too large"),
    "wide member": (b"cbuiltins\nset\n]" + WIDE + b"a\x85R.", "key is too large"),
    "deep pair": (b"ccollections\nOrderedDict\n]" + DEEP + b"N\x86a\x85R.", "key is too large"),
    "wide pair": (b"ccollections\nOrderedDict\n]" + WIDE + b"N\x86a\x85R.", "key is too large"),
    "endless bytes": (b"cbuiltins\nbytes\n" + WIDE + b"\x85R.", "no text"),
    "endless layout": (b"ctorch.serialization\n_get_layout\n" + WIDE + b"\x85R.", "layout a tuple"),
    "endless mark": (TENSOR + b"I0\n(I2\nt(I1\ntI00\n)" + WIDE + b"tR.", "marked a tuple"),
    "endless versions": (
        b"ccollections\nOrderedDict\n)R}V_metadata\n]q\x000" + b"(h\x00h\x00h\x00lq\x000" * 60 + b"h\x00sb.",
        "without end",
    ),
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
