"""The Trainer's own way to save, with a folder aside and a thread for the writing.

The Trainer's code decides what is in a checkpoint and writes the small files, into a hidden folder
that passes for the run's. Where it would write the model and the optimizer, they are noted, copied
to host memory, and written by a thread, which then gives the folder its name and rotates.
"""

from __future__ import annotations

import io
import logging
import os
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerState

from aiockpt.errors import PublishError

from .._background import Background, earlier, one_of
from .._snapshot import Buffers, Snapshot, take
from ._folders import Staging, rotate, steps_in, sweep
from ._ranks import everywhere, together

__all__ = ["AioTrainerMixin"]

log = logging.getLogger("aiockpt")

MODEL = "model"
TRAINER_STATE = "trainer_state.json"
TRAINING_ARGS = "training_args.bin"
PLAIN_MODES = ("not_parallel", "not_distributed", "distributed")


class AioTrainerMixin:
    """For `class Mine(AioTrainerMixin, Trainer)`: checkpoints are written while training goes on.

    A save copies model, optimizer and the rest to host memory and returns. A thread writes
    `checkpoint-N` aside, flushes it and gives it its name: `get_last_checkpoint` never sees half a
    one. What is in it is what the Trainer puts there; the stock Trainer resumes from it, and this
    one from stock checkpoints. Rotation (`save_total_limit`) comes after that, by step; it spares the
    newest, the best, and what an earlier run left at higher steps.

    A failed write is logged at once and raised once: by the next save, or by the end of `train`, on
    every rank. `train` returns, and the best model is loaded, when everything is on disk.

    FSDP, DeepSpeed, TPUs, SageMaker's model parallelism, models that are sharded when loaded, and
    `push_to_hub` save as the stock Trainer does, and a line in the log says so. Adapters (PEFT) and
    quantized or offloaded models are written before the save returns; their optimizer is not.
    """

    max_pending_saves = 1
    """Checkpoints under way, each with a copy of the state in host memory; a save waits for the oldest."""

    # Of the Trainer
    args: Any
    state: TrainerState
    model: Any
    optimizer: Any
    lr_scheduler: Any

    _aio_queue: Background | None = None
    _aio_staging: Staging | None = None
    _aio_buffers: Buffers | None = None
    _aio_staged: frozenset[str] = frozenset()
    _aio_said = False

    def train(self, *args: Any, **options: Any) -> Any:
        """As `Trainer.train`; returns when every checkpoint is on disk.

        Raises:
            PreviousSaveError: from inside the training, at the save after one that failed.
            CheckpointError: the last save failed; several: `SaveErrors`.
        """
        self._aio_staged = frozenset()
        try:
            output = super().train(*args, **options)  # type: ignore[misc]  # here and below: the Trainer's
        except BaseException as reason:
            for error in self._aio_finish():
                reason.add_note(f"A checkpoint was not written: {error}")
            raise
        self.drain_checkpoints()
        return output

    def drain_checkpoints(self) -> None:
        """Wait until every checkpoint is on disk. On several ranks all of them call it.

        Raises:
            CheckpointError: a save failed and nobody was told; several: `SaveErrors`.
            RanksFailedError: it was another rank's.
        """
        errors = everywhere(self._aio_finish(), distributed=self._aio_distributed)
        if errors:
            raise one_of(errors)

    def checkpoint_committed(self, folder: str) -> None:
        """Called with each finished checkpoint, on the writing thread: to be overridden.

        `on_save` of callbacks comes when the state is copied, before there is a folder. An error is
        told like one of the save, as a `PublishError`; the checkpoint stays.
        """

    # What the Trainer calls

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **options: Any) -> None:
        if not self._aio_plain():
            self.drain_checkpoints()
            super()._save_checkpoint(model, trial, *args, **options)  # type: ignore[misc]
            return
        staging = Staging(self._get_output_dir(trial), int(self.state.global_step))
        errors = everywhere(self._aio_begin(staging), distributed=self._aio_distributed)
        before = self.state.best_model_checkpoint
        self._aio_staging = staging
        try:
            super()._save_checkpoint(model, trial, *args, **options)  # type: ignore[misc]
            self._aio_name_best(staging, before)
            together(distributed=self._aio_distributed)  # each has put its random state there
            if self.args.should_save:
                self._aio_hand_over(staging)
        except BaseException:
            staging.discard()
            raise
        finally:
            self._aio_staging = None
        if errors:
            raise earlier(errors, staging.final)

    def _get_output_dir(self, trial: Any) -> str:
        if self._aio_staging is not None:
            return self._aio_staging.root
        return super()._get_output_dir(trial)  # type: ignore[misc, no-any-return]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        staging = self._aio_staging
        aside = staging is not None and output_dir == staging.folder and state_dict is None
        if staging is None or not aside or not self._aio_copies_model():
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]
        elif self.args.should_save:
            os.makedirs(staging.folder, exist_ok=True)
            staging.parts[MODEL] = self.model.state_dict()
            arguments = io.BytesIO()
            torch.save(self.args, arguments)  # noqa: TID251  # the Trainer's own format
            staging.small[TRAINING_ARGS] = arguments.getvalue()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        staging = self._aio_staging
        if staging is None or output_dir != staging.folder:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        elif self.args.should_save:
            staging.parts["optimizer.pt"] = self.optimizer.state_dict()
            staging.parts["scheduler.pt"] = self.lr_scheduler.state_dict()

    # Before the Trainer looks at the folders at the end; which of these it calls depends on its version

    def _load_best_model(self) -> None:
        self.drain_checkpoints()
        super()._load_best_model()  # type: ignore[misc]

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self.drain_checkpoints()
        return super()._finalize_training(*args, **options)  # type: ignore[misc]

    def _sorted_checkpoints(self, *args: Any, **options: Any) -> Any:
        if self._aio_staging is None:
            self.drain_checkpoints()
        return super()._sorted_checkpoints(*args, **options)  # type: ignore[misc]

    # Behind it

    @property
    def _aio_distributed(self) -> bool:
        return bool(self.args.world_size > 1)

    def _aio_plain(self) -> bool:
        """Whether the state is whole on the rank that saves."""
        sharded = ("is_fsdp_enabled", "is_deepspeed_enabled", "is_distributed_loading_by_transformers")
        reasons = [name for name in sharded if getattr(self, name, False)]
        mode = str(self.args.parallel_mode.value)
        reasons += [mode] if mode not in PLAIN_MODES else []
        reasons += ["push_to_hub"] if self.args.push_to_hub else []
        if reasons and not self._aio_said:
            self._aio_said = True
            log.warning("checkpoints are written by the Trainer itself, which waits: %s", ", ".join(reasons))
        return not reasons

    def _aio_copies_model(self) -> bool:
        """Whether `save_pretrained` does with a copy of the state dict what it does with the model's."""
        model = self.model
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        if getattr(model, "hf_quantizer", None) is not None or devices & {"cpu", "disk"}:
            return False
        if isinstance(model, PreTrainedModel):
            return not getattr(model, "_hf_peft_config_loaded", False)
        return not hasattr(model, "peft_config")

    def _aio_begin(self, staging: Staging) -> list[Exception]:
        """Wait for room, clear the way; returns the errors nobody was told of."""
        if not self.args.should_save:
            return []
        if self._aio_queue is None or self._aio_queue.foreign:
            self._aio_queue = Background("trainer", max_pending=self.max_pending_saves)
            self._aio_buffers = Buffers()
        if os.path.exists(staging.root):
            self._aio_queue.settle()  # the same step, saved twice in a row
        self._aio_queue.admit()
        if not self._aio_staged:
            sweep(staging.run_dir)
            self._aio_warn_of_later(staging)
        return self._aio_queue.unseen()

    def _aio_warn_of_later(self, staging: Staging) -> None:
        later = [step for step in steps_in(staging.run_dir) if step > staging.step]
        if later:
            log.warning(
                "%s holds checkpoints of steps after %d, of an earlier run: %s. They are not removed, and "
                "resume_from_checkpoint=True would take the highest of them",
                staging.run_dir,
                staging.step,
                ", ".join(map(str, later)),
            )

    def _aio_name_best(self, staging: Staging, before: str | None) -> None:
        """Say in the state where the best checkpoint will be; the Trainer has looked in the hidden folder."""
        best = getattr(self.state, "best_global_step", None)
        strategy = str(getattr(self.args.save_strategy, "value", self.args.save_strategy))
        found = before
        if best and strategy != "no":
            folder = os.path.join(staging.run_dir, f"checkpoint-{best}")
            if folder == staging.final or folder in self._aio_staged or os.path.isdir(folder):
                found = folder
        changed = self.state.best_model_checkpoint != found
        self.state.best_model_checkpoint = found
        if changed and self.args.should_save:
            self.state.save_to_json(os.path.join(staging.folder, TRAINER_STATE))

    def _aio_hand_over(self, staging: Staging) -> None:
        queue, buffers = self._aio_queue, self._aio_buffers
        assert queue is not None
        assert buffers is not None
        snapshot = take(staging.parts, buffers, file=staging.final)
        staging.parts.clear()
        replaces = os.path.isdir(staging.final)
        rest = partial(
            rotate,
            staging.run_dir,
            self.args.save_total_limit,
            committed=staging.step,
            best=self.state.best_model_checkpoint,
        )
        queue.save(staging.final, partial(self._aio_write, staging, snapshot, rest))
        self._aio_staged |= {staging.final}
        if replaces:
            queue.settle()  # whoever saves over a folder may look into it next

    def _aio_write(self, staging: Staging, snapshot: Snapshot, rest: partial[None]) -> None:
        """On the thread."""
        try:
            parts = snapshot.rebuild()
            if MODEL in parts:
                super()._save(staging.folder, state_dict=parts.pop(MODEL))  # type: ignore[misc]
            for name in list(parts):
                torch.save(parts.pop(name), os.path.join(staging.folder, name))  # noqa: TID251
            staging.commit()
        except BaseException:
            staging.discard()
            raise
        snapshot.release()
        rest()
        try:
            self.checkpoint_committed(staging.final)
        except Exception as error:
            message = f"{staging.final} is committed; checkpoint_committed failed: {error!r}"
            raise PublishError(message, step=staging.step, file=staging.final) from error

    def _aio_finish(self) -> list[Exception]:
        if self._aio_queue is None or self._aio_queue.foreign:
            return []
        errors = self._aio_queue.finish()
        self._aio_buffers = Buffers()
        return errors
