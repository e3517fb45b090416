"""What is written about metrics is true: each is documented, rules and dashboard use those there are, alerts fire."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_metrics import NASTY, example

from unstuck.metrics.catalogue import LE, READ, TALLIED, Histogram

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs/deploy"
METRIC_NAME = re.compile(r"\bunstuck_[a-z_]+\b")
ROW = re.compile(r"^\| `(unstuck_\w+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)


def exposed_names() -> set[str]:
    """Every name that a query may use."""
    names = {gauge.name for gauge in READ}
    for metric in TALLIED:
        parts = ("_bucket", "_sum", "_count") if isinstance(metric, Histogram) else ("",)
        names |= {f"{metric.name}{part}" for part in parts}
    return names


def test_a_scrape_shows_every_metric_of_the_catalogue() -> None:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", example(), re.MULTILINE))
    assert kinds == {
        **{gauge.name: "gauge" for gauge in READ},
        **{metric.name: "histogram" if isinstance(metric, Histogram) else "counter" for metric in TALLIED},
    }


def test_the_documentation_lists_every_metric_with_its_type_and_labels() -> None:
    rows = re.findall(
        r"^\| `(unstuck_\w+)` \| (\w+) \| ([^|]*) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    written = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert written == {
        **{gauge.name: ("gauge", gauge.labels) for gauge in READ},
        **{
            metric.name: ("histogram" if isinstance(metric, Histogram) else "counter", metric.labels)
            for metric in TALLIED
        },
    }


@pytest.mark.parametrize("name", ["prometheus-rules.yml", "grafana-dashboard.json"])
def test_rules_and_dashboard_use_only_metrics_that_exist(name: str) -> None:
    used = set(METRIC_NAME.findall((DEPLOY / name).read_text()))
    assert used
    assert used <= exposed_names()


def test_the_dashboard_is_laid_out_without_overlaps() -> None:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        assert all(target["expr"] for target in panel["targets"])
        cells |= own


def expressions() -> list[Any]:
    """Every query of the dashboard, with what its panel says of it."""
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    return [
        pytest.param(panel, target, id=f"{panel['title']} {target['refId']}")
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def labels_of() -> dict[str, set[str]]:
    """The labels of every name that a query may use."""
    labels = {gauge.name: set(gauge.labels) for gauge in READ}
    for metric in TALLIED:
        if isinstance(metric, Histogram):
            labels |= {f"{metric.name}{part}": set(metric.labels) for part in ("_sum", "_count")}
            labels[f"{metric.name}_bucket"] = {*metric.labels, LE}
        else:
            labels[metric.name] = set(metric.labels)
    return labels


@pytest.mark.parametrize(("panel", "target"), expressions())
def test_a_panel_asks_for_labels_that_are_there_and_names_them_in_its_legend(
    panel: dict[str, Any], target: dict[str, Any]
) -> None:
    expression, known = target["expr"], labels_of()
    used = METRIC_NAME.findall(expression)
    for name, chosen in re.findall(r"(unstuck_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*=~?", chosen)) <= known[name], expression
    grouped = {label for by in re.findall(r"by \(([^)]*)\)", expression) for label in re.findall(r"\w+", by)}
    assert all(grouped <= known[name] for name in used), expression
    legend = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target.get("legendFormat", "")))
    assert legend <= grouped - {LE}, expression
    # Without its labels in the legend, lines that differ by them cannot be told apart.
    assert panel["type"] == "stat" or legend == grouped - {LE}, expression
    counted = {metric.name for metric in TALLIED}
    for name in used:
        is_counter = name in counted or name.endswith(("_bucket", "_sum", "_count"))
        rated = re.search(rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[", expression) is not None
        assert is_counter == rated, f"counters are shown as rates, gauges as they are: {expression}"
        if name.endswith("_bucket"):
            assert "histogram_quantile(" in expression
            assert LE in grouped


def test_variables_of_the_dashboard_are_defined() -> None:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    defined = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) <= defined
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_promtool_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$\w+", "5m", one.values[1]["expr"].replace('"$queue"', '".*"'))}
        for number, one in enumerate(expressions())
    ]
    path = tmp_path / "queries.yml"
    # JSON is YAML.
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))


def promtool(*arguments: str, given: str | None = None) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not here")
    done = subprocess.run([program, *arguments], input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_text() -> None:
    promtool("check", "metrics", given=example().replace(NASTY, "q"))


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", str(DEPLOY / "prometheus-rules.yml"))


def test_every_rule_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    rules = re.findall(r"alert: (\w+)", (DEPLOY / "prometheus-rules.yml").read_text())
    tried = re.findall(r"alertname: (\w+)", RULE_TESTS)
    assert set(tried) == set(rules)
    path = tmp_path / "tests.yml"
    path.write_text(RULE_TESTS.replace("RULES", str(DEPLOY / "prometheus-rules.yml")))
    promtool("test", "rules", str(path))


RULE_TESTS = """
rule_files: [RULES]
evaluation_interval: 15s
tests:
  - name: all is well
    interval: 15s
    input_series: &well
      - {series: 'unstuck_build_info{version="1"}', values: '1x200'}
      - {series: 'unstuck_deaths_total{process="worker",cause="signal",detector="neighbour"}', values: '7x200'}
      - {series: 'unstuck_jobs{queue="a",state="pending"}', values: '5x200'}
      - {series: 'unstuck_queue_workers{queue="a"}', values: '2x200'}
      - {series: 'unstuck_queue_paused{queue="a"}', values: '0x200'}
      - {series: 'unstuck_queue_oldest_pending_age_seconds{queue="a"}', values: '1x200'}
      - {series: 'unstuck_jobs_ended_total{queue="a",state="quarantined"}', values: '3x200'}
      - {series: 'unstuck_workers{state="active"}', values: '2x200'}
      - {series: 'unstuck_workers_late', values: '0x200'}
      - {series: 'unstuck_sweep_overdue_seconds', values: '0x200'}
    alert_rule_test: &quiet
      - {eval_time: 30m, alertname: UnstuckWorkerDied, exp_alerts: []}
      - {eval_time: 30m, alertname: UnstuckCrashLoop, exp_alerts: []}
      - {eval_time: 30m, alertname: UnstuckQueueWithoutWorkers, exp_alerts: []}
      - {eval_time: 30m, alertname: UnstuckJobQuarantined, exp_alerts: []}
      - {eval_time: 30m, alertname: UnstuckBacklogOld, exp_alerts: []}
      - {eval_time: 30m, alertname: UnstuckHeartbeatLate, exp_alerts: []}
      - {eval_time: 30m, alertname: UnstuckReaperNotRunning, exp_alerts: []}
      - {eval_time: 30m, alertname: UnstuckDoorDown, exp_alerts: []}
  - name: everything is wrong, and a queue is paused
    interval: 15s
    input_series:
      - {series: 'unstuck_build_info{version="1"}', values: '1x200'}
      - {series: 'unstuck_deaths_total{process="worker",cause="signal",detector="neighbour"}', values: '_x110 12x90'}
      - {series: 'unstuck_jobs{queue="a",state="pending"}', values: '5x200'}
      - {series: 'unstuck_queue_workers{queue="a"}', values: '0x200'}
      - {series: 'unstuck_queue_paused{queue="a"}', values: '0x200'}
      - {series: 'unstuck_queue_paused{queue="b"}', values: '1x200'}
      - {series: 'unstuck_queue_oldest_pending_age_seconds{queue="a"}', values: '1000x200'}
      - {series: 'unstuck_queue_oldest_pending_age_seconds{queue="b"}', values: '1000x200'}
      - {series: 'unstuck_jobs_ended_total{queue="a",state="quarantined"}', values: '0x110 3x90'}
      - {series: 'unstuck_workers{state="active"}', values: '2x200'}
      - {series: 'unstuck_workers_late', values: '1x200'}
      - {series: 'unstuck_sweep_overdue_seconds', values: '100000x200'}
    promql_expr_test:
      - {expr: 'count by (alertname) (ALERTS{alertstate="firing"})', eval_time: 30m, exp_samples: [
          {labels: '{alertname="UnstuckWorkerDied"}', value: 1},
          {labels: '{alertname="UnstuckCrashLoop"}', value: 1},
          {labels: '{alertname="UnstuckQueueWithoutWorkers"}', value: 1},
          {labels: '{alertname="UnstuckJobQuarantined"}', value: 1},
          {labels: '{alertname="UnstuckBacklogOld"}', value: 1},
          {labels: '{alertname="UnstuckHeartbeatLate"}', value: 1},
          {labels: '{alertname="UnstuckReaperNotRunning"}', value: 1}]}
  - name: nothing can be scraped
    interval: 15s
    input_series: []
    promql_expr_test:
      - {expr: 'count by (alertname) (ALERTS{alertstate="firing"})', eval_time: 30m, exp_samples: [
          {labels: '{alertname="UnstuckDoorDown"}', value: 1}]}
"""
