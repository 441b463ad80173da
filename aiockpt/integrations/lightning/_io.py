"""What an `AioCheckpointIO` does, whichever package its base class comes from."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import Any, Literal

from aiockpt.errors import StorageError, UsageError

from .._background import Background, earlier, one_of
from .._snapshot import Buffers, Snapshot, take
from ._formats import AiockptFolder, Format, TorchFile, Wrapped

__all__ = ["AioCheckpoints"]

log = logging.getLogger("aiockpt")


class AioCheckpoints:
    """A `CheckpointIO` that copies a checkpoint to host memory, returns, and writes it in the background.

    `save_checkpoint` returns when the training loop may go on. Saves, removals and loads happen in the
    order of the calls. A checkpoint is seen under its name only when it is whole and flushed. A removal
    waits for the save before it, and is not carried out while the newest save has failed: what it would
    have removed may be all there is. `teardown`, which the Trainer calls at the end, waits for
    everything; the plugin can be used for the next `fit`.

    An error of the background is logged at once and raised once: by the next `save_checkpoint`, after
    that save was accepted, or by `teardown`; when the Trainer is failing for another reason, it becomes
    a note on that reason.

    Args:
        checkpoint_io: who writes; by default this plugin does, to a plain `.ckpt` file. It runs in a
            thread, one call at a time.
        format: `torch`: a file of `torch.save`, as Lightning's own. `aiockpt`: a folder of safetensors
            files with checksums, without pickle, for checkpoints of plain values.
        max_pending: saves under way, each with a copy of the state in host memory; `save_checkpoint`
            waits for the oldest when there are as many.
        on_failure: `raise`, or `log`: then only `teardown` raises.
        allow_pickle: with `format="aiockpt"`: pickle what has no other form, and unpickle it.

    Raises:
        UsageError: an option is wrong.
    """

    stock: type[Any]
    """The `TorchCheckpointIO` of the package."""
    # Of the base class that a subclass adds
    _checkpoint_io: Any
    _base_checkpoint_io_configured: bool

    def __init__(
        self,
        checkpoint_io: Any = None,
        *,
        format: Literal["torch", "aiockpt"] = "torch",
        max_pending: int = 1,
        on_failure: Literal["raise", "log"] = "raise",
        allow_pickle: bool = False,
    ) -> None:
        if format not in ("torch", "aiockpt"):
            raise UsageError(f"format is 'torch' or 'aiockpt', not {format!r}")
        if format == "aiockpt" and checkpoint_io is not None:
            raise UsageError(
                "format='aiockpt' is written by this plugin; it cannot wrap another CheckpointIO"
            )
        if on_failure not in ("raise", "log"):
            raise UsageError(f"on_failure is 'raise' or 'log', not {on_failure!r}")
        if max_pending < 1:
            raise UsageError(f"max_pending is at least 1, not {max_pending!r}")
        super().__init__(checkpoint_io)  # type: ignore[call-arg]  # the base that a subclass adds
        self._own: Format = (
            TorchFile(self.stock()) if format == "torch" else AiockptFolder(self.stock(), allow_pickle)
        )
        self._max_pending = max_pending
        self._on_failure = on_failure
        self._reset()

    def _reset(self) -> None:
        self._queue: Background | None = None
        self._buffers = Buffers()
        self._failing = False
        self._held: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """For launchers that pickle the Trainer: the options; a copy begins with nothing pending."""
        kept = ("_checkpoint_io", "_base_checkpoint_io_configured", "_own", "_max_pending", "_on_failure")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def checkpoint_io(self) -> Any:
        """The wrapped CheckpointIO; None when this plugin writes."""
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        # Strategies offer Lightning's stock one at every look, for plugins that cannot write by themselves.
        if self._checkpoint_io is None:
            if type(io) is not self.stock:
                self._checkpoint_io = io
                self._base_checkpoint_io_configured = True
        elif not self._base_checkpoint_io_configured:
            self._checkpoint_io.checkpoint_io = io
            self._base_checkpoint_io_configured = True

    @property
    def _format(self) -> Format:
        return self._own if self._checkpoint_io is None else Wrapped(self._checkpoint_io)

    # The contract of a CheckpointIO

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy the checkpoint; return when it may change. It is written in the background.

        Raises:
            TypeError: `storage_options` were given and no CheckpointIO is wrapped that takes them.
            UnsupportedStateError: values that the format cannot hold; lists their paths.
            PreviousSaveError: an earlier save failed; this one was accepted and goes on.
        """
        name, written = os.fspath(path), self._format
        written.check(checkpoint, name, storage_options)
        queue = self._open()
        queue.admit()
        snapshot = take(checkpoint, self._buffers, file=name)
        errors = queue.unseen() if self._on_failure == "raise" else []
        queue.save(name, partial(self._write, written, snapshot, name, storage_options))
        if errors:
            raise earlier(errors, name)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or folder, after everything that was called before."""
        name = os.fspath(path)
        self._open().then(name, partial(self._remove, self._format, name))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load, after everything that was called before.

        Raises:
            FileNotFoundError: there is none; a failed save leaves what was there before.
            CorruptCheckpointError: of a folder in aiockpt's format.
        """
        if self._queue is not None:
            self._queue.settle()
        options = {"map_location": map_location, "weights_only": weights_only}
        return self._format.load(
            os.fspath(path), {name: value for name, value in options.items() if value is not None}
        )

    def teardown(self) -> None:
        """Wait until everything is written; the plugin may be used again afterwards.

        Raises:
            CheckpointError: a save failed and nobody was told; several: `SaveErrors`.
        """
        errors = [] if self._queue is None else self._queue.finish()
        if self._held:
            log.warning("not removed, for the save after it failed: %s", ", ".join(self._held))
        self._reset()
        if self._checkpoint_io is not None:
            try:
                self._checkpoint_io.teardown()
            except Exception as error:
                errors.append(error)
        _raise_or_note(errors)

    # Behind it

    def _open(self) -> Background:
        if self._queue is None or self._queue.foreign:
            self._reset()
            self._queue = Background("lightning", max_pending=self._max_pending)
        return self._queue

    def _write(self, written: Format, snapshot: Snapshot, name: str, storage_options: Any) -> None:
        """On the thread."""
        self._held = [held for held in self._held if held != name]
        self._failing = True
        written.save(snapshot, name, storage_options)
        self._failing = False
        while self._held:
            held = self._held.pop(0)
            try:
                written.remove(held)
            except OSError as error:
                raise StorageError.wrap(error, "removing", file=held) from error

    def _remove(self, written: Format, name: str) -> None:
        """On the thread."""
        if self._failing:
            self._held.append(name)
        else:
            written.remove(name)


def _raise_or_note(errors: list[Exception]) -> None:
    """Raise, unless the Trainer tears down because it is failing: its own reason comes first."""
    if not errors:
        return
    reason = sys.exception()
    if reason is None or not _caught_by_lightning(reason):
        raise one_of(errors)
    for error in errors:
        reason.add_note(f"A checkpoint was not written: {error}")


def _caught_by_lightning(error: BaseException) -> bool:
    """Whether it is handled by the Trainer, and not by a program that calls `fit` while handling it."""
    trace = error.__traceback__
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return str(module).partition(".")[0] in ("lightning", "pytorch_lightning")
