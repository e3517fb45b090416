"""`unstuck why` and `unstuck quarantine` on a real ledger: a job that died of memory, hung, and was quarantined."""

import json

import msgspec
from tests.support.cli import Cli, CommandResult
from tests.support.fleet import wait_for
from tests.support.job_stories import AGAIN, HUNG, OUT_OF_MEMORY, POLICY

from unstuck.client.doctor.facts import Thresholds
from unstuck.client.operator import Operator
from unstuck.client.operator.jobs import LOOKED_UP
from unstuck.domain.endings import Attempt, Died, Outcome, Stalled, conclude
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.retry import RetryRule
from unstuck.domain.states import JobState
from unstuck.errors import ErrorCode
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob, Progress
from unstuck.ledger.contract.workers import AttemptRef, Claimed, ClaimRequest, Turn

SOON = msgspec.structs.replace(POLICY, retry=RetryRule(max_attempts=2, delay_s=0.05))
WISH = ClaimRequest(queues=("default",), tasks=("add",), limit=1)
TALE = (
    Died(OUT_OF_MEMORY.summary, ErrorCode.OUT_OF_MEMORY, autopsy=OUT_OF_MEMORY),
    Stalled(HUNG.summary, autopsy=HUNG),
    Died(AGAIN.summary, ErrorCode.OUT_OF_MEMORY, autopsy=AGAIN),
)


def new_job(policy: Policy | bytes = SOON, **changes: object) -> NewJob:
    stored = policy if isinstance(policy, bytes) else encode_policy(policy)
    on_crash = "fail" if isinstance(policy, bytes) else policy.on_crash
    job = NewJob(
        "add", "default", b'{"args":[1]}', policy=stored, on_crash=on_crash, enqueued_by="web.py@shop-1:311", priority=5
    )
    return msgspec.structs.replace(job, **changes)


def take(ledger: Ledger, worker_id: str = "w1") -> Claimed:
    """Claim and start the job that is due next."""

    def claim() -> tuple[Claimed, ...]:
        ledger.maintenance.promote_due(10)
        return ledger.workers.turn(Turn(worker_id, claim_request=WISH)).claimed

    [job] = wait_for(claim, "a job to claim")
    assert not ledger.workers.turn(Turn(worker_id, start=(AttemptRef(job.job_id, job.token),))).superseded
    return job


def suffer(ledger: Ledger, outcome: Outcome, policy: Policy = SOON, worker_id: str = "w1") -> int:
    """Let the next job end like this, by the rules."""
    job = take(ledger, worker_id)
    attempt = Attempt(job.job_id, job.token, policy, job.failures, job.crashes, False, job.suspected_crashes)
    ending = conclude(attempt, outcome)
    assert not ledger.workers.turn(Turn(worker_id, endings=(ending,))).superseded
    return job.job_id


def quarantine(shop: Cli, **changes: object) -> int:
    """Put one job through the whole tale; give its number."""
    with shop.ledger() as ledger:
        [stored] = ledger.jobs.enqueue([new_job(**changes)])
        for outcome in TALE:
            suffer(ledger, outcome)
    return stored.job_id


