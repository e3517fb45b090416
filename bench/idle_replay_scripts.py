"""Write down for `pgbench` what the two connections of an idle worker ask, and when.

The statements are recorded from the worker's own parts, which are called once each: turn, comparison, beat, ring of
neighbours, round of the reaper, count of the crowd, books. Of `WorkerLoop`, `Heartbeat`, `Loop` and `MetricsWriter`
only the timetable is here; `bench.idle_workers` compares it with real workers, statement by statement.
"""

import time
from dataclasses import dataclass

from bench.recording import RecordingLedger
from unstuck import host
from unstuck.config import DEFAULT_QUEUE, Settings
from unstuck.ledger.contract.workers import ClaimRequest, Heartbeat, NewWorker, Turn
from unstuck.ledger.metrics_writer import FLUSH_S, ROUTINE_S, MetricsWriter
from unstuck.ledger.postgres.connect import SESSION_SETTINGS
from unstuck.maintenance.loop import ASKING_PER_INTERVAL, COUNT_AFTER_LOSSES, COUNT_EVERY_S, SLOWEST, pace
from unstuck.maintenance.retention import RETENTION_EVERY_S
from unstuck.maintenance.upkeep import ORDER_EVERY_S
from unstuck.maintenance.worker_health import HEALTH_EVERY_S
from unstuck.metrics.catalogue import BEAT_DELAY
from unstuck.metrics.counters import Counters
from unstuck.recovery.death_watch import LOOKED_AT
from unstuck.recovery.reap import Reaper
from unstuck.runner.tasks import Manifest
from unstuck.worker.loop import BEATS_PER_COMPARISON

LEAST_WORKERS = int(SLOWEST * ASKING_PER_INTERVAL)
"""Number of reapers from which each asks for the ticket at the longest interval."""

JITTER_S = 0.1
"""Who begins a whole number of laps after another is not in step with it for ever."""


@dataclass(frozen=True)
class Scripts:
    """What each client runs again and again, by the purpose of its connection."""

    turn: str
    service: str


def idle_scripts(
    ledger: RecordingLedger, born: NewWorker, manifest: Manifest, settings: Settings, workers: int, apart_s: float
) -> Scripts:
    """Record a worker that is born for it and retires again; those that are replayed begin `apart_s` apart."""
    ledger.register(born)
    try:
        return Scripts(
            _turn_script(ledger, born, manifest, settings, apart_s),
            _service_script(ledger, born, settings, workers, apart_s),
        )
    finally:
        ledger.retire(born.id)


def _turn_script(
    ledger: RecordingLedger, born: NewWorker, manifest: Manifest, settings: Settings, apart_s: float
) -> str:
    names = tuple(task.name for task in manifest.tasks)
    ahead = any(task.policy.on_crash == "retry" for task in manifest.tasks)
    wish = ClaimRequest((DEFAULT_QUEUE,), names, settings.slots, run_ahead=ahead, start=settings.slots)
    turn = ledger.recorded(lambda: ledger.turn(Turn(born.id, claim_request=wish)))
    comparison = ledger.recorded(lambda: ledger.held(born.id))
    per_comparison = round(born.heartbeat_interval_s * BEATS_PER_COMPARISON / settings.poll_interval_s)
    return _lines(
        _beginning(ledger.quoted_schema, apart_s),
        _all(turn),
        r"\set lap :lap + 1",
        _if(f":lap % {per_comparison} = 0", _all(comparison)),
        _sleep(settings.poll_interval_s),
    )


