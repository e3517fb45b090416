"""The documentation says what is true: code blocks run, commands exist, settings and links are real."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.support.fleet import wait_for

from unstuck.cli.main import app as cli
from unstuck.client.operator import Operator
from unstuck.config import EVIDENCE, GROUPS, Recovery, Retention, Settings
from unstuck.domain.policy import TASK_SETTINGS

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
RUN_TIMEOUT_S = 60


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def runnable(mark: str) -> list[Any]:
    return [
        pytest.param(body, id=f"{name_of(path)}:{number}")
        for path in DOCS
        for number, (info, body) in enumerate(FENCE.findall(path.read_text()), 1)
        if info.strip() == mark
    ]


def run_python(*arguments: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        env={**plain_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("UNSTUCK_")}


# Code ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", runnable("python run"))
def test_a_block_marked_to_run_runs(code: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    done = run_python("example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", runnable("python run postgresql"))
def test_a_block_for_postgresql_runs(code: str, tmp_path: Path, pg_url: str) -> None:
    (tmp_path / "example.py").write_text(code)
    done = run_python("example.py", cwd=tmp_path, UNSTUCK_URL=pg_url)
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_readme_survives_its_crash_as_it_says(tmp_path: Path) -> None:
    blocks = FENCE.findall((ROOT / "README.md").read_text())
    [code] = [body for info, body in blocks if info.strip() == "python app"]
    [shown] = [body for info, body in blocks if info.strip() == "text"]
    (tmp_path / "app.py").write_text(code)
    command = [sys.executable, "-m", "unstuck.cli.main", "worker", "app:app"]
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(command, cwd=tmp_path, env=plain_environment(), stdout=log, stderr=log)
    try:
        wait_for(
            lambda: worker.poll() is not None or "Worker started" in (tmp_path / "worker.log").read_text(),
            "the worker's first words",
        )
        done = run_python("app.py", cwd=tmp_path)
        assert done.stdout == "3\n", done.stderr + (tmp_path / "worker.log").read_text()
        why = run_python("-m", "unstuck.cli.main", "why", "1", cwd=tmp_path)
        for line in shown.splitlines():
            # Durations differ from run to run.
            pattern = "[0-9.]+ m?s".join(re.escape(part) for part in re.split(r"[0-9.]+ ms", line))
            assert re.search(pattern, why.stdout), why.stdout
        listed = run_python("-m", "unstuck.cli.main", "jobs", cwd=tmp_path)
        assert "succeeded" in listed.stdout, listed.stderr
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(RUN_TIMEOUT_S) == 0
    finally:
        worker.kill()
        worker.wait()


# Commands -----------------------------------------------------------------------------------------


def shown_commands(path: Path) -> list[str]:
    """Give every command line of ours that a page shows: in shell blocks and between backticks."""
    text = path.read_text()
    lines = []
    for info, body in FENCE.findall(text):
        if info.strip() in ("sh", "console", "bash", "ini", ""):
            lines += [line.partition("#")[0].strip().removeprefix("$ ") for line in body.splitlines()]
    for inline in CODE.findall(FENCE.sub("", text)):
        lines.append(inline.strip())
    found = [line.partition("ExecStart=")[2] or line for line in lines]
    # A word or more after the name; not the name alone, and not the placeholder of a synopsis.
    return [line for line in found if re.match(r"unstuck\s+[a-z-]", line) and "COMMAND" not in line]


def options_of(command: Any) -> dict[str, bool]:
    """Give the options of a command, and whether each is a flag."""
    known = {"--help": True}
    for param in command.params:
        for option in (*param.opts, *param.secondary_opts):
            if option.startswith("-"):
                known[option] = bool(param.is_flag)
    return known


def test_every_command_shown_exists(subtests: pytest.Subtests) -> None:
    for path in DOCS:
        with subtests.test(name_of(path)):
            root = typer.main.get_command(cli)
            for line in shown_commands(path):
                words = shlex.split(line.split(" | ")[0].split(" > ")[0])[1:]
                command: Any = root
                known = options_of(root)
                while words:
                    word = words.pop(0)
                    if word.startswith("-") and not re.fullmatch(r"-\d+", word):
                        option, has_value, _ = word.partition("=")
                        assert option in known, f"{line!r} of {name_of(path)}: no option {option}"
                        if not known[option] and not has_value and words:
                            words.pop(0)
                    elif hasattr(command, "commands") and word in {*command.commands, "demo"}:
                        command = command.get_command(None, word)
                        known |= options_of(command)
                    elif command is root:
                        raise AssertionError(f"{line!r} of {name_of(path)}: no command {word!r}")


def test_every_command_and_option_is_described() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    root = typer.main.get_command(cli)
    common = options_of(root)
    for option in common:
        assert f"{option}" in text, f"common option {option}"
    sections: dict[str, str] = {}
    for part in re.split(r"^##+ ", text, flags=re.MULTILINE):
        sections |= dict.fromkeys(part.partition("\n")[0].strip().split(", "), part)
    options: dict[str, set[str]] = {}
    for name, command in commands_below(root, "unstuck"):
        # A command below another one may stand in that one's section.
        section = sections.get(name) or sections.get(name.rpartition(" ")[0], "")
        assert f"`{name}" in section, f"{name} is not in docs/cli.md"
        own = set(options_of(command)) - set(common)
        options.setdefault(section, set()).update(own)
        for option in own:
            assert f"`{option}" in section, f"{option} of {name} is not in docs/cli.md"
    for name in sections:
        if name.startswith("unstuck "):
            rows = set(re.findall(r"^\| `(--?[a-z-]+)", sections[name], re.MULTILINE))
            assert rows <= options.get(sections[name], set()) | set(common), f"{name} has other options"


def test_every_method_of_the_operator_that_is_described_is_there() -> None:
    text = (ROOT / "docs/cli.md").read_text().partition("## From Python")[2]
    rows = re.findall(r"^\| (itself|`\.\w+`) \| (.+) \|$", text, re.MULTILINE)
    ledger: Any = None
    operator = Operator(ledger, Settings(), by="test")
    parts = {name.strip("`."): CODE.findall(methods) for name, methods in rows}
    assert set(parts) - {"itself"} == {name for name in vars(operator) if not name.startswith("_")} - {"ledger"}
    for name, methods in parts.items():
        part = operator if name == "itself" else getattr(operator, name)
        for method in methods:
            assert callable(getattr(part, method, None)), f"app.operator has no {name}.{method}"


def commands_below(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from commands_below(command, f"{path} {name}")


# Settings -----------------------------------------------------------------------------------------


def table_rows(path: Path) -> dict[str, str]:
    """Give the second column by the name in the first, of every table of a page."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", path.read_text(), re.MULTILINE)
    return {name: value.strip().strip("`") for name, value in rows}


