"""Keep the book of foreign workers: those that come through another door than Python's own."""

import os
import secrets
from collections.abc import Collection, Sequence

import apsw
import msgspec

from unstuck.domain.states import LIVING, WorkerState
from unstuck.store.records import BeatAnswer, Fate, ForeignPulse, WorkerRecord, read_fate
from unstuck.store.sqlite.bell import SqliteBell, bell_address, reaches
from unstuck.store.sqlite.rows import worker_record
from unstuck.store.sqlite.silence import Clock, read_clock
from unstuck.store.sqlite.verbs import SQL, fetch, write_event
from unstuck.store.sqlite.worker import WorkerVerbs


class ForeignVerbs(WorkerVerbs):
    def foreign_worker(self, worker_id: str) -> WorkerRecord | None:
        return self._find_foreign("foreign_worker", worker_id)

    def foreign_worker_named(self, name: str) -> WorkerRecord | None:
        return self._find_foreign("foreign_worker_named", name)

    def living_python_worker(self, name: str) -> str | None:
        with self.db.read() as cursor:
            found = cursor.execute(SQL["living_python_worker"], (name,)).get
            return None if found is None else str(found)

    def fates(self, attempts: Sequence[tuple[int, int]]) -> list[Fate]:
        with self.db.read() as cursor:
            return [read_fate(row) for row in fetch(cursor, "fates", (msgspec.json.encode(attempts).decode(),))]

    def blocked_workers(self, worker_ids: Collection[str]) -> set[str]:
        # There are no locks on rows.
        return set()

    def beat_foreign(self, pulses: Sequence[ForeignPulse]) -> list[BeatAnswer]:
        with self.db.write(durable=False) as cursor:
            clock = read_clock()
            return [beat_one(cursor, pulse, clock) for pulse in pulses]

    def launch_beats(self, pulses: Sequence[ForeignPulse]) -> None:
        """There is nothing to wait for but the disk, and that is waited for in a thread."""

    def overhear(self) -> SqliteBell:
        bell = SqliteBell(bell_address(self.db.path, f"listener-{os.getpid()}-{secrets.token_hex(8)}"))
        try:
            with self.db.write() as cursor:
                for (address,) in fetch(cursor, "listeners"):
                    if not reaches(address):
                        # Whoever was killed could not take its bell away.
                        cursor.execute(SQL["remove_listener"], (address,))
                cursor.execute(SQL["add_listener"], (bell.address,))
        except BaseException:
            bell.close()
            raise
        # What this process rings from now on reaches it. Other processes learn of it within CACHE_S.
        self.ringer.look_again()
        return bell

    def _find_foreign(self, query: str, key: str) -> WorkerRecord | None:
        with self.db.read() as cursor:
            row = cursor.execute(SQL[query], (key,)).fetchone()
            return None if row is None else worker_record(row, read_clock(cursor))


def beat_one(cursor: apsw.Cursor, pulse: ForeignPulse, clock: Clock) -> BeatAnswer:
    """Beat for one of them, inside a write."""
    worker_id = pulse.worker_id
    found = cursor.execute(SQL["foreign_pulse"], (worker_id,)).fetchone()
    if found is None:
        return BeatAnswer(WorkerState.DEAD)
    state, draining, request, boot_id, disabled = found
    if state not in LIVING:
        return BeatAnswer(WorkerState(state))
    if boot_id != clock.boot_id:
        cursor.execute(SQL["move_to_this_boot"], (worker_id, clock.boot_id))
        cursor.execute(SQL["restart_deadlines"], (worker_id, clock.boot_s, clock.at))
    cursor.execute(SQL["beat_foreign"], (worker_id, clock.at, pulse.running, pulse.settled))
    was_suspect = state == WorkerState.SUSPECT
    if was_suspect:
        cursor.execute(SQL["clear_suspicion"], (worker_id,))
        state = WorkerState.DRAINING if draining else WorkerState.ACTIVE
        write_event(cursor, "worker_recovered", "It beat again: it was only slow.", worker_id=worker_id)
    if pulse.metadata is not None:
        cursor.execute(SQL["set_metadata"], (worker_id, msgspec.json.encode(pulse.metadata).decode()))
    cancel = tuple(fetch(cursor, "cancel_asked", (worker_id,)))
    return BeatAnswer(WorkerState(state), was_suspect, request, cancel, bool(disabled))
