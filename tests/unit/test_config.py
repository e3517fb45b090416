"""Settings come from code, environment and file, in that order, and unsafe ones never start."""

import contextlib
import inspect
import math
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstuck import App, Retry, config
from unstuck.config import Alerts, HttpSettings, MdpSettings, Recovery, Retention, Settings
from unstuck.domain.units import MAX_DURATION_S, brief, seconds
from unstuck.errors import ConfigError


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("UNSTUCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("clean_environment")
class TestWhereSettingsComeFrom:
    def test_defaults_where_nothing_is_said(self, tmp_path: Path) -> None:
        settings = config.load()
        assert settings.url == f"sqlite:///{tmp_path}/unstuck.db"
        assert settings.recovery.heartbeat_interval_s == 5
        assert settings.recovery.heartbeat_timeout_s == 30
        assert settings.recovery.claimed_stale_after_s == 30
        assert settings.recovery.running_stale_after_s == 30
        assert settings.recovery.check_interval_s == 1
        assert settings.recovery.session_grace_s == 2

    def test_code_wins_over_environment_over_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "unstuck.toml").write_text('url = "sqlite:///file.db"\npoll_interval = "9s"\nschema = "of_file"\n')
        monkeypatch.setenv("UNSTUCK_URL", "sqlite:///env.db")
        monkeypatch.setenv("UNSTUCK_SCHEMA", "of_env")
        settings = config.load({"url": "sqlite:///code.db", "schema": None})
        assert settings.url == f"sqlite:///{tmp_path}/code.db"
        assert settings.schema == "of_env"
        assert settings.poll_interval_s == 9

    def test_environment_wins_over_the_recovery_table_of_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "unstuck.toml").write_text('[recovery]\nheartbeat_timeout = "2m"\ncheck_interval = "3s"\n')
        monkeypatch.setenv("UNSTUCK_HEARTBEAT_TIMEOUT", "5m")
        recovery = config.load().recovery
        assert (recovery.heartbeat_timeout_s, recovery.check_interval_s) == (300, 3)

    def test_unstuck_toml_wins_over_pyproject(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text('[tool.unstuck]\nurl = "sqlite:///project.db"\n')
        assert config.load().url == f"sqlite:///{tmp_path}/project.db"
        (tmp_path / "unstuck.toml").write_text('url = "sqlite:///own.db"\n')
        assert config.load().url == f"sqlite:///{tmp_path}/own.db"

    def test_a_pyproject_of_someone_else_says_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
        assert config.load() == Settings()

    def test_recovery_may_be_nested_or_beside_in_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "unstuck.toml").write_text(
            'check_interval = "3s"\n[recovery]\nheartbeat_timeout = "2m"\nevidence = ["session"]\n'
            '[recovery.retention]\njobs = "1h"\n'
        )
        recovery = config.load().recovery
        assert recovery.check_interval_s == 3
        assert recovery.heartbeat_timeout_s == 120
        assert recovery.evidence == ("session",)
        assert recovery.kept.jobs_s == 3600
        assert recovery.kept.events_s == 7 * 86400

    def test_recovery_given_in_code_is_complete_in_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UNSTUCK_HEARTBEAT_TIMEOUT", "10m")
        assert config.load({"recovery": Recovery()}).recovery.heartbeat_timeout_s == 30

    def test_environment_is_typed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UNSTUCK_NOTIFY", "off")
        monkeypatch.setenv("UNSTUCK_CONCURRENCY", "7")
        monkeypatch.setenv("UNSTUCK_HEARTBEAT_TIMEOUT", "2m")
        monkeypatch.setenv("UNSTUCK_AUTO_FAIL_STALE_RUNNING", "false")
        monkeypatch.setenv("UNSTUCK_EVIDENCE", "session, neighbours")
        settings = config.load()
        assert settings.notify is False
        assert settings.slots == 7
        assert settings.recovery.heartbeat_timeout_s == 120
        assert settings.recovery.auto_fail_stale_running is False
        assert settings.recovery.evidence == ("session", "neighbours")

    def test_an_empty_variable_is_no_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UNSTUCK_URL", "")
        assert config.load() == Settings()

    def test_variables_of_other_tools_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("UNSTUCK_SOMETHING_ELSE", "UNSTUCK_LOG_LEVEL", "UNSTUCK_APP"):
            monkeypatch.setenv(name, "x")
        assert config.load() == Settings()

    @pytest.mark.parametrize(
        ("variable", "meant"),
        [
            ("UNSTUCK_WEB_TOKEN", "UNSTUCK_HTTP_TOKEN"),
            ("UNSTUCK_WEB_ALLOWED_HOST", "UNSTUCK_HTTP_ALLOWED_HOSTS"),
            ("UNSTUCK_WEB_PORT", "UNSTUCK_HTTP_PORT"),
        ],
    )
    def test_a_variable_of_a_group_that_was_renamed_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
    ) -> None:
        monkeypatch.setenv(variable, "x" * 40)
        with pytest.raises(ConfigError, match=rf"^There is no setting {variable}\. Did you mean {meant}\?$"):
            config.load()
        monkeypatch.delenv(variable)
        monkeypatch.setenv("UNSTUCK_WEB_SERVICE_HOST", "10.0.0.7")
        assert config.load() == Settings(), "Kubernetes sets it for a Service named unstuck-web"

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("unstuck.toml", "[web]\nport = 1\n"),
            ("pyproject.toml", "[tool.unstuck.web]\nport = 1\n"),
            ("unstuck.toml", "web = 3\n"),
        ],
    )
    def test_a_table_of_a_group_that_was_renamed_is_refused(self, tmp_path: Path, file: str, text: str) -> None:
        (tmp_path / file).write_text(text)
        with pytest.raises(ConfigError, match=r"^There is no setting 'web'\. Did you mean 'http'\?$"):
            config.load()

    def test_a_group_that_was_renamed_is_refused_in_code(self) -> None:
        with pytest.raises(ConfigError, match=r"^There is no setting 'web'\. Did you mean 'http'\?$"):
            App(web=HttpSettings())  # type: ignore[call-arg]

    def test_an_unknown_setting_of_a_group_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "unstuck.toml").write_text('[http]\ntokn = "x"\n')
        with pytest.raises(ConfigError, match=r"There is no http setting 'tokn'\. Did you mean 'token'\?"):
            config.load()

    def test_a_misspelt_variable_is_named_with_the_setting_that_was_meant(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of_others = (
            "QUEUE",
            "GRACE",
            "SERVER",
            "TOKEN",
            "WORKER_CONCURRENCY",
            "WORKER_HEARTBEAT_TIMEOUT",
            "EXPECTED_LEDGER",
        )
        for name in (*of_others, "HEARTBEAT_TIMEOUT", "APP", "SOMETHING_ELSE"):
            monkeypatch.setenv(f"UNSTUCK_{name}", "1m")
        assert config.misspelt_variables() == []
        monkeypatch.setenv("UNSTUCK_HEARTBEAT_TIMOUT", "1m")
        monkeypatch.setenv("UNSTUCK_MDP_BUSY_TIME_OUT", "1m")
        assert config.misspelt_variables() == [
            "UNSTUCK_HEARTBEAT_TIMOUT is no setting and is ignored. Did you mean UNSTUCK_HEARTBEAT_TIMEOUT?",
            "UNSTUCK_MDP_BUSY_TIME_OUT is no setting and is ignored. Did you mean UNSTUCK_MDP_BUSY_TIMEOUT?",
        ]

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("UNSTUCK_NOTIFY", "maybe", "UNSTUCK_NOTIFY must be true or false, not 'maybe'"),
            ("UNSTUCK_CONCURRENCY", "many", "UNSTUCK_CONCURRENCY must be a whole number, not 'many'"),
            ("UNSTUCK_URL", "redis://localhost", "redis:// is not a ledger"),
            ("UNSTUCK_HEARTBEAT_TIMEOUT", "soon", "heartbeat_timeout must be a duration"),
            ("UNSTUCK_EVIDENCE", "sesion", "Did you mean 'session'"),
        ],
    )
    def test_a_wrong_variable_is_named(
        self, name: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=message):
            config.load()

    @pytest.mark.parametrize("content", ["url = ", "\x00", 'url = "a"\nurl = "b"'])
    def test_a_file_that_is_no_toml_is_named(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "unstuck.toml").write_text(content)
        with pytest.raises(ConfigError, match=r"unstuck\.toml cannot be read"):
            config.load()

    def test_a_file_that_is_no_text_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "unstuck.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"unstuck\.toml cannot be read"):
            config.load()


