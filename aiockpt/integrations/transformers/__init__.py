"""Hugging Face Transformers: a `Trainer` whose checkpoints are written while training goes on.

    trainer = AioTrainer(model=model, args=TrainingArguments("runs/digits", save_steps=500), ...)

`AioTrainerMixin` does the same for a trainer of another class: `class Mine(AioTrainerMixin, TheirTrainer)`.
"""

from __future__ import annotations

from transformers import Trainer

from ._mixin import AioTrainerMixin

__all__ = ["AioTrainer", "AioTrainerMixin"]


class AioTrainer(AioTrainerMixin, Trainer):
    """`transformers.Trainer` with the promises of `AioTrainerMixin`."""
