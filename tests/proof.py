"""What must hold after every crash, fault and odd input: the invariants, in one place.

(a) every committed step loads, verifies, and opens in stock safetensors; (b) no temporary
entry is left; (c) descriptors and threads are back (the suite's own check); (d) nothing
outside the run's folder was opened for writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import safetensors
import torch

import aiockpt.reader
from aiockpt import Catalog, Checkpoint, Saver, Store
from aiockpt._memory import BlockPool
from aiockpt._reserve import Reserve
from aiockpt.storage.local import LocalStore
from aiockpt.storage.memory import MemoryStore
from tests.strategies import same

PACKAGE = str(Path(aiockpt.__file__).resolve().parent) + os.sep
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STEP_FOLDER = re.compile(r"step-\d{8,}(\.\d+)?")


def state_of(number: int) -> dict[str, Any]:
    """A small state that tells its number in every leaf, over two data files."""
    return {
        "model": {
            "w": torch.full((40, 30), float(number)),
            "half": torch.full((7,), number, dtype=torch.bfloat16),
        },
        "optim": {"m": torch.arange(9_000) + number, "step": number},
        "n": number,
        "log": [("loss", number / 3), {number: None}],
    }


def number_in(state: Any) -> int:
    """Which state it is, having checked every bit of it."""
    number = int(state["n"])
    assert_exact(state, state_of(number))
    return number


def assert_exact(found: Any, expected: Any) -> None:
    """Equal in types, order and bits. Fast, also for large tensors (but blind for ties)."""
    tensors, others = tensors_of(found), tensors_of(expected)
    assert len(tensors) == len(others)
    for one, other in zip(tensors, others, strict=True):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        assert torch.equal(*flat), "bits of a tensor differ"
    assert same(_without_tensors(found), _without_tensors(expected)), f"{found!r} is not {expected!r}"


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in dicts, lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in tensors_of(part)] if isinstance(value, list | tuple) else []


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, dict):
        return {key: _without_tensors(part) for key, part in value.items()}
    return [_without_tensors(part) for part in value] if type(value) is list else value


async def save(run: str | os.PathLike[str] | Store, state: Any, step: int, **options: Any) -> Checkpoint:
    """One save by a saver of its own."""
    async with Saver(run) as saver:
        return await saver.save(state, step=step, **options)


async def steps(run: str | os.PathLike[str] | Store) -> tuple[int, ...]:
    """The committed steps."""
    async with Catalog(run) as catalog:
        return await catalog.steps()


def litter(run: str | os.PathLike[str]) -> list[str]:
    """What lies in the run that a finished save leaves not behind: every hidden name."""
    found = []
    for folder, names, files in os.walk(run):
        found += [os.path.join(folder, name) for name in (*names, *files) if name.startswith(".")]
    return found


def memory_litter(store: MemoryStore) -> list[str]:
    """The same for a run in memory: attempts, and files of steps without a manifest."""
    bucket = store._bucket
    folders = {key.partition("/")[0] for key in bucket.files if "/" in key}
    loose = [name for name in folders if f"{name}/manifest.json" not in bucket.files]
    return [*map(str, bucket.attempts), *loose]


def leftovers(store: Store) -> list[str]:
    """The temporary entries of either kind of store."""
    inner = getattr(store, "inner", store)
    if isinstance(inner, MemoryStore):
        return memory_litter(inner)
    assert isinstance(inner, LocalStore)
    return litter(inner.path)


async def assert_sound(run: str | os.PathLike[str] | Store, *, allow_pickle: bool = False) -> tuple[int, ...]:
    """Every committed step verifies, loads, and opens in stock safetensors; returns the steps."""
    async with Catalog(run, allow_pickle=allow_pickle) as catalog:
        for checkpoint in await catalog.checkpoints():
            await catalog.verify(checkpoint)
            await catalog.load(checkpoint)
            if isinstance(catalog.store, LocalStore):
                open_in_stock(Path(catalog.store.path, checkpoint.name))
        return await catalog.steps()


def open_in_stock(folder: Path) -> int:
    """Read every shard of a step with the reference reader; returns how many tensors there were."""
    count = 0
    for shard in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                try:
                    file.get_tensor(name)
                except (AttributeError, KeyError):  # a dtype stock safetensors has no torch type for
                    file.get_slice(name).get_shape()
                count += 1
    return count


_pools: list[BlockPool] = []


def assert_blocks_home() -> None:
    """Every block of every pool made under `poisoned` is back in it."""
    for pool in _pools:
        assert not pool._out, f"{len(pool._out)} blocks are still out"


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Blocks that are given back are filled with a pattern, which the next grant checks.

    They are smaller than usual, since filling and checking is what takes the time (and
    on a busy machine, torch's threads waiting for each other). In the end all must be back.
    """
    make = BlockPool.__init__
    threads = torch.get_num_threads()

    def note(pool: BlockPool, *args: Any, **options: Any) -> None:
        make(pool, *args, **{"block_bytes": 1 << 20, **options})
        _pools.append(pool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockPool, "poison", True)
        patch.setattr(BlockPool, "__init__", note)
        patch.setattr(Reserve, "block_bytes", 1 << 20)
        patch.setattr(aiockpt.reader, "BLOCK_BYTES", 1 << 20)
        torch.set_num_threads(1)
        try:
            yield
            assert_blocks_home()
        finally:
            torch.set_num_threads(threads)
            _pools.clear()


