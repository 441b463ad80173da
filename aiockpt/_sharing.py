"""The half of a catalog that is about sharing a run: watches, leases, aliases, deletion."""

from __future__ import annotations

from ._aliases import Aliases, check_alias
from ._leaselist import LeaseInfo, leases
from ._leases import Lease
from ._loader import Loader
from ._pruning import prune
from ._watching import Watch, WatchOptions, wait_for
from .checkpoint import Checkpoint
from .policies import Keep, KeepFunction, as_keep
from .storage import Store

__all__ = ["Sharing"]


class Sharing:
    """What readers of a run tell each other through it.

    Attributes:
        store: the run.
        loader: loads its checkpoints.
    """

    store: Store
    loader: Loader

    # -------------------------------------------------------------- following a run

    def watch(
        self,
        *,
        after: int | Checkpoint | None = None,
        poll: float = 1.0,
        every: bool = False,
        follow: str = "latest",
        cursor: str | None = None,
        ttl: float = 60.0,
    ) -> Watch:
        """The checkpoints as they are committed: `async for checkpoint in catalog.watch():`.

        Each is leased while the body runs. A slow body misses none but those that a newer one
        has replaced. A run that is not there yet, or fails for a while, is waited for; that is
        logged once. What was written anew under an old step is news.

        Args:
            after: a step or a checkpoint: only what comes later.
            poll: seconds between two looks. On a local disk, where watchfiles is installed,
                a commit is seen at once.
            every: all checkpoints, oldest first, in place of the newest one.
            follow: `latest`, or `alias:NAME`: wherever that is promoted to, back as well.
            cursor: a name under which `await checkpoint.ack()` remembers how far it came;
                the next watch of that name goes on from there. It is kept in the run.
            ttl: of the leases, in seconds.

        Raises:
            UsageError: the options are wrong or do not go together.
        """
        options = WatchOptions(after=after, poll=poll, every=every, follow=follow, cursor=cursor, ttl=ttl)
        return Watch(self.loader, options)

    async def wait_for(self, step: int, *, poll: float = 1.0) -> Checkpoint:
        """Wait until a step is committed; bound it by `asyncio.timeout`.

        Returns:
            The step's checkpoint; where that was left out or is gone, the next one above it.

        Raises:
            UsageError: it is no step.
        """
        return await wait_for(self.loader, step, poll)

    # -------------------------------------------------------------- sharing a run

    def lease(
        self, checkpoint: Checkpoint | int | None = None, *, ttl: float = 60.0, purpose: str = ""
    ) -> Lease:
        """Keep a checkpoint from being deleted: `async with catalog.lease() as lease:`.

        A task of this loop renews it; a reader that died keeps the checkpoint for `ttl` seconds
        more. Where a run cannot be written there is one warning, and the files are held open.

        Args:
            checkpoint: from this catalog, or a step; None for the newest valid one.
            ttl: seconds; more than three times what the loop may ever be blocked.
            purpose: a word for those who look at the `leases()`.

        Raises:
            StepNotFoundError: on entering: there is no such checkpoint, or it is gone.
            As `get`.
        """
        return Lease(self.loader, checkpoint, ttl, purpose)

    async def leases(self) -> tuple[LeaseInfo, ...]:
        """Who keeps which checkpoint now, as the leases in the run say. Writes nothing.

        Raises:
            StorageError: the store failed.
        """
        return await leases(self.store)

    async def promote(self, checkpoint: Checkpoint | int, alias: str = "production") -> Checkpoint:
        """Let an alias point at a valid checkpoint, in one step; retention keeps it then.

        Of two who promote at once the last one wins.

        Args:
            checkpoint: from this catalog, or a step.
            alias: letters, digits, `.`, `_` and `-`.

        Raises:
            UsageError: it is no name for an alias.
            As `get`; the alias is as it was then.
        """
        check_alias(alias)
        # Leased until the alias is there: had it to be taken back, what it pointed at before
        # would have been unprotected meanwhile.
        async with self.lease(checkpoint) as lease:
            return await Aliases(self.loader.finder).promote(lease.checkpoint, alias)

    async def alias(self, alias: str = "production") -> Checkpoint:
        """The checkpoint that an alias points at.

        Raises:
            StepNotFoundError: there is no such alias, or its checkpoint is gone.
            CorruptCheckpointError: the alias or the checkpoint is damaged.
            StorageError: the store failed.
        """
        return await Aliases(self.loader.finder).alias(alias)

    async def aliases(self) -> dict[str, Checkpoint]:
        """Every alias that points at a checkpoint; others are logged. Raises StorageError."""
        return await Aliases(self.loader.finder).aliases()

    async def prune(self, keep: Keep | KeepFunction, *, dry_run: bool = True) -> tuple[int, ...]:
        """Delete what a policy lets go, as a saver does after a commit.

        Only valid checkpoints of the newest one's run are candidates. The newest stays in any
        case, and so does what is leased or promoted. A saver may be at work meanwhile.

        Args:
            keep: which steps stay, as for `Saver(keep=...)`.
            dry_run: only say what would go; say `dry_run=False` to delete it.

        Returns:
            The steps that went, or would go, oldest first. What could not be deleted is logged.

        Raises:
            UsageError: the policy returned something else than steps.
            StorageError: the store failed.
        """
        return await prune(self.store, self.loader.finder, as_keep(keep), dry_run=dry_run)

    async def demote(self, alias: str = "production") -> None:
        """Remove an alias; the checkpoint stays until retention takes it. A missing one is no error.

        Raises:
            StorageError: the store failed.
        """
        await Aliases(self.loader.finder).demote(alias)
