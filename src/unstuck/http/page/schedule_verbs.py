"""The verbs for schedules as forms: stop one, let it go on, run it now, forget it."""

from starlette.datastructures import FormData

from unstuck.client.operator import Operator
from unstuck.http.page import flash
from unstuck.http.page.forms import Question, Verb, text


def _pause(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    name = text(form, "schedule")
    changed = operator.pause_schedule(name)
    return "good", f"Schedule {name!r} is paused." if changed else f"Schedule {name!r} was paused already."


def _resume(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    name = text(form, "schedule")
    changed = operator.resume_schedule(name)
    return "good", f"Schedule {name!r} goes on with its next tick." if changed else f"Schedule {name!r} was not paused."


def _run(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    name = text(form, "schedule")
    return "good", f"Schedule {name!r} runs now, beside its ticks: job {operator.run_schedule(name)}."


def _remove(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    name = text(form, "schedule")
    if operator.remove_schedule(name):
        return "warning", (
            f"Schedule {name!r} is removed. It still stands in the code of living workers, and comes back when one "
            "starts: take it out."
        )
    return "good", f"Schedule {name!r} is removed."


VERBS: dict[str, Verb] = {
    "pause-schedule": _pause,
    "resume-schedule": _resume,
    "run-schedule": _run,
    "remove-schedule": _remove,
}
QUESTIONS: dict[str, Question] = {
    "remove-schedule": lambda form: (
        f"Remove schedule {text(form, 'schedule')!r}?",
        "It enqueues nothing any more. What it enqueued stays.",
        "Remove it",
    ),
}
