"""AioTrainer: what it writes is the Trainer's own, resumes bit for bit, and rotates after the commit."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from aiockpt.errors import PreviousSaveError, PublishError, SaveError, StorageError
from aiockpt.integrations.transformers import AioTrainer, AioTrainerMixin
from aiockpt.integrations.transformers._folders import rotate, steps_in
from tests.trainer_models import losses, model, trainer


class Slow(Trainer):
    """A trainer whose writes wait to be let through, and fail as often as told."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.open = threading.Event()
        self.open.set()
        self.fail: list[BaseException] = []

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        assert self.open.wait(20)
        if self.fail:
            raise self.fail.pop(0)
        super()._save(output_dir, state_dict)


class Gated(AioTrainerMixin, Slow):
    """The same behind the mixin."""

    committed: tuple[str, ...] = ()

    def checkpoint_committed(self, folder: str) -> None:
        assert os.path.isfile(os.path.join(folder, "trainer_state.json"))
        self.committed += (os.path.basename(folder),)


class Look(TrainerCallback):
    """Calls `look(step)` after each step, and `saved(step)` when the Trainer says that it saved."""

    def __init__(self, look: Any = None, saved: Any = None) -> None:
        self.look = look
        self.saved = saved

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.look is not None:
            self.look(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.saved is not None:
            self.saved(state.global_step)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint."""
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same weights."""
    left, right = tensors(one), tensors(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# What is written


def test_a_checkpoint_is_what_the_stock_trainer_writes(tmp_path: Path) -> None:
    """The same files with the same content, and nothing beside them."""
    trainer(tmp_path / "stock", steps=4, kind=Trainer).train()
    trainer(tmp_path / "ours", steps=4).train()
    assert sorted(os.listdir(tmp_path / "ours")) == ["checkpoint-2", "checkpoint-4"]
    for step in (2, 4):
        ours, stock = (tmp_path / name / f"checkpoint-{step}" for name in ("ours", "stock"))
        assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
        assert same(ours, stock)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            left, right = (torch.load(folder / name, weights_only=False) for folder in (ours, stock))
            torch.testing.assert_close(_plain(left), _plain(right), rtol=0, atol=0)
        assert json.loads((ours / "config.json").read_text()) == json.loads(
            (stock / "config.json").read_text()
        )
        assert torch.load(ours / "training_args.bin", weights_only=False).max_steps == 8
        states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (ours, stock)]
        assert states[0]["global_step"] == states[1]["global_step"] == step
        assert [entry.get("loss") for entry in states[0]["log_history"]] == [
            entry.get("loss") for entry in states[1]["log_history"]
        ]


def _plain(value: Any) -> Any:
    """Nested values as the comparison of torch takes them."""
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    if isinstance(value, (torch.Tensor, int, float)):
        return torch.as_tensor(value)
    return torch.tensor(list(repr(value).encode()))


@pytest.mark.parametrize(
    ("first", "second"), [(AioTrainer, AioTrainer), (AioTrainer, Trainer), (Trainer, AioTrainer)]
)
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, first: type[Trainer], second: type[Trainer]
) -> None:
    """The same loss at every step and the same weights, whoever wrote and whoever resumes."""
    straight = trainer(tmp_path / "straight", steps=8, kind=Trainer)
    straight.train()
    trainer(tmp_path / "run", steps=4, kind=first).train()
    resumed = trainer(tmp_path / "run", steps=8, kind=second)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)
    assert len(losses(resumed)) == 8
    assert same(tmp_path / "run" / "checkpoint-8", tmp_path / "straight" / "checkpoint-8")


def test_one_trainer_trains_twice(tmp_path: Path) -> None:
    """Nothing is used up by the end of the first training."""
    both = trainer(tmp_path, steps=8)
    both.train()
    both.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]