@pytest.mark.usefixtures("clean_environment")
class TestWrongNames:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"ulr": "sqlite:///x.db"}, "There is no setting 'ulr'. Did you mean 'url'"),
            (
                {"recovery": {"heartbeat_timout": "5s"}},
                "no recovery setting 'heartbeat_timout'. Did you mean 'heartbeat_t",
            ),
            ({"retention": {"job": "1d"}}, "no retention 'job'. Did you mean 'jobs'"),
        ],
    )
    def test_get_a_did_you_mean(self, values: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config.build(values)


@pytest.mark.usefixtures("clean_environment")
class TestUrls:
    @pytest.mark.parametrize(
        "good",
        ["sqlite:///a.db", "sqlite:////abs/a.db", "postgresql://u:p@h:5432/db", "postgres://h/db", "postgresql:///db"],
    )
    def test_that_name_a_ledger(self, good: str) -> None:
        config.check_url(good)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("", "not a ledger URL"),
            ("jobs.db", "not a ledger URL"),
            ("mysql://h/db", "mysql:// is not a ledger"),
            ("postgress://h/db", "Did you mean 'postgres'"),
            ("sqlite://jobs.db", "names no file"),
            ("sqlite:///", "names no file"),
            ("sqlite:///:memory:", "cannot be shared with a worker"),
        ],
    )
    def test_that_do_not_are_refused_with_the_cure(self, wrong: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            config.check_url(wrong)
        assert "sqlite:///" in str(caught.value)


@pytest.mark.usefixtures("clean_environment")
class TestUnsafeSettings:
    def test_a_timeout_that_one_late_beat_would_break(self) -> None:
        with pytest.raises(
            ValueError, match=r"Interval \(60s\) must be <= half of timeout \(100s\) to prevent false pos"
        ):
            Recovery(heartbeat_interval="60s", heartbeat_timeout="100s")

    @pytest.mark.parametrize(
        "preset", [("30s", "2m"), ("30s", "5m"), ("70s", "240s"), ("60s", "5m"), ("10s", "30s"), ("5s", "10s")]
    )
    def test_the_presets_of_the_guides_are_safe(self, preset: tuple[str, str]) -> None:
        Recovery(heartbeat_interval=preset[0], heartbeat_timeout=preset[1])

    @pytest.mark.parametrize("name", ["claimed_stale_after", "running_stale_after"])
    def test_thresholds_of_their_own_are_held_to_the_same_rule(self, name: str) -> None:
        with pytest.raises(ConfigError, match=name):
            Recovery(**{name: "6s"})  # type: ignore[arg-type]
        assert getattr(Recovery(**{name: "10s"}), f"{name}_s") == 10  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "values",
        [
            {"runner_heartbeat_interval": "30s", "running_stale_after": "30s"},
            {"runner_heartbeat_interval": "30s"},
            {"runner_heartbeat_interval": "4s", "heartbeat_timeout": "7s", "heartbeat_interval": "1s"},
        ],
    )
    def test_the_running_threshold_is_at_least_twice_the_interval_of_the_runner(self, values: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match="running_stale_after") as refused:
            Recovery(**values)  # type: ignore[arg-type]
        # Python knows unsafe settings by this class, and people by both names.
        assert isinstance(refused.value, ValueError)
        assert "runner_heartbeat_interval" in str(refused.value)
        assert "twice" in str(refused.value)

    @pytest.mark.parametrize(
        "values",
        [
            {"runner_heartbeat_interval": "30s", "running_stale_after": "60s"},
            {"runner_heartbeat_interval": "60s", "running_stale_after": "5m"},
            {"runner_heartbeat_interval": "10s", "running_stale_after": "30s"},
            # Runners give a sign once per second whatever is set, so the default is safe with any threshold.
            {"heartbeat_interval": "0.2s", "heartbeat_timeout": "1s"},
        ],
    )
    def test_the_valid_pairs_of_the_guide_are_accepted(self, values: dict[str, str]) -> None:
        Recovery(**values)  # type: ignore[arg-type]

    def test_the_same_holds_for_a_task_with_a_timeout_of_its_own(self) -> None:
        app = App("sqlite:///jobs.db", recovery=Recovery(runner_heartbeat_interval="30s", running_stale_after="5m"))
        with pytest.raises(ConfigError, match=r"'quick'.*runner_heartbeat_interval"):
            app.task(name="quick", heartbeat_timeout="40s")(lambda: None)

    @pytest.mark.parametrize(
        ("kind", "wrong", "right"),
        [
            (Recovery, "heartbeat_intervall", "heartbeat_interval"),
            (Recovery, "auto_fail_stale_runing", "auto_fail_stale_running"),
            (Recovery, "runner_heartbeat_interval_ms", "runner_heartbeat_interval"),
            (Retention, "job", "jobs"),
            (Settings, "pol_interval", "poll_interval"),
            (HttpSettings, "prot", "port"),
            (MdpSettings, "bnd", "bind"),
            (Alerts, "target", "targets"),
            (Retry, "max_atempts", "max_attempts"),
        ],
    )
    def test_a_misspelt_setting_in_code_is_named_with_what_was_meant(self, kind: Any, wrong: str, right: str) -> None:
        with pytest.raises(ConfigError, match=f"no {kind.__name__} setting '{wrong}'. Did you mean '{right}'"):
            kind(**{wrong: 1})
        with pytest.raises(ConfigError, match=wrong):
            replace(kind(), **{wrong: 1})
        # Editors and the docs still see the settings.
        assert right in inspect.signature(kind).parameters

    @pytest.mark.parametrize(
        "values",
        [
            {"heartbeat_interval": 0},
            {"heartbeat_timeout": "0s"},
            {"check_interval": 0},
            {"runner_heartbeat_interval": 0},
            {"session_grace": "-1s"},
            {"auto_fail_stale_running": "yes"},
            {"auto_disable_unhealthy": "yes"},
            {"auto_requeue_stale_claimed": 1},
            {"evidence": ("sessions",)},
            {"retention": "5s"},
            {"retention": "forever"},
        ],
    )
    def test_recovery_refuses(self, values: dict[str, object]) -> None:
        with pytest.raises(ConfigError):
            Recovery(**values)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "values",
        [
            {"schema": "a b"},
            {"schema": "1st"},
            {"schema": 'x"; drop table jobs'},
            {"schema": "x" * 51},
            {"schema": ""},
            {"poll_interval": 0},
            {"connect_timeout": "later"},
            {"max_payload_bytes": 0},
            {"max_payload_bytes": True},
            {"max_output_bytes": -1},
            {"max_processes": 1},
            {"concurrency": -1},
            {"concurrency": 1.5},
            {"listen_url": "nowhere"},
        ],
    )
    def test_settings_refuse(self, values: dict[str, object]) -> None:
        with pytest.raises(ConfigError):
            Settings(**values)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["head_timeout", "body_timeout", "unread_timeout"])
    def test_the_time_for_slow_clients_has_bounds(self, name: str) -> None:
        for wrong in ("99ms", 0, "61m", 10**400, True, "soon"):
            with pytest.raises(ConfigError, match=f"http {name} must be "):
                HttpSettings(**{name: wrong})
        for right in ("100ms", "1h"):
            assert getattr(HttpSettings(**{name: right}), name) == right

    def test_one_retention_for_everything(self) -> None:
        assert Recovery(retention="2h").kept == Retention("2h", "2h", "2h", "2h")


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("recovery = 3", "recovery must be a Recovery(…), or a table [recovery] in a file, not 3."),
        ("schema = 3", "schema must be a plain SQL name of up to 50 characters, not 3."),
        ("url = 3", "3 is not a ledger URL."),
        ('notify = "no"', "notify must be true or false, not 'no'."),
        ("auto_migrate = 1", "auto_migrate must be true or false, not 1."),
    ],
)
def test_a_value_of_the_wrong_kind_in_a_file_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "unstuck.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load()
    assert str(caught.value).startswith(sentence)


