"""What the tests of the Transformers integration train: a tiny GPT-2 on random tokens, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

from aiockpt.integrations.transformers import AioTrainer

logging.set_verbosity_error()
logging.disable_progress_bar()


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sentences, the same ones every time."""

    def __init__(self, count: int = 48) -> None:
        self.rows = torch.randint(0, 50, (count, 12), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model() -> GPT2LMHeadModel:
    """Two layers, tied embeddings, and dropout, which makes every step depend on the random state."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def trainer(folder: Path, *, steps: int, kind: type[Trainer] = AioTrainer, **options: Any) -> Any:
    """A quiet trainer on the CPU that saves every second step; the schedule ends at step 8."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "max_steps": 8,
        "seed": 7,
    }
    extras = {name: options.pop(name) for name in ("callbacks", "model") if name in options}
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        dataloader_pin_memory=False,
        **(defaults | options),
    )
    made = kind(
        model=extras.pop("model", None) or model(),
        args=args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(8),
        **extras,
    )
    if steps < args.max_steps:
        made.add_callback(_stop_after(steps))
    return made


def _stop_after(steps: int) -> Any:
    """A run that ends early, as one that is killed and resumed, with its schedule unchanged."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    return Stop()


def losses(trained: Any) -> list[float]:
    """The loss of each step since the run began, resumed or not."""
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
