"""The door of `unstuck` and `python -m unstuck`: Ctrl-C while the command is still loading ends it without a word."""

import signal
import sys
from typing import NoReturn


def run() -> NoReturn:
    handler = signal.getsignal(signal.SIGINT)
    # Where somebody chose to ignore it (nohup, a shell's &), that stays so.
    impatient = handler is signal.default_int_handler
    if impatient:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from unstuck.cli.main import main

    if impatient:
        signal.signal(signal.SIGINT, handler)
    sys.exit(main())


if __name__ == "__main__":
    run()
