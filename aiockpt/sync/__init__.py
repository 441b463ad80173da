"""aiockpt for code that is not async: the same verbs, and they block.

`Saver`, `FileSaver`, `Catalog`, `load`, `latest` and `convert` are those of `aiockpt` over a
bridge: an event loop in a daemon thread of its own does the work, the calling thread waits.
On a thread where an event loop is running, `await` the names of `aiockpt` itself.
"""

from __future__ import annotations

from ._catalog import Catalog, Lease, latest, load
from ._convert import convert
from ._filesaver import FileSaver
from ._pending import PendingSave
from ._saver import Saver, Staging

__all__ = ["Catalog", "FileSaver", "Lease", "PendingSave", "Saver", "Staging", "convert", "latest", "load"]
