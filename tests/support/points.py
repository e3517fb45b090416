"""Wait until a process passes a named point of the product, instead of sleeping and hoping that it did by now.

points = PassedPoints(tmp_path)
with serve(url, env=points.of("http.claim_waiting")) as served:
    ...
    points.wait("http.claim_waiting", served.process.pid)
"""

import secrets
from pathlib import Path

from tests.support.fleet import wait_for


class PassedPoints:
    """A file to which processes add a line whenever they pass a point; see `unstuck.failpoints`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"points-{secrets.token_hex(4)}"

    def of(self, *points: str, also: str = "") -> dict[str, str]:
        """Return the environment of a process that reports these points; `also` arms other actions as well."""
        notes = [f"{point}=note:{self._file}" for point in points]
        return {"UNSTUCK_FAILPOINTS": ",".join([*notes, *filter(None, [also])])}

    def count(self, point: str, pid: int, after: str = "") -> int:
        """Return how often this process has passed the point, since it last passed `after` if that is given."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        passed = [line.partition(" ")[2] for line in lines if line.startswith(f"{pid} ")]
        if after:
            passed = passed[len(passed) - passed[::-1].index(after) :] if after in passed else []
        return passed.count(point)

    def wait(self, point: str, pid: int, times: int = 1, after: str = "") -> None:
        """Wait until this process has passed the point at least this often."""
        wait_for(lambda: self.count(point, pid, after) >= times, f"process {pid} to pass {point} {times} times")
