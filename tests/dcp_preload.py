"""What the server of ranks imports before it forks: each rank would need a second or more for it."""

from __future__ import annotations

import contextlib
import importlib

for name in (
    "anyio._backends._asyncio",
    "aiockpt.storage.local",
    "aiockpt.storage.memory",
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.onnx",
    "tests.dcp_states",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
