"""The files to deploy with: they parse, every command in them exists, and their patience is longer than ours."""

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.unit.test_docs import options_of

from unstuck.cli.app_settings import PATIENCE_S
from unstuck.cli.main import app as cli
from unstuck.cli.serve import STOP_MARGIN_S
from unstuck.config import Settings
from unstuck.worker.bench import Bench
from unstuck.worker.supervisor import BURIAL_GRACE_S, LOOK_EVERY_S

DEPLOY = Path(__file__).resolve().parents[2] / "docs/deploy"
# The supervisor stops its undertaker and its watchman one after the other, each within the grace.
STOP_S = Settings().shutdown_grace_s + STOP_MARGIN_S + 3 * BURIAL_GRACE_S
START_S = PATIENCE_S + Bench("x").import_timeout_s


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
