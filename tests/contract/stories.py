"""What happens in a ledger, as short stories. `test_same_story` plays each on both databases, and compares them."""

from collections.abc import Callable, Iterator
from typing import Any

from tests.support.backdoor import Backdoor
from tests.support.builders import (
    birth,
    claim_jobs,
    crash,
    crash_retry,
    done,
    failure,
    failure_retry,
    new_job,
    put,
    release,
    run,
    running,
    turn,
    verdict,
    wish,
)

from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.limits import QueueLimit
from unstuck.domain.liveness import Detector
from unstuck.domain.node_inputs import NodeError, unpack_inputs
from unstuck.domain.schedules import ScheduleDefinition, Timing
from unstuck.domain.states import AttemptState, JobState, Transport, WorkerState
from unstuck.errors import DuplicateJob
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import Count, NewApiToken
from unstuck.ledger.contract.events import ConditionChange
from unstuck.ledger.contract.jobs import JobExtras, Progress, Request
from unstuck.ledger.contract.recovery import GuardDead, GuardNone, GuardSilent, GuardSuspect
from unstuck.ledger.contract.schedules import Firing, pack_job
from unstuck.ledger.contract.workers import (
    Claimed,
    ClaimRequest,
    DeferredOutcome,
    Exchange,
    Heartbeat,
    JournalEntry,
    NewWorker,
    OnceJob,
    Output,
    RemoteHeartbeat,
    ReplyAddress,
    Turn,
)
from unstuck.ledger.contract.workflows import NewEdge, NewNode, NewWorkflow

Story = Callable[[Ledger, Backdoor], Iterator[Any]]
"""Each value is an answer to compare. The whole ledger is compared with it."""
STORIES: dict[str, Story] = {}


class JobId(int):
    """An id of a job: which number it has is no part of the story."""


def story(told: Story) -> Story:
    STORIES[told.__name__] = told
    return told


# One job -------------------------------------------------------------------------------------------


