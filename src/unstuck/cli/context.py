"""Read the global options and settings of a command, and open its ledger. Reading never creates one."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from unstuck import config, logs
from unstuck.cli.output import Output
from unstuck.client.operator import Operator
from unstuck.config import Settings, sqlite_file
from unstuck.domain.units import seconds
from unstuck.errors import ConfigError, LedgerUnavailable, UnknownName
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import open_ledger, ready_ledger
from unstuck.ledger.sqlite.database import refuse_vanished
from unstuck.runner.tasks import AppDefinition


def open_existing(settings: Settings) -> Ledger:
    """Open a ledger whose tables are there and fit this code."""
    path = sqlite_file(settings.url)
    if path is not None and not path.exists():
        refuse_vanished(path)
        raise LedgerUnavailable(
            f"There is no ledger at {path}. Start a worker, enqueue a job or run `unstuck migrate` to make one, "
            "or name another with --url, --app or $UNSTUCK_URL."
        )
    ledger = open_ledger(settings)
    try:
        ledger.check_schema()
    except BaseException:
        ledger.close()
        raise
    return ledger


def open_or_create(settings: Settings) -> Ledger:
    """Open a ledger, making or updating its tables where the settings allow it."""
    return ready_ledger(settings)


log = logs.logger("unstuck.cli")

PANEL = "Common options"

_OPTIONS: dict[str, Any] = {
    "url": Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="The ledger. Else the app's, $UNSTUCK_URL, unstuck.toml.",
            rich_help_panel=PANEL,
        ),
    ],
    "app": Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:APP", help="Take the settings from this app.", rich_help_panel=PANEL),
    ],
    "log_level": Annotated[
        str | None,
        typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=PANEL),
    ],
    "log_format": Annotated[
        str | None,
        typer.Option(
            "--log-format", metavar="FORMAT", help="console or json; always to stderr.", rich_help_panel=PANEL
        ),
    ],
    "as_json": Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=PANEL)],
}


class UsageError(Exception):
    """The command line asks for something that cannot be meant; ends with exit code 2."""


@dataclass(frozen=True)
class Context:
    """What was said beside the command's own options."""

    url: str | None = None
    app: str | None = None
    log_level: str | None = None
    log_format: str | None = None
    as_json: bool = False

    @property
    def show(self) -> Output:
        return Output(self.as_json, self.ledger_name)

    @property
    def app_path(self) -> str | None:
        return self.app or os.environ.get("UNSTUCK_APP") or None

    def app_definition(self) -> AppDefinition | None:
        """Load the app that was named, if one was."""
        if self.app_path is None:
            return None
        from unstuck.runner.loader import load_app

        # What the app prints while it is imported must not mix with what the command prints.
        with redirect_stdout(sys.stderr):
            app = load_app(self.app_path, self.url)
        if app.note:
            self.show.note(app.note)
        return app

    def ledger_name(self) -> str:
        """Return the name of the ledger that this command looks at, for people."""
        return config.ledger_name(self.settings())

    def settings(self) -> Settings:
        """Return the settings in force: of the app that was named, else of environment and files; `--url` wins."""
        app = self.app_definition()
        if app is None:
            return config.load({"url": self.url})
        return config.restore(app.settings)

    @contextmanager
    def operator(self) -> Iterator[Operator]:
        """Open a ledger that is there already; never creates one."""
        settings = self.settings()
        ledger = open_existing(settings)
        try:
            with naming_the_ledger(settings):
                yield Operator(ledger, settings, via="cli")
        finally:
            ledger.close()

    @contextmanager
    def ledger(self, migrate: bool = True) -> Iterator[tuple[Ledger, Settings]]:
        """Open the ledger, creating or updating its tables where that is allowed."""
        settings = self.settings()
        ledger = open_or_create(settings if migrate else replace(settings, auto_migrate=False))
        try:
            with naming_the_ledger(settings):
                yield ledger, settings
        finally:
            ledger.close()


def log_ledger(what: str, settings: Settings) -> None:
    """Log which ledger a command that runs for long works on."""
    log.info(f"{what} uses the ledger {config.ledger_name(settings)}")


@contextmanager
def naming_the_ledger(settings: Settings) -> Iterator[None]:
    """Add to an error about something that does not exist in which ledger it was looked for."""
    try:
        yield
    except UnknownName as error:
        error.args = (f"{error} Ledger: {config.ledger_name(settings)}",)
        raise


def command(log_level: str = "warning") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a command of a function whose first parameter is `common: Common`: it gets the common options too."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(function).parameters.values())[1:]
        wants_context = any(parameter.name == "ctx" for parameter in own)

        def wrapper(**values: Any) -> Any:
            ctx: typer.Context = values.pop("ctx")
            # One dict for the whole command line: what stands further to the right wins.
            said = ctx.ensure_object(dict)
            said.update({name: value for name in _OPTIONS if (value := values.pop(name)) not in (None, False)})
            _resolve_urls(said)
            common = Context(**said)
            _set_up_logs(common, log_level)
            return function(common, **({"ctx": ctx} if wants_context else {}), **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        context = inspect.Parameter("ctx", keyword, annotation=typer.Context)
        mine = [p.replace(kind=keyword) for p in own if p.name != "ctx"]
        shared = [
            inspect.Parameter(name, keyword, default=False if name == "as_json" else None, annotation=annotation)
            for name, annotation in _OPTIONS.items()
        ]
        parameters = [context, *mine, *shared]
        wrapper.__name__ = function.__name__
        wrapper.__doc__ = function.__doc__
        wrapper.__module__ = function.__module__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _resolve_urls(said: dict[str, Any]) -> None:
    """Resolve relative addresses before anything runs that could change the directory, for our children too."""
    if said.get("url"):
        said["url"] = config.resolved_url(said["url"])
    if os.environ.get("UNSTUCK_URL"):
        os.environ["UNSTUCK_URL"] = config.resolved_url(os.environ["UNSTUCK_URL"])


def _set_up_logs(common: Context, default_level: str) -> None:
    level = common.log_level or os.environ.get("UNSTUCK_LOG_LEVEL") or default_level
    format = common.log_format or os.environ.get("UNSTUCK_LOG_FORMAT") or "console"
    try:
        logs.setup(level, format)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    for sentence in config.misspelt_variables():
        log.warning(sentence)
    # Workers that this process starts speak the way it was asked to.
    if common.log_level:
        os.environ["UNSTUCK_LOG_LEVEL"] = common.log_level
    if common.log_format:
        os.environ["UNSTUCK_LOG_FORMAT"] = common.log_format


def duration_s(text: str | None, option: str) -> float | None:
    """Read a duration given on the command line."""
    if text is None:
        return None
    try:
        return seconds(text, option)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def job_id(text: str) -> int:
    """Read a job's id as people write it: 4711 or #4711."""
    digits = text.strip().removeprefix("#")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 4000:
        raise UsageError(f"{text[:80]!r} is not a job id. Ids are numbers, as `unstuck jobs` shows them.")
    return int(digits)
