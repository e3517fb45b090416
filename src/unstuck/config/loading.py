"""Gather the settings from code, environment and file, and name the cure where one is wrong.

Code wins over `UNSTUCK_*`, which win over `unstuck.toml` or `[tool.unstuck]` in `pyproject.toml`,
which win over the defaults. Commands without an app read the same places.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from unstuck.config.groups import Recovery, Retention
from unstuck.config.ledger_url import check_url, current_directory, resolved_url
from unstuck.config.settings import GROUPS, Settings
from unstuck.config.urls import public_url
from unstuck.domain.text import MAX_NAME_CHARS, check_names, did_you_mean
from unstuck.errors import ConfigError

FORMER_GROUPS = {"web": "http"}
"""Groups by a name that they had before: what is set under it is refused, since a token or a limit that nothing reads
would not be missed."""
SETTING_NAMES = tuple(item.name for item in fields(Settings))
RECOVERY_NAMES = tuple(item.name for item in fields(Recovery))


def check_setting_names(given: Collection[str], others: Collection[str] = ()) -> None:
    """Raise ConfigError for the first name that is not a setting of an app, with the one that was probably meant."""
    known = (*SETTING_NAMES, *others)
    for name in given:
        _refuse_former_group(name)
        meant = get_close_matches(name[:MAX_NAME_CHARS], (*known, *RECOVERY_NAMES), n=1)
        if meant and meant[0] in RECOVERY_NAMES:
            raise ConfigError(f"There is no setting {name!r}. Did you mean recovery=Recovery({meant[0]}=…)?")
    check_names(given, known, "setting")


def load(overrides: Mapping[str, Any] | None = None, directory: Path | None = None) -> Settings:
    """Give the settings in force: `overrides` (code) over environment over file over defaults."""
    directory = directory or current_directory()
    merged = _from_file(directory)
    if isinstance(merged.get("url"), str):
        # A file names what lies beside it, whoever reads it.
        merged["url"] = resolved_url(merged["url"], directory)
    for name, value in _from_environment().items():
        if not isinstance(value, dict):
            merged[name] = value
        elif isinstance(table := merged.setdefault(name, {}), dict):
            merged[name] = {**table, **value}
        # What is no table in the file is refused below.
    merged.update({name: value for name, value in (overrides or {}).items() if value is not None})
    return build(merged)


def overruled(url: str | None) -> str:
    """Return a sentence about an address in the environment or a file that differs from the one in code, else ""."""
    if url is None:
        return ""
    directory = current_directory()
    environment, file = os.environ.get("UNSTUCK_URL"), _from_file(directory).get("url")
    source, other = ("UNSTUCK_URL", environment) if environment else ("the settings file", file)
    if not isinstance(other, str) or _same(resolved_url(other, directory), resolved_url(url, directory)):
        return ""
    named, own = public_url(resolved_url(other, directory)), public_url(resolved_url(url, directory))
    return (
        f"{source[0].upper()}{source[1:]} names the ledger {named}, and the code of the app names {own}: the code "
        f"wins. To let {source} decide, write App() without a URL."
    )


def _same(one: str, other: str) -> bool:
    return one.replace("postgres://", "postgresql://", 1) == other.replace("postgres://", "postgresql://", 1)


def build(values: Mapping[str, Any]) -> Settings:
    """Build settings from plain values, with the recovery settings nested or beside the others."""
    top = {item.name for item in fields(Settings)}
    inner = {item.name for item in fields(Recovery)}
    recovery: dict[str, Any] = {}
    ready: Recovery | None = None
    rest: dict[str, Any] = {}
    for name, value in values.items():
        _refuse_former_group(name)
        if name == "recovery" and isinstance(value, Recovery):
            ready = value
        elif name == "recovery" and isinstance(value, Mapping):
            recovery.update(_known(value, inner, "recovery setting"))
        elif name in GROUPS and isinstance(value, Mapping):
            rest[name] = GROUPS[name](**_known(value, {item.name for item in fields(GROUPS[name])}, f"{name} setting"))
        elif name == "recovery":
            raise ConfigError(f"recovery must be a Recovery(…), or a table [recovery] in a file, not {value!r}.")
        elif name in inner:
            recovery.setdefault(name, value)
        else:
            rest.update(_known({name: value}, {*top, *inner}, "setting"))
    if isinstance(recovery.get("retention"), Mapping):
        kept = {item.name for item in fields(Retention)}
        recovery["retention"] = Retention(**_known(recovery["retention"], kept, "retention"))
    if isinstance(recovery.get("evidence"), list):
        recovery["evidence"] = tuple(recovery["evidence"])
    settings = Settings(**rest)
    # What comes from here is given to other processes too, and they would find nothing in our memory.
    check_url(settings.url)
    # Recovery given in code is complete in itself: what a file says must not shine through it.
    return replace(settings, recovery=ready if ready is not None else Recovery(**recovery))


def dump(settings: Settings) -> bytes:
    """Write settings as JSON, for the process that must not import the app."""
    return msgspec.json.encode(_plain(asdict(settings)))


def _plain(value: Any) -> Any:
    # JSON would write a timedelta in a form that no duration is read from.
    if isinstance(value, timedelta):
        return value.total_seconds()
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def restore(data: bytes) -> Settings:
    """Read back what `dump` wrote."""
    values = msgspec.json.decode(data)
    return build(values)


def _known(values: Mapping[str, Any], known: set[str], what: str) -> dict[str, Any]:
    for name in values:
        if name not in known:
            raise ConfigError(f"There is no {what} {name!r}.{did_you_mean(name, known)}")
    return dict(values)


def _refuse_former_group(name: str) -> None:
    if name in FORMER_GROUPS:
        raise ConfigError(f"There is no setting {name!r}. Did you mean {FORMER_GROUPS[name]!r}?")


def _refuse_former_variable(variable: str, name: str, known: Collection[str]) -> None:
    group, _, inner = name.partition("_")
    if group in FORMER_GROUPS:
        meant = f"{FORMER_GROUPS[group]}_{inner}"[:MAX_NAME_CHARS]
        for close in get_close_matches(meant, known, n=1, cutoff=ALMOST_THE_SAME):
            raise ConfigError(f"There is no setting {variable}. Did you mean UNSTUCK_{close.upper()}?")


def _from_file(directory: Path) -> dict[str, Any]:
    own = directory / "unstuck.toml"
    if own.is_file():
        return _read_toml(own)
    project = directory / "pyproject.toml"
    if project.is_file():
        # Read in every process that starts; most say nothing of us, and need not be understood.
        section = _read_toml(project, mentioning="unstuck").get("tool", {}).get("unstuck", {})
        if not isinstance(section, dict):
            raise ConfigError(f"{project}: [tool.unstuck] must be a table, not {section!r}.")
        return section
    return {}


def _read_toml(path: Path, mentioning: str = "") -> dict[str, Any]:
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if mentioning in text else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


_RESERVED_VARIABLES = frozenset({"UNSTUCK_FAILPOINTS", "UNSTUCK_LOG_LEVEL", "UNSTUCK_LOG_FORMAT", "UNSTUCK_APP"})
ALMOST_THE_SAME = 0.9
"""How alike two names are if one is a typing error: the example workers have names of their own that are less alike."""
_SPACED = frozenset({"UNSTUCK_ALERTS_TARGETS"})
"""Lists of what may hold commas itself."""


def misspelt_variables() -> list[str]:
    """Return a sentence for each variable that is no setting and is written almost like one.

    Others are left alone: they may belong to another tool or to a later version."""
    known = list(_variables())
    found = []
    for variable, text in sorted(os.environ.items()):
        name = variable.removeprefix("UNSTUCK_").lower()
        if not text or not variable.startswith("UNSTUCK_") or variable in _RESERVED_VARIABLES or name in known:
            continue
        close = get_close_matches(name[:MAX_NAME_CHARS], known, n=1, cutoff=ALMOST_THE_SAME)
        found += [f"{variable} is no setting and is ignored. Did you mean UNSTUCK_{one.upper()}?" for one in close]
    return found


def _variables() -> dict[str, Any]:
    """Return the settings that a variable can give, with their defaults."""
    known = {item.name: item.default for cls in (Settings, Recovery) for item in fields(cls)}
    for group in ("recovery", *GROUPS):
        del known[group]
    for group, kind in GROUPS.items():
        known |= {f"{group}_{item.name}": item.default for item in fields(kind)}
    return known


def _from_environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = _variables()
    for variable, text in os.environ.items():
        if not variable.startswith("UNSTUCK_") or variable in _RESERVED_VARIABLES or not text:
            continue
        name = variable.removeprefix("UNSTUCK_").lower()
        if name not in known:
            _refuse_former_variable(variable, name, known)
            # Variables of other tools or later versions must not stop a worker.
            continue
        value = _typed(known[name], variable, text)
        group, _, inner = name.partition("_")
        if group in GROUPS:
            found.setdefault(group, {})[inner] = value
        elif name in RECOVERY_NAMES:
            found.setdefault("recovery", {})[name] = value
        else:
            found[name] = value
    return found


def _typed(default: Any, variable: str, text: str) -> Any:
    if isinstance(default, bool):
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{variable} must be true or false, not {text!r}.")
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError as error:
            raise ConfigError(f"{variable} must be a whole number, not {text!r}.") from error
    if isinstance(default, tuple) and variable not in _SPACED:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text
