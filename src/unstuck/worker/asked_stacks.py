"""Note where a running job stands when somebody asks: its runner writes its stacks down and goes on undisturbed."""

from dataclasses import dataclass

from unstuck.worker.roster import Crew

READ_AFTER_S = 0.1
"""How long a runner usually takes to write them."""
GIVEN_UP_AFTER_S = 5.0
"""A machine that is very busy lets it wait for its turn."""
MAX_ASKED = 100
NOTHING = "Its stack could not be noted: the job took the signal for it away."
TOO_LATE = "Its stack was not noted within 5s: its process is frozen, gets no time, or took the signal for it away."


@dataclass(frozen=True)
class StackAsked:
    """Somebody wants to know where a job stands."""

    job_id: int
    token: int


def read_word(word: str, worker_id: str) -> StackAsked | None:
    """Understand what was rung: 'stack:WORKER:JOB:TOKEN'; None for any other word, and for other workers'."""
    kind, _, rest = word.partition(":")
    parts = rest.split(":")
    if kind != "stack" or len(parts) != 3 or parts[0] != worker_id or not (parts[1] + parts[2]).isdecimal():
        return None
    return StackAsked(int(parts[1]), int(parts[2]))


class AskedStacks:
    """Used by the floor alone."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[StackAsked, Crew, float, float]] = {}
        self._refused: list[StackAsked] = []

    def ask(self, asked: StackAsked, crew: Crew | None, now_s: float) -> None:
        """Have the runner of this job write down where it stands; a job that we do not have is none of ours."""
        if crew is None or asked.token in self._asked or len(self._asked) >= MAX_ASKED:
            return
        # Whoever is being ended has a stack of its own noted for its autopsy.
        if crew.jobs[asked.token].stop is None and crew.runner.dump_stack():
            self._asked[asked.token] = (asked, crew, now_s + READ_AFTER_S, now_s + GIVEN_UP_AFTER_S)
        else:
            self._refused.append(asked)

    def take(self, now_s: float) -> list[tuple[int, str]]:
        """Give the jobs whose stacks are there now, with them."""
        told = [(asked.job_id, NOTHING) for asked in self._refused]
        self._refused = []
        for token, (asked, crew, read_at_s, until_s) in list(self._asked.items()):
            if now_s < read_at_s:
                continue
            del self._asked[token]
            job = crew.jobs.get(token)
            if job is None or job.stop is not None:
                continue
            stack = crew.runner.stack()
            if not stack and now_s < until_s:
                self._asked[token] = (asked, crew, now_s + READ_AFTER_S, until_s)
                continue
            told.append((asked.job_id, stack or TOO_LATE))
            # What it dies of later must not be told with where it stood now.
            crew.runner.forget_stack()
        return told
