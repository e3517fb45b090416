"""Read the address of a ledger: check it, and resolve the file that a SQLite address names."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from unstuck.domain.text import did_you_mean
from unstuck.errors import ConfigError

IN_MEMORY = "sqlite:///:memory:"
"""A ledger that lives and dies with one process: for who opens it and serves from it alone, such as a broker."""
_SCHEMES = ("sqlite", "postgresql", "postgres")
_FILE = "sqlite:///"


def check_url(url: str) -> None:
    """Refuse an address that no ledger can have, and say which can."""
    cure = "Use sqlite:///file.db or postgresql://user@host/database."
    if not isinstance(url, str) or "://" not in url:
        raise ConfigError(f"{url!r} is not a ledger URL. {cure}")
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        # The address may hold a password: say what is wrong with it, not what it is.
        raise ConfigError(f"The ledger URL cannot be read: {error}. {cure}") from None
    if scheme not in _SCHEMES:
        raise ConfigError(f"{scheme}:// is not a ledger that Unstuck knows.{did_you_mean(scheme, _SCHEMES)} {cure}")
    if scheme == "sqlite":
        path = url.removeprefix("sqlite://")
        if not path.startswith("/") or path in ("/", ""):
            raise ConfigError(f"{url!r} names no file. Use sqlite:///relative.db or sqlite:////absolute/path.db.")
        if path == "/:memory:":
            raise ConfigError(
                "sqlite:///:memory: cannot be shared with a worker process. Use a file, sqlite:///unstuck.db."
            )


def resolved_url(url: str, directory: Path | None = None) -> str:
    """Return the address with a relative path or a `~` made absolute; any other address as it is.

    Done once, when settings are built: a later `os.chdir()` must not lead to another ledger."""
    path = _path(url)
    if path is None or url == IN_MEMORY or os.path.isabs(path):
        return url
    expanded = _at_home(path)
    if not os.path.isabs(expanded):
        expanded = os.path.join(directory or current_directory(), expanded)
    folder, name = os.path.split(expanded)
    return _FILE + _quoted(os.path.join(os.path.realpath(folder), name))


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite ledger; None for any other ledger."""
    path = _path(url)
    return None if path is None else Path(path)


def current_directory() -> Path:
    """Return the working directory, or raise ConfigError if it is gone."""
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigError(f"The current directory cannot be used: {error.strerror}. Change to another one.") from error


def _path(url: str) -> str | None:
    if not isinstance(url, str) or not url.startswith(_FILE):
        return None
    return unquote(url.removeprefix(_FILE))


def _at_home(path: str) -> str:
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        user = path[1:].partition("/")[0]
        raise ConfigError(
            f"There is no user {user!r} whose home {path!r} could be in. For a file of that name write "
            f"sqlite:///./{path}."
        )
    return expanded


def _quoted(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"The path {path!r} is not UTF-8, and SQLite cannot open such a file. Use another directory."
        ) from None
    return path.replace("%", "%25")
