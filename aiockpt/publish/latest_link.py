"""A symbolic link in the run's folder that leads to the newest committed step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..checkpoint import Checkpoint
from ..errors import UsageError
from ..storage import Store
from . import Publisher, check_published_name

__all__ = ["LatestLink"]


@runtime_checkable
class _Linking(Protocol):
    """A store that has symbolic links."""

    async def symlink(self, name: str, target: str) -> None: ...


class LatestLink(Publisher):
    """`RUN/latest` is a link to the newest step's folder, changed in one step.

    Only for runs in a folder. It is for people and for tools that want a path: whoever can
    should ask `aiockpt.latest`, which looks at what is there. Whoever deletes the newest
    step by hand leaves it dangling until the next commit.

    Args:
        name: of the link.

    Raises:
        UsageError: the name cannot be used.
    """

    pointer = True
    repeats = True

    def __init__(self, name: str = "latest") -> None:
        self.link = check_published_name(name)

    def check(self, store: Store) -> None:
        if not isinstance(store, _Linking):
            raise UsageError(
                f"LatestLink needs a run in a folder; {store.url} has no links. Use TrackerFile."
            )

    async def publish(self, store: Store, checkpoint: Checkpoint) -> None:
        assert isinstance(store, _Linking)
        await store.symlink(self.link, checkpoint.name)