@pytest.mark.usefixtures("clean_environment")
def test_a_section_of_pyproject_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool]\nunstuck = 3\n")
    with pytest.raises(ConfigError, match="must be a table, not 3"):
        config.load()


@pytest.mark.usefixtures("clean_environment")
def test_a_directory_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="current directory cannot be used"):
        config.load()


@pytest.mark.usefixtures("clean_environment")
def test_settings_survive_the_way_to_another_process() -> None:
    settings = Settings(
        url="postgresql://h/db",
        recovery=Recovery(
            heartbeat_interval=timedelta(seconds=2),
            heartbeat_timeout="10s",
            evidence=(),
            retention=Retention(jobs="1h"),
            auto_fail_stale_running=False,
        ),
        concurrency=3,
        poll_interval=timedelta(milliseconds=500),
    )
    again = config.restore(config.dump(settings))
    assert again.url == settings.url
    assert again.slots == 3
    assert again.poll_interval_s == 0.5
    assert again.recovery.heartbeat_interval_s == 2
    assert again.recovery.evidence == ()
    assert again.recovery.kept.jobs_s == 3600
    assert again.recovery.auto_fail_stale_running is False


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///jobs.db", "sqlite:///jobs.db"),
        ("postgresql://app@db/app", "postgresql://app@db/app"),
        ("postgresql://app:hush@db:5432/app", "postgresql://app:***@db:5432/app"),
        ("postgresql://app:hu%40sh:x@db/app", "postgresql://app:***@db/app"),
        (
            "postgresql://db/app?user=a&password=hush&sslmode=require",
            "postgresql://db/app?user=a&password=***&sslmode=require",
        ),
        ("postgresql://db/app?PASSWORD=hush", "postgresql://db/app?PASSWORD=***"),
        ("postgresql://[hush", "***"),
    ],
)
def test_an_address_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert config.public_url(url) == shown


