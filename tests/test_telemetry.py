"""Spans, metrics and TensorBoard's event file: what is reported is what happened."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, generate_latest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import aiockpt
from aiockpt.errors import CheckpointError
from aiockpt.integrations.telemetry import Telemetry
from aiockpt.integrations.tensorboard import TensorBoard
from aiockpt.policies.keep import KeepLast
from aiockpt.policies.when import EverySteps
from aiockpt.storage import open_store
from aiockpt.testing import FaultyStore

EXAMPLE = Path(__file__).parent.parent / "examples" / "tensorboard_costs.py"


class Collected:
    """A telemetry listener with an SDK that keeps everything in memory."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider(metric_readers=[self.reader])
        self.spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.listener = Telemetry(self.meters.get_meter("t"), self.tracers.get_tracer("t"))

    def points(self) -> dict[str, Any]:
        """The one data point of each metric."""
        data = self.reader.get_metrics_data()
        metrics = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: metric.data.data_points[0] for metric in metrics}


@pytest.fixture
def collected() -> Iterator[Collected]:
    """An SDK of the test's own, shut down in the end."""
    made = Collected()
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()


def state() -> dict[str, Any]:
    """A megabyte."""
    return {"model": {"w": torch.ones(1 << 18)}}


async def test_each_commit_is_measured(tmp_path: Path, collected: Collected) -> None:
    """Counts and bytes are exact, seconds are those of the handle, in the order of the phases."""
    async with aiockpt.Saver(
        tmp_path, listeners=[collected.listener], keep=KeepLast(1), keep_grace=0
    ) as saver:
        handles = [await saver.stage(state(), step=step) for step in (1, 2, 3)]
        checkpoints = [await handle for handle in handles]
        await asyncio.sleep(0)
        points = collected.points()
        assert points["aiockpt.save.pending"].value == 0
    nbytes = sum(checkpoint.nbytes for checkpoint in checkpoints)
    assert points["aiockpt.save.bytes"].value == nbytes
    for what in ("blocked", "staged", "written", "committed"):
        assert points[f"aiockpt.save.{what}"].count == 3
    total = sum(handle.seconds[aiockpt.Phase.COMMITTED] for handle in handles)
    assert points["aiockpt.save.committed"].sum == pytest.approx(total)
    sums = [points[f"aiockpt.save.{what}"].sum for what in ("staged", "written", "committed")]
    assert sums == sorted(sums)
    assert points["aiockpt.save.bytes"].attributes == {"aiockpt.run": str(tmp_path)}


async def test_one_span_a_save_in_the_callers_trace(tmp_path: Path, collected: Collected) -> None:
    """With its step, its bytes and the moment it was staged."""
    tracer = collected.tracers.get_tracer("training")
    async with aiockpt.Saver(tmp_path, listeners=[collected.listener]) as saver:
        with tracer.start_as_current_span("step 7") as outer:
            await saver.save(state(), step=7)
    spans = {span.name: span for span in collected.spans.get_finished_spans()}
    span = spans["aiockpt.save"]
    assert span.parent is not None
    assert span.parent.span_id == outer.get_span_context().span_id
    assert span.attributes is not None
    assert span.attributes["aiockpt.step"] == 7
    assert [event.name for event in span.events] == ["staged"]
    assert span.status.is_ok or span.status.is_unset


async def test_a_failure_is_counted_and_ends_its_span(tmp_path: Path, collected: Collected) -> None:
    """With the error's type, which a dashboard groups by."""
    store = FaultyStore(open_store(tmp_path), kind="full")
    async with aiockpt.Saver(store, listeners=[collected.listener]) as saver:
        store.faults.fail_at = len(store.operations) + 5
        with pytest.raises(CheckpointError):
            await saver.save(state(), step=1)
    point = collected.points()["aiockpt.save.failures"]
    assert point.value == 1
    assert point.attributes["error.type"] == "StorageError"
    (span,) = collected.spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.events[-1].name == "exception"


async def test_a_cancelled_save_is_no_failure(tmp_path: Path, collected: Collected) -> None:
    """Somebody wanted it so; its span still ends."""
    async with aiockpt.Saver(tmp_path, listeners=[collected.listener]) as saver:
        handle = saver.save_nowait(state(), step=1)
        await handle.cancel_and_wait()
    assert "aiockpt.save.failures" not in collected.points()
    assert len(collected.spans.get_finished_spans()) == 1