@story
def a_job_succeeds(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    yield ledger.workers.register(living("w1"))
    put(ledger, priority=7, enqueued_by="me", timeout_s=60.0, heartbeat_timeout_s=30.0)
    yield ledger.queues.unserved([("default", "add"), ("default", "other"), ("other", "add")])
    [job] = claim_jobs(ledger)
    yield job
    yield turn(ledger, start=[job])
    yield turn(ledger, outputs=[Output(job.job_id, job.token, b"out", b"err")], done=[done(job)])
    yield ledger.jobs.outcomes([job.job_id])
    yield turn(ledger, done=[done(job)])


@story
def jobs_end_badly(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    for ends in (failure, crash, failure_retry, crash_retry, quarantine, suspicion, company):
        job = running(ledger, queue="default", on_crash="retry", timeout_s=60.0)
        yield turn(ledger, endings=[ends(job)])
        yield ledger.jobs.attempts(job.job_id)
        turn(ledger, done=[done(again) for again in run(ledger)])
    job = running(ledger)
    yield turn(
        ledger,
        endings=[crash(job, autopsy=Autopsy(DeathKind.SIGNAL, "killed by SIGSEGV (signal 11)", Detector.RUNNER))],
    )
    yield ledger.jobs.attempts(job.job_id)


@story
def a_retry_waits(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    job = running(ledger)
    yield turn(ledger, endings=[failure_retry(job, delay_s=60.0)])
    yield of_jobs(ledger.jobs.cancel([job.job_id], "me"))
    yield of_jobs(ledger.jobs.retry([job.job_id], "you"))
    [again] = run(ledger)
    yield turn(ledger, endings=[crash_retry(again, delay_s=60.0)])
    backdoor.age_job(job.job_id, 61)
    yield ledger.maintenance.promote_due(10).count


@story
def attempts_stand_in_their_order_though_the_clock_was_set_back(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    first = running(ledger, on_crash="retry", heartbeat_timeout_s=30.0, timeout_s=90.0)
    backdoor.age_job(first.job_id, -3600)
    turn(ledger, endings=[crash_retry(first)])
    backdoor.age_job(first.job_id, 3600)
    [second] = run(ledger)
    yield [attempt.token == first.token for attempt in ledger.jobs.attempts(first.job_id)]
    turn(ledger, endings=[crash(second)])
    yield ledger.jobs.attempts(first.job_id)


@story
def proofs_of_life_have_deadlines(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1", suspect_after_s=200.0, running_stale_after_s=500.0))
    for changes in ({}, {"heartbeat_timeout_s": 30.0}, {"heartbeat": False}, {"timeout_s": 70.0}):
        put(ledger, **changes)
    jobs = claim_jobs(ledger)
    yield ledger.workers.beat(Heartbeat("w1", 0, 0))
    turn(ledger, start=jobs)
    yield ledger.workers.held("w1")
    for job in jobs:
        yield ledger.jobs.attempts(job.job_id)
    turn(ledger, done=[done(job) for job in jobs[:2]], endings=[failure(job) for job in jobs[2:]])


@story
def a_job_is_cancelled(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    pending, scheduled = put(ledger, queue="other"), put(ledger, delay_s=60.0)
    [claimed, run_one] = [put(ledger, priority=9), put(ledger)]
    jobs = {job.job_id: job for job in claim_jobs(ledger)}
    turn(ledger, start=[jobs[run_one]])
    yield of_jobs(ledger.jobs.cancel([pending, scheduled, claimed, run_one, 999_999], "me"))
    yield ledger.workers.beat(Heartbeat("w1", 1, 0))
    yield turn(ledger, endings=[failure_retry(jobs[run_one])])
    yield of_jobs(ledger.jobs.cancel([run_one], "me"))
    yield turn(ledger, start=[jobs[claimed]])


@story
def a_cancelled_job_is_given_back(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    for event in (None, "released"):
        job = running(ledger)
        yield of_jobs(ledger.jobs.cancel([job.job_id], "me"))
        yield turn(ledger, release=[release(job, event=event, message="Worker is leaving" if event else "")])
        yield ledger.jobs.attempts(job.job_id)
        yield of_jobs(ledger.jobs.retry([job.job_id], "me"))
        yield turn(ledger, done=[done(again) for again in run(ledger)])


@story
def a_job_is_given_back(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    put(ledger)
    [job] = claim_jobs(ledger)
    yield turn(ledger, release=[release(job, event="released", message="Task re-queued due to stale worker: w1")])
    [job] = run(ledger)
    yield turn(ledger, release=[release(job)])


@story
def an_operator_tries_jobs_again(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    ids = []
    for ends in (failure, crash, quarantine):
        job = running(ledger, unique_key=f"key-{ends.__name__}")
        turn(ledger, endings=[ends(job)])
        ids.append(job.job_id)
    put(ledger, unique_key="key-crash")
    pending = put(ledger, queue="other")
    put(ledger, queue="apart")
    [live] = run(ledger, queues=("apart",))
    ledger.jobs.cancel([pending], "me")
    turn(ledger, done=[done(live)])
    yield of_jobs(ledger.jobs.retry([*ids, pending, live.job_id, 999_999], "it's me"))
    yield of_jobs(ledger.jobs.retry([*ids, pending], "you"))


@story
def jobs_expire(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    terms = (("other", 2.0), ("other", 0.5), ("default", 90.0), ("default", 86400.0))
    jobs = {put(ledger, queue=queue, more=JobExtras(expires_in_s=seconds)): seconds for queue, seconds in terms}
    yield [JobId(job_id) for job_id in jobs]
    for job_id, seconds in jobs.items():
        backdoor.age_expiry(job_id, seconds + 1.0)
    # What a worker finds instead of work is cancelled too.
    yield wish(ledger).claimed
    yield ledger.maintenance.expire_due(10).count


@story
def duplicates(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    yield ledger.jobs.enqueue([new_job(unique_key="a"), new_job(unique_key="a")])
    try:
        ledger.jobs.enqueue([new_job(unique_key="a", more=JobExtras(on_duplicate="refuse"))])
    except DuplicateJob as refused:
        yield str(refused).replace(str(refused.job_id), "N")
    yield ledger.jobs.enqueue([new_job(unique_key="a", more=JobExtras(on_duplicate="replace"))])
    yield ledger.jobs.enqueue([new_job(unique_key="b", more=JobExtras(unique="pending"))])
    yield ledger.jobs.enqueue([new_job(unique_key="c", more=JobExtras(unique_for_s=3600.0))])
    yield [JobId(job.job_id) for job in run(ledger)]
    yield ledger.jobs.enqueue([new_job(unique_key=key, more=JobExtras(on_duplicate="replace")) for key in ("a", "b")])
    once = Request(b"k" * 32, b"f" * 32, 3600.0)
    yield ledger.jobs.enqueue_once(once, [new_job()])
    yield ledger.jobs.enqueue_once(once, [new_job()])


@story
def a_queue_is_purged(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    tried = running(ledger)
    turn(ledger, endings=[failure_retry(tried, delay_s=60.0)])
    for changes in (
        {},
        {"delay_s": 60.0},
        {"more": JobExtras(concurrency_key="k")},
        {"more": JobExtras(concurrency_key="k")},
    ):
        put(ledger, **changes)
    yield ledger.queues.purge("default", "me")


@story
def a_job_sleeps_and_waits_for_signals(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    job = running(ledger)
    step = JournalEntry(job.job_id, job.token, 1, "step", "fetch", b"1")
    yield turn(ledger, entries=[step], endings=[suspend(job, delay_s=60.0)])
    backdoor.age_job(job.job_id, 61)
    yield ledger.maintenance.promote_due(10).count
    [job] = run(ledger)
    yield turn(ledger, endings=[suspend(job, awaits="go")])
    yield ledger.jobs.signal(job.job_id, "other", b"1", "me")
    yield ledger.jobs.signal(job.job_id, "go", b"2", "me")
    [job] = run(ledger)
    yield (ledger.jobs.journal(job.job_id), ledger.jobs.signals(job.job_id))
    yield turn(ledger, endings=[suspend(job, delay_s=60.0, awaits="other")])
    [job] = run(ledger)
    yield turn(ledger, endings=[suspend(job, delay_s=60.0, awaits="third")])
    yield of_jobs(ledger.jobs.cancel([job.job_id], "me"))
    yield ledger.jobs.signal(job.job_id, "third", b"3", "me")


@story
def hooks_follow_ends(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    kinds = ("success", "failure", "crash", "retry")
    hooks = {kind: [{"task": f"after_{kind}", "queue": "hooks"}] for kind in kinds}
    for ends in (failure, crash_retry, failure_retry):
        job = running(ledger, more=JobExtras(hooks=hooks), priority=5)
        yield turn(ledger, endings=[ends(job)])
        turn(ledger, done=[done(again) for again in run(ledger)])


@story
def a_job_shows_how_far_it_is(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    job = running(ledger)
    ledger.workers.note_progress("w1", [Progress(job.job_id, job.token, 5.0, 1.0, 2.0, "half of it")])
    yield ledger.jobs.progress([job.job_id])
    ledger.workers.note_deferred("w1", [DeferredOutcome(job.job_id, job.token, "a lock")])
    found = ledger.jobs.deferred_outcome(job.job_id)
    yield found and (found.worker_id, found.is_return, found.reason)
    turn(ledger, done=[done(job)])
    yield ledger.jobs.progress([job.job_id])


# Queues --------------------------------------------------------------------------------------------


@story
def queues_are_paused_and_limited(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1", queues=("default", 'it\'s "quoted"')))
    for queue in ("default", 'it\'s "quoted"'):
        put(ledger, queue=queue)
        yield ledger.queues.pause(queue, "me")
        yield wish(ledger, queues=("default", 'it\'s "quoted"')).claimed
    yield ledger.queues.resume(None, "you")
    ledger.queues.declare_limits({"default": QueueLimit(concurrency=2)})
    ledger.queues.limit("default", QueueLimit(concurrency=1), "me")
    put(ledger)
    yield len(wish(ledger).claimed)
    yield ledger.queues.limits()
    ledger.queues.unlimit("default", "me")
    yield ledger.queues.limits()
    ledger.queues.limit("slow", QueueLimit(rate=5, window_s=60.0), "me")


@story
def jobs_wait_for_a_concurrency_key(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    for _ in range(3):
        put(ledger, more=JobExtras(concurrency_key="customer", concurrency_limit=1))
    yield ledger.queues.concurrency_keys()
    [job] = run(ledger)
    yield turn(ledger, endings=[failure_retry(job)])
    ledger.queues.limit_key("customer", 2, "me")
    yield ledger.queues.concurrency_keys()
    jobs = run(ledger)
    yield turn(ledger, endings=[crash(one) for one in jobs])
    ledger.queues.limit_key("customer", None, "me")
    yield ledger.jobs.links(jobs[0].job_id)


# Workers -------------------------------------------------------------------------------------------


@story
def a_worker_comes_and_goes(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    yield ledger.workers.register(living("w1", metadata={"version": "1"}))
    ledger.workers.register(living("w2"))
    yield ledger.workers.request("w1", "drain", "it's me")
    yield ledger.workers.beat(Heartbeat("w1", 2, 3, {"version": "2"}))
    ledger.workers.drain("w1")
    ledger.workers.stop("w1")
    yield ledger.workers.request("w1", "stop", "me")
    yield ledger.workers.beat(Heartbeat("w1", 0, 0))
    yield ledger.workers.disable("w2", "too many crashes", "me")
    yield ledger.workers.disable("w2", "again", "me")
    yield ledger.workers.enable("w2", "me", "fixed")
    yield ledger.workers.disable_host("elsewhere", "broken", "me")
    yield ledger.workers.register(living("w3", host="elsewhere"))
    yield ledger.workers.enable_host("elsewhere", "me")
    yield ledger.workers.fleet().workers


@story
def a_worker_is_silent_while_no_one_keeps_watch(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    wanted = [("default", "add")]
    ledger.workers.register(living("w1"))
    backdoor.move_beats(-3600.0)
    backdoor.forget_watch()
    watch(backdoor, since_s=4000.0, until_s=3599.0)
    watch(backdoor, since_s=1.0, until_s=0.0)
    yield ledger.queues.unserved(wanted)
    yield ledger.workers.fleet().late
    yield ledger.events.look_for_conditions().late
    watch(backdoor, since_s=1800.0, until_s=0.0)
    yield ledger.queues.unserved(wanted)
    yield ledger.workers.fleet().late


@story
def a_worker_dies(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    for changes in ({"on_crash": "retry"}, {}, {"priority": 9}, {"priority": -9}):
        put(ledger, **changes)
    claim_jobs(ledger, limit=1, start=1)
    claim_jobs(ledger, start=2)
    backdoor.age_beat("w1", 60.0)
    yield ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), GuardNone())
    yield ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    held = ledger.recovery.held_jobs("w1", 2)
    yield held
    yield [JobId(job.job_id) for job in ledger.workers.held("w1")]
    yield [JobId(job.job_id) for job in ledger.recovery.held_jobs("w1", 100)]
    yield [JobId(job.job_id) for job in ledger.recovery.stale(30.0)]
    ends = [
        crash_retry(job, event="requeued", message="Task re-queued due to stale worker: w1")
        for job in ledger.workers.held("w1")
        if job.state is JobState.RUNNING
    ]
    gives = [
        release(job, event="released", message="given back")
        for job in ledger.workers.held("w1")
        if job.state is JobState.CLAIMED
    ]
    yield ledger.recovery.settle("w1", ends, gives, GuardDead())
    yield ledger.workers.beat(Heartbeat("w1", 0, 0))
    yield turn(ledger, done=[done(job) for job in held])


@story
def held_jobs_come_oldest_first(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    low = put(ledger, priority=-5)
    high = put(ledger, priority=5)
    yield [JobId(job.job_id) for job in claim_jobs(ledger, limit=1)]
    claim_jobs(ledger)
    for job_id in (low, high):
        backdoor.age_job(job_id, 60.0)
    yield [JobId(job.job_id) for job in ledger.workers.held("w1")]
    yield [JobId(job.job_id) for job in ledger.recovery.held_jobs("w1", 1)]
    yield [JobId(job.job_id) for job in ledger.recovery.stale(0.0)]


@story
def a_remote_worker(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    birth_of = living("r1", name="shell", transport=Transport.HTTP, owner="token-1", metadata={"language": "sh"})
    yield ledger.workers.register(birth_of)
    yield ledger.workers.record_heartbeats([RemoteHeartbeat("r1", 1, 2), RemoteHeartbeat("nobody", 1)])
    job = running_by(ledger, "r1")
    yield ledger.jobs.fates([(job.job_id, job.token), (999_999, 1)])
    yield turn(ledger, "r1", endings=[failure(job)])
    yield ledger.jobs.fates([(job.job_id, job.token)])
    ledger.workers.stop("r1")
    yield ledger.workers.find_remote("shell")


# Workflows, schedules, alerts ----------------------------------------------------------------------


@story
def a_workflow_succeeds(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    number = begin(ledger, (1, 2), nodes=2)
    yield ledger.workflows.get(number)
    for _ in range(2):
        yield turn(ledger, done=[done(job) for job in run(ledger)])
    yield ledger.workflows.get(number)


@story
def a_workflow_fails_and_is_retried(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    number = begin(ledger, (1, 2), nodes=3)
    first, second = run(ledger)
    yield turn(ledger, endings=[crash(first)])
    yield ledger.workflows.get(number)
    yield turn(ledger, endings=[failure_retry(second)])
    yield ledger.workflows.retry(number, "it's me")
    yield ledger.workflows.get(number)
    yield of_jobs(ledger.jobs.cancel([number], "me"))
    yield ledger.workflows.get(number)


@story
def a_node_is_retried_by_name(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    number = begin(ledger, (1, 2), nodes=2)
    [job] = run(ledger)
    turn(ledger, endings=[failure(job)])
    yield of_jobs(ledger.jobs.retry([job.job_id], "it's me"))
    yield ledger.workflows.get(number)
    yield turn(ledger, done=[done(again) for again in run(ledger)])


@story
def a_workflow_is_retried_by_its_own_job(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    number = begin(ledger, (1, 2), nodes=2)
    [job] = run(ledger)
    turn(ledger, endings=[failure(job)])
    yield of_jobs(ledger.jobs.retry([number], "it's me"))
    yield ledger.workflows.get(number)


@story
def a_workflow_pauses_and_goes_on(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    number = begin(ledger, (1, 2), nodes=2, on_error="pause")
    [job] = run(ledger)
    yield turn(ledger, endings=[failure(job)])
    yield ledger.workflows.get(number)
    yield ledger.workflows.resume(number, "me")
    yield ledger.workflows.get(number)
    yield ledger.workflows.resume(number, "me")
    other = begin(ledger, (1, 2), nodes=2, on_error="continue")
    turn(ledger, endings=[failure(job) for job in run(ledger)])
    yield ledger.workflows.get(other)


@story
def a_running_node_is_cancelled(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    number = begin(ledger, nodes=2)
    [first] = run(ledger, limit=1)
    yield of_jobs(ledger.jobs.cancel([number], "me"))
    yield ledger.workers.beat(Heartbeat("w1", 1, 0))
    yield turn(ledger, endings=[crash_retry(first)])
    yield ledger.workflows.get(number)


@story
def a_schedule_fires(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    made = ScheduleDefinition("it's nightly", "add", "default", Timing(every_s=60.0), pack_job(new_job()))
    yield ledger.schedules.know([made], "operator")
    [record] = ledger.schedules.list()
    yield ledger.schedules.fire(Firing(record.name, record.version, 2e9, 1e9, (new_job(),), "schedule_missed", "late"))
    yield ledger.schedules.fire(Firing(record.name, record.version, 2e9, 1e9, (new_job(),)))
    yield ledger.schedules.pause(record.name, True, "it's me")
    yield ledger.schedules.list()
    yield ledger.schedules.pause(record.name, False, "me")
    yield ledger.schedules.remove(record.name, "it's me")


@story
def a_condition_lasts(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    for step in ("seen", "begun", "begun", "lasting", "over", "over"):
        change = ConditionChange(step, "no_workers", "default", f"Nobody serves it ({step})")
        yield ledger.events.change_conditions([change], 0.0)
        yield ledger.events.conditions()
    yield isinstance(ledger.events.write("no_workers", "it's said", job_id=1, worker_id="w1", about="default"), int)


@story
def what_operators_did_is_kept(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    number = ledger.admin.begin_audit("me", "cli", "cancel", "job 1")
    yield ledger.admin.audit()
    ledger.admin.end_audit(number, "done")
    yield ledger.admin.audit()


@story
def a_map_goes_over_a_list(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    nodes = (
        NewNode(0, None, "all", "group", source=3),
        NewNode(1, 0, "list", "task", job=new_job()),
        NewNode(2, 0, "each", "map", source=1, on_error="continue", job=new_job()),
        NewNode(3, 0, "sum", "task", job=new_job()),
    )
    edges = (NewEdge(1, 2, True), NewEdge(2, 3, True))
    number = ledger.workflows.begin(NewWorkflow("all", new_job(task="unstuck.workflow"), nodes, edges)).job_id
    turn(ledger, done=[done(job, b"[1,2,3]") for job in run(ledger)])
    yield ledger.workflows.get(number)
    first, second, third = run(ledger)
    yield [read_input(job) for job in (first, second, third)]
    yield turn(ledger, done=[done(first)], endings=[failure(second), crash_retry(third)])
    yield ledger.workflows.get(number)
    turn(ledger, done=[done(job) for job in run(ledger)])
    [last] = run(ledger)
    yield read_input(last)
    turn(ledger, done=[done(last, b"9")])
    yield ledger.jobs.outcomes([number])


@story
def a_map_over_something_else_fails(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    for result in (b'"a text"', b"[]"):
        nodes = (
            NewNode(0, None, "all", "group", source=2),
            NewNode(1, 0, "list", "task", job=new_job()),
            NewNode(2, 0, "each", "map", source=1, job=new_job()),
        )
        flow = NewWorkflow("all", new_job(task="unstuck.workflow"), nodes, (NewEdge(1, 2, True),))
        number = ledger.workflows.begin(flow).job_id
        turn(ledger, done=[done(job, result) for job in run(ledger)])
        yield ledger.workflows.get(number)
        yield ledger.jobs.outcomes([number])


@story
def a_workflow_is_repaired(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    number = begin(ledger, (1, 2), nodes=2)
    found = ledger.workflows.get(number)
    assert found is not None
    table, no, now = (
        ("unstuck_jobs", "0", "unixepoch('subsec')")
        if backdoor.dialect == "sqlite"
        else ("jobs", "false", "clock_timestamp()")
    )
    ended = f"state = 'failed', ready = {no}, finished_at = {now}, error_code = ''"
    backdoor.rows(f"UPDATE {table} SET {ended} WHERE id = {found.nodes[0].job_id}")
    yield [(JobId(one.workflow_id), one.what) for one in ledger.maintenance.repair_workflows(10)]
    yield ledger.workflows.get(number)


@story
def a_node_is_part_of_a_group(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    nodes = (
        NewNode(0, None, "all", "group", source=4),
        NewNode(1, 0, "prices", "group"),
        NewNode(2, 1, "net", "task", on_error="continue", job=new_job()),
        NewNode(3, 1, "tax", "task", on_error="pause", job=new_job(on_crash="retry")),
        NewNode(4, 0, "send", "task", job=new_job(more=JobExtras(concurrency_key="mail"))),
    )
    flow = NewWorkflow("all", new_job(task="unstuck.workflow", unique_key="bill"), nodes, (NewEdge(1, 4, False),))
    yield ledger.workflows.begin(flow).fresh
    yield ledger.workflows.begin(flow).fresh
    net, tax = run(ledger)
    yield turn(ledger, endings=[failure(net), failure(tax)])
    [found] = ledger.workflows.list()
    yield ledger.workflows.get(found.id)
    yield ledger.workflows.retry(found.id, "me")
    turn(ledger, done=[done(job) for job in run(ledger)])
    yield ledger.workflows.get(found.id)
    yield turn(ledger, done=[done(job) for job in run(ledger)])
    yield ledger.workflows.retry(found.id, "me")


@story
def a_broker_hands_in_what_happened(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    client = b"c" * 16
    once = Request(b"k" * 32, b"f" * 32, 3600.0)
    address = ReplyAddress(client, "echo", "request-1", notify=True)
    ledger.workers.register(living("m1", name="old", transport=Transport.MDP))
    asked = Exchange(
        jobs=(new_job(),),
        reply_addresses=(address,),
        once=(OnceJob(once, new_job(), ReplyAddress(client, "echo", "r2")),),
    )
    stored = ledger.workers.exchange(asked)
    yield [[one.fresh for one in stored.enqueued], [one and one.fresh for one in stored.once]]
    yield [one and one.fresh for one in ledger.workers.exchange(Exchange(once=asked.once)).once]
    wanted = Turn("m1", claim_request=ClaimRequest(("default",), ("add",), 1, start=1))
    found = ledger.workers.exchange(
        Exchange(turns=(wanted,), heartbeats=(RemoteHeartbeat("m1", 1, 0, {"language": "C"}),))
    )
    yield found
    assert found.turns is not None
    [job] = found.turns[0].claimed
    ended = Exchange(turns=(Turn("m1", done=(done(job),)), Turn("no-such")), answered=(job.job_id,))
    yield ledger.workers.exchange(ended)
    yield ledger.workers.reply_addresses(client)
    yield ledger.workers.reply_address(job.job_id)


@story
def ended_jobs_are_removed(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    turn(ledger, done=[done(running(ledger)), done(running(ledger, more=JobExtras(retain_s=1e6)))])
    turn(ledger, endings=[failure(running(ledger))])
    number = begin(ledger, nodes=1)
    turn(ledger, done=[done(job) for job in run(ledger)])
    put(ledger)
    yield ledger.workflows.get(number)
    backdoor.age_all_jobs(3600.0)
    yield ledger.maintenance.prune(7200.0)
    yield ledger.maintenance.prune(60.0, ["failed"])
    swept = ledger.maintenance.sweep_old(60.0, 60.0, 60.0, 100)
    yield (swept.jobs, swept.events, swept.workers)
    swept = ledger.maintenance.sweep_kept(100)
    yield (swept.jobs, swept.keys)


@story
def a_backup_is_restored(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    job = running(ledger)
    put(ledger)
    claim_jobs(ledger)
    number = ledger.void_tokens()
    # What was running has another token now, and is settled by the next sweep.
    found = ledger.workers.held("w1")
    yield (number, [JobId(one.job_id) for one in found], [one.token == job.token for one in found])
    ends = [crash(one) for one in found]
    yield len(ledger.recovery.settle("w1", ends, [], GuardDead()))


@story
def a_worker_is_disabled_by_a_reaper(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    for number in (1, 2):
        ledger.workers.register(living(f"w{number}"))
    yield ledger.workers.disable("w1", "its jobs die", "reaper", auto=True)
    yield ledger.workers.disable("w2", "its jobs die", "reaper", auto=True)
    put(ledger)
    yield wish(ledger)
    yield ledger.workers.beat(Heartbeat("w1", 0, 0))
    yield len(ledger.workers.standings())
    yield ledger.workers.disable_host("it's elsewhere", "broken", "me")
    yield ledger.workers.enable("w1", "reaper", "no one else is left")


@story
def tokens_and_counters(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.admin.add_api_token(NewApiToken("t1", "ci", b"h" * 32, b"s" * 32, ("read", "enqueue"), "me"))
    ledger.admin.add_api_token(NewApiToken("t2", "old", b"i" * 32, b"s" * 32, ("read",), "me", expires_in_s=0.0))
    yield ledger.admin.revoke_api_token("t1")
    yield ledger.admin.revoke_api_token("t1")
    yield ledger.admin.api_tokens()
    ledger.admin.count([Count("a", "{}", 2.0), Count("b", "{}", 1.0)], [Count("a", "{}", 2.0)])
    yield ledger.admin.counters()
    yield [(one.name, one.value) for one in ledger.admin.counter_series(["a", "b"], 0)]
    yield ledger.admin.counter_sums("a", 0)


@story
def a_suspect_worker_beats_again(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.workers.register(living("w1"))
    put(ledger)
    [job] = claim_jobs(ledger)
    yield ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), GuardSilent(3600.0))
    yield ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), GuardNone())
    yield ledger.queues.unserved([("default", "add")])
    yield ledger.recovery.settle("w1", [], [release(job, event="requeued", message="Task re-queued")], GuardSuspect())
    yield turn(ledger, start=[job])
    yield ledger.workers.beat(Heartbeat("w1", 1, 2, {"a": 1}))
    yield ledger.recovery.settle("w1", [], [], GuardSuspect())
    yield ledger.recovery.declare_dead("w1", verdict(), GuardSuspect())


@story
def alerts_are_told_of_events(ledger: Ledger, backdoor: Backdoor) -> Iterator[Any]:
    ledger.events.add_alert_target("target")
    found = ledger.events.alert_target("target")
    assert found is not None
    ledger.workers.register(living("w1"))
    job = running(ledger)
    turn(ledger, endings=[quarantine(job)])
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    page = ledger.events.for_alerts(("worker_dead", "quarantined", "no_workers"), found.newest, (), 10)
    yield [(one.kind, one.message, one.task, one.queue, one.worker_name, one.verdict) for one in page.events]
    yield ledger.events.save_alert_target("target", found.version, found.position, "{}")
    yield ledger.events.save_alert_target("target", found.version, found.position, "{}")


# Shorthand -----------------------------------------------------------------------------------------


def living(worker_id: str, **changes: Any) -> NewWorker:
    """A worker that is not silent, however slow the machine is."""
    facts = {"heartbeat_interval_s": 60.0, "suspect_after_s": 300.0, "running_stale_after_s": 600.0}
    return birth(worker_id, **{**facts, **changes})


def quarantine(job: Claimed) -> Ending:
    error = JobError("CRASHED_TOO_OFTEN", "Worker died unexpectedly", "killed by SIGSEGV")
    facts = {"counter": "crash", "event": "quarantined", "message": "CRASHED_TOO_OFTEN: killed by SIGSEGV"}
    return Ending(job.job_id, job.token, JobState.QUARANTINED, AttemptState.CRASHED, error=error, **facts)


def suspicion(job: Claimed) -> Ending:
    return crash_retry(job, counter="suspicion")


def company(job: Claimed) -> Ending:
    return crash_retry(job, counter="company")


def suspend(job: Claimed, delay_s: float | None = None, awaits: str | None = None) -> Ending:
    wakes = delay_s is not None
    return Ending(
        job.job_id,
        job.token,
        JobState.WAITING,
        AttemptState.SUSPENDED,
        delay_s=delay_s or 0.0,
        awaits_signal=awaits,
        wakes=wakes,
    )


def running_by(ledger: Ledger, worker_id: str) -> Claimed:
    put(ledger)
    [job] = run(ledger, worker_id)
    return job


def begin(ledger: Ledger, *pairs: tuple[int, int], nodes: int, on_error: Any = "fail") -> int:
    tasks = [NewNode(place, 0, f"n{place}", "task", on_error=on_error, job=new_job()) for place in range(1, nodes + 1)]
    whole = NewNode(0, None, "all", "group", source=nodes)
    edges = tuple(NewEdge(source, target, True) for source, target in pairs)
    return ledger.workflows.begin(NewWorkflow("all", new_job(task="unstuck.workflow"), (whole, *tasks), edges)).job_id


def watch(backdoor: Backdoor, *, since_s: float, until_s: float) -> None:
    """As if a reaper had kept watch in that time, counted in seconds before now."""
    if backdoor.dialect == "sqlite":
        table, ago = "unstuck_watch_periods", "unixepoch('subsec') - {}"
    else:
        table, ago = "watch_periods", "clock_timestamp() - make_interval(secs => {})"
    since, until = ago.format(since_s), ago.format(until_s)
    backdoor.rows(f"INSERT INTO {table} (since, until, cause) VALUES ({since}, {until}, 'start')")


def read_input(job: Claimed) -> dict[int, Any]:
    return {place: _readable(found) for place, found in unpack_inputs(job.inputs).items()}


def _readable(found: Any) -> Any:
    if isinstance(found, NodeError):
        return {name: getattr(found, name) for name in ("code", "message", "cause", "node", "job_id")}
    return [_readable(one) for one in found] if isinstance(found, list) else found


def of_jobs(answers: dict[int, str]) -> dict[JobId, str]:
    return {JobId(job_id): answer for job_id, answer in answers.items()}
