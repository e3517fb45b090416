"""Prepare the statements that run all the time, so that the server parses and plans each of them once per connection.

Each is one call of a function, so that a plan made once is as good as a new one. Statements with joins of their own are
not prepared: a plan made for an empty table would stay.
"""

import sys
from typing import Any

import psycopg

REPEATED = ("turn", "enqueue", "beat", "begin_exchange", "end_exchange")
"""Names of the statements that are worth preparing."""
PREPARING_FAILED = frozenset({"26000", "42P05", "0A000"})
"""A prepared statement is unknown, known already, or was made for another shape of its function. Nothing was done."""


def allow_preparing(connection: psycopg.Connection[Any]) -> None:
    """Let the driver prepare what it is asked to prepare, and nothing by itself."""
    connection.prepare_threshold = sys.maxsize


def stop_preparing(connection: psycopg.Connection[Any]) -> bool:
    """Prepare nothing more on this connection; return whether a statement that failed is worth repeating."""
    was_preparing = connection.prepare_threshold is not None
    connection.prepare_threshold = None
    return was_preparing and not connection.closed
