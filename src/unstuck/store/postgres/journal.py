"""Keep what jobs write down on their way, and the signals that they are sent."""

from unstuck.domain.errors import RefusedValue
from unstuck.domain.journal import MAX_SIGNALS, Kept, Line, pack
from unstuck.store.checks import check_ids
from unstuck.store.postgres import arrays
from unstuck.store.postgres.holders import HolderVerbs
from unstuck.store.records import JournalRecord, SignalRecord


class JournalVerbs(HolderVerbs):
    def signal(self, job_id: int, name: str, value: bytes, by: str) -> str:
        check_ids((job_id,))
        if "\0" in name:
            raise RefusedValue("The name of a signal must not hold a NUL character.")
        values = {"job_id": job_id, "name": name, "value": value, "by": by, "limit": MAX_SIGNALS}
        answer, queue = self.past_locks(self.read_lane, lambda: self.read_lane.write(self.sql["signal"], values))[0]
        if queue is not None:
            self.ring((f"queue:{queue}",))
        return str(answer)

    def journal(self, job_id: int) -> list[JournalRecord]:
        check_ids((job_id,))
        return [JournalRecord(*row) for row in self.read("journal", job_id=job_id)]

    def signals(self, job_id: int) -> list[SignalRecord]:
        check_ids((job_id,))
        return [SignalRecord(*row) for row in self.read("signals", job_id=job_id)]

    def _journals(self, job_ids: list[int]) -> dict[int, bytes]:
        """Give what these jobs wrote down and the signals that are kept for them, packed for a new attempt."""
        if not job_ids:
            return {}
        values = {"ids": arrays.int8s(job_ids)}
        lines: dict[int, list[Line]] = {job_id: [] for job_id in job_ids}
        for job_id, *line in self.turn_lane.ask(self.sql["journal_lines"], values):
            lines[job_id].append(Line(*line))
        kept: dict[int, list[Kept]] = {job_id: [] for job_id in job_ids}
        for job_id, *signal in self.turn_lane.ask(self.sql["kept_signals"], values):
            kept[job_id].append(Kept(*signal))
        return {job_id: pack(lines[job_id], kept[job_id]) for job_id in job_ids}
