"""Train a tiny GPT-2 to count, with Hugging Face's Trainer; checkpoints are written while it trains.

Run it again with more steps and it goes on from its last checkpoint. Nothing is downloaded.

    python examples/hf_trainer.py --run runs/counting --steps 60
    python examples/hf_trainer.py --run runs/counting --steps 120
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from aiockpt import CheckpointError
from aiockpt.integrations.transformers import AioTrainer

NUMBERS = 32
LENGTH = 16


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Stretches of 0, 1, 2, ..., 31, 0, 1, ..."""

    def __len__(self) -> int:
        return NUMBERS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(LENGTH) + index) % NUMBERS
        return {"input_ids": row, "labels": row}


class Announcing(AioTrainer):
    """Says when a checkpoint may be relied on."""

    def checkpoint_committed(self, folder: str) -> None:
        """On the writing thread, once the folder is durable."""
        print(f"durable: {Path(folder).name}")


def train(run: Path, steps: int) -> None:
    """Train to `steps`, resuming from the newest checkpoint of `run` if there is one."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=NUMBERS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    trainer = Announcing(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(run),
            max_steps=steps,
            save_steps=20,
            save_total_limit=2,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Counting(),
    )
    newest = get_last_checkpoint(run) if run.is_dir() else None
    print(f"resuming from {Path(newest).name}" if newest else "started anew")
    trainer.train(resume_from_checkpoint=newest)
    # `train` returned: everything is on disk, and any tool of Hugging Face reads it.
    saved = GPT2LMHeadModel.from_pretrained(run / f"checkpoint-{steps}")
    told = saved(torch.arange(LENGTH)[None]).logits.argmax(-1)[0, 4:]
    right = (told == torch.arange(5, LENGTH + 1)).float().mean()
    print(f"step {trainer.state.global_step}, of the next numbers {right:.0%} are right")
    print("kept:", ", ".join(sorted(path.name for path in run.iterdir())))


def main() -> int:
    """Parse the command line and train; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/counting"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step, a multiple of 20")
    args = parser.parse_args()
    try:
        train(args.run, args.steps)
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
