"""`unstuck workflow` draws one, `unstuck workflows` lists, retries, resumes and cancels; why and doctor know them."""

import pytest
from tests.support.cli import Cli
from tests.support.workflows import opened_app, start, start_mapped, three


def lines(shop: Cli, number: int, *more: str) -> dict[str, str]:
    """Give the drawn lines of nodes by their names."""
    said = shop.run("workflow", str(number), *more)
    assert said.code == 0, said
    rows = [line.strip(" │├└─") for line in said.out.splitlines() if " " in line.strip()]
    return {row.split()[0]: row for row in rows}


def test_a_workflow_is_drawn_in_order_with_what_it_waits_for(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    number = start(shop)
    said = shop.run("workflow", str(number))
    shown = [line for line in said.out.splitlines() if line.startswith("  ")]
    names = [line.strip(" │├└─").split()[0] for line in shown if "unstuck" not in line]
    assert names == ["NODE", "fetch", "figures", "price", "tax", "send"]
    drawn = lines(shop, number)
    assert "pending" in drawn["fetch"]
    assert "waits for price" in drawn["tax"]
    assert "waits for figures" in drawn["send"]
    view = shop.run("workflow", str(number), "--json").json
    assert [node["name"] for node in view["nodes"]] == ["fetch", "figures", "price", "tax", "send"]
    assert {"source": 1, "target": 3} in view["edges"]
    assert shop.run("workflows").out.splitlines()[1].split()[:3] == [str(number), "running", "bills"]
    assert shop.run("workflows", "--state", "failed").out == ""


def test_what_failed_is_told_everywhere_and_taken_up_again(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    number = start(shop)
    [held] = shop.claim(start=True)
    shop.fail(held, "the card was declined")
    drawn = lines(shop, number)
    assert "the card was declined" in drawn["fetch"]
    assert "node fetch failed before it" in drawn["send"]
    whole = shop.run("why", str(number)).out
    assert "Node 'fetch'" in whole
    assert "3 nodes were not begun" in whole
    assert f"unstuck workflows retry {number}" in whole
    node = shop.run("why", str(held.job_id)).out
    assert f"node 'fetch' of workflow {number} (bills)" in node
    assert f"With it failed workflow {number}." in node
    assert f"node 'fetch' of {number} (bills)" in shop.run("job", str(held.job_id)).out
    assert shop.run("workflows", "list", "--json", "--state", "failed").json[0]["id"] == number
    assert shop.run("workflows", "retry", str(number)).code == 0
    assert "pending" in lines(shop, number)["fetch"]
    again = shop.run("workflows", "retry", str(number))
    assert (again.code, "it is running" in again.err) == (1, True)


def test_a_paused_workflow_is_a_matter_for_the_doctor_until_somebody_decides(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    number = start(shop, on_error="pause")
    fine = shop.run("doctor", str(number), "--json").json
    assert [finding["code"] for finding in fine if finding["severity"] != "info"] == []
    shop.fail(shop.claim(start=True)[0])
    [paused] = [one for one in shop.run("doctor", "--json").json if one["code"] == "workflow-paused"]
    assert (paused["facts"]["workflow"], paused["facts"]["nodes"]) == (number, ["fetch"])
    assert shop.run("doctor", str(number), "--json").json[0]["code"] == "workflow-paused"
    assert "paused" in lines(shop, number)["fetch"]
    assert shop.run("workflows", "resume", str(number), "--json").json == {"id": number, "resumed": True}
    assert "pending" in lines(shop, number)["price"]
    assert "workflow-paused" not in [one["code"] for one in shop.run("doctor", "--json").json]


def test_the_job_that_stands_for_a_workflow_is_nobody_s_problem(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    number = start(shop)
    shop.succeed(shop.claim(start=True)[0])
    findings = shop.run("doctor", "--json").json
    assert not [finding for finding in findings if "unstuck.workflow" in str(finding)]
    [queue] = [queue for queue in shop.run("queues", "--json").json if queue["name"] == "default"]
    assert (queue["pending"], queue["scheduled"], queue["claimed"], queue["running"]) == (1, 0, 0, 0)
    assert shop.run("stale", "--json").json == []
    job = shop.run("job", str(number), "--json").json
    assert (job["state"], job["waiting"], job["worker"]) == ("waiting", None, None)
    assert job["workflow"]["node"] is None


def test_a_cancelled_workflow_stops_what_runs_and_begins_nothing(either_shop: Cli) -> None:
    shop = either_shop
    shop.worker()
    number = start(shop)
    [held] = shop.claim(start=True)
    assert shop.run("workflows", "cancel", str(number), "--yes").code == 0
    drawn = lines(shop, number)
    assert "running" in drawn["fetch"]
    assert f"workflow {number} was cancelled" in drawn["send"]
    assert shop.run("job", str(held.job_id), "--json").json["cancel_requested"] is True
    assert shop.run("audit", "--json").json[0]["verb"] == "cancel workflow"


def test_a_large_map_is_summed_up_and_shown_whole_when_asked(shop: Cli) -> None:
    shop.worker()
    number = start_mapped(shop, items=15, bad=3)
    drawn = lines(shop, number)
    assert "14 of 15 succeeded, 1 failed" in drawn["parse"]
    assert "page is torn" in drawn["parse[3]"]
    assert "parse[4]" not in drawn
    assert "parse[14]" in lines(shop, number, "--all")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("workflow", "4711"), 1, "Workflow 4711 does not exist"),
        (("workflows", "retry", "4711"), 1, "Workflow 4711 does not exist"),
        (("workflow", "x"), 2, "is not a job id"),
        (("workflows", "--state", "faild"), 2, "Did you mean 'failed'"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(shop: Cli, arguments: tuple[str, ...], code: int, said: str) -> None:
    shop.worker()
    assert said in shop.refused(code, *arguments)


def test_whoever_starts_what_nobody_serves_is_told(shop: Cli) -> None:
    with opened_app(shop) as (app, add):
        assert "No living worker takes task 'add'" in (three(app, add).start().warning or "")


def test_a_node_is_not_taken_for_a_workflow(shop: Cli) -> None:
    shop.worker()
    number = start(shop)
    [held] = shop.claim()
    assert f"`unstuck workflow {number}` draws it" in shop.refused(1, "workflow", str(held.job_id))
