"""A process that dies at any point of a save leaves the old checkpoint or the new one, never neither."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt import Catalog, Saver
from aiockpt.publish.latest_link import LatestLink
from aiockpt.publish.tracker_file import TrackerFile
from tests.crash_child import NEW, OLD, big_state, finish, start
from tests.proof import assert_exact, assert_sound, litter, number_in, save, state_of, steps

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
@pytest.mark.parametrize("floor", ["files", "store"])
async def test_a_save_may_be_killed_at_any_operation(floor: str, tmp_path: Path) -> None:
    """SIGKILL before the n-th call, for every n from entering the saver to leaving it."""
    await save(tmp_path / "template", state_of(OLD), OLD)
    said = finish("die", floor, tmp_path)
    operations = json.loads(said[-1])
    commit = operations.index("rename" if floor == "files" else "attempt.commit")
    runs = sorted(tmp_path.glob(f"{floor}-*"))
    assert len(runs) == len(operations) + 1
    left = 0
    for n, run in enumerate(runs):
        # Seen by a process that only reads, while the wreck still lies there.
        async with Catalog(run) as catalog:
            found = await catalog.latest("full")
            assert found is not None
            assert found.skipped == ()
            expected = OLD if n <= commit else NEW
            assert number_in(await catalog.load()) == found.step == expected, operations[n]
        left += bool(litter(run))
        async with Saver(run) as saver:
            assert litter(run) == [], f"killed at {operations[n]}"
            restored = await saver.restore()
            assert restored is not None
            assert number_in(restored.values) == expected
            await saver.save(state_of(7), step=7)
        assert await steps(run) == tuple(sorted({OLD, expected, 7}))
    assert left > 5  # else nothing was ever there to be swept


async def test_a_forked_child_does_not_keep_a_dead_save_alive(tmp_path: Path) -> None:
    """A data loader that outlives its killed trainer does not hold the trainer's lock."""
    await save(tmp_path, state_of(OLD), OLD)
    with start("orphan", tmp_path) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        child.wait()
        try:
            assert litter(tmp_path)
            async with Saver(tmp_path) as saver:
                os.kill(grandchild, 0)
                assert litter(tmp_path) == []
                restored = await saver.restore()
                assert restored is not None
                assert number_in(restored.values) == OLD
                await saver.save(state_of(NEW), step=NEW)
        finally:
            os.kill(grandchild, 9)
    assert await assert_sound(tmp_path) == (OLD, NEW)


def published(run: Path) -> set[int]:
    """The steps that link and tracker file name right now."""
    link, tracker = run / "latest", run / "latest_checkpointed_iteration.txt"
    named = {int(os.readlink(link).removeprefix("step-"))} if link.is_symlink() else set()
    return named | ({int(tracker.read_text())} if tracker.exists() else set())


@pytest.mark.slow
async def test_no_latest_is_ever_half_there(tmp_path: Path) -> None:
    """Twenty kills at spread times, while a reader keeps verifying whatever is the newest.

    He follows the published link and number, too: they name only what is committed.

    KempnerInstitute/KempnerForge#102: `latest` moved before the data was durable.
    facebookresearch/metaseq#53: killed saves left torn shards beside good ones.
    """
    run = tmp_path / "run"
    await save(run, big_state(1), 1)
    over = asyncio.Event()
    seen: set[int] = set()
    pointed: set[int] = set()

    async def watch() -> None:
        async with Catalog(run) as catalog:
            while not over.is_set():
                for step in published(run):
                    await catalog.verify(step)
                    pointed.add(step)
                found = await catalog.latest()
                if found is not None:
                    await catalog.verify(found)
                    seen.add(found.step)
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        with start("kill-on-demand", run) as child:
            for number in range(20):
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write(f"{number * 0.01}\n")
                child.stdin.flush()
                line = await asyncio.get_running_loop().run_in_executor(None, child.stdout.readline)
                assert line == "-9\n"
                found = await aiockpt.latest(run)
                assert found is not None
                assert found.skipped == ()
                assert_exact(await aiockpt.load(run), big_state(found.step))
            child.communicate()
        over.set()
    assert seen
    assert pointed
    async with Saver(run, publish=[LatestLink(), TrackerFile()]) as saver:
        assert litter(run) == []
        assert saver.run_id
    newest = await aiockpt.latest(run)
    assert newest is not None
    assert published(run) == {newest.step}  # also what the last one killed had not come to publish
    await assert_sound(run)