def test_the_whole_tale_is_told_and_the_job_let_go(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    number = str(quarantine(shop, unique_key="report-2026"))

    story = shop.run("why", number, "--json").json
    assert [step["kind"] for step in story["story"]] == [
        "enqueued",
        *("started", "progress", "died", "decided"),
        *("started", "ended", "decided"),
        *("started", "died", "decided", "told"),
    ]
    assert story["job"]["state"] == "quarantined"
    rules = [step["facts"]["rule"] for step in story["story"] if step["kind"] == "decided"]
    assert rules[0] == 'on_crash="retry": crash 1 of 1 allowed; tried again in 100ms'
    assert rules[1].startswith("retry: failure 1 of 2; tried again in ")
    assert rules[2] == 'on_crash="retry" with max_crash_retries=1: death 2 ends it'
    assert story["story"][-1]["facts"]["exception"] == "JobQuarantined"
    assert story["actions"][0]["command"] == f"unstuck retry {number}"

    said = shop.run("why", number)
    assert said.code == 0
    assert "\x1b" not in said.out
    order = [
        "It is quarantined and will not run again by itself: its process died twice",
        "web.py@shop-1:311 enqueued it to queue 'default' with priority 5 under the unique key 'report-2026'.",
        "Try 1: worker ada (w1)",
        "Try 1 died: killed by the kernel for want of memory (SIGKILL). Seen after 6 ms",
        "            loading matrix 4 of 10",
        "Try 2 was ended: gave no sign for 30s",
        '              File "/srv/shop/locks.py", line 21 in acquire',
        "Try 3 died: probably killed",
        "gets JobQuarantined.",
        f"unstuck retry {number}",
    ]
    places = [said.out.find(words) for words in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)

    [listed] = shop.run("quarantine", "list", "--json").json
    assert (listed["id"], listed["task"], listed["crash_count"]) == (int(number), "add", 2)
    assert [victim["kind"] for victim in listed["victims"]] == ["out_of_memory", "out_of_memory"]
    assert listed["victims"][0]["worker_name"] == "ada"
    assert "ada on" in shop.run("quarantine").out

    job = shop.run("job", number, "--json").json
    assert [attempt["autopsy"]["kind"] for attempt in job["attempts"]] == ["out_of_memory", "stall", "out_of_memory"]
    assert "left a stack" in shop.run("job", number).out

    retried = shop.run("retry", number)
    assert (retried.code, retried.out) == (0, f"Job {number} queued again\n")
    again = shop.run("why", number, "--json").json
    assert again["job"]["state"] == "pending"
    assert again["story"][-1]["kind"] == "operator"
    assert "(it was quarantined), with fresh counters" in again["story"][-1]["text"]
    assert "It will run alone in its process" in again["next"]
    refused = shop.run("retry", number)
    assert (refused.code, refused.out) == (1, f"Job {number} not finished yet, nothing to retry\n")


def test_a_running_job_and_a_worker_that_was_pruned(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    shop.worker("w2", "grace")
    with shop.ledger() as ledger:
        [stored] = ledger.jobs.enqueue([new_job()])
        suffer(ledger, TALE[0])
        ledger.workers.stop("w1")
        wait_for(lambda: ledger.maintenance.sweep_old(1e6, 1e6, 0.0, 100).workers, "the worker to be pruned")
        job = take(ledger, "w2")
        [started] = [one for one in ledger.jobs.attempts(job.job_id) if one.token == job.token]
        assert started.started_at is not None
        ledger.workers.note_progress("w2", [Progress(job.job_id, job.token, started.started_at + 0.001, 1, 4, "first")])
    number = str(stored.job_id)
    story = shop.run("why", number, "--json").json
    assert "worker w1 on crunch-1 (no longer in the ledger)" in story["story"][1]["text"]
    assert 'It has come to 1 of 4 (25%), "first"' in story["next"]
    assert "on worker grace" in story["next"]
    assert story["headline"].startswith("It is running, try 2; try 1 ended badly: killed by the kernel")
    assert [action["command"] for action in story["actions"]] == [f"unstuck stack {number}", f"unstuck cancel {number}"]
    shown = shop.run("job", number)
    assert '1 of 4 (25%), "first"' in shown.out
    assert f"`unstuck why {number}`" in shown.out
    assert shop.run("job", number, "--json").json["progress"]["total"] == 4


def test_rules_that_cannot_be_read_do_not_break_the_story(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    with shop.ledger() as ledger:
        [stored] = ledger.jobs.enqueue([new_job(b'{"on_crash": 7}')])
        suffer(ledger, Died("the worker died"), Policy())
    said = shop.run("why", str(stored.job_id))
    assert said.code == 0
    assert "Its stored rules cannot be read by this version" in said.out


def test_an_unknown_job_is_refused_with_a_sentence(shop: Cli) -> None:
    shop.worker()
    for number in ("1", "99999999999999999999"):
        assert "does not exist" in shop.refused(1, "why", number)


def test_quarantined_jobs_are_retried_by_number_or_by_task_and_run_alone(shop: Cli) -> None:
    shop.worker()
    first, second, third = quarantine(shop), quarantine(shop), quarantine(shop)
    [waiting] = shop.jobs()
    mixed = shop.run("retry", str(first), str(waiting), "4711", "99999999999999999999", "--json")
    assert mixed.code == 1
    answers = [line["answer"] for line in msgspec.json.decode(mixed.out)]
    assert answers == ["queued", "live", "missing", "missing"]
    assert "No jobs match." in shop.run("retry", "--state", "quarantined", "--task", "crawl").err
    assert shop.run("retry", "--state", "quarantined", "--task", "add").out.count("queued again") == 2
    assert shop.run("retry", "--state", "quarantined").code == 0
    assert "No job is quarantined." in shop.run("quarantine", "list").err
    with shop.ledger() as ledger:
        for number in (first, second, third):
            record = ledger.jobs.get(number)
            assert record is not None
            assert (record.state, record.run_alone, record.crash_count) == (JobState.PENDING, True, 0)


def test_many_are_retried_in_pages(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    deadly = Policy(on_crash="retry", max_crash_retries=0)
    with shop.ledger() as ledger:
        ledger.jobs.enqueue([new_job(deadly)] * (LOOKED_UP + 2))
        held = ledger.workers.turn(Turn("w1", claim_request=msgspec.structs.replace(WISH, limit=LOOKED_UP + 1))).claimed
        ledger.workers.turn(Turn("w1", start=tuple(AttemptRef(job.job_id, job.token) for job in held)))
        ends = [conclude(Attempt(job.job_id, job.token, deadly, 0, 0), TALE[0]) for job in held]
        ledger.workers.turn(Turn("w1", endings=tuple(ends)))
        numbers = [job.job_id for job in held]
        answers = Operator(ledger, shop.settings).jobs.retry([*numbers, max(numbers) + 1, max(numbers) + 2])
    assert list(answers.values()) == ["queued"] * len(numbers) + ["live", "missing"]


FIELDS = {"code", "severity", "what", "why", "cure", "facts"}


def codes(said: CommandResult) -> set[str]:
    findings = json.loads(said.out)
    assert all(finding.keys() == FIELDS for finding in findings)
    return {finding["code"] for finding in findings if finding["severity"] != "info"} - {"oom-group"}


def test_all_is_well(either_shop: Cli) -> None:
    # Who stands in for a worker never beats and never sweeps: however slow the machine, neither is due yet.
    calm = either_shop.with_settings(heartbeat_interval="5m", heartbeat_timeout="1h")
    calm.worker()
    with calm.ledger() as ledger:
        assert ledger.maintenance.take_ticket("sweep", 3600.0)
    said = either_shop.run("doctor")
    assert said.code == 0
    assert "problem" not in said.out.replace("no problems", "")
    shown = either_shop.run("doctor", "--json")
    assert (shown.code, codes(shown)) == (0, set())


def test_a_problem_is_told_with_its_cure_and_the_exit_code(either_shop: Cli) -> None:
    either_shop.jobs(3)
    said = either_shop.run("doctor")
    assert said.code == 1
    lines = said.out.splitlines()[2:]
    assert lines[0] == "problem  3 ready jobs wait in queue 'default'"
    assert lines[1].startswith("    why   No living worker serves queue 'default'. Example: job 1;")
    assert lines[2] == "    cure  Start one with `unstuck worker module:app --queues default`."
    assert lines[3] == "    code  no-worker-for-queue"
    assert lines[-1].startswith("1 problem")
    shown = either_shop.run("doctor", "--json")
    assert (shown.code, codes(shown)) == (1, {"no-worker-for-queue"})


def test_a_job_that_is_due_while_nobody_lives_is_found_before_the_patience_with_the_living_ends(
    either_shop: Cli,
) -> None:
    either_shop.jobs(delay_s=0.5)
    wait_for(lambda: "due-but-waiting" in codes(either_shop.run("doctor", "--json")), "the forgotten job to be found")
    said = either_shop.run("doctor", "--json")
    [finding] = [one for one in json.loads(said.out) if one["code"] == "due-but-waiting"]
    assert said.code == 1
    assert finding["facts"]["by_s"] < Thresholds().late_s


def test_a_warning_alone_is_no_failure(shop: Cli) -> None:
    shop.worker()
    shop.jobs()
    shop.run("pause", "default")
    said = shop.run("doctor")
    assert said.code == 0
    assert said.out.splitlines()[-1].endswith(("1 warning.", "2 warnings."))


def test_a_database_that_is_away_is_a_finding_and_no_traceback(shop: Cli) -> None:
    for arguments in (["doctor"], ["doctor", "17"]):
        said = shop.run(*arguments, "--json", "--url", "postgresql://nobody@127.0.0.1:1/nothing")
        assert (said.code, said.err, codes(said)) == (1, "", {"ledger-unreachable"})
    assert codes(shop.run("doctor", "--json")) == {"no-ledger"}
    assert not list(shop.folder.glob("jobs.db*")), "looking must not make a ledger"


def test_one_job(shop: Cli) -> None:
    shop.jobs()
    said = shop.run("doctor", "1")
    assert said.code == 1
    assert said.out.startswith("problem  Job 1 (add) waits in queue 'default' and does not run")
    shop.worker()
    assert [finding["code"] for finding in shop.run("doctor", "#1", "--json").json] == ["queueing"]
    shop.succeed(*shop.claim(start=True))
    assert "has succeeded" in shop.run("doctor", "1").out
    assert "Job 99 does not exist" in shop.refused(1, "doctor", "99")
    assert "not a job id" in shop.refused(2, "doctor", "x")
