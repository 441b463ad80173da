"""On which device each restored tensor comes to life: `map_location`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from .errors import UsageError

__all__ = ["Devices", "MapLocation"]

MapLocation = None | str | torch.device | Callable[[str], str | torch.device]
"""None (host memory), a device, or a function from a tensor's path to its device."""

_HOST: Final = torch.device("cpu")


class Devices:
    """Decides the devices of one load; a device is tried before it is promised.

    Args:
        map_location: what the caller said.
    """

    def __init__(self, map_location: MapLocation) -> None:
        fine = map_location is None or isinstance(map_location, (str, torch.device)) or callable(map_location)
        if not fine:
            raise UsageError(
                f"map_location is None, a device or a function from path to device, not {map_location!r}"
            )
        self._map = map_location
        self._known: dict[str, torch.device] = {}
        # A generator's state is set from host memory only, wherever everything else goes.
        self._rng_bytes = torch.get_rng_state().numel()

    def check(self) -> None:
        """Try the one device there is, if there is only one; blocking.

        Raises:
            UsageError: it cannot be used here.
        """
        if self._map is not None and not callable(self._map):
            self._usable(self._map, "")

    def of(self, path: str, dtype: str, shape: tuple[int, ...], *, host: bool) -> torch.device:
        """The device of a tensor; blocking.

        Args:
            path: the tensor's.
            dtype: its dtype's name.
            shape: its shape.
            host: whether it is part of something that lives in host memory.

        Raises:
            UsageError: its device cannot be used here, or the function is none from path to device.
        """
        if self._map is None or host or (dtype == "uint8" and shape == (self._rng_bytes,)):
            return _HOST
        return self._usable(self._map(path) if callable(self._map) else self._map, path)

    def _usable(self, name: str | torch.device, path: str) -> torch.device:
        found = self._known.get(str(name))
        if found is None:
            try:
                found = torch.device(name)
                torch.empty(1, device=found)
            except (
                RuntimeError,
                AssertionError,
                NotImplementedError,
                ImportError,
                TypeError,
                ValueError,
            ) as error:
                why = str(error).partition("\n")[0]
                where = f" (map_location of {path})" if path else ""
                raise UsageError(
                    f"device {name!r} cannot be used{where}: {why}", path=path or None
                ) from error
            self._known[str(name)] = found
        return found
