"""A store or disk that fails at any one operation: the old checkpoint or the new one, never neither.

Each test makes the n-th operation of one public call fail, for every n, one floor up
(the store) and one floor down (the disk), and looks at everything afterwards.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch

from aiockpt import (
    Catalog,
    CheckpointError,
    CommitUnknownError,
    CorruptCheckpointError,
    Saver,
    StepNotFoundError,
    Store,
)
from aiockpt.testing import Kind
from tests.bench import Bench, arm, attempt, check_error, failed_operation
from tests.proof import (
    assert_blocks_home,
    assert_exact,
    leftovers,
    number_in,
    poisoned,
    save,
    state_of,
    steps,
)

FLOORS = ("store-local", "store-memory", "files")
KINDS: tuple[Kind, ...] = ("error", "after", "tear", "full")
READ_KINDS: tuple[Kind, ...] = ("error", "after")
OLD, NEW = 1, 2

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.timeout(300)]


@pytest.fixture
def poison() -> Iterator[None]:
    """Blocks are poisoned while they lie in the pool."""
    with poisoned():
        yield


@asynccontextmanager
async def entered(store: Store) -> AsyncIterator[Saver]:
    """A saver whose failed saves are of no interest when it is left."""
    saver = Saver(store, on_failure="log")
    await saver.__aenter__()
    try:
        yield saver
    finally:
        with suppress(CheckpointError):
            await saver.aclose()


def lost_reply(kind: Kind, hit: str) -> bool:
    """Whether something was made of which the save never heard: for the next saver to sweep."""
    return kind == "after" and hit.startswith(("store.begin", "lock"))


Save = Callable[[Saver], Awaitable[object]]


async def sweep_saves(bench: Bench, kind: Kind, act: Save, *, step: int, code: int = errno.EIO) -> list[str]:
    """Fail the act at every operation; returns the operations hit whose act succeeded all the same."""
    harmless: list[str] = []
    for n in itertools.count():
        store, counter = bench.copy(kind, code)
        async with entered(store) as saver:
            arm(counter, n)
            error = await attempt(lambda: act(saver))
            with suppress(CheckpointError):
                await saver.drain()  # older generations are removed after the save has returned
            if not counter.fired:
                assert error is None
                assert n > 8
                return harmless
            hit = failed_operation(counter)
            counter.heal()
            code = counter.faults.errno
            check_error(error, code)
            if isinstance(error, CheckpointError):
                assert error.step == step
            else:
                harmless.append(hit)
            found = await saver.restore()
            assert found is not None
            number = number_in(found.values)
            assert number in (OLD, NEW)
            assert found.skipped == ()
            if not isinstance(error, CommitUnknownError):
                assert number == (NEW if error is None else OLD), hit
            assert_blocks_home()
            if error is not None and not lost_reply(kind, hit):
                assert leftovers(store) == [], f"{kind} at {hit} left something behind"
            # The next save works, on this saver and on the next, and leaves nothing.
            await saver.save(state_of(7), step=7)
        async with Saver(store) as again:
            assert leftovers(store) == [], hit
            found = await again.restore()
            assert found is not None
            assert number_in(found.values) == 7
        bench.drop(store)
    raise AssertionError


# ---------------------------------------------------------------- saving


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floor", FLOORS)
async def test_a_save_may_fail_at_any_operation(floor: str, kind: Kind, tmp_path: Path) -> None:
    """Old or new, bit by bit; nothing left behind; our error with the step; the next save works."""
    bench = Bench(floor, tmp_path)
    await bench.make_template(OLD)
    harmless = await sweep_saves(bench, kind, lambda saver: saver.save(state_of(NEW), step=NEW), step=NEW)
    # Once the rename is done and durable, a lock file that stays is no reason to fail.
    assert all(hit.startswith(("unlink", "rename")) for hit in harmless)


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EACCES])
async def test_other_answers_of_a_disk(code: int, tmp_path: Path) -> None:
    """Whatever the errno: it is kept, and the outcome is the same."""
    bench = Bench("files", tmp_path)
    await bench.make_template(OLD)
    await sweep_saves(bench, "error", lambda s: s.save(state_of(NEW), step=NEW), step=NEW, code=code)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["error", "after"])
@pytest.mark.parametrize("floor", FLOORS)
async def test_writing_a_step_anew_may_fail_at_any_operation(floor: str, kind: Kind, tmp_path: Path) -> None:
    """`overwrite=True`: the older generation is there until the newer one is."""
    bench = Bench(floor, tmp_path)
    await bench.make_template(OLD)
    await sweep_saves(bench, kind, lambda s: s.save(state_of(NEW), step=OLD, overwrite=True), step=OLD)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["error", "after"])
@pytest.mark.parametrize("floor", FLOORS)
async def test_going_back_may_fail_at_any_operation(floor: str, kind: Kind, tmp_path: Path) -> None:
    """`restore(step=, rewind=True)`: it is done, or it can be done again; the older step stays."""
    bench = Bench(floor, tmp_path)
    await bench.make_template(OLD, NEW)
    for n in itertools.count():
        store, counter = bench.copy(kind)
        async with entered(store) as saver:
            arm(counter, n)
            error = await attempt(lambda: saver.restore(step=OLD, rewind=True))
            if not counter.fired:
                assert error is None
                assert n > 8
                return
            hit = failed_operation(counter)
            counter.heal()
            check_error(error, errno.EIO)
            found = await saver.restore()
            assert found is not None
            assert number_in(found.values) == (OLD if error is None else found.step), hit
            again = await saver.restore(step=OLD, rewind=True)
            assert again is not None
            assert number_in(again.values) == OLD
            await saver.save(state_of(7), step=NEW)
        async with Saver(store) as last:
            # A lease that could not be removed holds until it expires.
            kept = ["leases"] if "delete leases/" in hit else []
            assert leftovers(store) in ([], kept), hit
            restored = await last.restore()
            assert restored is not None
            assert number_in(restored.values) == 7
        bench.drop(store)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["error", "after"])
async def test_going_back_never_brings_an_older_generation_up(kind: Kind, tmp_path: Path) -> None:
    """A step that was written anew, its older generation left by a crash: the older never shows again."""
    bench = Bench("files", tmp_path)
    await bench.make_template(OLD, 5)
    older = bench.template / "step-00000005"
    shutil.copytree(older, tmp_path / "kept")
    await save(bench.template, state_of(NEW), 5, overwrite=True)
    shutil.copytree(tmp_path / "kept", older)
    for n in itertools.count():
        store, counter = bench.copy(kind)
        async with entered(store) as saver:
            arm(counter, n)
            error = await attempt(lambda: saver.restore(step=OLD, rewind=True))
            fired = counter.fired
            counter.heal()
            check_error(error, errno.EIO)
            found = await saver.restore()
            assert found is not None
            number = number_in(found.values)
            assert number == OLD if error is None else number in (OLD, NEW)
        bench.drop(store)
        if not fired:
            assert n > 20
            return


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("existing", [True, False], ids=["run", "nothing"])
@pytest.mark.parametrize("floor", FLOORS)
async def test_entering_may_fail_at_any_operation(
    floor: str, existing: bool, kind: Kind, tmp_path: Path
) -> None:
    """A saver is entered or says why not; the next one works, and the run's id is one for ever."""
    bench = Bench(floor, tmp_path)
    if existing:
        await bench.make_template(OLD)
    for n in itertools.count():
        store, counter = bench.copy(kind)
        arm(counter, n)
        saver = Saver(store)
        error = await attempt(saver.__aenter__)
        fired = counter.fired
        counter.heal()
        check_error(error, counter.faults.errno)
        await saver.aclose()
        async with Saver(store) as again:
            assert error is not None or again.run_id == saver.run_id
            assert leftovers(store) == []
            if existing:
                found = await again.restore()
                assert found is not None
                assert number_in(found.values) == OLD
            await again.save(state_of(NEW), step=NEW)
        bench.drop(store)
        if not fired:
            assert error is None
            assert n >= 4
            return


