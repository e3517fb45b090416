"""Commands that are built one at a time are the commands that are built all at once."""

from collections.abc import Iterator
from typing import Any

import typer

from unstuck.cli import lazy_commands
from unstuck.cli.lazy_commands import LazyCommands
from unstuck.cli.main import app


def described(name: str, command: Any) -> Iterator[tuple[object, ...]]:
    """Yield all that a user sees of a command and those below it."""
    options = [(one.name, one.opts, one.secondary_opts, one.required, str(one.default)) for one in command.params]
    settings = (command.context_settings, command.hidden, getattr(command, "invoke_without_command", None))
    yield name, command.name, command.help, command.rich_help_panel, *settings, options
    for below, its in getattr(command, "commands", {}).items():
        yield from described(f"{name} {below}", its)


def test_each_is_the_same_as_before() -> None:
    whole: Any = typer.main.get_command(app)
    lazy = LazyCommands(app)
    assert list(lazy) == list(whole.commands)
    assert len(lazy) == len(whole.commands) > 20
    for name, command in whole.commands.items():
        assert list(described(name, lazy[name])) == list(described(name, command))


def test_one_command_builds_no_other(monkeypatch: Any) -> None:
    built: list[str] = []
    build = lazy_commands.typer.main.get_command
    monkeypatch.setattr(lazy_commands.typer.main, "get_command", lambda one: built.append("one") or build(one))
    lazy = LazyCommands(app)
    assert lazy["jobs"] is lazy["jobs"]
    assert built == ["one"]
    assert "jbos" not in lazy
