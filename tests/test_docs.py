"""The code in README and docs runs as it stands."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/quickstart.md",
    "docs/sync.md",
    "docs/preemption.md",
    "docs/publishing.md",
    "docs/keep-and-when.md",
    "docs/metrics.md",
    "docs/moving.md",
    "docs/sharing-a-run.md",
    "docs/dcp.md",
    "docs/serving.md",
    "docs/asgi.md",
    "docs/convert.md",
    "docs/file-saver.md",
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return BLOCK.findall((ROOT / page).read_text())


async def train_one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What the pages leave to the reader."""
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    await asyncio.sleep(0)


def run(code: str, names: dict[str, Any]) -> None:
    """Execute a block, `await` at its top level included, as a notebook would."""
    outcome = eval(compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)


# DCP says this whenever it saves or loads in a single process.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("page", PAGES)
def test_code_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of the page works, after the ones before it."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"train_one_step": train_one_step, "aiockpt": aiockpt}
    found = blocks(page)
    assert found
    for code in found:
        run(code, names)
    if page == "docs/file-saver.md":  # the one page without a run
        assert sorted(path.name for path in Path("exports").iterdir()) == [
            "half",
            *(f"model-{n}.pt" for n in (300, 400, 500, "last")),
        ]
        return
    newest = asyncio.run(aiockpt.latest("runs/digits"))
    assert newest is not None
    assert newest.step == 1000


def test_usage_in_the_readme_is_short() -> None:
    """Twenty lines at most, the imports and the run included."""
    assert len([line for line in blocks("README.md")[0].splitlines() if line.strip()]) <= 16


def test_pages_show_one_usage() -> None:
    """README and quickstart begin with the same program."""
    assert blocks("README.md")[0] == blocks("docs/quickstart.md")[0]
