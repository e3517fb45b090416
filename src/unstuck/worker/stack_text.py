"""Make the stacks that a dying process wrote readable: user code first, without our own frames and threads."""

import re
from itertools import takewhile
from pathlib import Path

_ROOM = str(Path(__file__).parent.parent / "runner")
_BLOCK = re.compile(r"^(?:Current thread|Thread) 0x|^Stack \(|^Task of job ", re.MULTILINE)
_FIRST = {"Task": 0, "Current": 1, "Stack": 1}
_ATTEMPT = f"{_ROOM}/async_loop.py"
_PULSE = f"{_ROOM}/pulse.py"
_LIFE = f"{_ROOM}/child.py"


def tidy(text: str) -> str:
    """Give a faulthandler dump without the frames of the runner itself, its pulse, and the list of modules.

    The thread comes first that was interrupted or died; before it where jobs wait, if an event loop wrote that down:
    its own thread only shows that it waits."""
    text = text.partition("\nExtension modules:")[0].strip()
    starts = [match.start() for match in _BLOCK.finditer(text)]
    if not starts:
        return text
    blocks = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    kept = [_without_ours(block) for block in blocks if _PULSE not in block]
    kept.sort(key=lambda block: _FIRST.get(block.split(" ", 1)[0], len(_FIRST)))
    return "\n".join([text[: starts[0]].strip(), *kept]).strip()


def _without_ours(block: str) -> str:
    head, *frames = block.strip().splitlines()
    # A job on a shared loop: what called it is ours, and asyncio's.
    frames = list(takewhile(lambda frame: _ATTEMPT not in frame or not frame.endswith(" in _attempt"), frames))
    # Frames outside of the runner's life say how its process was started, whatever did that.
    frames = list(takewhile(lambda frame: _LIFE not in frame or not frame.endswith(" in live"), frames))
    # The outermost frames are ours: cut from the last one of the user's to the end.
    while frames and (_ROOM in frames[-1] or "<frozen runpy>" in frames[-1]):
        frames.pop()
    return "\n".join([head, *(frames or ["  (no Python code of the job on this stack)"])]) + "\n"
