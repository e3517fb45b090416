"""Write the tracebacks of user code without our own frames, whatever the exception does to stop us."""

import importlib
import traceback
from pathlib import Path
from types import TracebackType

_ROOM = str(Path(__file__).parent)
_HOUSE = str(Path(__file__).parent.parent)


def user_traceback(error: BaseException) -> str:
    """Give the traceback from the first frame that is not ours or the import machinery's."""
    trace = error.__traceback__
    while trace is not None and _ours(trace):
        trace = trace.tb_next
    try:
        return "".join(traceback.TracebackException(type(error), error, trace).format()).rstrip()
    except BaseException as second:  # noqa: BLE001 - an exception that cannot be written must not end the runner
        lines = "".join(traceback.format_tb(trace))
        return f"{lines}{type_name(error)}: (cannot be written: {type_name(second)})"


def user_place(error: BaseException) -> str:
    """Give "file.py, line 7: " for the innermost line of user code that led to an error of ours."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_HOUSE, "<"))
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""


def message_of(error: BaseException) -> str:
    """Give `str(error)`, or say that it has none."""
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - as above
        return f"(its message cannot be written: {type_name(second)})"


def type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name.startswith((_ROOM, "<frozen importlib")) or name == importlib.__file__
