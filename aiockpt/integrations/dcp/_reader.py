"""`AioStorageReader`: DCP decides which boxes each rank needs; reading and verifying is ours."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from aiockpt._finding import Finder
from aiockpt._listing import Candidate, read_run
from aiockpt._saved import Saved
from aiockpt._threads import Lane, offload
from aiockpt._tree import decode_value, find
from aiockpt.checkpoint import Checkpoint
from aiockpt.errors import CheckpointError, UsageError
from aiockpt.reader import CheckpointReader, as_budget
from aiockpt.storage import Store, open_store

from ._fill import Fill
from ._flat import Flat, Leaf, flatten_saved
from ._machine import Lease, Outcome
from ._threadwise import Threadwise
from ._where import Where, is_id, where

__all__ = ["AioStorageReader"]

CheckpointId = str | os.PathLike[str]


class AioStorageReader(StorageReader):
    """Lets `torch.distributed.checkpoint` load a checkpoint of aiockpt, whoever wrote it.

    Works with the stock planners and any number of ranks, resharding included. Each rank reads
    the pieces (1 MiB) that hold its own bytes, and every piece is verified before a byte of it
    reaches a tensor. Objects are rebuilt without pickle; DCP's own planner then wants them as an
    archive, which is made in memory.

    Args:
        checkpoint_id: path or URL of the step's folder, such as `runs/a/step-00000100`; of several
            generations of a step the newest valid one is read. The `checkpoint_id=` of a load
            goes first.
        budget: bytes of host memory for blocks.
        verify: whether bytes are checked; never turn it off for files from elsewhere.
        allow_pickle: whether pickled values may be unpickled. Only for files you trust.

    Raises:
        UsageError: the id is none, or the budget too small.
    """

    def __init__(
        self,
        checkpoint_id: CheckpointId | None = None,
        *,
        budget: int | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__()
        if checkpoint_id is not None:
            where(checkpoint_id)
        as_budget(budget)
        self._options = {"budget": budget, "allow_pickle": allow_pickle}
        self._verify = verify
        self._id = checkpoint_id
        self._start()

    def _start(self) -> None:
        self._asked: dict[int, CheckpointId] = {}
        self._loads: Threadwise[_Load] = Threadwise()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_options", "_verify", "_id")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def checkpoint_id(self) -> CheckpointId | None:
        """The id of the next load of this thread."""
        return self._asked.get(threading.get_ident(), self._id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new read.

        Raises:
            UsageError: `checkpoint_id` is none.
        """
        self._loads.drop()
        if checkpoint_id is not None:
            where(checkpoint_id)
            self._id = self._asked[threading.get_ident()] = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe the checkpoint to the planner.

        Raises:
            StepNotFoundError: there is no such checkpoint.
            CorruptCheckpointError: its manifest or a part is damaged, or a tensor is not whole.
            UsageError: the id is none, or the state cannot be flattened.
        """
        failed = self._loads.get()
        if kwargs and failed is not None and failed.error is not None:
            raise failed.error  # asked again for metadata of this rank alone: there is none
        load = _Load(where(self.checkpoint_id), self._options, verify=self._verify)
        self._loads.put(load)
        lease = Lease()
        try:
            return lease.run(load.open)
        except CheckpointError as error:
            load.error = error
            raise
        finally:
            lease.close()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take in what this rank reads: what `read_metadata` opened on this thread.

        Raises:
            UsageError: the metadata come from elsewhere.
        """
        load = self._load()
        if load.flat is None or metadata.state_dict_metadata is not load.flat.metadata.state_dict_metadata:
            raise UsageError("these metadata do not come from this reader's read_metadata")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which save this rank reads."""
        return replace(plan, storage_data=self._load().checkpoint.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See to it that all ranks read the same save.

        Raises:
            UsageError: the step was written anew between their looks at it.
        """
        if len({plan.storage_data for plan in plans} - {None}) > 1:
            raise UsageError(
                "the ranks would read different saves: the step was written anew meanwhile; load it again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Outcome[None]:  # type: ignore[override]
        """Begin to read this rank's boxes and objects.

        Returns:
            At once: a future, whose `wait` raises what went wrong. Then tensors that the planner
            gave may hold some bytes of the checkpoint, all of them verified.

        Raises:
            UsageError: called on the adapter's own loop.
        """
        load = self._load()
        lease = Lease()
        outcome = lease.start(lambda: load.read(plan.items, planner))
        outcome.then(lambda failed: lease.close())
        self._loads.take()
        self._asked.pop(threading.get_ident(), None)
        return outcome

    def _load(self) -> _Load:
        load = self._loads.get()
        if load is None:
            raise UsageError("call read_metadata first, on the same thread")
        return load

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it is the path or URL of a folder in a run, of a scheme we know; touches no file."""
        return is_id(checkpoint_id)


class _Load:
    """One load of one rank; coroutines on the adapter's loop."""

    def __init__(self, place: Where, options: dict[str, Any], *, verify: bool) -> None:
        self.pid = os.getpid()
        self.error: CheckpointError | None = None
        self.flat: Flat | None = None
        self.checkpoint: Checkpoint
        self._place = place
        self._options = options
        self._verify = verify
        self._reader: CheckpointReader
        self._store: Store

    async def open(self) -> Metadata:
        """Find the checkpoint and read what describes it."""
        store = self._store = open_store(self._place.run)
        names = (await read_run(store)).names
        numbers = names.parse(self._place.name)
        if numbers is None:
            raise UsageError(
                f"checkpoint_id ends in {self._place.name!r}, which names no step; this run calls its steps "
                f"like {names.folder(100)!r}",
                file=self._place.id,
            )
        finder = Finder(store, names.step_format)
        step, generation = numbers
        if generation:
            self.checkpoint, manifest = await finder.inspect(Candidate(step, generation, self._place.name))
        else:
            self.checkpoint, manifest = await finder.get(step)
        self._reader = CheckpointReader(
            store, self.checkpoint.name, step=step, manifest=manifest, **self._options
        )
        saved = await self._reader.metadata()
        self.flat = await offload(flatten_saved, saved, self._place.id, lane=Lane.CONTROL)
        return self.flat.metadata

    async def read(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """Read the items and hand them to the planner; the last thing it does."""
        try:
            await self._read(items, planner)
        finally:
            with contextlib.suppress(OSError):
                await self._store.aclose()

    async def _read(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        assert self.flat is not None
        saved = await self._reader.metadata()
        fill = Fill(saved, planner)
        objects: list[tuple[ReadItem, Leaf]] = []
        for item in items:
            leaf = self.flat.leaves.get(item.storage_index.fqn)
            if leaf is None or bool(leaf.rows) is not (item.type == LoadItemType.TENSOR):
                raise UsageError(f"{item.storage_index.fqn}: the plan asks for what the checkpoint lacks")
            if leaf.rows:
                fill.add(item, leaf)
            else:
                objects.append((item, leaf))
        await self._reader.read_spans(fill.spans(), fill, verify=self._verify)
        await offload(fill.finish_empty)
        for item, leaf in objects:
            value = await self._object(saved, leaf)
            await offload(_hand_over, planner, item, value)

    async def _object(self, saved: Saved, leaf: Leaf) -> Any:
        allow_pickle = self._options["allow_pickle"]
        if not leaf.holds_tensors:
            return await offload(lambda: decode_value(leaf.json, leaf.path, allow_pickle=allow_pickle))
        plan = await self._reader.plan(paths=[leaf.path])
        await self._reader.read(plan, verify=self._verify)
        return find((await self._reader.apply(plan)).state, leaf.path)

    def close(self) -> None:
        """Nothing is open between the calls."""


def _hand_over(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Give an object to the planner, as the archive it expects."""
    data = io.BytesIO()
    torch.save(value, data)  # noqa: TID251 - DCP's planner unpickles what we pickle here, in memory
    data.seek(0)
    planner.load_bytes(item, data)
