"""Look at the health of a ledger on PostgreSQL, and ring the bell to hear whether it can be heard."""

import secrets
import statistics
import time
from collections.abc import Iterator
from itertools import groupby

from unstuck.domain.recovery_rules import read_all, rules_of_ledger
from unstuck.domain.watch_clock import Cause
from unstuck.errors import LedgerError
from unstuck.ledger.contract.diagnosis import (
    COUNT_LIMIT,
    LOOK_ERRORS,
    LOOK_GROUPS,
    LOOK_JOBS,
    LOOK_QUEUES,
    SWEEP_TICKET,
    AddressLook,
    Blocker,
    Diagnosis,
    JobGroup,
    QueueBacklog,
    RetentionLag,
    Snapshot,
    TableLook,
    TaskBacklog,
    WakeupState,
    WatchLook,
)
from unstuck.ledger.postgres.connect import read_address
from unstuck.ledger.postgres.database import Verbs
from unstuck.ledger.postgres.locks import find_blockers
from unstuck.ledger.postgres.notifier import PostgresListener

CLOCK_LOOKS = 3
BELL_PATIENCE_S = 3.0
BELL_SLICE_S = 0.2


class DiagnosingVerbs(Verbs):
    def diagnose(self, *, far_s: float, late_s: float) -> Diagnosis:
        pooled = self.read_connection.open().pooled
        now_at, clock_off_s, round_trip_s = self._look_at_clock()
        ticket = self.read("look_ticket", name=SWEEP_TICKET)
        reachable, wakeup_note = self._try_wakeup(pooled)
        limits = {"jobs": LOOK_JOBS, "groups": LOOK_GROUPS}
        quarantined = self.read("look_quarantined", errors=LOOK_ERRORS, groups=LOOK_GROUPS)
        tables = tuple(TableLook(*row) for row in self.read("look_tables", schema=self.schema))
        return Diagnosis(
            database="postgresql",
            now_at=now_at,
            clock_off_s=clock_off_s,
            round_trip_s=round_trip_s,
            queues=self.look_at_queues(),
            scheduled=tuple(JobGroup(*row) for row in self.read("look_scheduled", far_s=far_s, **limits)),
            coming=tuple(JobGroup(*row) for row in self.read("look_coming", **limits)),
            overdue=tuple(JobGroup(*row) for row in self.read("look_overdue", late_s=late_s, **limits)),
            quarantined=tuple(JobGroup(*row) for row in quarantined),
            unswept_s=ticket[0][0] if ticket else None,
            overkept=self._look_at_retention(),
            watch=tuple(WatchLook(Cause(row[0]), *row[1:]) for row in self.read("look_watch")),
            several_hosts=tuple(self._look_at_addresses()),
            pooler=pooled,
            wakeup_reachable=reachable,
            wakeup_note=wakeup_note,
            tables=tables,
            snapshots=tuple(Snapshot(*row) for row in self.read("look_snapshots", groups=LOOK_GROUPS)),
            size_bytes=sum(table.size_bytes for table in tables),
        )

    def blockers(self, *, open_s: float) -> tuple[Blocker, ...]:
        return find_blockers(self, open_s)

    def _look_at_retention(self) -> tuple[RetentionLag, ...]:
        stored = read_all(text for (text,) in self.read("recovery_rules"))
        kept = rules_of_ledger(stored, self.settings.recovery.rules).kept
        rows = self.read(
            "look_retention", jobs_s=kept.jobs_s, events_s=kept.events_s, rows=COUNT_LIMIT, groups=LOOK_GROUPS
        )
        return tuple(RetentionLag(*row) for row in rows)

    def _look_at_addresses(self) -> Iterator[AddressLook]:
        addresses = {"url": self.address}
        if self.settings.listen_url:
            addresses["listen_url"] = read_address(self.settings.listen_url)
        for setting, address in addresses.items():
            hosts = address.hosts()
            if len(hosts) > 1:
                user, database = (str(address.parameters.get(name) or "") for name in ("user", "dbname"))
                yield AddressLook(setting, hosts, user, database or user, address.chosen())

    def _look_at_clock(self) -> tuple[float, float, float]:
        """Give the server's time, how far ours is ahead of it at least, and the usual round trip."""
        looks = []
        for _ in range(CLOCK_LOOKS):
            before_at, started_s = time.time(), time.monotonic()
            [(now_at,)] = self.read("clock")
            looks.append((time.monotonic() - started_s, before_at, now_at, time.time()))
        # The quickest answer says the most: the server looked at its clock somewhere between our two looks at ours.
        _, before_at, now_at, after_at = min(looks)
        if before_at <= now_at <= after_at:
            off_s = 0.0
        else:
            off_s = before_at - now_at if now_at < before_at else after_at - now_at
        return now_at, off_s, statistics.median(took_s for took_s, *_ in looks)

    def look_at_queues(self) -> tuple[QueueBacklog, ...]:
        rows = self.read("look_ready", queues=LOOK_QUEUES, count=COUNT_LIMIT, jobs=LOOK_JOBS)
        found = [
            QueueBacklog(name, paused, ready, tuple(TaskBacklog(*row[3:]) for row in tasks))
            for (name, paused, ready), tasks in groupby(rows, key=lambda row: row[:3])
        ]
        known = {queue.name for queue in found}
        paused_names = [name for (name,) in self.read("look_paused", queues=LOOK_QUEUES) if name not in known]
        return (*found, *(QueueBacklog(name, True, 0) for name in paused_names))

    def _try_wakeup(self, pooled: bool) -> tuple[WakeupState, str]:
        """Listen on a connection of the kind that workers listen on, ring the way everybody rings, and wait."""
        if not self.settings.notify:
            return "off", ""
        if pooled and not self.settings.listen_url:
            return "pooled", ""
        connection = self._connection("doctor", self.settings.listen_url)
        # A channel of its own: nobody is woken for a rehearsal.
        channel = f"{self.schema}.doctor"
        word = f"doctor:{secrets.token_hex(8)}"
        listener = PostgresListener(connection, channel, lambda heard: heard == word)
        try:
            if connection.open().pooled:
                return "silent", "listen_url leads to a pooler too"
            deadline_s = time.monotonic() + BELL_PATIENCE_S
            while time.monotonic() < deadline_s:
                self.read_connection.ask(self.sql["ring"], {"channel": channel, "payload": word})
                if listener.wait(BELL_SLICE_S):
                    return "works", ""
            return "silent", f"a NOTIFY was not heard within {BELL_PATIENCE_S:g}s"
        except LedgerError as error:
            return "silent", str(error)
        finally:
            listener.close()
            connection.close()
