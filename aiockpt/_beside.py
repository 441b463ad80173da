"""What goes on beside the saves of a saver: listeners, publishers, run files, numbers.

None of it can harm a save or the run: whatever fails here is logged and kept in the
saver's failures. `Saving` tells of events, on the loop, and returns at once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from ._door import translate
from ._ledger import Ledger
from ._log import log
from ._place import Places
from ._preemption import Preemption
from ._publishing import Publishing
from ._records import UserFile
from ._runfiles import FOLDER, RunFiles
from ._turns import Turns
from .checkpoint import Checkpoint
from .errors import CheckpointError, PublishError, SaveCancelledError, StorageError
from .listeners import Failure, Listeners
from .pending import PendingSave, Phase
from .publish import Publisher, PublishFunction
from .stats import SaverStats, Tally
from .storage import Store

__all__ = ["Beside"]


class Beside:
    """Everything that happens because of saves and is none.

    Args:
        store: of the run.
        ledger: the saver's; keeps the failures.
        places: knows the newest committed step.
        listeners: told of everything.
        publish: told of commits.
        run_files: files of the run, by name.
        preemption: asks to stop once it is notified.

    Raises:
        UsageError: something given is not what it should be.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        places: Places,
        *,
        listeners: Iterable[object] = (),
        publish: Iterable[Publisher | PublishFunction] = (),
        run_files: Mapping[str, UserFile] | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.ledger = ledger
        self.tally = Tally()
        self.publishing = Publishing(store, publish, lambda: places.newest, self._unpublished)
        self.run_files = RunFiles(run_files or {})
        self.preemption = preemption
        self.stop: str | None = None
        """Why training was asked to stop."""
        self._store = store
        self._listeners = Listeners(listeners)
        self._files = Turns("run files")
        self._saver: Callable[[], object | None] = lambda: None
        self._open = False

    @property
    def stop_requested(self) -> str | None:
        """Why training is to stop, or None."""
        if self.stop is None and self.preempted:
            assert self.preemption is not None
            signum = self.preemption.signal
            return f"preemption ({signum.name})" if signum else "preemption"
        return self.stop

    @property
    def preempted(self) -> bool:
        """Whether the process was told to end."""
        return self.preemption is not None and self.preemption.requested

    def enter(self, saver: object, newest: Callable[[], Awaitable[Checkpoint | None]]) -> None:
        """The saver was entered, `run.json` is there."""
        self._saver = weakref.ref(saver)
        self._open = True
        if self.run_files.record:
            self._files.put(self._write_files)
        self._listeners.tell("begin", saver)
        self.publishing.again(newest)

    def rewound(self, checkpoint: Checkpoint) -> None:
        """The run now ends at `checkpoint`."""
        plain = replace(checkpoint, values={}, report=None)  # a queue must not keep what was loaded

        async def newest() -> Checkpoint:
            return plain

        self.publishing.again(newest)

    # Told by `Saving`

    def begun(self, pending: PendingSave) -> None:
        """A save has begun."""
        self.tally.begun(pending._called)
        self._listeners.tell("before_save", pending)

    def staged(self, pending: PendingSave) -> None:
        """Its state may change."""
        self._listeners.tell("after_stage", pending)

    def committed(self, pending: PendingSave, checkpoint: Checkpoint) -> None:
        """It is a checkpoint."""
        seconds = pending.seconds
        self.tally.committed(
            checkpoint.nbytes,
            blocked=pending.blocked_seconds,
            write=seconds[Phase.COMMITTED],
            admitted=seconds[Phase.PLANNED],
        )
        self.publishing.committed(checkpoint)
        self._listeners.tell("after_commit", checkpoint)

    def failed(self, pending: PendingSave, error: CheckpointError) -> None:
        """It has ended otherwise."""
        self.tally.failed(cancelled=isinstance(error, SaveCancelledError))
        self._listeners.tell(
            "after_failure", Failure(step=pending.step, save_id=pending.save_id, error=error)
        )

    def stats(self, skipped: int, retained: int | None = None) -> SaverStats:
        """The numbers as they are now."""
        progress = [request.pending.progress for request in self.ledger.active]
        left = sum(max(0, p.total - p.written) for p in progress)
        return self.tally.snapshot(pending_bytes=left, skipped=skipped, retained=retained)

    # The end

    async def idle(self) -> None:
        """Wait until run files are written and commits published."""
        await self._files.idle()
        await self.publishing.idle()

    async def close(self, deadline: float | None) -> None:
        """Finish everything, at most until `deadline`; what is late is cancelled, and told."""
        if not self._open:
            return
        self._open = False
        if await self._files.close(None if deadline is None else max(0.0, deadline - time.monotonic())):
            self._report(StorageError("the run's files were not written in time", file=FOLDER))
        await self.publishing.close(deadline)
        saver = self._saver()
        if saver is not None:
            self._listeners.tell("end", saver)
        await self._listeners.close(deadline)

    async def _write_files(self) -> None:
        try:
            await self.run_files.write(self._store)
        except Exception as error:
            self._report(translate(error, "cannot write the run's files", step=None))

    def _report(self, error: CheckpointError) -> None:
        log.error("%s", error)
        self.ledger.failures.append(error)
        self.ledger.other_errors.append(error)

    def _unpublished(self, publisher: str, checkpoint: Checkpoint, error: PublishError) -> None:
        self.ledger.failures.append(error)
        failure = partial(Failure, step=checkpoint.step, save_id=checkpoint.save_id, publisher=publisher)
        self._listeners.tell("after_failure", failure(error=error))
