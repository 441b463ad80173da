"""Reads are planned so that every wanted byte comes once, verified, from few pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt._manifest import PIECE_BYTES, ShardRecord
from aiockpt._plan import plan_shards
from aiockpt._reads import MOST_BUFFERS, Run, check_extents, plan_reads, whole_shard
from aiockpt._table import TensorTable
from aiockpt.layouts.per_item import PerItem

BLOCK = 4 * PIECE_BYTES
SIZES = st.one_of(
    st.integers(0, 9), st.integers(0, 3 * PIECE_BYTES), st.just(PIECE_BYTES), st.just(BLOCK * 2)
)


def table_of(sizes: Sequence[int], shard_bytes: int = 3 * BLOCK) -> tuple[TensorTable, list[ShardRecord]]:
    """A planned table of byte tensors, and its shards."""
    table = TensorTable()
    for i, size in enumerate(sizes):
        table.add(i, f"m/t{i}", "uint8", (size,))
    plans = plan_shards(table, PerItem(shard_bytes=shard_bytes))
    return table, [ShardRecord(plan.name, len(plan.header), plan.nbytes, "", "") for plan in plans]


@st.composite
def wishes(draw: st.DrawFn) -> tuple[TensorTable, list[ShardRecord], set[int], set[int]]:
    """Tensors, their shards, the wanted rows, and those of them that are fresh."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=40))
    table, shards = table_of(sizes)
    rows = st.sets(st.sampled_from(range(len(sizes))))
    return table, shards, draw(rows), draw(rows)


def pieces_of(table: TensorTable, row: int) -> set[tuple[int, int]]:
    """The pieces that hold bytes of a row."""
    begin, end = table.begin[row], table.begin[row] + table.nbytes[row]
    return {(table.shard[row], i) for i in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)) if end > begin}


@given(wishes())
def test_every_wanted_byte_comes_once(
    wish: tuple[TensorTable, list[ShardRecord], set[int], set[int]],
) -> None:
    """The parts of all runs are exactly the wanted rows' bytes, at their place in the run."""
    table, shards, wanted, fresh = wish
    found: dict[int, int] = dict.fromkeys(wanted, 0)
    for run in plan_reads(table, shards, wanted, fresh, BLOCK):
        for row, first, nbytes, at in run.parts:
            assert first == found[row]
            assert run.shard == table.shard[row]
            assert run.offset + at == table.begin[row] + first
            assert at + nbytes <= run.nbytes
            found[row] += nbytes
    assert found == {row: table.nbytes[row] for row in wanted}


@given(wishes())
def test_only_whole_wanted_pieces_are_read(
    wish: tuple[TensorTable, list[ShardRecord], set[int], set[int]],
) -> None:
    """Runs are whole pieces, each read once, none of them without a wanted byte, none beyond a block."""
    table, shards, wanted, fresh = wish
    seen: list[tuple[int, int]] = []
    for run in plan_reads(table, shards, wanted, fresh, BLOCK):
        assert run.offset % PIECE_BYTES == 0
        assert 0 < run.nbytes <= BLOCK
        end = run.offset + run.nbytes
        assert end % PIECE_BYTES == 0 or end == shards[run.shard].nbytes
        seen += [(run.shard, index) for index in run.pieces()]
    assert len(seen) == len(set(seen))
    assert set(seen) == {piece for row in wanted for piece in pieces_of(table, row)}


@given(wishes())
def test_direct_reads_fill_fresh_memory_only(
    wish: tuple[TensorTable, list[ShardRecord], set[int], set[int]],
) -> None:
    """A direct run holds nothing but fresh rows, end to end; a piece with any other byte is staged."""
    table, shards, wanted, fresh = wish
    direct: set[tuple[int, int]] = set()
    for run in plan_reads(table, shards, wanted, fresh, BLOCK):
        if run.direct:
            direct |= {(run.shard, index) for index in run.pieces()}
            assert {row for row, *_ in run.parts} <= fresh
            sizes = [nbytes for _, _, nbytes, _ in run.parts]
            assert sum(sizes) == run.nbytes
            assert [at for *_, at in run.parts] == [sum(sizes[:i]) for i in range(len(sizes))]
    for row in set(range(len(table))) - (wanted & fresh):
        assert not direct & pieces_of(table, row)


def test_a_crowded_piece_is_staged() -> None:
    """A piece spread over very many tensors is not read into each of them by itself."""
    table, shards = table_of([PIECE_BYTES // 64] * 64)
    rows = range(64)
    assert [run.direct for run in plan_reads(table, shards, rows, set(rows), BLOCK)] == [False]
    table, shards = table_of([PIECE_BYTES // MOST_BUFFERS] * MOST_BUFFERS)
    rows = range(MOST_BUFFERS)
    assert [run.direct for run in plan_reads(table, shards, rows, set(rows), BLOCK)] == [True]


def test_a_part_of_a_tensor_is_one_entry() -> None:
    """Pieces of one tensor that are read together are one part, not one a piece."""
    table, shards = table_of([3 * PIECE_BYTES])
    (run,) = plan_reads(table, shards, [0], {0}, BLOCK)
    assert run.parts == [(0, 0, 3 * PIECE_BYTES, 0)]


@given(st.lists(SIZES, max_size=20))
def test_verifying_reads_everything(sizes: list[int]) -> None:
    """The runs for verifying are each shard from its first byte to its last."""
    _, shards = table_of(sizes)
    for number, record in enumerate(shards):
        at = 0
        runs: list[Run] = list(whole_shard(number, record, BLOCK))
        for run in runs:
            assert (run.shard, run.offset, run.direct) == (number, at, False)
            at += run.nbytes
        assert at == record.nbytes


@given(st.lists(SIZES, max_size=30))
def test_planned_extents_are_sound(sizes: list[int]) -> None:
    """What the planner makes has neither holes nor overlaps."""
    assert check_extents(*table_of(sizes)) is None


@pytest.mark.parametrize(
    ("begins", "row"),
    [([0, 0, 20], 1), ([0, 10, 19], 2), ([0, 11, 20], 1), ([1, 10, 20], 0), ([0, 10, 21], 2)],
)
def test_wrong_extents_are_found(begins: list[int], row: int) -> None:
    """Overlaps and holes are found, and by the row that has them."""
    table, shards = table_of([10, 10, 10])
    table.begin[:] = begins
    problem = check_extents(table, shards)
    assert problem is not None
    assert problem[0] == row


def test_bytes_of_no_tensor_are_found() -> None:
    """A shard longer than its tensors is damage: nobody would ever read its end."""
    table, shards = table_of([10, 10])
    shards[0] = ShardRecord(shards[0].name, shards[0].header, 21, "", "")
    problem = check_extents(table, shards)
    assert problem is not None
    assert "no tensor" in problem[1]
