"""Ask an app for its settings in a process of its own: whoever watches over workers imports no user code."""

import os
import subprocess
import sys

import msgspec

from unstuck import config
from unstuck.config import Settings
from unstuck.errors import ConfigError, UnstuckError

PATIENCE_S = 120.0


class _Answer(msgspec.Struct):
    settings: str = ""
    error: str = ""


def settings_of(target: str) -> Settings:
    """Import the app in a child and give its settings, or raise what went wrong there."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "unstuck.cli.app_settings", target, str(write)]
    try:
        # What the app prints while it is imported goes to stderr: stdout belongs to the command.
        # In a group of its own: Ctrl-C is for the command, which ends the child without a traceback of its own.
        child = subprocess.Popen(
            command, pass_fds=[write], stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0
        )
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as answers:
        try:
            code = child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{target} was not imported within {PATIENCE_S:.0f}s; mend what holds it up.") from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        data = answers.read()
    if not data:
        raise ConfigError(f"The process that imported {target} ended with code {code} and without an answer.")
    answer = msgspec.json.decode(data, type=_Answer)
    if answer.error:
        raise ConfigError(answer.error)
    return config.restore(answer.settings.encode())


def _answer(target: str) -> _Answer:
    from unstuck.runner.loader import load_app

    try:
        return _Answer(settings=load_app(target).settings.decode())
    except UnstuckError as error:
        return _Answer(error=str(error))


def main() -> None:
    answer = msgspec.json.encode(_answer(sys.argv[1]))
    with os.fdopen(int(sys.argv[2]), "wb") as pipe:
        pipe.write(answer)
        pipe.flush()
        # Threads that the app started must not keep this process alive.
        os._exit(0)


if __name__ == "__main__":
    main()
