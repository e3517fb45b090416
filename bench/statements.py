"""Count what a PostgreSQL was asked, by the names that the ledger's statements have, and compare two counts."""

import re
from typing import cast

from bench.databases import Postgres
from bench.stage import Stage
from unstuck.store.postgres.ledger import PostgresLedger

Calls = dict[str, float]
"""Calls per second, by the statement's name in the `.sql` files."""

OTHERS = "others"
FAIR_PART = 0.05
"""What is asked less often than that was counted too seldom to say much alone; it is part of the sum."""


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


def compared(real: Calls, replayed: Calls) -> str:
    """Say both, the most frequent first."""
    names = sorted({*real, *replayed}, key=lambda name: -real.get(name, 0.0))
    each = (f"{name} {real.get(name, 0.0):.2f} and {replayed.get(name, 0.0):.2f}" for name in names)
    return f"{', '.join(each)}; in all {sum(real.values()):.1f} and {sum(replayed.values()):.1f}"


def minutely_each(calls: Calls, workers: int) -> Calls:
    """Give calls per minute of one worker."""
    return {name: count * 60 / workers for name, count in calls.items()}


def disagreement(real: Calls, replayed: Calls) -> float:
    """Give the largest share by which the sums differ, or a statement that is a fair part of them."""
    total = sum(real.values())
    shares = [abs(sum(replayed.values()) / total - 1.0)]
    shares += [abs(replayed.get(name, 0.0) / calls - 1.0) for name, calls in real.items() if calls >= FAIR_PART * total]
    return max(shares)


def _shape(text: str) -> str:
    """Leave out what each writes in its own way: parameters, constants and their types, white space."""
    text = re.sub(r"%\(\w+\)s|\$\d+|'[^']*'|\b(\d+(\.\d+)?|true|false|null)\b|(?<=extract\()epoch", "?", text)
    return " ".join(re.sub(r"\?::(double precision|\w+)(\[\])?", "?", text).replace("%%", "%").split())