def written(default: Any) -> str:
    match default:
        case None:
            return "none"
        case bool():
            return str(default).lower()
        case tuple():
            return ", ".join(default)
        case _:
            return str(default)


@pytest.mark.parametrize("kind", [Settings, Recovery, Retention], ids=lambda kind: kind.__name__)
def test_every_setting_is_described_with_its_default(kind: Any) -> None:
    rows = table_rows(ROOT / "docs/settings.md")
    for item in fields(kind):
        if item.name == "recovery" or item.name in GROUPS:
            continue
        assert item.name in rows, f"{kind.__name__}.{item.name} is not in docs/settings.md"
        if item.default is not MISSING:
            assert rows[item.name] == written(item.default), item.name


@pytest.mark.parametrize("group", GROUPS)
def test_every_setting_of_a_group_is_described_with_its_default(group: str) -> None:
    rows = table_rows(ROOT / "docs/settings.md")
    for item in fields(GROUPS[group]):
        assert rows[f"{group}.{item.name}"] == (written(item.default) or "none"), item.name


def test_settings_that_do_not_exist_are_not_described() -> None:
    known = {item.name for kind in (Settings, Recovery, Retention) for item in fields(kind)}
    grouped = {f"{group}.{item.name}" for group, kind in GROUPS.items() for item in fields(kind)}
    assert set(table_rows(ROOT / "docs/settings.md")) == known - {"recovery"} - set(GROUPS) | grouped
    assert rows_of_evidence() == set(EVIDENCE)


