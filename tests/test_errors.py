"""Errors: the tree is the one that is drawn, and each error survives a trip to another process."""

from __future__ import annotations

import copy
import errno
import pickle
import re
from collections.abc import Iterator

import pytest

import aiockpt.errors
from aiockpt import errors
from aiockpt.errors import CheckpointError

LINE = re.compile(r"^(?P<indent>[│ ├└─]*)(?P<name>\w+)(?:\((?P<builtin>\w+)\))?(?:\s+(?P<what>\S.*))?$")

EXAMPLES: dict[str, CheckpointError] = {
    "BusyError": errors.BusyError("one save is pending", step=4),
    "CheckpointError": CheckpointError("no", step=1, file="manifest.json", path="model/weight"),
    "CommitUnknownError": errors.CommitUnknownError("lost the reply", step=2, save_id="ab" * 16),
    "CorruptCheckpointError": errors.CorruptCheckpointError(
        "checksum differs", step=3, file="m.safetensors", path="model/w", touched=["model/a", "model/b"]
    ),
    "DrainTimeoutError": errors.DrainTimeoutError("stuck", step=5, file="m.safetensors"),
    "ForeignFormatError": errors.ForeignFormatError("no zip", file="w.pt", path="model/w"),
    "PickleRefusedError": errors.PickleRefusedError("pickled", path="extra"),
    "RanksFailedError": errors.RanksFailedError(
        "saving", {1: ValueError("no"), 3: OSError(28, "full")}, file="d"
    ),
    "RunLockedError": errors.RunLockedError("locked", file="runs/a", holder={"pid": 3, "since": 1.5}),
    "PreviousSaveError": errors.PreviousSaveError("an earlier save failed", step=6),
    "ReloadError": errors.ReloadError("m", step=3, path="a/b", stage="cover"),
    "MemoryShortError": errors.MemoryShortError("m", step=3, stage="memory"),
    "RequestAbortedError": errors.RequestAbortedError("m", step=3),
    "PublishError": errors.PublishError("no link", step=7, file="step-7", publisher="LatestLink"),
    "SaveCancelledError": errors.SaveCancelledError("cancelled", step=7, save_id="cd" * 16),
    "SaveError": errors.SaveError("failed", step=8, save_id="ef" * 16),
    "SaveErrors": errors.SaveErrors("two saves failed", [errors.SaveError("a", step=1), OSError(28, "full")]),
    "StateMismatchError": errors.StateMismatchError(
        missing=["a"],
        unexpected=["b", "c"],
        mismatched=[("d", "shape (1,) != (2,)")],
        hint="strict=False",
        step=9,
    ),
    "StateMutatedError": errors.StateMutatedError("changed", step=10, path="model/w"),
    "StepError": errors.StepError("-1 is not a step", step=-1),
    "StepExistsError": errors.StepExistsError("step 1 exists", step=1, file="step-00000001"),
    "StepNotFoundError": errors.StepNotFoundError("no step 1", step=1),
    "StorageError": errors.StorageError(
        "write x: full", errno=errno.ENOSPC, step=11, file="x", path="model/w"
    ),
    "UnsafeFileError": errors.UnsafeFileError("names os.system", file="w.pt"),
    "UnsupportedFormatError": errors.UnsupportedFormatError(99, 0, step=12, file="manifest.json"),
    "UnsupportedStateError": errors.UnsupportedStateError([("a", "a lambda"), ("b", "a socket")], step=13),
    "UsageError": errors.UsageError("enter the saver first"),
}


def _drawing() -> Iterator[tuple[str, str | None, str | None]]:
    """Read the docstring's tree as (class, parent in the tree, built-in)."""
    assert errors.__doc__ is not None
    branch: list[str] = []
    for line in errors.__doc__.split("```")[1].strip().splitlines():
        match = LINE.match(line)
        assert match is not None, f"not a line of a tree: {line!r}"
        depth = len(match["indent"]) // 4
        assert depth <= len(branch), f"hangs in the air: {line!r}"
        del branch[depth:]
        yield match["name"], branch[-1] if branch else None, match["builtin"]
        branch.append(match["name"])


