"""A stretch of a tensor's bytes is read right, whatever its strides, pieces, and the memory there is."""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import aiockpt
from aiockpt.convert._leaf import Content, Piece, Room, row_major, view_of
from tests.formats import torch_bytes


class _Storage:
    """Bytes in memory that refuse what lies outside of them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.bytes = bytes(view_of(tensor))
        self.nbytes = len(self.bytes)
        self.most = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        assert 0 <= offset <= offset + len(view) <= self.nbytes
        self.most = max(self.most, len(view))
        view[:] = self.bytes[offset : offset + len(view)]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of some memory: permuted, cut, stepped, expanded."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.int32, torch.float64, torch.complex128]))
    numel = torch.Size(shape).numel()
    tensor = torch.arange(numel).to(dtype).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(tensor.shape):
        start = draw(st.integers(0, size - 1))
        step = draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    return tensor.expand(draw(st.integers(1, 3)), *tensor.shape) if draw(st.booleans()) else tensor


def _content(tensor: torch.Tensor, pieces: list[Piece]) -> Content:
    return Content(tensor.dtype, tuple(tensor.shape), pieces)


def _read(content: Content, step: int, room: int) -> bytes:
    data = b""
    for first in range(0, content.nbytes, step):
        out = torch.empty(min(step, content.nbytes - first), dtype=torch.uint8)
        content.read(first, out, Room(room))
        data += bytes(view_of(out))
    return data


def _logical(tensor: torch.Tensor) -> bytes:
    return bytes(view_of(tensor.contiguous()))


@given(views(), st.integers(1, 40), st.integers(1, 40))
def test_any_view_is_read_in_any_steps(tensor: torch.Tensor, step: int, room: int) -> None:
    """The bytes are those of the contiguous tensor, and no read takes more memory than there is."""
    item = tensor.element_size()
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    storage = _Storage(whole)
    begin = int(tensor.storage_offset()) * item
    content = _content(
        tensor, [Piece((0,) * tensor.dim(), tuple(tensor.shape), tensor.stride(), begin, storage)]
    )
    assert _read(content, step * item, room * item) == _logical(tensor)
    assert storage.most <= max(room, step) * item
    again = _content(tensor.contiguous(), [_whole(tensor.contiguous())])
    assert _read(again, 7 * item, item) == _logical(tensor)
    assert again.digest == content.digest != ""


def _whole(tensor: torch.Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece((0,) * len(shape), shape, row_major(shape), 0, _Storage(tensor))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
def test_pieces_are_put_together(shape: list[int], data: st.DataObject) -> None:
    """A tensor cut along every dimension, each box stored by itself, some the other way round."""
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    boxes: list[tuple[tuple[int, ...], torch.Tensor]] = [((0,) * len(shape), tensor)]
    for dim in range(len(shape)):
        cut = []
        for offsets, box in boxes:
            at = data.draw(st.integers(0, box.shape[dim]))
            low, high = box.narrow(dim, 0, at), box.narrow(dim, at, box.shape[dim] - at)
            moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
            cut += [(offsets, low), (moved, high)]
        boxes = cut
    pieces = []
    for offsets, box in boxes:
        turned = data.draw(st.booleans())
        kept = box.mT.contiguous().mT if turned and box.dim() > 1 else box.contiguous()
        flat = torch.empty(0, dtype=kept.dtype).set_(kept.untyped_storage())
        if kept is box or flat.numel() != kept.numel():
            kept = box.clone(memory_format=torch.contiguous_format)
            flat = kept.reshape(-1)
        pieces.append(Piece(offsets, tuple(box.shape), kept.stride(), 0, _Storage(flat)))
    assert _read(_content(tensor, pieces), 4 * data.draw(st.integers(1, 30)), 4 * 5) == _logical(tensor)


# ---------------------------------------------------------------- metadata of other versions


@pytest.mark.parametrize("python", ["pathlib", "pathlib._local"])
async def test_metadata_of_other_versions(tmp_path: Path, python: str) -> None:
    """No planner data, no version, no storage meta; the path of another Python, which stays text."""
    item = torch_bytes(torch.arange(6).reshape(2, 3))
    box = meta.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    entry = meta.TensorStorageMetadata(meta.TensorProperties(torch.int64), torch.Size([2, 3]), [box])
    place = {meta.MetadataIndex("a.w", box.offsets): _StorageInfo("__0_0.distcp", 0, len(item))}
    whole = meta.Metadata({"a.w": entry}, storage_data=place)
    new = meta.StorageMeta(checkpoint_id=pathlib.PurePosixPath("/home/x"), save_id="s")
    for number, storage_meta in enumerate((None, new)):
        whole.storage_meta = storage_meta
        vars(whole).pop("version", None)
        data = pickle.dumps(whole, 2).replace(b"cpathlib\n", f"c{python}\n".encode())
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ".metadata").write_bytes(data)
        (folder / "__0_0.distcp").write_bytes(item)
        await aiockpt.convert(folder, tmp_path / f"{number}.pt", to="torch")
        loaded = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert list(loaded) == ["a.w"]
        assert torch.equal(loaded["a.w"], torch.arange(6).reshape(2, 3))


class OldEnums(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 does: `getattr` of the class and a name."""

    enum: Any = _MEM_FORMAT_ENCODING

    def reducer_override(self, value: Any) -> Any:
        is_enum = isinstance(value, _MEM_FORMAT_ENCODING)
        return (getattr, (self.enum, value.name)) if is_enum else NotImplemented


def _metadata(pickler: type[OldEnums], item: bytes) -> bytes:
    box = meta.ChunkStorageMetadata(torch.Size([0]), torch.Size([6]))
    entry = meta.TensorStorageMetadata(meta.TensorProperties(torch.int64), torch.Size([6]), [box])
    place = {meta.MetadataIndex("w", box.offsets): _StorageInfo("__0_0.distcp", 0, len(item))}
    file = io.BytesIO()
    pickler(file).dump(meta.Metadata({"w": entry}, storage_data=place))
    return file.getvalue()


async def test_metadata_written_by_the_first_releases_of_python_3_11(tmp_path: Path) -> None:
    """They name `getattr`, which is read for members of a known enum, without looking anything up."""
    item = torch_bytes(torch.arange(6))
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(_metadata(OldEnums, item))
    (folder / "__0_0.distcp").write_bytes(item)
    await aiockpt.convert(folder, tmp_path / "w.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "w.pt", weights_only=True)["w"], torch.arange(6))


async def test_getattr_of_anything_else_is_refused(tmp_path: Path) -> None:
    """It is the first step of many a hostile pickle."""

    class Hostile(OldEnums):
        enum = torch.Size

    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(_metadata(Hostile, b""))
    with pytest.raises(aiockpt.UnsafeFileError, match="nothing of it was run"):
        await aiockpt.convert(folder, tmp_path / "w.pt", to="torch")