async def test_skipped_and_retained(tmp_path: Path, collected: Collected) -> None:
    """What was due and left out, and how many checkpoints retention left."""
    store = FaultyStore(open_store(tmp_path), kind="stall")
    options: dict[str, Any] = {"keep": KeepLast(2), "keep_grace": 0.0, "when": EverySteps(1)}
    async with aiockpt.Saver(store, listeners=[collected.listener], save_last=False, **options) as saver:
        for step in range(1, 5):
            await saver.save(state(), step=step)
            await saver._housekeeping.drain()
        store.faults.fail_at = len(store.operations) + 5
        held = saver.save_nowait(state(), step=5)
        await store.stalled.wait()
        assert await saver.stage_if_due(state(), step=6, if_busy="skip") is None
        points = collected.points()
        assert points["aiockpt.save.pending"].value == 1
        assert points["aiockpt.save.skipped"].value == saver.stats.skipped == 1
        assert points["aiockpt.run.retained"].value == saver.stats.retained == 2
        store.release.set()
        await held


async def test_a_reloader_is_observed(tmp_path: Path, collected: Collected) -> None:
    """The step that serves, what each reload took, and which checkpoints were not fit to serve."""
    reloader = aiockpt.Reloader(tmp_path, lambda: torch.nn.Linear(2, 2), poll=0.02)
    async with aiockpt.Saver(tmp_path) as saver, reloader, collected.listener.observing(reloader):
        for step in (1, 2):
            await saver.save({"model": torch.nn.Linear(2, 2)}, step=step)
            await reloader.wait_for(step)
        bad = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(bad.weight, float("nan"))
        await saver.save({"model": bad}, step=3)
        async with asyncio.timeout(30):
            async for event in reloader.events():
                if event["event"] == "failed":
                    break
        await asyncio.sleep(0)
        points = collected.points()
    assert points["aiockpt.live.version"].value == 2
    assert points["aiockpt.reload.duration"].count == 2
    assert collected.points()["aiockpt.reload.failures"].value == 1


async def test_prometheus_shows_it(tmp_path: Path) -> None:
    """Through OpenTelemetry's own exporter, by the names the docs give."""
    meters = MeterProvider(metric_readers=[PrometheusMetricReader()])
    try:
        async with aiockpt.Saver(tmp_path, listeners=[Telemetry(meters.get_meter("aiockpt"))]) as saver:
            checkpoint = await saver.save(state(), step=1)
            text = generate_latest(REGISTRY).decode()
    finally:
        meters.shutdown()
    assert "aiockpt_save_blocked_seconds_count" in text
    assert "aiockpt_save_committed_seconds_bucket" in text
    (line,) = [line for line in text.splitlines() if line.startswith("aiockpt_save_bytes_total{")]
    assert float(line.split()[-1]) == checkpoint.nbytes


async def test_without_an_sdk_nothing_happens(tmp_path: Path) -> None:
    """The API's own no-op."""
    async with aiockpt.Saver(tmp_path, listeners=[Telemetry()]) as saver:
        await saver.save(state(), step=1)


async def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """Scalars at their steps, by TensorBoard's own reader; and its record of a checkpoint."""
    logs, run = tmp_path / "logs", tmp_path / "run"
    async with aiockpt.Saver(run, listeners=[TensorBoard(logs)]) as saver:
        for step in (10, 20):
            await saver.save(state(), step=step, metrics={"loss": 1 / step, "good": True})
    events = EventAccumulator(str(logs)).Reload()
    scalars = events.Tags()["scalars"]
    seconds = {f"checkpoint/{what}_seconds" for what in ("blocked", "staged", "write", "saved", "interval")}
    assert set(scalars) == seconds | {"checkpoint/nbytes", "metrics/loss", "metrics/good"}
    loss = [(event.step, event.value) for event in events.Scalars("metrics/loss")]
    assert loss == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))]
    assert events.Scalars("checkpoint/interval_seconds")[1].value > 0
    (file,) = logs.iterdir()
    assert f"{run}/step-00000020".encode() in file.read_bytes()


async def test_records_of_the_log_know_step_and_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a save logs on its way carries both as fields, whoever formats it."""
    store = FaultyStore(open_store(tmp_path), kind="full")
    with caplog.at_level(logging.INFO, "aiockpt"):
        async with aiockpt.Saver(store, on_failure="log") as saver:
            handle = saver.save_nowait(state(), step=4)
            store.faults.fail_at = len(store.operations) + 5
            # Nobody waits for the handle itself: that is what makes the saver log.
            with pytest.raises(CheckpointError):
                await saver.drain()
            assert handle.exception() is not None
    (record,) = [record for record in caplog.records if "failed" in record.message]
    assert record.step == 4  # type: ignore[attr-defined]
    assert record.run == store.url  # type: ignore[attr-defined]
    logging.getLogger("aiockpt").warning("about nothing in particular")
    assert (caplog.records[-1].step, caplog.records[-1].run) == (None, None)  # type: ignore[attr-defined]


def test_the_example_runs(tmp_path: Path) -> None:
    """It says what was saved, and the event file is there; no bars without a terminal."""
    options = ["--run", str(tmp_path / "run"), "--logs", str(tmp_path / "logs"), "--steps", "40"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 checkpoints")
    assert EventAccumulator(str(tmp_path / "logs")).Reload().Tags()["scalars"]
