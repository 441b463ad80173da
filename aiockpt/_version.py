"""The version, in the one place that the build, the code and the manifests read."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"
