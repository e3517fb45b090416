"""Say in a few words whether jobs are looked after: for monitors, which ask often. The doctor looks deeper."""

from collections.abc import Iterator, Sequence

import msgspec

from unstuck.domain.durations import brief
from unstuck.domain.states import LIVING
from unstuck.domain.sweeping import PATIENCE_S, ROUNDS_MISSED
from unstuck.store.records import Fleet, QueueRecord


class Trouble(msgspec.Struct, frozen=True):
    code: str
    message: str
    cure: str


def judge(fleet: Fleet, queues: Sequence[QueueRecord], *, check_interval_s: float) -> list[Trouble]:
    return list(_troubles(fleet, queues, ROUNDS_MISSED * check_interval_s + PATIENCE_S))


def _troubles(fleet: Fleet, queues: Sequence[QueueRecord], patience_s: float) -> Iterator[Trouble]:
    living = sum(count for state, count in fleet.workers.items() if state in LIVING)
    if living and (fleet.unswept_s is None or fleet.unswept_s > patience_s):
        since = "ever" if fleet.unswept_s is None else f"for {brief(fleet.unswept_s)}"
        yield Trouble(
            "no_reaper",
            f"No reaper has walked a round {since}: the dead are not found.",
            "Start a worker without --no-reaper, `unstuck serve`, or `unstuck reaper` as a service.",
        )
    unserved = [queue.name for queue in queues if queue.pending and not queue.workers]
    if unserved:
        yield Trouble(
            "no_workers",
            f"Jobs are due in {', '.join(unserved[:5])}, and no living worker serves "
            f"{'it' if len(unserved) == 1 else 'them'}.",
            "Start a worker for these queues: `unstuck worker app:app --queues …`.",
        )
    if fleet.late:
        yield Trouble(
            "workers_late",
            f"{fleet.late} of {living} workers missed two heartbeats in a row; the longest silence is "
            f"{brief(fleet.silent_s)}.",
            "`unstuck workers` shows who; what is dead is settled by itself.",
        )
