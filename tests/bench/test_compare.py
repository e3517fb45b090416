"""`python -m bench --compare` says what two stored files show, and no more."""

import json
from pathlib import Path

import pytest
from bench.__main__ import main, parser
from bench.databases import NAMES
from bench.report import Table
from bench.results import Comparison, Results, Rounds, Verdict, compare, judge

from bench import parts

COLUMNS = ("jobs/s", "seen by")


def stored(rows: dict[str, list[float]], *, machine: str = "2 × CPU", key: str = "throughput") -> Results:
    """Return a run whose first column has these figures, one for each round."""
    rounds = Rounds(key, "Throughput", COLUMNS, ["how it was measured"])
    rounds.rows = {label: [(figure, "kernel") for figure in figures] for label, figures in rows.items()}
    return Results("2026-11-19 12:00 UTC", "abc", machine, ["SQLite: a commit survives"], "full", [rounds])


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([100.0, 110.0, 120.0], [131.0, 140.0, 150.0], Verdict.DIFFERS),
        ([100.0, 110.0, 120.0], [130.0, 130.0, 131.0], Verdict.WITHIN_SPREAD),
        ([130.0, 130.0, 131.0], [100.0, 110.0, 120.0], Verdict.WITHIN_SPREAD),
        ([10.0, 10.1, 10.2], [9.0, 9.1, 9.2], Verdict.DIFFERS),
        ([10.0, 10.0], [10.0, 10.0], Verdict.WITHIN_SPREAD),
        ([100.0], [900.0], Verdict.ONE_ROUND),
        ([100.0, 101.0], [900.0], Verdict.ONE_ROUND),
        ([100.0], [900.0, 901.0], Verdict.ONE_ROUND),
    ],
)
def test_a_line_differs_if_its_medians_are_further_apart_than_the_rounds_of_either_file(
    before: list[float], after: list[float], verdict: Verdict
) -> None:
    assert judge(before, after) is verdict


def test_each_line_with_figures_in_both_files_is_compared() -> None:
    before = stored({"SQLite": [100.0, 110.0, 120.0], "removed": [1.0, 1.0]})
    after = stored({"SQLite": [150.0, 220.0, 240.0], "PostgreSQL": [5.0, 6.0], "idle": [0.0, 0.0]})
    before.parts[0].rows["idle"] = [(0.0, "kernel"), (0.0, "kernel")]
    assert list(compare(before, after)) == [
        Comparison("throughput", "SQLite", "jobs/s", 110.0, 220.0, Verdict.DIFFERS),
        Comparison("throughput", "idle", "jobs/s", 0.0, 0.0, Verdict.WITHIN_SPREAD),
    ]
    assert [one.ratio for one in compare(before, after)] == [2.0, None]


def test_two_stored_files_are_compared_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    stored({"SQLite": [100.0, 110.0, 120.0], "PostgreSQL": [50.0, 60.0, 70.0]}).save(before)
    stored({"SQLite": [200.0, 220.0, 240.0], "PostgreSQL": [55.0, 66.0, 75.0]}).save(after)
    assert main(["--compare", str(before), str(after)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Before: Unstuck benchmark · 2026-11-19 12:00 UTC · abc · 2 × CPU"
    rows = {line.partition(":")[0]: line.split(maxsplit=5)[2:] for line in said if "jobs/s" in line}
    assert rows == {
        "SQLite": ["110", "220", "2.00", "differs"],
        "PostgreSQL": ["60.0", "66.0", "1.10", "within the spread"],
    }
    assert any(line == "2 lines: 1 differs, 1 within the spread" for line in said)


def test_one_round_says_that_it_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, figure in (("before", 100.0), ("after", 900.0)):
        stored({"SQLite": [figure]}).save(tmp_path / f"{name}.json")
    main(["--compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")])
    assert "one round: says nothing" in capsys.readouterr().out


def test_files_of_different_machines_are_compared_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, machine in (("before", "2 × CPU"), ("after", "64 × CPU")):
        stored({"SQLite": [1.0, 1.0]}, machine=machine).save(tmp_path / f"{name}.json")
    main(["--compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")])
    assert "Not the same machine: do not compare these figures." in capsys.readouterr().out


def test_a_stored_run_is_read_as_it_was(tmp_path: Path) -> None:
    results = stored({"SQLite": [1.0, 2.5]})
    results.save(tmp_path / "run.json")
    assert Results.load(tmp_path / "run.json") == results


@pytest.mark.parametrize("text", ["[]", '{"at": "2026-11-18", "tables": []}', "no json"])
def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    assert main(["--compare", str(tmp_path / "other.json")]) == 2
    assert capsys.readouterr().err.startswith("bench: ")


def test_several_rounds_are_stored_apart_and_shown_as_their_median() -> None:
    tables = []
    for rate in (100.0, 400.0, 200.0):
        tables.append(Table("throughput", "Throughput", ("jobs/s", "seen by", "WAL")))
        tables[-1].add("SQLite", rate, "kernel", None)
    rounds = Rounds.of(tables)
    assert rounds.numbers("SQLite", "jobs/s") == [100.0, 400.0, 200.0]
    assert rounds.numbers("SQLite", "seen by") == []
    assert rounds.numbers("SQLite", "unknown") == []
    assert rounds.text().splitlines()[2].split() == ["SQLite", "200", "kernel", "–"]
    assert "the median of 3 rounds" in rounds.text()
    assert json.dumps(rounds.rows)


def test_the_command_line_names_parts_and_groups() -> None:
    options = parser().parse_args([])
    assert options.parts == list(parts.PARTS)
    assert options.databases == list(NAMES)
    options = parser().parse_args(
        ["--parts", "stale-check,http", "--databases", "sqlite", "--rounds", "3", "--quick", "--compare", "a.json"]
    )
    assert options.parts == ["stale-check", "http-heartbeats", "remote-workers"]
    assert (options.databases, options.rounds, options.quick) == (["sqlite"], 3, True)
    assert options.compare == [Path("a.json")]
    assert parser().parse_args(["--only", "machine"]).parts == ["machine"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "nonsense"], "'nonsense' is not one of core, http, majordomo, machine"),
        (["--parts", ","], "name at least one part"),
        (["--databases", "mysql"], "'mysql' is not a list of postgresql, sqlite"),
        (["--rounds", "0"], "'0' is not a number of at least 1"),
        (["--compare", "a", "b", "c"], "--compare takes one or two files"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words)
    assert said in capsys.readouterr().err
