"""Spans and metrics over OpenTelemetry, for any exporter, Prometheus among them.

    async with aiockpt.Saver(run, listeners=[Telemetry()]) as saver: ...

Without an OpenTelemetry SDK set up by the application all of it costs next to nothing and
goes nowhere: that is how the API works. Names follow OpenTelemetry's conventions; seconds
and bytes carry their units, so that a Prometheus exporter shows
`aiockpt_save_blocked_seconds`, `aiockpt_save_bytes_total` and so on.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from aiockpt.checkpoint import Checkpoint
from aiockpt.errors import SaveCancelledError
from aiockpt.listeners import Failure
from aiockpt.pending import PendingSave, Phase
from aiockpt.reloader import Reloader
from aiockpt.stats import SaverStats

__all__ = ["Telemetry"]


class Telemetry:
    """Reports the saves of one saver as its listener, and with `observing` what a reloader serves.

    One span a save, from its call to its end, in the caller's trace, with an event for each
    phase. Metrics, with the attribute `aiockpt.run`:

    | name | kind | unit |
    |---|---|---|
    | `aiockpt.save.blocked`, `.staged`, `.written`, `.committed` | histogram | s from the call |
    | `aiockpt.save.bytes` | counter | By, committed |
    | `aiockpt.save.pending` | gauge | saves under way |
    | `aiockpt.save.failures` | counter | with `error.type`; publishers' too |
    | `aiockpt.save.skipped` | counter | due, and left out |
    | `aiockpt.run.retained` | gauge | checkpoints after the last pass of retention |
    | `aiockpt.live.version` | gauge | step that is served |
    | `aiockpt.reload.duration` | histogram | s from discovery to the swap |
    | `aiockpt.reload.failures` | counter | with `error.type`; the version before serves on |

    Args:
        meter: by default `get_meter("aiockpt")`.
        tracer: by default `get_tracer("aiockpt")`.
    """

    def __init__(self, meter: Meter | None = None, tracer: Tracer | None = None) -> None:
        self._meter = meter or metrics.get_meter("aiockpt")
        self._tracer = tracer or trace.get_tracer("aiockpt")
        self._under_way: dict[str, tuple[PendingSave, Span]] = {}
        self._saver: Callable[[], Any] = lambda: None
        self._reloader: Callable[[], Any] = lambda: None
        self._run = ""
        self._seconds = {
            what: self._meter.create_histogram(f"aiockpt.save.{what}", "s", f"from the call until {meaning}")
            for what, meaning in _SECONDS.items()
        }
        self._bytes = self._meter.create_counter("aiockpt.save.bytes", "By", "bytes of committed files")
        self._failures = self._meter.create_counter("aiockpt.save.failures", "1", "saves that failed")
        self._reload = self._meter.create_histogram("aiockpt.reload.duration", "s", "from discovery to swap")
        self._bad = self._meter.create_counter("aiockpt.reload.failures", "1", "checkpoints not fit to serve")
        self._observe()

    def _observe(self) -> None:
        """Numbers that are looked up when somebody collects."""
        gauge, counter = self._meter.create_observable_gauge, self._meter.create_observable_counter
        gauge("aiockpt.save.pending", [self._of_saver(lambda stats, n: n)], "1", "saves under way")
        counter(
            "aiockpt.save.skipped", [self._of_saver(lambda stats, n: stats.skipped)], "1", "due, left out"
        )
        gauge(
            "aiockpt.run.retained", [self._of_saver(lambda stats, n: stats.retained)], "1", "checkpoints kept"
        )
        gauge("aiockpt.live.version", [self._live], "1", "the step that is served")

    def _of_saver(
        self, look: Callable[[SaverStats, int], int | None]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            saver = self._saver()
            value = None if saver is None else look(saver.stats, len(saver.pending))
            return [] if value is None else [Observation(value, self._attributes())]

        return observe

    def _live(self, options: CallbackOptions) -> Iterable[Observation]:
        reloader = self._reloader()
        serving = None if reloader is None else reloader.status()["serving"]
        return [] if serving is None else [Observation(serving["step"], self._attributes())]

    def _attributes(self, **more: str) -> dict[str, str]:
        return {"aiockpt.run": self._run} | {key.replace("_", "."): value for key, value in more.items()}

    # What a reloader tells

    @contextlib.asynccontextmanager
    async def observing(self, reloader: Reloader[Any]) -> AsyncIterator[None]:
        """While the body runs: the step that is served, and what each reload took.

        async with Reloader(run, Model) as reloader, telemetry.observing(reloader): ...
        """
        self._reloader = weakref.ref(reloader)
        self._run = self._run or reloader.catalog.store.url
        events = reloader.events()
        task = asyncio.get_running_loop().create_task(self._follow(events), name="aiockpt telemetry")
        try:
            yield
        finally:
            events.close()  # what was told so far is still read
            await asyncio.wait({task})

    async def _follow(self, events: AsyncIterator[dict[str, Any]]) -> None:
        async for event in events:
            if event["event"] == "swapped":
                self._reload.record(event["total"], self._attributes())
            elif event["event"] == "failed":
                self._bad.add(1, self._attributes(error_type=event["error"]))

    # What a saver tells

    def begin(self, saver: Any) -> None:
        """The saver was entered."""
        self._saver = weakref.ref(saver)
        self._run = saver.store.url

    def before_save(self, pending: PendingSave) -> None:
        """Begin the save's span."""
        about: dict[str, str | int] = {"aiockpt.run": self._run}
        about |= {"aiockpt.step": pending.step, "aiockpt.save_id": pending.save_id}
        self._under_way[pending.save_id] = pending, self._tracer.start_span("aiockpt.save", attributes=about)

    def after_stage(self, pending: PendingSave) -> None:
        """The state may change."""
        if pending.save_id in self._under_way:
            self._under_way[pending.save_id][1].add_event(
                "staged", {"aiockpt.bytes": pending.progress.staged}
            )

    def after_commit(self, checkpoint: Checkpoint) -> None:
        """Report what the save took."""
        pending, span = self._under_way.pop(checkpoint.save_id, (None, None))
        self._bytes.add(checkpoint.nbytes, self._attributes())
        if pending is None or span is None:
            return
        seconds = pending.seconds
        taken = {
            "blocked": pending.blocked_seconds,
            "staged": seconds.get(Phase.STAGED),
            "written": seconds.get(Phase.WRITTEN),
            "committed": seconds.get(Phase.COMMITTED),
        }
        for what, value in taken.items():
            if value is not None:
                self._seconds[what].record(value, self._attributes())
                span.set_attribute(f"aiockpt.{what}", value)
        span.set_attribute("aiockpt.bytes", checkpoint.nbytes)
        span.end()

    def after_failure(self, failure: Failure) -> None:
        """Count it; a cancelled save is no failure."""
        _, span = self._under_way.pop(failure.save_id, (None, None))
        if not isinstance(failure.error, SaveCancelledError):
            self._failures.add(1, self._attributes(error_type=type(failure.error).__name__))
        if span is not None:
            span.record_exception(failure.error)
            span.set_status(Status(StatusCode.ERROR, str(failure.error)))
            span.end()

    def end(self, saver: Any) -> None:
        """Leave no span open."""
        for _, span in self._under_way.values():
            span.end()
        self._under_way.clear()


_SECONDS = {
    "blocked": "its caller could go on",
    "staged": "its state could change",
    "written": "its bytes were durable",
    "committed": "a crash could not lose it",
}
