"""The verbs for limits as forms: how much may be taken of a queue, how many of a key may be at work."""

from starlette.datastructures import FormData

from unstuck.client.operator import Operator
from unstuck.domain.errors import ConfigError
from unstuck.domain.limits import limit_in_words, read_limit
from unstuck.http.page import flash
from unstuck.http.page.forms import Question, Verb, text
from unstuck.http.page.words import count

MAX_NUMBER_CHARS = 10


def _whole(form: FormData, name: str) -> int | None:
    given = text(form, name)
    if not given:
        return None
    # Text is measured first: Python refuses to read numbers of thousands of digits.
    if not (given.isascii() and given.isdecimal()) or len(given) > MAX_NUMBER_CHARS:
        raise ConfigError(f"{name} must be a whole number, not {given[:40]!r}.")
    return int(given)


def _limit_queue(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    queue = text(form, "queue")
    limit = read_limit(_whole(form, "concurrency"), text(form, "rate") or None)
    if not limit:
        return "warning", "Say how many at once, or a rate, or both."
    operator.limit_queue(queue, limit)
    return "good", f"Queue {queue!r}: {limit_in_words(limit)}."


def _free_queue(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    queue = text(form, "queue")
    operator.limit_queue(queue, read_limit(None, None))
    return "good", f"Queue {queue!r} has no limit, whatever its app says."


def _limit_as_declared(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    queue = text(form, "queue")
    operator.limit_queue(queue, None)
    return "good", f"Queue {queue!r} takes its limit from its app again, with the next worker that starts."


def _limit_line(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    key, places = text(form, "line"), _whole(form, "places")
    if places is None:
        return "warning", "Say how many of the key may be at work at once."
    operator.limit_line(key, places)
    return "good", f"Line {key!r}: {count(places, 'job')} at once."


def _line_as_enqueued(operator: Operator, form: FormData) -> tuple[flash.Level, str]:
    # Not trimmed: a key may begin or end with a space, and the button carries it as it is.
    given = form.get("line")
    key = given if isinstance(given, str) else ""
    operator.limit_line(key, None)
    return "good", f"Line {key!r} takes its limit from what is enqueued."


VERBS: dict[str, Verb] = {
    "limit-queue": _limit_queue,
    "free-queue": _free_queue,
    "limit-as-declared": _limit_as_declared,
    "limit-line": _limit_line,
    "line-as-enqueued": _line_as_enqueued,
}
QUESTIONS: dict[str, Question] = {
    "free-queue": lambda form: (
        f"Remove the limit of queue {text(form, 'queue')!r}?",
        "Workers take as much of it as they have room for, whatever its app says.",
        "Remove the limit",
    ),
}
