"""Find the dead by evidence and see that what they held is settled: one round at a time, safe to be killed anywhere.

Every verdict repeats its evidence in the write (guard), so a worker that beat since we looked is left alone. A
worker that is dead in the ledger can commit nothing more; only then are its processes ended and its jobs given on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from unstuck import failpoints, host, logs
from unstuck.config import Recovery
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.liveness import KERNEL, Detector, Evidence, Verdict, judge
from unstuck.domain.recovery_rules import RecoveryRules, rules_of_ledger
from unstuck.domain.states import LIVE_STATES, WorkerState
from unstuck.domain.units import MAX_DURATION_S, brief
from unstuck.domain.watch_clock import Cause, Tick, slack_s
from unstuck.errors import LedgerBusy, LedgerError, LedgerUnavailable
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import Ticked, WorkerWatch
from unstuck.ledger.contract.workers import WorkerVerdict
from unstuck.maintenance import upkeep
from unstuck.maintenance.retention import Housekeeping
from unstuck.maintenance.worker_health import HealthWatch
from unstuck.metrics.catalogue import DEATHS, DETECTION, SWEEP
from unstuck.metrics.counters import Counters
from unstuck.recovery.decide import autopsy_of_worker
from unstuck.recovery.evidence import Observer, guard_for, silent_unwatched
from unstuck.recovery.result import SweepResult
from unstuck.recovery.settle import Handover
from unstuck.recovery.watch import ReaperWatch

SWEEP_TICKET = "sweep"
RECONNECT_S = 1.5
"""A worker that lost its session tries again once per second at least (`worker/heartbeat.py`): no shorter grace."""
WORTH_SAYING_S = 3.0
"""A gap in the watch is logged as a warning from this length on."""
# Shorter than the interval: whoever won the last round must be able to win the next one on time.
TICKET_SHARE = 0.9
RULES_EVERY_S = 30.0
"""How often the rules are read that workers stored for the ledger as a whole."""
MAX_DEFERRED = 5
"""How many parts of a round may each wait for a lock in vain before the rest is left for the next round as well."""

log = logs.logger("unstuck.recovery")


class Reaper:
    """Judge the workers of a ledger and recover the jobs of those that are dead.

    `by` names the process that runs it: a worker's id, 'reaper' or 'supervisor'."""

    def __init__(self, ledger: Ledger, recovery: Recovery, *, by: str, counters: Counters | None = None) -> None:
        self.ledger = ledger
        self.recovery = recovery
        self.by = by
        self.counters = counters or Counters()
        self._interval_s = recovery.heartbeat_interval_s
        """The shortest heartbeat interval of the fleet, as far as we know."""
        self._check_interval_s = recovery.check_interval_s
        self.watch = ReaperWatch(self._check_interval_s)
        self._watched_s = 0.0
        self.wake: Callable[[SweepResult], None] = lambda done: None
        """Called after each reported death: the reaper loop learns when requeued jobs become due."""
        # Read once: a setting is parsed each time it is asked for, and a round asks for every worker.
        self._own_rules = recovery.rules
        self._ledger_rules = self._own_rules
        self._ledger_rules_until_s = 0.0
        self.observer = Observer(single_host=ledger.single_host)
        self._handover = Handover(ledger, self.rules_for, self.observer, self.counters)
        self._housekeeping = Housekeeping(recovery.heartbeat_interval_s)
        self._order = upkeep.ConcurrencyUpkeep()
        self._health = HealthWatch(by)
        self._standing: dict[str, WorkerVerdict | None] = {}
        self._said_deferred = False

    # What others call ---------------------------------------------------------------------------

    @property
    def contact_every_s(self) -> float:
        """How often it must reach the ledger, so that its watch has no holes that matter to the quickest worker."""
        return min(self._check_interval_s, self._interval_s / 2)

    def contact_in_s(self, now_s: float) -> float:
        """Return in how long it must reach the ledger again: a round that ended just now may have been a long one.

        Other work gets its turn in between, within the slack of a tick."""
        every_s = self.contact_every_s
        since_s = self.watch.since_contact_s(now_s) or 0.0
        return max(every_s - since_s, min(every_s, slack_s(self._interval_s) / 2))

    def rules_for(self, worker: WorkerWatch) -> RecoveryRules:
        """Return the rules by which a worker is judged: those that it stored, or ours if it stored none."""
        return self._own_rules if worker.rules is None else worker.rules

    def sweep(self, *, ticket: bool = True) -> SweepResult:
        """Judge every worker, settle what the dead held, end what overran, keep house; give the counts."""
        if not self.keep_watch(SWEEP_TICKET if ticket else None):
            return SweepResult(skipped="ticket")
        begun_s = host.boottime_s()
        done = SweepResult(skipped="" if self.watch.awake else "late")
        try:
            workers, well = self.ledger.recovery.to_judge()
            done.watched = len(workers) + well
            self._forget_strangers(workers)
            self._attend(workers, done)
            with self._unless_busy("overdue jobs", done):
                self._handover.end_overdue(workers, done)
            with self._unless_busy("due jobs", done):
                upkeep.promote(self.ledger, done)
            with self._unless_busy("expired jobs", done):
                upkeep.expire(self.ledger, done)
            with self._unless_busy("order in queues", done):
                self._order.run(self.ledger, done)
            with self._unless_busy("workflows", done):
                upkeep.repair_workflows(self.ledger, done)
            with self._unless_busy("retention", done):
                self._housekeeping.run(self.ledger, self._rules_of_ledger().kept, done)
            with self._unless_busy("health", done):
                if self._rules_of_ledger().auto_disable_unhealthy and self.watch.awake:
                    self._health.run(self.ledger, done)
            if not done.deferred:
                self._said_deferred = False
        finally:
            # What was written before an error must still be heard.
            self._wakeups(done)
        self.counters.observe(SWEEP, host.boottime_s() - begun_s)
        return done

    def keep_watch(self, ticket: str | None = None) -> bool:
        """Keep the watch over the ledger; return whether the ticket is ours, or none was asked for."""
        sent_s = host.boottime_s()
        return self._send(self.watch.tick(sent_s, self._interval_s), sent_s, ticket)

    def _keep_in_touch(self) -> None:
        """Tick in the middle of a round if a contact is due: a round of many slow calls must not tear the watch."""
        sent_s = host.boottime_s()
        if (self.watch.since_contact_s(sent_s) or 0.0) >= self.contact_every_s:
            # A lock that is in the way of this one is seen by the next: it comes too late to join the period.
            with suppress(LedgerBusy):
                self._send(self.watch.tick_amid(sent_s, self._interval_s), sent_s, None)

    def _send(self, said: Tick, sent_s: float, ticket: str | None) -> bool:
        ticked = self.ledger.recovery.tick(said, ticket, self._check_interval_s * TICKET_SHARE)
        self._reached(sent_s, ticked)
        self._watched_s = ticked.watched_s
        _say_what_happened(ticked)
        return ticked.won

    def count_unwatched(self, claim_s: float) -> None:
        """Have the ledger count all of the last `claim_s`, though no one watched: after a second look at the silent."""
        sent_s = host.boottime_s()
        ticked = self.ledger.recovery.tick(Tick(claim_s, self.contact_every_s, cause=Cause.START))
        self._reached(sent_s, ticked)

    def _reached(self, sent_s: float, ticked: Ticked) -> None:
        now_s, stale_s = host.boottime_s(), ticked.stale_s
        self.watch.reached(sent_s, now_s, stale_s=stale_s, connected_s=ticked.connected_s, at=ticked.at)

    def promote(self) -> SweepResult:
        """Only make due jobs ready: the reaper loop does this between two sweeps."""
        done = SweepResult()
        upkeep.promote(self.ledger, done)
        upkeep.expire(self.ledger, done)
        self._wakeups(done)
        return done

    def keep_house(self) -> SweepResult:
        """Remove one batch of expired rows, if one is due: the reaper loop does this between two sweeps."""
        done = SweepResult()
        self._housekeeping.run(self.ledger, self._rules_of_ledger().kept, done)
        return done

    def report_death(
        self,
        worker_id: str,
        detector: Detector,
        evidence: str,
        death: Autopsy | None = None,
        seen: WorkerWatch | None = None,
    ) -> SweepResult:
        """Take a proof of death (or an operator's word) at once: condemn, clear up, settle all that it held.

        `death` is what whoever saw it knows of how the process ended, `seen` what the ledger said a moment ago."""
        done = SweepResult()
        near = host.hostname() if detector in KERNEL else None
        worker = seen or next((one for one in self.ledger.recovery.watch(near) if one.id == worker_id), None)
        if worker is None:
            return done
        verdict = Verdict(WorkerState.DEAD, detector, evidence, min(worker.silent_s, MAX_DURATION_S))
        try:
            # Up to three peers report the same death. The first settles it; the others find the worker dead already.
            if worker.state not in LIVE_STATES:
                held = _held_at_death(self._standing_verdict(worker.id))
                self._handover.recover(worker, detector, evidence, done, death, held)
            elif self._condemn(worker, verdict, done, death):
                self._handover.recover(worker, detector, evidence, done, death)
        finally:
            self._wakeups(done)
        self.wake(done)
        return done

    def unwatched(self) -> list[WorkerWatch]:
        """Return the workers that were not heard for a whole timeout while no reaper kept watch."""
        workers, _ = self.ledger.recovery.to_judge()
        return [worker for worker in workers if worker.state in LIVE_STATES and silent_unwatched(worker)]

    # Judging ------------------------------------------------------------------------------------

    def _attend(self, workers: Sequence[WorkerWatch], done: SweepResult) -> None:
        living = [(worker, self._evidence(worker)) for worker in workers if worker.state in LIVE_STATES]
        for worker in workers:
            if worker.state not in LIVE_STATES:
                with self._apart(worker, done):
                    self._finish_burial(worker, done)
        for worker, evidence in living:
            if evidence.well:
                continue
            with self._apart(worker, done):
                self._act(worker, evidence, done)

    @contextmanager
    def _unless_busy(self, what: str, done: SweepResult) -> Iterator[None]:
        """Leave a part of the round for the next one if a lock is in its way, so that the other parts go on."""
        try:
            yield
        except LedgerBusy as error:
            done.deferred += 1
            if done.deferred >= MAX_DEFERRED:
                raise
            self.say_deferred(what, error)
        self._keep_in_touch()

    def say_deferred(self, what: str, error: LedgerBusy) -> None:
        """Log what a lock holds up: once, until a whole round went through."""
        if not self._said_deferred:
            log.warning("A lock holds up the reaper; the next round tries again", what=what, error=str(error))
        self._said_deferred = True

    @contextmanager
    def _apart(self, worker: WorkerWatch, done: SweepResult) -> Iterator[None]:
        """Keep the trouble with one worker from the others; an unreachable ledger is everybody's."""
        try:
            with self._unless_busy(f"worker {worker.id}", done):
                yield
        except LedgerUnavailable:
            raise
        except LedgerError:
            log.exception("A worker could not be settled; the next round tries again", worker=worker.id)

    def _evidence(self, worker: WorkerWatch) -> Evidence:
        connected = self.watch.connected_s(host.boottime_s()) >= self._reunion_s(worker)
        return self.observer.evidence(worker, self._watched_s, connected=connected)

    def _reunion_s(self, worker: WorkerWatch) -> float:
        """Return for how long a reaper that reconnected cannot tell whose sessions were lost together with its own."""
        grace_s = self.rules_for(worker).session_grace_s
        return max(grace_s, worker.heartbeat_interval_s, self.recovery.heartbeat_interval_s)

    def _act(self, worker: WorkerWatch, evidence: Evidence, done: SweepResult) -> None:
        # Of silence only watched time counts. So a reaper that is late in every round may still judge by a long one.
        lease = self.watch.awake or evidence.long_overdue
        rules = self.rules_for(worker)
        steady = self.watch.steady_s(host.boottime_s()) >= self._reunion_s(worker)
        verdict = judge(
            evidence,
            session_grace_s=max(rules.session_grace_s, RECONNECT_S),
            peers="neighbours" in rules.evidence,
            session=self.watch.awake and steady and "session" in rules.evidence,
            lease=lease,
        )
        if verdict is not None and verdict.state is WorkerState.DEAD:
            if self._handover.left_to_operator(worker, verdict, done):
                # Dead, it could not come back and finish what nobody may take from it; suspect, it can.
                if worker.state is not WorkerState.SUSPECT:
                    self._condemn(worker, _only_suspect(verdict), done)
            elif self._condemn(worker, verdict, done):
                self._handover.recover(worker, verdict.detector, verdict.evidence, done)
            return
        if verdict is not None:
            self._condemn(worker, verdict, done)
        if lease and evidence.overdue and worker.held:
            self._handover.take_expired_leases(worker, done)

    def _condemn(self, worker: WorkerWatch, verdict: Verdict, done: SweepResult, death: Autopsy | None = None) -> bool:
        if verdict.state is WorkerState.DEAD:
            death = autopsy_of_worker(worker, verdict, death)
        session = worker.session_id if verdict.detector is Detector.SESSION else None
        said = verdict.evidence, verdict.silent_s
        written = WorkerVerdict(verdict.state, verdict.detector, *said, self.by, death, session)
        if not self.ledger.recovery.declare_dead(worker.id, written, guard_for(worker, verdict)):
            return False
        facts = {
            "worker": worker.id,
            "worker_name": worker.name,
            "host": worker.host,
            "pid": worker.pid,
            "detector": verdict.detector.value,
            "evidence": verdict.evidence,
            "silent_s": round(verdict.silent_s, 3),
            "held": worker.held,
        }
        if verdict.state is WorkerState.DEAD:
            done.deaths[verdict.detector] += 1
            self._count_death(verdict.detector, death)
            log.error(f"Dead worker detected: {worker.id}", **facts)
        else:
            done.suspected += 1
            log.warning(f"Worker under suspicion: {worker.id}", **facts)
        if failpoints.active:
            failpoints.reached("reap.after_declare_dead")
        return True

    def _count_death(self, detector: Detector, death: Autopsy | None) -> None:
        kind = DeathKind.UNKNOWN if death is None else death.kind
        self.counters.add(DEATHS, ("worker", kind.value, detector.value))
        if death is not None and death.seen_after_s is not None:
            self.counters.observe(DETECTION, death.seen_after_s, ("worker", detector.value))

    def _finish_burial(self, worker: WorkerWatch, done: SweepResult) -> None:
        """Go on where an earlier reaper was interrupted, or where a worker stopped without giving back."""
        if worker.state is WorkerState.STOPPED:
            self._handover.recover(worker, None, "it stopped before this job was finished", done)
            return
        standing = self._standing_verdict(worker.id)
        if standing is None:
            self._handover.recover(worker, Detector.OPERATOR, "it is dead in the ledger", done)
        else:
            held = _held_at_death(standing)
            self._handover.recover(worker, standing.detector, standing.evidence, done, standing.autopsy, held)

    # ------------------------------------------------------------------------------------------

    def _rules_of_ledger(self) -> RecoveryRules:
        """Return the rules for what belongs to no worker, as the workers' apps have them."""
        now_s = host.boottime_s()
        if now_s >= self._ledger_rules_until_s:
            self._ledger_rules = rules_of_ledger(self.ledger.recovery.rules(), self._own_rules)
            self._ledger_rules_until_s = now_s + RULES_EVERY_S
        return self._ledger_rules

    def _standing_verdict(self, worker_id: str) -> WorkerVerdict | None:
        """Give the verdict that stands; the dead do not change, so it is read once."""
        if worker_id in self._standing:
            return self._standing[worker_id]
        verdict = next((record.verdict for record in self.ledger.workers.list() if record.id == worker_id), None)
        self._standing[worker_id] = verdict
        return verdict

    def _forget_strangers(self, workers: Sequence[WorkerWatch]) -> None:
        ids = {worker.id for worker in workers}
        self._handover.forget_all_but(ids)
        self.observer.forget_all_but(ids)
        intervals_s = [worker.heartbeat_interval_s for worker in workers if worker.state in LIVE_STATES]
        self._interval_s = min([self.recovery.heartbeat_interval_s, *intervals_s])
        self._standing = {known: verdict for known, verdict in self._standing.items() if known in ids}

    def _wakeups(self, done: SweepResult) -> None:
        words = {f"queue:{queue}" for queue in done.queues}
        if done.deaths:
            words.add("workers")
        if words:
            self.ledger.notify(words)