def rows_of_evidence() -> set[str]:
    return set(table_rows(ROOT / "docs/settings.md")["evidence"].split(", "))


def test_every_setting_of_a_task_is_described() -> None:
    assert set(TASK_SETTINGS) <= set(table_rows(ROOT / "docs/tasks.md"))


def test_the_example_file_is_a_valid_one(tmp_path: Path) -> None:
    example = next(body for info, body in FENCE.findall((ROOT / "docs/settings.md").read_text()) if info == "toml")
    (tmp_path / "unstuck.toml").write_text(example)
    check = "from unstuck.config import load; s = load(); assert s.recovery.kept.jobs_s == 30 * 86400, s"
    done = run_python("-c", check, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# Links --------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)
    return set(plain)


def test_links_lead_somewhere(subtests: pytest.Subtests) -> None:
    for path in DOCS:
        with subtests.test(name_of(path)):
            for target in LINK.findall(FENCE.sub("", path.read_text())):
                if target.startswith(("http://", "https://", "mailto:")):
                    continue
                file, _, anchor = target.partition("#")
                there = (path.parent / file).resolve() if file else path
                assert there.exists(), f"{name_of(path)} links to {target}"
                if anchor and there.suffix == ".md":
                    assert anchor in anchors(there), f"{name_of(path)} links to {target}"


def test_the_crash_model_names_tests_that_exist() -> None:
    text = (ROOT / "docs/crash-model.md").read_text()
    named = re.findall(r"\[`(test_\w+)`\]\((\.\./tests/[\w/]+\.py)\)", text)
    assert named
    for test, file in named:
        source = (ROOT / "docs" / file).resolve().read_text()
        assert f"def {test}(" in source, f"{test} is not in {file}"


@pytest.mark.parametrize("page", ["docs/runbook.md", "docs/troubleshooting.md"])
def test_messages_to_search_for_are_really_said(page: str) -> None:
    """The first column of a table quotes a log line in backticks or an error in quotes; … and {} stand for anything."""
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    # Sentences are wrapped over several string literals in the code.
    said = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(r'^\| (?:`([A-Z][^`]+)`|"([^"|]+)") \|', (ROOT / page).read_text(), re.MULTILINE)
    assert rows
    for quoted in (backticks or quotes for backticks, quotes in rows):
        for part in re.split(r"…|\{\w+\}|\bN\b", quoted):
            assert part.strip(" .:;") in said, f"{page} quotes {quoted!r}, and nobody says {part!r}"


def test_pages_speak_of_unstuck_only() -> None:
    for path in DOCS:
        text = path.read_text()
        for word in ("/root/", "/home/", "localhost:54"):
            assert word not in text, f"{name_of(path)} mentions {word}"


def test_every_example_of_the_page_on_workflows_runs(tmp_path: Path) -> None:
    blocks = FENCE.findall((ROOT / "docs/workflows.md").read_text())
    [tasks] = [body for info, body in blocks if info.strip() == "python flows"]
    examples = [body for info, body in blocks if info.strip() == "python flow"]
    assert len(examples) >= 6
    (tmp_path / "flows.py").write_text(tasks)
    log = tmp_path / "worker.log"
    command = [sys.executable, "-m", "unstuck.cli.main", "worker", "flows:app", "--concurrency", "2"]
    with log.open("wb") as out:
        worker = subprocess.Popen(command, cwd=tmp_path, env=plain_environment(), stdout=out, stderr=out)
    try:
        wait_for(lambda: worker.poll() is not None or "Worker started" in log.read_text(), "the worker's first words")
        for number, example in enumerate(examples):
            (tmp_path / f"example_{number}.py").write_text(example)
            done = run_python(f"example_{number}.py", cwd=tmp_path)
            assert done.returncode == 0, f"{example}\n{done.stderr}\n{log.read_text()}"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(RUN_TIMEOUT_S) == 0
    finally:
        worker.kill()
        worker.wait()
