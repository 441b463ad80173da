"""The examples with Lightning and Transformers: they save, resume, and end where they should."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.lightning_models import WARNINGS

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]


@pytest.fixture(autouse=True)
def _seeds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """`seed_everything` leaves its seed in the environment."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def run(
    example: str,
    folder: Path,
    *args: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Run an example as a program in this process, which has the heavy imports; returns its output."""
    monkeypatch.setattr(sys, "argv", [example, "--run", str(folder), *args])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    out, err = capsys.readouterr()
    assert end.value.code == 0, out + err
    return out


def test_lightning_fit_goes_on_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs of it come to one: three epochs, then two more."""
    folder = tmp_path / "run"
    out = run("lightning_fit.py", folder, "--epochs", "3", monkeypatch=monkeypatch, capsys=capsys)
    assert "started anew" in out
    out = run("lightning_fit.py", folder, "--epochs", "5", monkeypatch=monkeypatch, capsys=capsys)
    assert "resuming from" in out
    assert "best: epoch=4.ckpt, kept: epoch=3.ckpt, epoch=4.ckpt, last.ckpt" in out


def test_hf_trainer_goes_on_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs of it come to one, and the model it ends with can count."""
    folder = tmp_path / "run"
    out = run("hf_trainer.py", folder, "--steps", "60", monkeypatch=monkeypatch, capsys=capsys)
    assert "started anew" in out
    assert out.count("durable: checkpoint-") == 3
    out = run("hf_trainer.py", folder, "--steps", "100", monkeypatch=monkeypatch, capsys=capsys)
    assert "resuming from checkpoint-60" in out
    assert "step 100, of the next numbers 100% are right" in out
    assert "kept: checkpoint-100, checkpoint-80" in out
