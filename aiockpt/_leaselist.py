"""Who keeps which checkpoint: the leases of a run, read and not judged.

For people and status pages. Whoever deletes asks `_leases.leased`, which writes a probe
to know the store's time; here the youngest lease tells it, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._leases import FOLDER, LIMIT, NAME
from ._ttl import DEFAULT_TTL, is_ttl
from .errors import StorageError
from .storage import Entry, Store

__all__ = ["LeaseInfo", "leases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseInfo:
    """What one lease says."""

    name: str
    """The checkpoint's folder."""
    step: int | None
    """None where the lease cannot be read."""
    save_id: str
    purpose: str
    """`serving` for a `Reloader`, `watch` for a watch, else what its holder said."""
    host: str
    pid: int | None
    job: str
    since: float | None
    """Seconds since 1970 on the holder's clock."""
    ttl: float
    """Seconds for which it holds without renewal."""
    renewed: float | None
    """When it was last renewed, in seconds on the store's clock; None where that does not say."""
    expired: bool
    """Whether it is too old by the youngest lease there is: its holder died or stands still."""


async def leases(store: Store) -> tuple[LeaseInfo, ...]:
    """All leases of a run, by checkpoint.

    Raises:
        StorageError: the store failed.
    """
    try:
        entries = [entry for entry in await store.list(FOLDER) if NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StorageError.wrap(error, "list", file=FOLDER) from error
    now = max((entry.modified for entry in entries if entry.modified is not None), default=None)
    found = [await _read(store, entry, now) for entry in entries]
    return tuple(
        sorted((info for info in found if info is not None), key=lambda info: (info.name, info.pid or 0))
    )


async def _read(store: Store, entry: Entry, now: float | None) -> LeaseInfo | None:
    match = NAME.fullmatch(entry.name)
    assert match is not None
    try:
        data = await store.get(f"{FOLDER}/{entry.name}", limit=LIMIT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError.wrap(error, "read", file=f"{FOLDER}/{entry.name}") from error
    body = _body(data)
    ttl = float(body["ttl"]) if is_ttl(body.get("ttl")) else DEFAULT_TTL
    age = None if now is None or entry.modified is None else now - entry.modified
    who = body.get("who") if isinstance(body.get("who"), dict) else {}
    assert who is not None
    return LeaseInfo(
        name=match["name"],
        step=body["step"] if type(body.get("step")) is int else None,
        save_id=match["save"],
        purpose=str(body.get("purpose") or ""),
        host=str(who.get("host") or ""),
        pid=who["pid"] if type(who.get("pid")) is int else None,
        job=str(who.get("job") or ""),
        since=float(body["since"]) if isinstance(body.get("since"), (int, float)) else None,
        ttl=ttl,
        renewed=entry.modified,
        expired=age is not None and age > ttl,
    )


def _body(data: bytes) -> Mapping[str, Any]:
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