# ---------------------------------------------------------------- reading


async def load(catalog: Catalog) -> int:
    """Load the newest."""
    return number_in(await catalog.load())


async def load_into(catalog: Catalog) -> int:
    """Fill living objects with the newest, all or nothing."""
    into = {"model": {"w": torch.zeros(40, 30), "half": torch.zeros(7, dtype=torch.bfloat16)}}
    found = await catalog.load(into=into, atomic=True)
    assert_exact(into["model"], state_of(found.step)["model"])
    return found.step


async def latest(catalog: Catalog) -> int | None:
    """Ask for the newest."""
    found = await catalog.latest("full")
    return None if found is None else found.step


async def verify(catalog: Catalog) -> int:
    """Check the newest."""
    return (await catalog.verify()).step


async def list_steps(catalog: Catalog) -> int:
    """List all."""
    return (await catalog.steps())[-1]


@pytest.mark.parametrize("act", [load, load_into, latest, verify, list_steps])
@pytest.mark.parametrize("kind", READ_KINDS)
@pytest.mark.parametrize("floor", FLOORS)
async def test_reading_may_fail_at_any_operation(
    floor: str, kind: Kind, act: Callable[[Catalog], Awaitable[int | None]], tmp_path: Path
) -> None:
    """The newest, or our error: never an older one, none, or a part; and the next try works."""
    bench = Bench(floor, tmp_path)
    await bench.make_template(OLD, NEW)
    store, counter = bench.copy(kind)
    for n in itertools.count():
        counter.faults.fired = False
        async with Catalog(store) as catalog:
            arm(counter, n)
            found: list[int | None] = []

            async def go(catalog: Catalog = catalog, found: list[int | None] = found) -> None:
                found.append(await act(catalog))

            error = await attempt(go)
            fired = counter.fired
            counter.heal()
            check_error(error, errno.EIO)
            assert not isinstance(error, CorruptCheckpointError | StepNotFoundError)
            assert found == ([] if error else [NEW])
            assert_blocks_home()
            if fired and error is not None:
                assert await act(catalog) == NEW
        if not fired:
            assert n >= 3
            return


async def test_restoring_through_a_saver_may_fail_at_any_operation(tmp_path: Path) -> None:
    """`Saver.restore(into)`: whole, or our error; the saver goes on."""
    bench = Bench("files", tmp_path)
    await bench.make_template(OLD)
    store, counter = bench.copy()
    async with entered(store) as saver:
        for n in itertools.count():
            counter.faults.fired = False
            moments = torch.zeros(9_000, dtype=torch.int64)
            into = {"optim": {"m": moments, "step": 0}}
            arm(counter, n)
            error = await attempt(lambda into=into: saver.restore(into, atomic=True))  # type: ignore[misc]
            fired = counter.fired
            counter.heal()
            check_error(error, errno.EIO)
            expected = state_of(OLD)["optim"]["m"]
            assert torch.equal(moments, torch.zeros_like(expected) if error else expected)
            if not fired:
                assert n > 5
                break
        await saver.save(state_of(NEW), step=NEW)
    assert await steps(store) == (OLD, NEW)
