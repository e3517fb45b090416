"""The files to deploy with: they parse, every command in them exists, and their patience is longer than ours."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.docs.test_pages import options_of
from tests.unit.test_metrics import NASTY, example

from unstuck.cli.app_settings import PATIENCE_S
from unstuck.cli.main import app as cli
from unstuck.cli.run import STOP_MARGIN_S
from unstuck.config import Settings
from unstuck.metrics.catalogue import LE, READ, TALLIED, Histogram
from unstuck.worker.fork_client import ForkServerClient
from unstuck.worker.supervisor import BURIAL_GRACE_S, LOOK_EVERY_S

DEPLOY = Path(__file__).resolve().parents[2] / "docs/deploy"
# The supervisor stops its undertaker and its reaper one after the other, each within the grace.
STOP_S = Settings().shutdown_grace_s + STOP_MARGIN_S + 3 * BURIAL_GRACE_S
START_S = PATIENCE_S + ForkServerClient("x").import_timeout_s


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((DEPLOY / "unstuck.service").read_text())
    return parser


def manifest() -> str:
    return (DEPLOY / "kubernetes.yaml").read_text()


def dockerfile() -> dict[str, str]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines}


def commands() -> list[Any]:
    """Give every command line of ours in the files."""
    docker = dockerfile()
    start = [*json.loads(docker["ENTRYPOINT"]), *json.loads(docker["CMD"])]
    health = json.loads(docker["HEALTHCHECK"].partition("CMD ")[2])
    found = [("unit", shlex.split(unit()["Service"]["ExecStart"])), ("start", start), ("health", health)]
    lists = re.findall(r"^ +(command|args): (\[.*\])$", manifest(), re.MULTILINE)
    assert len(lists) == 4
    for key, text in lists:
        found.append((f"kubernetes {key}", json.loads(text) if key == "command" else ["unstuck", *json.loads(text)]))
    return [pytest.param(words, id=name) for name, words in found]


@pytest.mark.parametrize("words", commands())
def test_every_command_and_option_exists(words: list[str]) -> None:
    assert Path(words[0]).name == "unstuck"
    root: Any = typer.main.get_command(cli)
    command = root.get_command(None, words[1])
    assert command is not None, words
    for word in words[2:]:
        assert not word.startswith("-") or word in options_of(command), f"{word} of {words}"


def test_the_unit_speaks_to_systemd_and_leaves_the_drain_its_time() -> None:
    assert set(unit().sections()) == {"Unit", "Service", "Install"}
    service = unit()["Service"]
    wanted = {
        "Type": "notify",
        "NotifyAccess": "main",
        "KillMode": "mixed",
        "Delegate": "yes",
        "DelegateSubgroup": "supervisor",
        "OOMPolicy": "continue",
        "Restart": "always",
    }
    assert {key: service[key] for key in wanted} == wanted
    assert float(service["TimeoutStopSec"]) > STOP_S
    assert float(service["TimeoutStartSec"]) > START_S
    # Half of it between two signs of life, and many looks in that time.
    assert float(service["WatchdogSec"]) / 2 > 10 * LOOK_EVERY_S


def test_the_container_stops_by_the_signal_that_is_heeded() -> None:
    assert dockerfile()["STOPSIGNAL"] == "SIGTERM"


def test_the_manifest_is_laid_out_as_yaml() -> None:
    lines = [line for line in manifest().splitlines() if line.strip() and not line.strip().startswith("#")]
    deepest = 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        assert indent % 2 == 0, line
        assert indent <= deepest + 4, line
        assert re.fullmatch(r"\s*(- )?[A-Za-z]\w*:( .+)?", line), line
        deepest = indent
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        return
    assert yaml.safe_load(manifest())["kind"] == "Deployment"


def test_kubernetes_waits_for_the_drain_and_restarts_nobody_for_an_outage() -> None:
    text = manifest()
    grace = re.search(r"terminationGracePeriodSeconds: (\d+)", text)
    assert grace is not None
    assert int(grace[1]) > STOP_S
    probes = dict(re.findall(r"^ +(\w+)Probe:\n +exec:\n +command: (\[.*\])$", text, re.MULTILINE))
    assert set(probes) == {"startup", "liveness", "readiness"}
    # What restarts a container must forgive an outage; readiness restarts nothing, and may tell the truth.
    assert "--forgive-outage" in json.loads(probes["liveness"])
    assert "--forgive-outage" in json.loads(probes["startup"])
    assert "--forgive-outage" not in json.loads(probes["readiness"])
    startup = re.search(r"startupProbe:.*?periodSeconds: (\d+).*?failureThreshold: (\d+)", text, re.DOTALL)
    assert startup is not None
    assert int(startup[1]) * int(startup[2]) > START_S


ROOT = Path(__file__).resolve().parents[2]
DEPLOY_FILES = ROOT / "docs/deploy"
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
    used = set(METRIC_NAME.findall((DEPLOY_FILES / name).read_text()))
    assert used
    assert used <= exposed_names()


def test_the_dashboard_is_laid_out_without_overlaps() -> None:
    board = json.loads((DEPLOY_FILES / "grafana-dashboard.json").read_text())
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
    board = json.loads((DEPLOY_FILES / "grafana-dashboard.json").read_text())
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
    board = json.loads((DEPLOY_FILES / "grafana-dashboard.json").read_text())
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
    promtool("check", "rules", str(DEPLOY_FILES / "prometheus-rules.yml"))


def test_every_rule_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    rules = re.findall(r"alert: (\w+)", (DEPLOY_FILES / "prometheus-rules.yml").read_text())
    tried = re.findall(r"alertname: (\w+)", RULE_TESTS)
    assert set(tried) == set(rules)
    path = tmp_path / "tests.yml"
    path.write_text(RULE_TESTS.replace("RULES", str(DEPLOY_FILES / "prometheus-rules.yml")))
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
