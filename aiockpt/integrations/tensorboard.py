"""What saving costs, and the metrics of what was saved, for TensorBoard.

async with aiockpt.Saver(run, listeners=[TensorBoard("logs")]) as saver: ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from aiockpt._threads import Lane, offload
from aiockpt.checkpoint import Checkpoint
from aiockpt.pending import PendingSave, Phase

__all__ = ["TensorBoard"]


class TensorBoard:
    """A listener that writes one event file.

    At each committed step: `checkpoint/blocked_seconds`, `staged_seconds`, `write_seconds`,
    `nbytes`, `saved_seconds` (training time saved so far) and `interval_seconds`; the save's numeric
    metrics as `metrics/<name>`; and TensorBoard's own record of a checkpoint with its path.
    The files are written in a thread, never on the loop's.

    Args:
        logdir: the folder of the event file; made when the saver is entered.
        tag: put in front of the names of what saving costs.
    """

    def __init__(self, logdir: str | os.PathLike[str], *, tag: str = "checkpoint") -> None:
        self._logdir = os.fspath(logdir)
        self._tag = tag
        self._writer: EventFileWriter | None = None
        self._saver: Any = None
        self._under_way: dict[str, PendingSave] = {}

    async def begin(self, saver: Any) -> None:
        """Make the event file."""
        self._saver = saver
        self._writer = await offload(EventFileWriter, self._logdir, lane=Lane.CONTROL)

    def before_save(self, pending: PendingSave) -> None:
        """Keep the handle: it knows the seconds."""
        self._under_way[pending.save_id] = pending

    def after_failure(self, failure: Any) -> None:
        """Nothing to write."""
        self._under_way.pop(failure.save_id, None)

    async def after_commit(self, checkpoint: Checkpoint) -> None:
        """Write the numbers of this step."""
        pending = self._under_way.pop(checkpoint.save_id, None)
        values = self._costs(checkpoint, pending) | _numbers(checkpoint.metrics)
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        session = SessionLog(status=SessionLog.CHECKPOINT, checkpoint_path=checkpoint.url)
        events = [Event(summary=summary), Event(session_log=session)]
        for event in events:
            event.wall_time, event.step = checkpoint.time, checkpoint.step
        await offload(self._write, events, lane=Lane.CONTROL)

    def _costs(self, checkpoint: Checkpoint, pending: PendingSave | None) -> dict[str, float]:
        stats = self._saver.stats
        costs = {
            "nbytes": float(checkpoint.nbytes),
            "saved_seconds": stats.saved_seconds,
            "interval_seconds": stats.interval_seconds,
        }
        if pending is not None:
            costs["blocked_seconds"] = pending.blocked_seconds
            costs["staged_seconds"] = pending.seconds[Phase.STAGED]
            costs["write_seconds"] = pending.seconds[Phase.COMMITTED]
        return {f"{self._tag}/{name}": value for name, value in costs.items()}

    def _write(self, events: list[Event]) -> None:
        assert self._writer is not None, "begin comes first"
        for event in events:
            self._writer.add_event(event)
        self._writer.flush()

    async def end(self, saver: Any) -> None:
        """Close the event file."""
        if self._writer is not None:
            await offload(self._writer.close, lane=Lane.CONTROL)
        self._saver = self._writer = None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those metrics that are numbers."""
    return {f"metrics/{name}": float(v) for name, v in metrics.items() if isinstance(v, int | float)}
