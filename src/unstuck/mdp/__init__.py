"""The ZeroMQ door: a Majordomo broker on the ledger, with clients and workers in Python.

`unstuck broker` runs the broker; every request that it takes is a job.
"""

from typing import TYPE_CHECKING, Any

from unstuck.errors import ConfigError

if TYPE_CHECKING:
    from unstuck.mdp.async_client import AsyncClient as AsyncClient
    from unstuck.mdp.client import Client as Client
    from unstuck.mdp.connection import CurveKeys as CurveKeys
    from unstuck.mdp.pending_call import PendingCall as PendingCall
    from unstuck.mdp.services import Call as Call
    from unstuck.mdp.worker import Worker as Worker

MDP_INSTALL_HINT = "The ZeroMQ door needs more packages: pip install 'unstuck[mdp]'."

_HOMES = {
    "AsyncClient": "unstuck.mdp.async_client",
    "Call": "unstuck.mdp.services",
    "Client": "unstuck.mdp.client",
    "CurveKeys": "unstuck.mdp.connection",
    "PendingCall": "unstuck.mdp.pending_call",
    "Worker": "unstuck.mdp.worker",
}

__all__ = ["AsyncClient", "Call", "Client", "CurveKeys", "PendingCall", "Worker"]

if not TYPE_CHECKING:  # Else a type checker would believe in every name.

    def __getattr__(name: str) -> Any:
        # Loaded on first use: settings and frames are read where ZeroMQ is not installed.
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module 'unstuck.mdp' has no attribute {name!r}")
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("unstuck"):
                raise
            raise ConfigError(f"{MDP_INSTALL_HINT} ({error})") from error


def __dir__() -> list[str]:
    return list(__all__)