def test_big_models_are_sharded_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save_pretrained` decides on the files; both kinds of trainer resume from them."""
    stock = GPT2LMHeadModel.save_pretrained

    def small_shards(self: Any, *args: Any, **options: Any) -> None:
        stock(self, *args, **(options | {"max_shard_size": "8KB"}))

    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", small_shards)
    trainer(tmp_path, steps=4).train()
    assert "model.safetensors.index.json" in os.listdir(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path, steps=6, kind=Trainer)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


def test_weights_alone(tmp_path: Path) -> None:
    """`save_only_model=True` leaves out what only a resume needs."""
    trainer(tmp_path, steps=2, save_only_model=True).train()
    names = os.listdir(tmp_path / "checkpoint-2")
    assert "model.safetensors" in names
    assert not {"optimizer.pt", "scheduler.pt", "rng_state.pth"} & set(names)


# While training goes on


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """The copy is that of the step, and nobody sees the folder before it is whole."""
    trainer(tmp_path / "stock", steps=2, kind=Trainer).train()
    gated = trainer(tmp_path / "ours", steps=4, kind=Gated)
    gated.open.clear()
    seen: list[str | None] = []

    def look(step: int) -> None:
        seen.append(get_last_checkpoint(tmp_path / "ours"))
        if step == 3:
            gated.args.run_name = "changed since"
            gated.open.set()

    gated.add_callback(Look(look))
    gated.train()
    assert seen[:3] == [None, None, None]
    assert same(tmp_path / "ours" / "checkpoint-2", tmp_path / "stock" / "checkpoint-2")
    assert gated.committed == ("checkpoint-2", "checkpoint-4")
    arguments = [
        torch.load(tmp_path / "ours" / f"checkpoint-{step}" / "training_args.bin", weights_only=False)
        for step in (2, 4)
    ]
    assert [saved.run_name == "changed since" for saved in arguments] == [False, True]


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    """At most one copy of the state exists; that is where training waits."""
    gated = trainer(tmp_path, steps=4, kind=Gated)
    gated.open.clear()
    saved: list[int] = []
    gated.add_callback(Look(saved=saved.append))
    training = threading.Thread(target=gated.train)
    training.start()
    training.join(1.5)
    assert training.is_alive()
    assert saved in ([], [2])
    gated.open.set()
    training.join(20)
    assert saved == [2, 4]


def test_a_killed_save_leaves_a_folder_nobody_takes_for_a_checkpoint(tmp_path: Path) -> None:
    """Half-made ones are hidden, swept by the next run; one half replaced comes back."""
    trainer(tmp_path, steps=4).train()
    (tmp_path / ".aiockpt-checkpoint-6" / "checkpoint-6").mkdir(parents=True)
    (tmp_path / "checkpoint-4").rename(tmp_path / ".checkpoint-4.replaced")
    assert Path(get_last_checkpoint(tmp_path)).name == "checkpoint-2"
    (tmp_path / ".checkpoint-2.replaced").mkdir()
    resumed = trainer(tmp_path, steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert "model.safetensors" in os.listdir(tmp_path / "checkpoint-2")


def test_files_are_flushed_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is seen after a loss of power is whole."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def note_rename(source: Any, target: Any) -> None:
        events.append(f"-> {os.path.basename(target)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    trainer(tmp_path / "run", steps=2).train()
    named = events.index("-> checkpoint-2")
    assert set(os.listdir(tmp_path / "run" / "checkpoint-2")) <= set(events[:named])
    assert events[named - 1] == "checkpoint-2"
    assert events[named + 1] == "run"


# Errors


def test_a_failed_write_is_raised_by_the_next_save(tmp_path: Path) -> None:
    """That save is accepted and completed; the failed one left nothing."""
    gated = trainer(tmp_path, steps=8, kind=Gated)
    gated.fail.append(OSError(28, "No space left on device"))
    with pytest.raises(PreviousSaveError, match="No space left") as raised:
        gated.train()
    assert isinstance(raised.value.__cause__, StorageError)
    assert os.listdir(tmp_path) == ["checkpoint-4"]
    gated.train(resume_from_checkpoint=True)
    assert gated.state.global_step == 8


def test_the_last_failure_is_raised_by_the_end_of_train(tmp_path: Path) -> None:
    """Nobody is told that a training without its last checkpoint went well."""
    gated = trainer(tmp_path, steps=2, kind=Gated)
    gated.fail.append(ValueError("of the writer"))
    with pytest.raises(SaveError, match="checkpoint-2 failed: ValueError: of the writer"):
        gated.train()
    assert os.listdir(tmp_path) == []


def test_the_reason_of_a_failing_training_comes_first(tmp_path: Path) -> None:
    """The lost checkpoint is a note on it."""
    gated = trainer(tmp_path, steps=8, kind=Gated)
    gated.fail.append(OSError(28, "No space left on device"))

    class Breaks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise ZeroDivisionError("of the user's")

    gated.add_callback(Breaks())
    with pytest.raises(ZeroDivisionError) as raised:
        gated.train()
    assert any("No space left" in note for note in raised.value.__notes__)


def test_an_error_of_the_hook_leaves_the_checkpoint(tmp_path: Path) -> None:
    """It is told, as what it is: the checkpoint is there, the older one has made room."""

    class Uploads(AioTrainer):
        def checkpoint_committed(self, folder: str) -> None:
            if folder.endswith("4"):
                raise ConnectionError("no route to host")

    with pytest.raises(PublishError, match=r"checkpoint-4 is committed.*no route"):
        trainer(tmp_path, steps=4, kind=Uploads, save_total_limit=1).train()
    assert os.listdir(tmp_path) == ["checkpoint-4"]


# Rotation


def test_old_checkpoints_go_after_the_new_one_is_there(tmp_path: Path) -> None:
    """A failed save removes nothing: the old one is all there is."""
    gated = trainer(tmp_path, steps=8, kind=Gated, save_total_limit=1)
    seen: list[list[str]] = []

    def look(step: int) -> None:
        if step in (3, 5):
            gated._aio_queue.settle()
            seen.append(os.listdir(tmp_path))
            gated.fail += [OSError(5, "I/O error")] if step == 3 else []

    gated.add_callback(Look(look))
    with pytest.raises(PreviousSaveError, match="I/O error"):
        gated.train()
    assert seen == [["checkpoint-2"], ["checkpoint-2"]]
    assert os.listdir(tmp_path) == ["checkpoint-6"]


@pytest.mark.parametrize("limit", [1, 2])
def test_rotation_keeps_the_newest_by_number(tmp_path: Path, limit: int) -> None:
    """As integers: 10 is newer than 8, whatever text or times say."""
    trainer(tmp_path, steps=12, max_steps=12, save_total_limit=limit).train()
    assert sorted(os.listdir(tmp_path)) == sorted(f"checkpoint-{step}" for step in [10, 12][-limit:])


def test_higher_steps_of_an_earlier_run_do_not_push_out_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are no part of this run: named in the log, not removed, not counted."""
    (tmp_path / "checkpoint-1000").mkdir()
    trainer(tmp_path, steps=4, save_total_limit=1).train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1000", "checkpoint-4"]
    assert [record.getMessage() for record in caplog.records if "1000" in record.getMessage()]


@pytest.mark.parametrize(
    ("limit", "committed", "best", "left"),
    [
        (None, 30, None, [4, 10, 20, 30]),
        (0, 30, None, [4, 10, 20, 30]),
        (1, 30, None, [30]),
        (3, 30, None, [10, 20, 30]),
        (1, 30, 4, [4, 30]),
        (2, 30, 4, [4, 30]),
        (3, 30, 4, [4, 20, 30]),
        (1, 30, 30, [30]),
        (1, 10, None, [10, 20, 30]),
        (1, 10, 30, [10, 20, 30]),
    ],
)
def test_which_checkpoints_stay(
    tmp_path: Path, limit: int | None, committed: int, best: int | None, left: list[int]
) -> None:
    """The newest and the best ones always; others by step while there is room; later ones untouched."""
    for step in (4, 10, 20, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-3.old").mkdir()
    (tmp_path / "checkpoint-5").touch()
    path = None if best is None else str(tmp_path / f"checkpoint-{best}")
    rotate(str(tmp_path), limit, committed=committed, best=path)
    assert steps_in(str(tmp_path)) == left
    assert {"checkpoint-3.old", "checkpoint-5"} <= set(os.listdir(tmp_path))


class Worse(AioTrainer):
    """The first evaluation is the best one."""

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **options)
        metrics["eval_loss"] = float(self.state.global_step)
        return metrics


@pytest.mark.parametrize("limit", [1, 2, None])
def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path: Path, limit: int | None) -> None:
    """With any limit, the newest one beside it; the state names it by its final path."""
    best = trainer(
        tmp_path,
        steps=8,
        kind=Worse,
        save_total_limit=limit,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    best.train()
    assert best.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    kept = {"checkpoint-2"} if limit == 1 else {"checkpoint-2", "checkpoint-8"}  # the Trainer's own last step
    assert kept <= set(os.listdir(tmp_path))
    assert limit is None or len(os.listdir(tmp_path)) == limit
    weights = tensors(tmp_path / "checkpoint-2")
    assert torch.equal(best.model.transformer.wte.weight, weights["transformer.wte.weight"])
    for folder in tmp_path.iterdir():
        state = json.loads((folder / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")


# Around it


def test_a_mixin_over_a_trainer_of_the_users_own(tmp_path: Path) -> None:
    """What that one adds to a checkpoint is in ours."""

    class Theirs(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
            super()._save(output_dir, state_dict)
            assert output_dir is not None
            Path(output_dir, "extra.txt").write_text("more")

    class Mine(AioTrainerMixin, Theirs):
        pass

    trainer(tmp_path, steps=2, kind=Mine).train()
    assert (tmp_path / "checkpoint-2" / "extra.txt").read_text() == "more"


def test_save_model_is_as_ever(tmp_path: Path) -> None:
    """Called by the user it returns when the model is written."""
    made = trainer(tmp_path / "run", steps=2)
    made.train()
    made.save_model(str(tmp_path / "final"))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "final")
    assert torch.equal(loaded.transformer.wte.weight, made.model.transformer.wte.weight)


def test_a_plain_module_is_saved_as_the_trainer_does(tmp_path: Path) -> None:
    """A model that is none of transformers' has its state dict saved, nothing else."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(12, 1)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.head(input_ids.float()).square().mean()}

    torch.manual_seed(0)
    trainer(tmp_path, steps=2, model=Plain()).train()
    assert tensors(tmp_path / "checkpoint-2").keys() == {"head.weight", "head.bias"}
    resumed = trainer(tmp_path, steps=4, model=Plain(), kind=Trainer)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


def test_what_cannot_be_copied_is_written_by_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sharded states and uploads go the Trainer's own way, and the log says so once."""
    sharded = trainer(tmp_path, steps=4)
    monkeypatch.setattr(sharded.args, "push_to_hub", True)
    monkeypatch.setattr(sharded, "_push_from_checkpoint", lambda folder: None)
    monkeypatch.setattr(sharded, "_finish_current_push", lambda: None)
    sharded.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-4"]
    assert len([r for r in caplog.records if "push_to_hub" in r.getMessage()]) == 1


def test_a_quantized_model_is_written_before_the_save_returns(tmp_path: Path) -> None:
    """`save_pretrained` would not take a copy of its state dict; the optimizer is still copied."""
    made = trainer(tmp_path, steps=2)
    made.model.hf_quantizer = None
    assert made._aio_copies_model()
    made.model.hf_quantizer = object()
    assert not made._aio_copies_model()
    made.model.hf_quantizer = None
    made.model.hf_device_map = {"": "disk"}
    assert not made._aio_copies_model()
    made.model.hf_device_map = {"": 0}
    assert made._aio_copies_model()
    plain = torch.nn.Linear(1, 1)
    plain.peft_config = {}  # type: ignore[assignment]
    made.model = plain
    assert not made._aio_copies_model()


def test_the_example_of_the_docstring_is_a_trainer() -> None:
    """`AioTrainer` is `Trainer` with the mixin before it."""
    assert AioTrainer.__mro__[1:3] == (AioTrainerMixin, Trainer)
    assert model().config.n_layer == 2
