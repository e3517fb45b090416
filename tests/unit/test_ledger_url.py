"""The address of a ledger is resolved once, when settings are built, wherever it came from."""

import os
from pathlib import Path

import pytest

from unstuck import App, ConfigError, config
from unstuck.config import Settings, sqlite_file
from unstuck.ledger.sqlite.ledger import SqliteLedger, path_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start in a directory of our own, with another one beside it."""
    for name in list(os.environ):
        if name.startswith("UNSTUCK_"):
            monkeypatch.delenv(name)
    here = tmp_path / "here"
    (tmp_path / "elsewhere").mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path / "elsewhere"


def opened(settings: Settings) -> Path:
    return path_of(settings.url)


@pytest.mark.parametrize("given", ["jobs.db", "./jobs.db", "../here/jobs.db", "data/../jobs.db"])
def test_a_relative_path_is_that_of_the_directory_in_which_the_app_was_built(
    given: str, elsewhere: Path, tmp_path: Path
) -> None:
    (tmp_path / "here/data").mkdir()
    app = App(f"sqlite:///{given}")
    os.chdir(elsewhere)
    assert app.settings.url == f"sqlite:///{tmp_path}/here/jobs.db"
    assert opened(app.settings) == tmp_path / "here/jobs.db"

    @app.task
    def nothing() -> None: ...

    assert nothing.enqueue().id > 0
    assert (tmp_path / "here/jobs.db").exists()
    assert not list(elsewhere.iterdir())
    app.close()


def test_the_environment_the_file_and_the_default_are_resolved_alike(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert App().settings.url == f"sqlite:///{tmp_path}/here/unstuck.db"
    monkeypatch.setenv("UNSTUCK_URL", "sqlite:///jobs.db")
    assert App().settings.url == f"sqlite:///{tmp_path}/here/jobs.db"
    monkeypatch.delenv("UNSTUCK_URL")
    (tmp_path / "here/unstuck.toml").write_text('url = "sqlite:///data.db"')
    assert App().settings.url == f"sqlite:///{tmp_path}/here/data.db"
    os.chdir(elsewhere)
    # A file names what lies beside it, whoever reads it from where.
    assert config.load(directory=tmp_path / "here").url == f"sqlite:///{tmp_path}/here/data.db"


def test_settings_that_are_handed_to_another_process_name_the_same_file(elsewhere: Path, tmp_path: Path) -> None:
    data = config.dump(App("sqlite:///jobs.db").settings)
    os.chdir(elsewhere)
    assert opened(config.restore(data)) == tmp_path / "here/jobs.db"


def test_a_tilde_is_somebodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert App("sqlite:///~/jobs.db").settings.url == f"sqlite:///{tmp_path}/jobs.db"
    assert opened(App("sqlite:///./~/jobs.db").settings) == tmp_path / "here/~/jobs.db"
    with pytest.raises(ConfigError, match=r"There is no user 'nobody-of-this-name'.*sqlite:///\./~"):
        App("sqlite:///~nobody-of-this-name/jobs.db")


@pytest.mark.parametrize("name", ["a b", "50%25", "ä", "a?b#c"])
def test_any_name_of_a_directory_survives(name: str, elsewhere: Path, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    os.chdir(folder)
    settings = config.restore(config.dump(App("sqlite:///jobs.db").settings))
    os.chdir(elsewhere)
    ledger = SqliteLedger(settings)
    ledger.migrate()
    ledger.close()
    assert (folder / "jobs.db").exists()
    assert sqlite_file(settings.url) == folder / "jobs.db"


def test_an_absolute_address_is_left_as_it_is() -> None:
    for url in ("sqlite:////tmp/a%20b.db", "postgresql://user:secret@host/database"):
        assert App(url).settings.url == url
    assert sqlite_file("sqlite:////tmp/a%20b.db") == Path("/tmp/a b.db")
    assert sqlite_file("postgresql:///sqlite:///x") is None
    assert Settings(url=config.IN_MEMORY).url == config.IN_MEMORY


def test_a_directory_that_is_gone_matters_only_to_relative_addresses(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert Settings(url=f"sqlite:///{tmp_path}/jobs.db").url.endswith("/jobs.db")
    with pytest.raises(ConfigError, match="The current directory cannot be used"):
        Settings(url="sqlite:///jobs.db")


def test_a_directory_whose_name_is_not_text_is_refused(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    os.chdir(folder)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        Settings(url="sqlite:///jobs.db")


def test_code_wins_over_the_environment_and_a_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert App("sqlite:///code.db").definition().note == ""
    (tmp_path / "here/unstuck.toml").write_text('url = "postgresql://shop:secret@db/shop"')
    note = App("sqlite:///code.db").definition().note
    assert note.startswith("The settings file names the ledger postgresql://shop:***@db/shop, and the code")
    assert "To let the settings file decide" in note
    assert App("postgres://shop:secret@db/shop").definition().note == ""
    monkeypatch.setenv("UNSTUCK_URL", "sqlite:///env.db")
    note = App("sqlite:///code.db").definition().note
    assert note == (
        f"UNSTUCK_URL names the ledger sqlite:///{tmp_path}/here/env.db, and the code of the app names "
        f"sqlite:///{tmp_path}/here/code.db: the code wins. To let UNSTUCK_URL decide, write App() without a URL."
    )
    assert App("sqlite:///./env.db").definition().note == ""
    assert App().definition().note == ""
    app = App("sqlite:///code.db")
    app.use_ledger("sqlite:///chosen.db")
    assert app.definition().note == ""
    app = App("sqlite:///code.db")
    assert not sum(app.ledger.jobs.count().values())
    assert app.operator is not None
    app.close()
    assert [record.message for record in caplog.records].count(note) == 1


def test_the_name_of_a_ledger_hides_its_password_and_shows_an_unusual_schema() -> None:
    shown = config.ledger_name(Settings(url="postgresql://shop:secret@db/shop"))
    assert shown == "postgresql://shop:***@db/shop"
    assert (
        config.ledger_name(Settings(url="postgresql://db/shop", schema="mine")) == "postgresql://db/shop (schema mine)"
    )
    assert config.ledger_name(Settings(url="sqlite:////jobs.db", schema="mine")) == "sqlite:////jobs.db"
