"""The code on the pages about Lightning and Transformers runs as it stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import lightning_models, trainer_models
from tests.test_docs import blocks, run

pytestmark = [pytest.mark.filterwarnings(line) for line in lightning_models.WARNINGS]


def test_code_of_the_lightning_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer of the page trains and leaves the checkpoints it speaks of."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks("docs/lightning.md"):
        run(code, names)
    made = names["trainer"]
    made.fit_loop.max_epochs = 2
    made.log_every_n_steps = 1  # or Lightning remarks how few the batches are
    made.fit(lightning_models.Net(), lightning_models.data())
    assert len(os.listdir("runs/digits")) == 3
    assert "last.ckpt" in os.listdir("runs/digits")


# torch, of a loader that pins memory as the Trainer's do by default, where there is no accelerator.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_code_of_the_transformers_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's trainer resumes what another one left, and its hook hears of checkpoints."""
    monkeypatch.chdir(tmp_path)
    trainer_models.trainer(Path("runs/digits"), steps=2).train()
    uploaded: list[str] = []
    names: dict[str, Any] = {
        "model": trainer_models.model(),
        "dataset": trainer_models.Tokens(),
        "upload": uploaded.append,
    }
    for code in blocks("docs/transformers.md"):
        run(code, names)
    assert names["trainer"].state.global_step == 18
    trainer_models.trainer(Path("runs/other"), steps=2, kind=names["Mine"]).train()
    assert uploaded == [os.path.join("runs/other", "checkpoint-2")]
