"""The demo's training run, made repeatable for ckpt-chaos: fixed names, one writer.

ckpt-chaos kills one run at every file event of another, so the events of all runs must be
the same. Attempt folders and temporary files get their names from a counter instead of
chance, and one writer keeps the order of writes fixed. A run that is resumed counts from
elsewhere: like chance, it never meets a name that a killed run left behind.
"""

from __future__ import annotations

import importlib
import itertools
import runpy
import sys
import uuid
from pathlib import Path

import aiofiles.threadpool
import aiofiles.threadpool.binary

import aiockpt._pipeline

RESUMED = 1 << 64

_out = Path(sys.argv[sys.argv.index("--out") + 1])
_count = itertools.count(RESUMED if _out.exists() and any(_out.iterdir()) else 1)


def _numbered() -> uuid.UUID:
    return uuid.UUID(int=next(_count))


def _let_torn_files_through() -> None:
    """ckpt-chaos hands out its own file objects in `torn` mode; aiofiles has to know them."""
    try:
        torn = importlib.import_module("ckpt_chaos.inject")._TornFile
    except ImportError:
        return

    def wrap(file, *, loop=None, executor=None):  # type: ignore[no-untyped-def]
        return aiofiles.threadpool.binary.AsyncBufferedIOBase(file, loop=loop, executor=executor)

    aiofiles.threadpool.wrap.register(torn)(wrap)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    uuid.uuid4 = _numbered
    aiockpt._pipeline.WRITERS = 1  # type: ignore[misc]
    _let_torn_files_through()
    sys.argv[0] = str(Path(__file__).parent.parent / "examples" / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