def _held_at_death(standing: WorkerVerdict | None) -> int:
    return 0 if standing is None or standing.autopsy is None else standing.autopsy.beside_count


def _say_what_happened(ticked: Ticked) -> None:
    if ticked.set_back_s:
        log.warning(
            f"The ledger's clock was set back by {brief(ticked.set_back_s)}. No worker loses its lease by that."
        )
    if ticked.began in (None, Cause.START) or ticked.gap_s is None:
        return
    # On a busy machine a second is lost now and then, and no one needs to hear of it.
    say = log.warning if ticked.gap_s >= WORTH_SAYING_S else log.debug
    say(
        f"{_WHY[ticked.began]} The last {brief(ticked.gap_s)} do not count against any worker.",
        cause=ticked.began.value,
        not_counted_s=round(ticked.gap_s, 3),
    )


_WHY = {
    Cause.START: "No reaper was watching.",
    Cause.PAUSE: "This reaper was paused, and no other one was watching.",
    Cause.OUTAGE: "The ledger could not be reached.",
    Cause.FAILOVER: "The database server was restarted, or another one took over.",
    Cause.CLOCK: "The ledger's clock was set forward, or the database stood still.",
}


def _only_suspect(verdict: Verdict) -> Verdict:
    evidence = f"{verdict.evidence}; recovery is switched off, so an operator must decide"
    return Verdict(WorkerState.SUSPECT, verdict.detector, evidence, verdict.silent_s)