# ---------------------------------------------------------------- writes outside the folder

_watchers: list[Callable[[str], None]] = []
_hooked = threading.Lock()
_installed = False
_PATHS = {"os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2,
          "os.truncate": 1, "os.chmod": 1, "os.utime": 1, "os.chown": 1}  # fmt: skip


def _from_package() -> bool:
    """Whether the package is on the stack; what torch does for itself when called by a test is not ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watchers:
        return
    if event == "open":
        path, mode, flags = args
        writes = bool((flags or 0) & WRITE_FLAGS) or any(c in (mode or "") for c in "wax+")
        found = [path] if writes else []
    else:
        found = list(args[: _PATHS.get(event, 0)])
    if not found or not _from_package():
        return
    for path in found:
        if isinstance(path, str | bytes | os.PathLike):  # else a descriptor
            for watcher in list(_watchers):
                watcher(os.path.abspath(os.fsdecode(path)))


@contextlib.contextmanager
def writes_seen() -> Iterator[list[str]]:
    """Every path that the package opens for writing, makes, renames or removes meanwhile."""
    global _installed  # noqa: PLW0603  # an audit hook cannot be removed: one for the process
    with _hooked:
        if not _installed:
            sys.addaudithook(_audit)
            _installed = True
    seen: list[str] = []
    _watchers.append(seen.append)
    try:
        yield seen
    finally:
        _watchers.remove(seen.append)


def outside(seen: list[str], folder: Path) -> list[str]:
    """What of it lies outside the folder (and is no cache of the interpreter's)."""
    inside = f"{folder}{os.sep}"
    return [
        path
        for path in seen
        if not path.startswith(inside) and path != str(folder) and "__pycache__" not in path
    ]


def in_own_loop(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end on a fresh loop in a thread: for fixtures, whatever loop is theirs."""
    failed: list[BaseException] = []

    def body() -> None:
        try:
            asyncio.run(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@contextlib.contextmanager
def case(tmp_path: Path) -> Iterator[Path]:
    """A folder for one public case; afterwards all invariants are checked on every run in it."""
    folder = tmp_path / "case"
    folder.mkdir()
    with writes_seen() as seen, poisoned():
        yield folder
    assert outside(seen, folder) == []
    for run in runs_under(folder):
        assert litter(run) == []
        in_own_loop(lambda run=run: _sound(run))  # type: ignore[misc]


async def _sound(run: Path) -> None:
    await assert_sound(run)


def runs_under(folder: Path) -> list[Path]:
    """Every run at or below the folder."""
    return [Path(at) for at, _, files in os.walk(folder) if "run.json" in files]


def newest(run: str | os.PathLike[str] | Store) -> Coroutine[Any, Any, Checkpoint | None]:
    """The newest checkpoint by its manifest."""
    return aiockpt.latest(run)
