"""Tensors in chunks, checkpoints in parts: whole when read, refused when a hole or an overlap is left."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt import CheckpointWriter, ChunkSpec, CorruptCheckpointError, SaveError, TensorSpec, UsageError
from aiockpt._chunks import MOST_CUTS, Box, cover_problem, slices
from aiockpt._manifest import PIECE_BYTES, TensorPage, decode_page, encode_page
from aiockpt._names import new_save_id
from aiockpt._reads import box_spans
from aiockpt.checkpoint import Checkpoint
from aiockpt.storage import open_store

# ---------------------------------------------------------------- coverage, pure


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that cover it exactly once, cut at random."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[d]))
        for begin, n in ((0, at), (at, sizes[d] - at)):
            boxes.append(
                (
                    (*offsets[:d], offsets[d] + begin, *offsets[d + 1 :]),
                    (*sizes[:d], n, *sizes[d + 1 :]),
                )
            )
    return shape, boxes


def covered_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """By counting."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[slices(box)] += 1
    return bool((count == 1).all())


@given(tilings(), st.data())
def test_coverage_is_what_counting_says(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    """A tiling is taken; with a box lost, doubled or moved it is judged as counting every element does."""
    shape, boxes = tiling
    assert cover_problem(shape, boxes) is None
    i = data.draw(st.integers(0, len(boxes) - 1))
    _, sizes = boxes[i]
    moved = tuple(data.draw(st.integers(0, n - s)) for n, s in zip(shape, sizes, strict=True))
    for changed in (
        boxes[:i] + boxes[i + 1 :],
        [*boxes, boxes[i]],
        [*boxes[:i], (moved, sizes), *boxes[i + 1 :]],
    ):
        assert (cover_problem(shape, changed) is None) is covered_once(shape, changed)


def test_chunks_that_lie_outside_or_are_too_odd_are_refused() -> None:
    """Numbers are checked before they are used, and no number of dimensions makes the check slow."""
    assert "does not lie in" in str(cover_problem((4,), [((1,), (4,))]))
    assert "does not lie in" in str(cover_problem((4,), [((-1,), (5,))]))
    assert "does not lie in" in str(cover_problem((4,), [((0, 0), (4, 1))]))
    many = (2,) * (MOST_CUTS + 30)
    assert "dimensions" in str(cover_problem(many, [((0,) * len(many), (1,) * len(many))]))


@given(st.data())
def test_spans_hold_every_byte_of_a_box(data: st.DataObject) -> None:
    """Every wanted byte is in just one span, and no gap that is read along is longer than a piece."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    big = data.draw(st.sampled_from([1, PIECE_BYTES // 2, PIECE_BYTES]))
    offsets = [data.draw(st.integers(0, n - 1)) for n in shape]
    sizes = [data.draw(st.integers(1, n - at)) for n, at in zip(shape, offsets, strict=True)]
    spans = list(box_spans(3, shape, offsets, sizes, big))
    bytes_read = [first for _, first, _ in spans]
    assert bytes_read == sorted(set(bytes_read))
    for (_, first, n), (_, after, _) in itertools.pairwise(spans):
        assert first + n <= after
    for index in itertools.product(*(range(a, a + n) for a, n in zip(offsets, sizes, strict=True))):
        flat = 0
        for i, n in zip(index, shape, strict=True):
            flat = flat * n + i
        holding = [s for s in spans if s[1] <= flat * big and (flat + 1) * big <= s[1] + s[2]]
        assert len(holding) == 1


# ---------------------------------------------------------------- several ranks, one checkpoint

WEIGHT = torch.arange(6 * 5, dtype=torch.float32).reshape(6, 5)
HALVES: list[list[Box]] = [[((0, 0), (6, 2))], [((0, 2), (4, 3)), ((4, 2), (2, 3))]]


async def write(run: Path, halves: list[list[Box]] = HALVES) -> Checkpoint:
    """Two ranks write one tensor in chunks, one tensor each, and values."""
    save_id = new_save_id()
    parts = []
    writers = []
    for rank, boxes in enumerate(halves):
        writer = CheckpointWriter(run, step=1, save_id=save_id, rank=rank, world=len(halves))
        chunks = [ChunkSpec("model/weight", torch.float32, (6, 5), *box) for box in boxes]
        own = TensorSpec(f"model/own{rank}", torch.int64, (2,))
        await writer.plan([*chunks, own], resolve, values={"n": 1, f"of{rank}": rank})
        parts.append(await writer.write())
        writers.append(writer)
    try:
        return await writers[0].finish(parts)
    finally:
        await writers[1].abort()


def resolve(item: Any) -> torch.Tensor:
    """The bytes of an item."""
    if isinstance(item, ChunkSpec):
        piece = WEIGHT[slices((item.offsets, item.sizes))]
        return piece if tuple(piece.shape) == item.sizes else torch.zeros(item.sizes)
    return torch.full(item.shape, int(item.path[-1]), dtype=item.dtype)


async def test_chunks_of_two_ranks_are_one_tensor(tmp_path: Path) -> None:
    """Whole when loaded as new, in place, on its own and by column; every byte verifies."""
    checkpoint = await write(tmp_path)
    assert checkpoint.items == ("model",)
    state: Any = await aiockpt.load(tmp_path)
    assert state["n"] == 1
    assert (state["of0"], state["of1"]) == (0, 1)
    assert torch.equal(state["model"]["weight"], WEIGHT)
    assert torch.equal(state["model"]["own1"], torch.tensor([1, 1]))
    for target in (torch.zeros(6, 5), torch.zeros(5, 6).t(), torch.zeros(6, 10)[:, ::2]):
        await aiockpt.load(tmp_path, into={"model": {"weight": target}}, strict=False, atomic=True)
        assert torch.equal(target, WEIGHT)
    part: Any = await aiockpt.load(tmp_path, paths=["model/weight"])
    assert torch.equal(part["model"]["weight"], WEIGHT)
    async with aiockpt.Catalog(tmp_path) as catalog:
        report = await catalog.verify(checkpoint)
        assert report.tensors == 3
    manifest = await aiockpt.CheckpointReader(open_store(tmp_path), checkpoint.name, step=1).manifest()
    assert [(item.name, item.tensors, item.nbytes) for item in manifest.items] == [("model", 3, 152)]


@pytest.mark.parametrize(
    ("halves", "why"),
    [
        ([HALVES[0], [((0, 2), (4, 3))]], "leave a hole"),
        ([HALVES[0], [*HALVES[1], ((5, 4), (1, 1))]], "overlap"),
        ([[((0, 0), (6, 2))], [((0, 2), (6, 2)), ((0, 3), (6, 1))]], "a hole and overlap"),
        ([HALVES[0], [((0, 3), (6, 3))]], "does not lie in"),
    ],
)
async def test_a_hole_or_an_overlap_is_never_committed(
    halves: list[list[Box]], why: str, tmp_path: Path
) -> None:
    """The commit is refused and names the tensor; nothing is visible."""
    with pytest.raises(SaveError, match=why) as error:
        await write(tmp_path, halves)
    assert error.value.path == "model/weight"
    assert not [p for p in tmp_path.iterdir() if "step" in p.name]


async def test_ranks_may_write_in_any_order_into_an_attempt_that_is_there(tmp_path: Path) -> None:
    """With `attempt=` nobody waits for rank 0: it was begun before all of them."""
    store, save_id = open_store(tmp_path), new_save_id()
    await store.prepare()
    begun = await store.begin("step-00000001", save_id)
    parts = []
    for rank, attempt in ((1, await store.attach("step-00000001", save_id)), (0, begun)):
        writer = CheckpointWriter(store, step=1, save_id=save_id, rank=rank, world=2, attempt=attempt)
        chunks = [ChunkSpec("model/weight", torch.float32, (6, 5), *box) for box in HALVES[rank]]
        await writer.plan(chunks, resolve)
        parts.append(await writer.write())
    await writer.finish(parts)
    state: Any = await aiockpt.load(tmp_path)
    assert torch.equal(state["model"]["weight"], WEIGHT)


async def test_a_tensor_of_two_ranks_is_refused(tmp_path: Path) -> None:
    """A whole tensor that two ranks hold would be one too many."""
    save_id = new_save_id()
    writers = [CheckpointWriter(tmp_path, step=1, save_id=save_id, rank=r, world=2) for r in (0, 1)]
    parts = []
    for writer in writers:
        await writer.plan_state({"w": torch.ones(3)})
        parts.append(await writer.write())
    with pytest.raises(SaveError, match="w whole: its 2 chunks overlap"):
        await writers[0].finish(parts)
    await writers[1].abort()


async def test_parts_that_do_not_make_a_whole_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader does not trust the writer: coverage is checked again."""
    monkeypatch.setattr("aiockpt._commit.share_problem", lambda shares: None)
    await write(tmp_path / "hole", [HALVES[0], [((0, 2), (4, 3))]])
    with pytest.raises(CorruptCheckpointError, match="leave a hole") as error:
        await aiockpt.load(tmp_path / "hole")
    assert error.value.path == "model/weight"


async def test_ranks_that_disagree_on_a_value_are_damage(tmp_path: Path) -> None:
    """The same value twice is one; two values of one path are none."""
    save_id = new_save_id()
    writers = [CheckpointWriter(tmp_path, step=1, save_id=save_id, rank=r, world=2) for r in (0, 1)]
    parts = []
    for rank, writer in enumerate(writers):
        await writer.plan_state({"n": rank})
        parts.append(await writer.write())
    await writers[0].finish(parts)
    await writers[1].abort()
    with pytest.raises(CorruptCheckpointError, match="different values"):
        await aiockpt.load(tmp_path)


async def test_a_lost_part_is_damage(tmp_path: Path) -> None:
    """Without the file of one rank there is no checkpoint."""
    await write(tmp_path)
    (tmp_path / "step-00000001" / "part-00001.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="part-00001"):
        await aiockpt.load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk": [2]},
        {"chunk": [0, 0]},
        {"chunk": [-1]},
        {"whole": [4, 4]},
        {"offsets": [-1]},
        {"offsets": []},
    ],
)
def test_a_page_with_bad_chunks_is_damage(changes: dict[str, list[int]]) -> None:
    """Columns of chunks are checked like all others."""
    page = TensorPage(
        [0, 1], ["a", "b"], [0, 0], [1, 0], [2], [0, 0], [0, 0], [0, 8], [-1, -1], [0], [4], [0]
    )
    decode_page(encode_page(page), TensorPage, file="part")
    with pytest.raises(CorruptCheckpointError):
        decode_page(encode_page(msgspec.structs.replace(page, **changes)), TensorPage, file="part")


def test_a_chunk_is_checked_when_it_is_made() -> None:
    """Offsets and sizes must fit the shape."""
    with pytest.raises(UsageError, match="offsets"):
        ChunkSpec("w", torch.float32, (4, 4), (0,), (4, 4))
