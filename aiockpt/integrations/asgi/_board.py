"""What the status page shows: the reloader's own words, the run's checkpoints, and who serves what.

The run is listed while somebody looks, once for all who do, and the less often the longer
it takes: a page that is left open must not wear out a store.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from aiockpt import Checkpoint, Reloader
from aiockpt._listing import Candidate, VanishedError
from aiockpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError

__all__ = ["Board", "health"]

NEWEST: Final = 40
"""Checkpoints that are shown."""
ATTEMPTS: Final = 60
"""Reloads that are shown."""
METRICS: Final = 6
"""Metrics of a checkpoint that are shown."""
AGE: Final = 1.0
"""Seconds for which a listing is good, at least."""
SHARE: Final = 10
"""A listing is good for this many times as long as it took."""


def health(reloader: Reloader[Any], *, details: bool) -> dict[str, Any]:
    """Whether it serves and what; with details also why not something newer."""
    status = reloader.status()
    serving = status["serving"] or {}
    brief = {
        "state": status["state"],
        "ready": status["ready"],
        "step": serving.get("step"),
        "save_id": serving.get("save_id"),
    }
    if not details:
        return brief
    more = ("follow", "strategy", "pinned", "reloading", "quarantined", "reloads", "failures", "error")
    return brief | {key: status[key] for key in more}


class Board:
    """The facts of one reloader, for any number of onlookers."""

    def __init__(self, reloader: Reloader[Any]) -> None:
        self._reloader = reloader
        self._listing: dict[str, Any] = {"checkpoints": [], "older": 0, "replicas": [], "trouble": ""}
        self._until = 0.0
        self._lock = asyncio.Lock()

    async def facts(self) -> dict[str, Any]:
        """Everything the page shows, in plain values."""
        async with self._lock:
            if time.monotonic() >= self._until and self._reloader.status()["state"] != "closed":
                begun = time.monotonic()
                await self._look()
                now = time.monotonic()
                self._until = now + max(AGE, SHARE * (now - begun))
        status = self._reloader.status()
        status["history"] = status["history"][-ATTEMPTS:]
        swapped = {(h["step"], h["save_id"]) for h in status["history"] if h["outcome"] == "swapped"}
        bad = {(q["step"], q["save_id"]): q for q in status["quarantined"]}
        rows = [_judged(row, swapped, bad) for row in self._listing["checkpoints"]]
        return status | self._listing | {"checkpoints": rows, "now": time.time()}

    async def _look(self) -> None:
        try:
            self._listing = await self._list()
        except CheckpointError as error:
            self._listing = self._listing | {"trouble": f"{type(error).__name__}: {error}"}

    async def _list(self) -> dict[str, Any]:
        catalog = self._reloader.catalog
        candidates = await catalog.loader.finder.candidates()
        names: dict[tuple[int, str], list[str]] = {}
        for alias, found in (await catalog.aliases()).items():
            names.setdefault((found.step, found.save_id), []).append(alias)
        replicas = [_replica(lease) for lease in await self._reloader.replicas() if not lease.expired]
        shown = candidates[-NEWEST:]
        rows = [row for row in [await self._row(candidate) for candidate in reversed(shown)] if row]
        for row in rows:
            row["aliases"] = names.get((row["step"], row["save_id"]), [])
        older = len(candidates) - len(shown)
        return {"checkpoints": rows, "older": older, "replicas": replicas, "trouble": ""}

    async def _row(self, candidate: Candidate) -> dict[str, Any] | None:
        try:
            return _facts((await self._reloader.catalog.loader.finder.inspect(candidate))[0])
        except VanishedError:
            return None
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            row = {"step": candidate.step, "save_id": "", "name": candidate.name, "damage": str(error)}
            return row | {"time": None, "nbytes": None, "metrics": {}}


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "save_id": checkpoint.save_id,
        "name": checkpoint.name,
        "time": checkpoint.time,
        "nbytes": checkpoint.nbytes,
        "metrics": dict(list(checkpoint.metrics.items())[:METRICS]),
        "damage": "",
    }


def _replica(lease: Any) -> dict[str, Any]:
    return {key: getattr(lease, key) for key in ("step", "save_id", "host", "pid", "job", "since")}


def _judged(row: dict[str, Any], swapped: set[Any], bad: dict[Any, Any]) -> dict[str, Any]:
    """What is known of a checkpoint's content: every byte was read, or why it is not served."""
    identity = (row["step"], row["save_id"])
    found = bad.get(identity)
    if row["damage"]:
        return row | {"verdict": "damaged", "reason": row["damage"]}
    if found is not None:
        return row | {"verdict": "quarantined", "reason": f"{found['stage']}: {found['reason']}"}
    return row | {"verdict": "verified" if identity in swapped else "committed", "reason": ""}