def _facts(error: BaseException) -> object:
    """Everything an error says, in a form that can be compared."""
    if isinstance(error, BaseExceptionGroup):
        return type(error), error.message, [_facts(e) for e in error.exceptions], dict(vars(error))
    named = [getattr(error, name, None) for name in ("errno", "strerror", "filename")]
    facts = dict(vars(error))
    if "failures" in facts:
        facts["failures"] = {rank: _facts(failure) for rank, failure in facts["failures"].items()}
    return type(error), str(error), error.args, named, facts


def test_drawing_is_true() -> None:
    """The docstring draws each class once, under the base it has, with the built-in it is."""
    drawn = list(_drawing())
    assert sorted(name for name, _, _ in drawn) == sorted(errors.__all__)
    for name, parent, builtin in drawn:
        bases = {base.__name__ for base in getattr(errors, name).__bases__}
        assert bases == {parent, builtin} - {None}, name


def test_every_error_is_in_the_tree() -> None:
    """A class added to the module is exported, has a docstring of its own and an example here."""
    classes = {n for n, v in vars(errors).items() if isinstance(v, type) and v.__module__ == errors.__name__}
    assert classes == set(errors.__all__) == set(EXAMPLES)
    for name in classes:
        cls = getattr(errors, name)
        assert cls.__doc__, name
        assert issubclass(cls, CheckpointError), name


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_pickles_with_its_facts(name: str) -> None:
    """An error from a worker process arrives as the same class with the same facts."""
    error = EXAMPLES[name]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert _facts(pickle.loads(pickle.dumps(error, protocol))) == _facts(error)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_copies_with_its_facts(name: str) -> None:
    """Copying goes through the same door as pickling and loses nothing either."""
    error = EXAMPLES[name]
    assert _facts(copy.copy(error)) == _facts(error)
    assert _facts(copy.deepcopy(error)) == _facts(error)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_says_where(name: str) -> None:
    """`step`, `file` and `path` can be asked of any of our errors; None where they do not apply."""
    error = EXAMPLES[name]
    for fact in ("step", "file", "path"):
        assert hasattr(error, fact), fact


def test_documented_attributes_exist() -> None:
    """What a docstring lists under Attributes is set by the constructor."""
    for name, error in EXAMPLES.items():
        section = (type(error).__doc__ or "").partition("Attributes:\n")[2]
        for attribute in re.findall(r"^ {8}(\w+):", section, re.MULTILINE):
            assert hasattr(error, attribute), f"{name}.{attribute}"


def test_handle_does_not_travel() -> None:
    """The handle of the accepted save belongs to one process: pickling leaves it behind."""
    error = errors.PreviousSaveError("an earlier save failed", step=1, pending=object())
    assert error.pending is not None
    assert pickle.loads(pickle.dumps(error)).pending is None


def test_messages_stay_short() -> None:
    """A message spells out twenty offences and counts the rest; the attribute has them all."""
    error = errors.UnsupportedStateError([(f"leaf{i}", "a lambda") for i in range(50)])
    assert len(error.problems) == 50
    assert str(error).count("a lambda") == errors.SHOWN
    assert "and 30 more" in str(error)


def test_step_is_filled_in_once() -> None:
    """`at` adds the step where it was unknown and never overwrites one."""
    error = CheckpointError("no")
    assert error.at(3) is error
    assert error.at(4).step == 3


def test_wrap_keeps_the_store_s_words() -> None:
    """A foreign OSError becomes ours with its errno, and both can be caught the usual way."""
    foreign = OSError(errno.ENOSPC, "No space left on device", "/elsewhere")
    ours = errors.StorageError.wrap(foreign, "write", file="m.safetensors", step=2)
    assert isinstance(ours, OSError)
    assert (ours.errno, ours.filename, ours.step) == (errno.ENOSPC, "m.safetensors", 2)
    assert str(ours) == "write m.safetensors: No space left on device"


def test_groups_split_into_our_own() -> None:
    """`except*` and `split` hand out SaveErrors, so the front door's promise holds after them."""
    group = EXAMPLES["SaveErrors"]
    assert isinstance(group, errors.SaveErrors)
    match, rest = group.split(errors.SaveError)
    assert isinstance(match, errors.SaveErrors)
    assert isinstance(rest, errors.SaveErrors)
    assert aiockpt.errors.SaveErrors is errors.SaveErrors