@pytest.mark.usefixtures("clean_environment")
def test_no_variable_of_an_example_is_a_setting() -> None:
    root = Path(__file__).parents[2]
    texts = [path.read_text() for path in (root / "examples").iterdir() if path.is_file()]
    used = {name for text in texts for name in re.findall(r"UNSTUCK_[A-Z_]+", text)}
    assert "UNSTUCK_SERVER" in used
    settings = {f"UNSTUCK_{name.upper()}" for name in (*config.SETTING_NAMES, *config.RECOVERY_NAMES)}
    groups = tuple(f"UNSTUCK_{name.upper()}_" for name in config.GROUPS)
    assert not [name for name in used if name in settings or name.startswith(groups)]


@pytest.mark.parametrize(
    ("written", "expected_s"),
    [
        ("30s", 30),
        ("5m", 300),
        ("2h30m", 9000),
        ("2h 30m", 9000),
        (" 1D ", 86400),
        ("1w", 604800),
        ("350ms", 0.35),
        ("1.5h", 5400),
        ("90", 90),
        ("0.25", 0.25),
        (0, 0),
        (12, 12),
        (0.5, 0.5),
        (timedelta(minutes=2), 120),
        (timedelta(milliseconds=250), 0.25),
    ],
)
def test_every_way_of_writing_a_duration(written: object, expected_s: float) -> None:
    assert seconds(written) == pytest.approx(expected_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        " ",
        "5x",
        "m",
        "5 minutes",
        "1h-5m",
        "-5s",
        "--",
        "5m5",
        True,
        False,
        None,
        [],
        "nan",
        "inf",
        math.nan,
        math.inf,
        -1,
        -0.001,
        timedelta(seconds=-1),
        MAX_DURATION_S + 1,
        "11w" * 60,
        b"5s",
    ],
)
def test_what_is_no_duration_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ConfigError, match="heartbeat_timeout must be"):
        seconds(wrong, "heartbeat_timeout")  # type: ignore[arg-type]


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="like '30s', '5m'"):
        seconds("soon")


@pytest.mark.parametrize(
    ("value_s", "expected"),
    [
        (0.35, "350ms"),
        (0, "0ms"),
        (1, "1s"),
        (60, "60s"),
        (100, "100s"),
        (119.4, "119s"),
        (120, "2m"),
        (90 * 60, "1h30m"),
        (3600, "1h"),
        (86400 + 3600 + 60, "1d1h"),
        (7 * 86400, "7d"),
    ],
)
def test_durations_are_written_briefly(value_s: float, expected: str) -> None:
    assert brief(value_s) == expected


@given(st.integers(min_value=1, max_value=int(MAX_DURATION_S)))
def test_what_is_written_can_be_read_again_within_its_precision(value_s: int) -> None:
    again_s = seconds(brief(value_s))
    assert abs(again_s - value_s) <= max(0.5, value_s * 0.05)


@given(st.text(max_size=20))
def test_any_text_gives_seconds_or_a_clear_refusal(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert 0 <= seconds(text) <= MAX_DURATION_S
