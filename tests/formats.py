"""States and hostile files for the tests of conversions."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

MARK = "AIOCKPT_TEST_MARK"


class Payload:
    """Runs a command when a pickle of it is loaded by anybody careless."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def rich_state() -> dict[str, Any]:
    """What torch's own `weights_only=True` reads, odd tensors and ties included."""
    torch.manual_seed(3)
    big, other = torch.randn(300, 200), torch.randn(60, 90)
    return {
        "model": OrderedDict(
            weight=torch.nn.Parameter(torch.randn(7, 5)),
            bias=torch.nn.Parameter(torch.randn(5), requires_grad=False),
            tied=big,
            head=big,
        ),
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 5)}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "odd": {
            "transposed": other.t(),
            "slice": other[3:50, 5:77],
            "expanded": torch.ones(1).expand(5),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(7),
            "bool": torch.tensor([True, False]),
            "half": torch.randn(3).half(),
            "bf16": torch.randn(3).bfloat16(),
            "complex": torch.randn(3, dtype=torch.complex64),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        },
        "tensors": [torch.ones(2), {"inside": torch.zeros(2)}],
        "values": {"epoch": 3, "name": "ä\u2028", "none": None, "set": {1, 2}, "big": 1 << 200, "z": 2 + 1j},
    }


NEW_DTYPES = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")


def zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with these records."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return out.getvalue()


def torch_bytes(state: Any, *, legacy: bool = False) -> bytes:
    """What `torch.save` writes."""
    out = io.BytesIO()
    torch.save(state, out, _use_new_zipfile_serialization=not legacy)
    return out.getvalue()


def edited(archive: bytes, **records: bytes) -> bytes:
    """An archive of torch with some records replaced (`data_pkl` for data.pkl)."""
    names = {name.replace("_", ".", 1): data for name, data in records.items()}
    with zipfile.ZipFile(io.BytesIO(archive)) as old:
        found = {info.filename: old.read(info) for info in old.infolist()}
    root = next(iter(found)).partition("/")[0]
    return zipped(found | {f"{root}/{name}": data for name, data in names.items()})


def old_file(obj: bytes) -> bytes:
    """A file of the format before zip around one pickle."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    return b"".join(pickle.dumps(part, 2) for part in head) + obj + pickle.dumps([], 2)


def tensor_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with that header."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data