async def test_dead_saves_are_swept_and_living_ones_and_users_files_are_not(tmp_path: Path) -> None:
    """The wrecks of killed saves go when a saver starts; everything else stays.

    ByteDance-Seed/VeOmni#1173, huggingface/transformers#28848: temporary folders of the size
    of a model filled the disk, keyed on a step that never came again.
    """
    run = tmp_path / "run"
    await save(run, state_of(OLD), OLD)
    users = ["notes.txt", "tensorboard/events", "step_5.bak", ".tmp_user", ".step-5.tmp", "step-5"]
    for name in users:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    with start("kill-on-demand", run) as child:
        for delay in (0.0, 0.005, 0.01, 0.02, 0.03):
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{delay}\n")
            child.stdin.flush()
            assert child.stdout.readline() == "-9\n"
        child.communicate()
    with start("hold", run, 10**6) as living:
        assert living.stdin is not None
        assert living.stdout is not None
        assert living.stdout.readline() == "holding\n"
        async with Saver(run) as saver:
            ours = [p for p in litter(run) if ".tmp" not in p]
            assert {Path(p).name.split(".")[1] for p in ours if p.startswith(str(run / ".step"))} == {
                "step-01000000"
            }
            await saver.save(state_of(10**5), step=10**5)
        living.stdin.write("\n")
        living.stdin.flush()
        assert living.stdout.read() == "committed\n"
    for name in users:
        assert (run / name).read_text() == "mine"
        (run / name).unlink()
    assert litter(run) == []
    found = await assert_sound(run)
    assert found[-2:] == (10**5, 10**6)


@pytest.mark.slow
@pytest.mark.parametrize("one_pid", ["no", "yes"])
async def test_four_processes_save_the_same_step(one_pid: str, tmp_path: Path) -> None:
    """Exactly one wins, the others are told so, and what is there is the winner's alone.

    NVIDIA/apex#886, pytorch/pytorch#12042, karpathy/nanochat#336: every rank wrote one path.
    """
    said = finish("race", tmp_path, 6, one_pid)
    assert [line for line in said if line.startswith("[")] == ["[0, 0, 0, 0]"] * 6
    winners = [int(line.split()[1]) for line in said if line.startswith("won")]
    assert len(winners) == 6
    assert said.count("lost") == 18
    for number, winner in enumerate(winners):
        run = tmp_path / str(number)
        assert litter(run) == []
        assert await assert_sound(run) == (1,)
        assert_exact(await aiockpt.load(run), big_state(winner))


async def test_processes_meet_in_folders_that_do_not_exist_yet(tmp_path: Path) -> None:
    """Everybody makes the missing folders, nobody trips over the others' doing so.

    NVIDIA-NeMo/Automodel#3686: `makedirs(exist_ok=True)` raised FileExistsError at step 297 of 300.
    """
    root = tmp_path / "a" / "b" / "c"
    said = finish("crowd", root)
    assert len(said) == 4
    for rank in range(4):
        assert number_in(await aiockpt.load(root / f"own-{rank}")) == rank
    saved = sorted(int(line.split()[1]) for line in said if line.startswith("saved"))
    assert saved
    assert await assert_sound(root / "shared") == tuple(saved)
    assert litter(tmp_path) == []


async def test_no_rights_above_the_run_are_needed_and_none_to_read_it(tmp_path: Path) -> None:
    """All writing happens in the run's folder; reading writes nothing; no rights is told at once.

    verl-project/verl#3354: only the leaf was writable. Heliox-OS#181: found out at the first save.
    """
    # pytest's own folders are closed to the user that the child becomes.
    root = Path(f"/tmp/aiockpt-unwritable-{os.getpid()}")
    try:
        root.mkdir()
        await save(root / "theirs", state_of(OLD), OLD)
        leaf = root / "parent" / "leaf"
        leaf.mkdir(parents=True)
        if os.getuid() == 0:
            os.chown(leaf, 65534, 65534)
            for folder in (root, root / "parent", root / "theirs", root / "theirs" / "step-00000001"):
                folder.chmod(0o755)
        else:
            for folder in (root / "parent", root / "theirs"):
                folder.chmod(0o555)
        found = json.loads(finish("unwritable", root)[-1])
        assert found["leaf"] == NEW
        assert found["outside"] == []
        assert found["begin"][0] == "EACCES"
        assert found["begin"][1].startswith(str(root / "theirs"))
        assert found["make"] == ["EACCES", str(root / "parent" / "new")]
        assert found["steps"] == [OLD]
        assert found["theirs"] == OLD
        assert found["written by reading"] == []
    finally:
        for folder in (root / "parent", root / "theirs"):
            folder.chmod(0o755)
        shutil.rmtree(root)


def test_a_big_state_is_what_it_says() -> None:
    """The children's state is large enough to be killed in, and over two files."""
    assert sum(t.nbytes for t in big_state(1).values()) == 4 << 20
    assert not torch.equal(big_state(1)["model"], big_state(2)["model"])
