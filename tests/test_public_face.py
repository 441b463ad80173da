"""The public face: names, versions and imports are what they say."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import aiockpt
from aiockpt import _version

CORE = ("aiofiles", "anyio", "msgspec", "safetensors", "torch", "xxhash")

IMPORT_AND_LIST = """
import sys
for name in {core!r}:
    __import__(name)
import safetensors.torch
before = set(sys.modules)
import {module}
import json
print(json.dumps(sorted(set(sys.modules) - before)))
"""

IMPORT_WITHOUT_THE_REST = """
import sys, warnings
warnings.simplefilter("ignore")  # torch says that it found no numpy
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Bare())
import {module}
assert not set(sys.modules) & set({missing!r}), sorted(sys.modules)
"""

OPTIONAL = (
    "numpy",
    "sklearn",
    "scipy",
    "uvloop",
    "pytest",
    "hypothesis",
    "blockbuster",
    "psutil",
    "rich",
    "tqdm",
)
PLUGGED_IN = ("aiockpt.cli", "aiockpt.integrations", "aiockpt.progress.", "aiockpt.testing")


def _modules() -> list[str]:
    """Every module of the package, by name."""
    found = pkgutil.walk_packages(aiockpt.__path__, "aiockpt.")
    return ["aiockpt", *sorted(module.name for module in found)]


def _is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


MODULES = _modules()
PUBLIC = [name for name in MODULES if _is_public(name)]


def _run(code: str) -> str:
    """Run code in a fresh interpreter and give its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _order(entry: str) -> tuple[int, str]:
    """Sort as the linter does: constants, classes, the rest."""
    return (0 if entry.isupper() else 1 if entry[0].isupper() else 2), entry


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_sorted_and_true(name: str) -> None:
    """A public module lists its names in order, once each, and has them all."""
    module = importlib.import_module(name)
    # A value plug-in registers itself when it is loaded, and integrations are imported one by one.
    listed: list[str] = list(getattr(module, "__all__", []))
    nameless = name.startswith("aiockpt.values.") or name == "aiockpt.integrations"
    assert listed or nameless, f"{name} has no __all__"
    assert listed == sorted(set(listed), key=_order)
    for entry in listed:
        assert hasattr(module, entry), f"{name}.{entry}"


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_give(name: str) -> None:
    """Each module opens with a sentence."""
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), name


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name: str) -> None:
    """Classes and functions that a public module lists explain themselves."""
    module: ModuleType = importlib.import_module(name)
    for entry in getattr(module, "__all__", ()):
        value = getattr(module, entry)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert (value.__doc__ or "").strip(), f"{name}.{entry}"


def test_errors_are_at_the_front_door() -> None:
    """Whatever can be raised can be caught without knowing where it is defined."""
    assert set(aiockpt.errors.__all__) <= set(aiockpt.__all__)


def test_version_is_the_installed_one() -> None:
    """`aiockpt.__version__` and the package's metadata agree."""
    assert aiockpt.__version__ == _version.__version__ == importlib.metadata.version("aiockpt")


def test_typed() -> None:
    """The marker that makes checkers read our annotations is in the package."""
    assert (Path(aiockpt.__path__[0]) / "py.typed").exists()


def test_import_brings_in_the_core_only() -> None:
    """`import aiockpt` loads nothing that its core dependencies had not loaded, bar the standard library."""
    new = json.loads(_run(IMPORT_AND_LIST.format(core=CORE, module="aiockpt")))
    # `sysconfig` of the standard library keeps its data in a module named after the machine.
    own = {name for name in new if name.startswith("_sysconfigdata_")} | set(sys.stdlib_module_names)
    foreign = {name.partition(".")[0] for name in new} - own
    assert foreign <= {"aiockpt", *CORE}


def test_import_needs_no_optional_package() -> None:
    """The core works where numpy and everything from the extras is missing."""
    core = ", ".join(name for name in MODULES if not name.startswith(PLUGGED_IN))
    _run(IMPORT_WITHOUT_THE_REST.format(missing=OPTIONAL, module=core))


def test_import_starts_nothing() -> None:
    """An import makes no thread and no folder; threads start with the first save."""
    code = "import aiockpt, threading; print(len(threading.enumerate()))"
    assert _run(code).strip() == "1"