def _service_script(ledger: RecordingLedger, born: NewWorker, settings: Settings, workers: int, apart_s: float) -> str:
    lap_s = born.heartbeat_interval_s
    asks_s = settings.recovery.check_interval_s * pace(workers)
    if asks_s != lap_s:
        raise ValueError(f"a reaper who asks every {asks_s}s and a beat every {lap_s}s do not make one lap")
    beat = ledger.recorded(lambda: ledger.beat(Heartbeat(born.id, 0, 0)))
    ring = ledger.recorded(lambda: ledger.peers_of(born.id, host.hostname(), LOOKED_AT))
    reaper = Reaper(ledger, settings.recovery, by=born.id)
    sweep, order, retention, health = _by_ticket(ledger.recorded(reaper.sweep))
    retention += ledger.recorded(lambda: _finish_retention(reaper))
    crowd = ledger.recorded(ledger.fleet)
    crowd_laps = max(COUNT_EVERY_S, workers / ASKING_PER_INTERVAL) / lap_s
    tallies = Counters()
    tallies.observe(BEAT_DELAY, 0.001)
    books = ledger.recorded(MetricsWriter(ledger, tallies).flush)
    return _lines(
        _beginning(
            ledger.quoted_schema,
            apart_s,
            f'listen "{ledger.schema}";',
            r"\set losses 0",
            r"\set retention_lap 0",
            r"\set order_lap 0",
            r"\set health_lap 0",
            rf"\set crowd_lap random(0, {2 * crowd_laps:.0f})",
            rf"\set books_lap random(0, {ROUTINE_S / lap_s:.0f})",
        ),
        _all(beat),
        _if(
            ":lap >= :books_lap",
            _all(books),
            rf"\set books_lap :lap + random({ROUTINE_S / lap_s:.0f}, {(ROUTINE_S + FLUSH_S) / lap_s:.0f})",
        ),
        _sleep(lap_s / 3),
        _all(ring),
        _sleep(lap_s / 3),
        r"\set losses :losses + 1",
        _with_ticket(
            sweep,
            r"\set losses 0",
            _now_and_then("order", ORDER_EVERY_S / lap_s, _with_ticket(order)),
            _now_and_then("retention", RETENTION_EVERY_S / lap_s, _with_ticket(retention)),
            _now_and_then("health", HEALTH_EVERY_S / lap_s, _with_ticket(health)),
        ),
        _if(
            f":losses >= {COUNT_AFTER_LOSSES} and :lap >= :crowd_lap",
            _all(crowd),
            rf"\set crowd_lap :lap + random({crowd_laps:.0f}, {2 * crowd_laps:.0f})",
        ),
        r"\set lap :lap + 1",
        _sleep(lap_s / 3),
    )


def _beginning(schema: str, apart_s: float, *then: str) -> str:
    """Once for each client: wait for its turn to begin, be a session like the ledger's, and learn who it is."""
    return _if(
        ":lap = 0 and :begun = 0",
        r"\set begun 1",
        rf"\set wait_ms :client_id * {apart_s * 1000:.0f} + random(0, {JITTER_S * 1000:.0f})",
        r"\sleep :wait_ms ms",
        *(f"select set_config('{name}', '{value}', false);" for name, value in SESSION_SETTINGS),
        "select id as worker_id, host, pg_backend_pid() as session_pid,"
        " (select backend_start from pg_stat_get_activity(pg_backend_pid())) as session_start"
        f" from {schema}.workers where state = 'active' order by id offset :client_id limit 1",
        r"\gset",
        *then,
    )


def _by_ticket(statements: list[str]) -> list[list[str]]:
    """Split a round where it asks for a ticket: the sweep itself, order in queues, retention, health."""
    parts: list[list[str]] = []
    for statement in statements:
        if "as taken" in statement:
            parts.append([])
        parts[-1].append(statement)
    if len(parts) != 4:
        raise RuntimeError(f"a first round asks for {len(parts)} tickets and not for four")
    return parts


def _finish_retention(reaper: Reaper) -> None:
    while (wait_s := reaper.keep_house().next_batch_in_s) is not None:
        time.sleep(wait_s)


def _with_ticket(statements: list[str], *then: str) -> str:
    ticket, *rest = statements
    return _lines(r"\set taken 0", ticket, r"\aset", _if(":taken = 1", _all(rest), *then))


def _now_and_then(name: str, laps: float, part: str) -> str:
    return _if(f":lap >= :{name}_lap", rf"\set {name}_lap :lap + {laps:.0f}", part)


def _all(statements: list[str]) -> str:
    return _lines(*(f"{statement};" for statement in statements))


def _if(condition: str, *parts: str) -> str:
    return _lines(rf"\if {condition}", *parts, r"\endif")


def _sleep(seconds: float) -> str:
    return rf"\sleep {seconds * 1000:.0f} ms"


def _lines(*parts: str) -> str:
    return "\n".join(parts)
