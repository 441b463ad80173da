"""Who may look behind the scenes, and who may give orders."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from typing import Final

from aiockpt.errors import UsageError

from ._wire import Scope

__all__ = ["Access"]

SHORTEST: Final = 16
"""Characters of a token, at least."""


class Access:
    """Tells clients apart.

    Args:
        token: what whoever gives orders has to show; None: nobody gives any.
        clients: `loopback`, `any`, or networks such as `10.0.0.0/8`.

    Raises:
        UsageError: one of them is wrong.
    """

    def __init__(self, token: str | None, clients: str | Iterable[str]) -> None:
        given: object = token  # whatever the caller's types say
        if given is not None and not (isinstance(given, str) and len(given) >= SHORTEST):
            raise UsageError(f"token= is at least {SHORTEST} characters, or None for no orders by HTTP")
        self.orders = token is not None
        self._token = b"" if token is None else token.encode()
        self._any = clients == "any"
        self._networks = () if self._any else _networks(clients)

    def near(self, scope: Scope) -> bool:
        """Whether the client's address is one of those who may look.

        A server on a socket file knows no address: nobody is near then.
        """
        if self._any:
            return True
        try:
            address = ipaddress.ip_address((scope.get("client") or ("",))[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)

    def knows(self, scope: Scope) -> bool:
        """Whether the request shows the token. Takes as long for a wrong one as for the right one."""
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, given = shown[0].partition(b" ") if len(shown) == 1 else (b"", b"", b"")
        right = hmac.compare_digest(given.strip(), self._token)
        return right and self.orders and kind.lower() == b"bearer"


def _networks(clients: object) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    if clients == "loopback":
        clients = ("127.0.0.0/8", "::1/128")
    if isinstance(clients, str) or not isinstance(clients, Iterable):
        raise UsageError(f"clients= is 'loopback', 'any' or networks, not {clients!r:.80}")
    try:
        return tuple(ipaddress.ip_network(network) for network in clients)
    except ValueError as error:
        raise UsageError(f"clients=: {error}") from error
