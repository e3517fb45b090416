"""`unstuck doctor` at the command line: what it prints, and what its exit code says."""

import json

from tests.acceptance.shop import Said, Shop
from tests.fleet import wait_for

from unstuck.client.doctor.facts import Limits

FIELDS = {"code", "severity", "what", "why", "cure", "facts"}


def codes(said: Said) -> set[str]:
    findings = json.loads(said.out)
    assert all(finding.keys() == FIELDS for finding in findings)
    return {finding["code"] for finding in findings if finding["severity"] != "info"} - {"oom-group"}


def test_all_is_well(either_shop: Shop) -> None:
    # Who stands in for a worker never beats and never sweeps: however slow the machine, neither is due yet.
    calm = either_shop.with_settings(heartbeat_interval="5m", heartbeat_timeout="1h")
    calm.worker()
    with calm.ledger() as ledger:
        assert ledger.take_ticket("sweep", 3600.0)
    said = either_shop.run("doctor")
    assert said.code == 0
    assert "problem" not in said.out.replace("no problems", "")
    shown = either_shop.run("doctor", "--json")
    assert (shown.code, codes(shown)) == (0, set())


def test_a_problem_is_told_with_its_cure_and_the_exit_code(either_shop: Shop) -> None:
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
    either_shop: Shop,
) -> None:
    either_shop.jobs(delay_s=0.5)
    wait_for(lambda: "due-but-waiting" in codes(either_shop.run("doctor", "--json")), "the forgotten job to be found")
    said = either_shop.run("doctor", "--json")
    [finding] = [one for one in json.loads(said.out) if one["code"] == "due-but-waiting"]
    assert said.code == 1
    assert finding["facts"]["by_s"] < Limits().late_s


def test_a_warning_alone_is_no_failure(shop: Shop) -> None:
    shop.worker()
    shop.jobs()
    shop.run("pause", "default")
    said = shop.run("doctor")
    assert said.code == 0
    assert said.out.splitlines()[-1].endswith(("1 warning.", "2 warnings."))


def test_a_database_that_is_away_is_a_finding_and_no_traceback(shop: Shop) -> None:
    for arguments in (["doctor"], ["doctor", "17"]):
        said = shop.run(*arguments, "--json", "--url", "postgresql://nobody@127.0.0.1:1/nothing")
        assert (said.code, said.err, codes(said)) == (1, "", {"ledger-unreachable"})
    assert codes(shop.run("doctor", "--json")) == {"no-ledger"}
    assert not list(shop.folder.glob("jobs.db*")), "looking must not make a ledger"


def test_one_job(shop: Shop) -> None:
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
