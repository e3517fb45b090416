"""Count what a PostgreSQL was asked, by the names that the ledger's statements have, and compare two counts."""

import re
from typing import cast

from bench.databases import Postgres
from bench.stage import Stage
from unstuck.store.postgres.ledger import PostgresLedger

Calls = dict[str, float]
"""Calls per second, by the statement's name in the `.sql` files."""

OTHERS = "others"


def calls_of(database: Postgres, stage: Stage, elapsed_s: float) -> Calls:
    """Give what was asked since the counters were reset, without the look at them."""
    names = {_shape(text.decode()): name for name, text in cast(PostgresLedger, stage.ledger).sql.items()}
    rows = database.query(
        stage.url,
        "select query, calls from pg_stat_statements where toplevel and query !~ 'pg_stat_|datname|current_database'"
        " and dbid = (select oid from pg_database where datname = current_database())",
    )
    calls: Calls = {}
    for text, count in rows:
        name = names.get(_shape(text), OTHERS)
        calls[name] = calls.get(name, 0.0) + count / elapsed_s
    return calls


def compared(real: Calls, replayed: Calls, workers: int) -> str:
    """Say both, per minute and worker, the most frequent first."""
    names = sorted({*real, *replayed}, key=lambda name: -real.get(name, 0.0))
    each = (f"{name} {_minutely(real, name, workers)} and {_minutely(replayed, name, workers)}" for name in names)
    total = f"{sum(real.values()) * 60 / workers:.1f} and {sum(replayed.values()) * 60 / workers:.1f}"
    return f"{', '.join(each)}; in all {total}"


def agreement(real: Calls, replayed: Calls) -> float:
    """Give by which share the sums differ."""
    return abs(sum(replayed.values()) / sum(real.values()) - 1.0)


def _minutely(calls: Calls, name: str, workers: int) -> str:
    return f"{calls.get(name, 0.0) * 60 / workers:.1f}"


def _shape(text: str) -> str:
    """Leave out what the driver and the server write in their own ways: parameters, constants, white space."""
    text = re.sub(r"%\(\w+\)s|\$\d+|'[^']*'|\b(\d+|true|false)\b|(?<=extract\()epoch", "?", text).replace("%%", "%")
    return " ".join(text.split())
