"""A text file that holds the number of the newest committed step."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..storage import Store
from . import Publisher, check_published_name

__all__ = ["TrackerFile"]


class TrackerFile(Publisher):
    """`RUN/latest_checkpointed_iteration.txt` holds the newest step, as Megatron-LM and verl have it.

    Args:
        name: of the file.

    Raises:
        UsageError: the name cannot be used.
    """

    pointer = True
    repeats = True

    def __init__(self, name: str = "latest_checkpointed_iteration.txt") -> None:
        self.file = check_published_name(name)

    async def publish(self, store: Store, checkpoint: Checkpoint) -> None:
        await store.put(self.file, str(checkpoint.step).encode())
