"""Find the notebook of the attempt that runs: opened when a job first needs it, closed with its report."""

from collections.abc import Callable
from typing import Any

from unstuck.runner.line import Line
from unstuck.runner.notebook import Notebook
from unstuck.runner.pausing import Suspended, suspension_in
from unstuck.runner.wire import SUCCEEDED, SUSPENDED, JobFrame, Report

Packing = Callable[[Any, tuple[Any, ...], dict[str, Any], int], bytes]
"""Packs a job that follows: the task or its name, its arguments, and the id of the job that asks for it."""


class Notebooks:
    """Of one runner. Most jobs never open theirs, and pay one entry in a dict."""

    def __init__(self, line: Line, limit_bytes: int, pack: Packing) -> None:
        self._line = line
        self._limit_bytes = limit_bytes
        self._frames: dict[int, JobFrame] = {}
        self._open: dict[int, Notebook] = {}
        self.pack = pack

    def expect(self, frame: JobFrame) -> None:
        """An attempt begins."""
        self._frames[frame.token] = frame

    def of(self, token: int) -> Notebook | None:
        found = self._open.get(token)
        if found is None:
            frame = self._frames.get(token)
            if frame is None:
                return None
            opened = Notebook(frame.job_id, token, frame.journal, self._line, self._limit_bytes)
            # Two threads of a job may come here at once.
            found = self._open.setdefault(token, opened)
        return found

    def close(self, token: int, report: Report, error: BaseException | None, raised: "Raised") -> Report:
        """An attempt ended, with what it raised: give the report that is right for what it wrote down."""
        frame = self._frames.pop(token, None)
        notebook = self._open.pop(token, None)
        if notebook is None:
            if frame is None or not frame.journal:
                return report
            # It wrote something down once, and now comes to nothing of it.
            notebook = Notebook(frame.job_id, token, frame.journal, self._line, self._limit_bytes)
        suspended = None if error is None else suspension_in(error)
        if error is None and isinstance(notebook.leaving, Suspended):
            # Code that catches everything swallowed it: it waits all the same, and what it returned is done again.
            suspended = notebook.leaving
        if suspended is not None:
            report = Report(token, SUSPENDED)
        elif report.kind == SUCCEEDED:
            try:
                notebook.check_complete()
            except Exception as mismatch:  # noqa: BLE001 - becomes the report
                report = raised(token, mismatch)
        pause = None if suspended is None else suspended.pause
        report.rest = notebook.close(pause, succeeded=report.kind == SUCCEEDED)
        return report

    def flush(self) -> None:
        """Hand over checkpoints that came too soon after the last; called with every pulse."""
        if self._open:
            for notebook in list(self._open.values()):
                notebook.flush()


Raised = Callable[[int, BaseException], Report]
