"""What goes on in a reloader, in plain values that JSON can hold."""

from __future__ import annotations

from typing import Any

from ._switching import Switching

__all__ = ["status_of"]

DOING = ("step", "save_id", "stage", "begun", "why")


def status_of(switching: Switching[Any]) -> dict[str, Any]:
    """See `Reloader.status`."""
    serving, versions = switching.serving, switching.versions
    current, attempt = serving.current, switching.attempt
    failed = switching.fatal or serving.failed
    return {
        "run": switching.catalog.store.url,
        "state": _state(switching),
        "ready": current is not None and not serving.closed and not (serving.failed and serving.is_shut),
        "gate": "shut" if serving.is_shut else "open",
        "follow": switching.choices.follow,
        "strategy": switching.choices.strategy,
        "pinned": None if switching.pinned is None else switching.pinned.step,
        "serving": None if current is None else current.facts(),
        "previous": None if versions.previous is None else versions.previous.facts(),
        "draining": versions.undrained(),
        "reloading": None if attempt is None else {name: attempt.facts[name] for name in DOING},
        "quarantined": switching.quarantine.facts(),
        "reloads": switching.log.swapped,
        "failures": switching.log.failed,
        "history": switching.log.history(),
        "error": None if failed is None else f"{type(failed).__name__}: {failed}",
    }


def _state(switching: Switching[Any]) -> str:
    if switching.serving.closed:
        return "closed"
    if switching.fatal or switching.serving.failed:
        return "failed"
    return "serving" if switching.serving.current else "starting"
