"""Build a command when it is asked for: to build all of them takes longer than most of them run."""

from collections.abc import Iterator, Mapping
from typing import Any

import typer


class LazyCommands(Mapping[str, Any]):
    """The commands of an app by name."""

    def __init__(self, app: typer.Typer) -> None:
        self._commands = {info.name or "": info for info in app.registered_commands}
        self._groups = {info.name or "": info for info in app.registered_groups}
        self._built: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter((*self._commands, *self._groups))

    def __len__(self) -> int:
        return len(self._commands) + len(self._groups)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = self._build(name)  # KeyError if there is none of this name
        return self._built[name]

    def _build(self, name: str) -> Any:
        alone = typer.Typer(add_completion=False)
        if name in self._commands:
            alone.registered_commands.append(self._commands[name])
            return typer.main.get_command(alone)
        alone.registered_groups.append(self._groups[name])
        return typer.main.get_group(alone).commands[name]
