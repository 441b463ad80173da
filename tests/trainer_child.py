"""One rank of data-parallel trainings, for `test_trainer_ranks`: trains, and tells how each ended.

Arguments: a folder for all of them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from transformers import Trainer  # noqa: E402

from aiockpt.errors import CheckpointError  # noqa: E402
from aiockpt.integrations.transformers import AioTrainer, AioTrainerMixin  # noqa: E402
from tests.trainer_models import losses, trainer  # noqa: E402


class Full(Trainer):
    """The disk is full when the model is written."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        raise OSError(28, "No space left on device")


class Failing(AioTrainerMixin, Full):
    """The same behind the mixin."""


def train(folder: Path, steps: int, *, kind: type[Trainer] = AioTrainer, resume: bool = False) -> Any:
    """Train; returns what this rank saw."""
    made = trainer(folder, steps=steps, kind=kind, ddp_backend="gloo")
    try:
        made.train(resume_from_checkpoint=resume)
    except CheckpointError as error:
        return {"error": type(error).__name__, "says": str(error)}
    return {"losses": losses(made), "listing": sorted(os.listdir(folder))}


def main(folder: Path) -> None:
    """All trainings in one process: starting one is what takes long."""
    outcomes = {
        "straight": train(folder / "straight", 4),
        "stopped": train(folder / "run", 2),
        "resumed": train(folder / "run", 4, resume=True),
        "failed": train(folder / "failed", 4, kind=Failing),
        "failed at the end": train(folder / "last", 2, kind=Failing),
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Left to the interpreter's exit, gloo's threads end the process by an abort now and then.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
