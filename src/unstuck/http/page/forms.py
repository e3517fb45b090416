"""Read what the forms of verbs carry, and say what a verb and its question are."""

from collections.abc import Callable

from starlette.datastructures import FormData

from unstuck.client.operator import Operator
from unstuck.http.page import flash

Verb = Callable[[Operator, FormData], tuple[flash.Level, str]]
Question = Callable[[FormData], tuple[str, str, str]]
"""Gives what to ask, what it will mean, and the word on the button."""


def text(form: FormData, name: str) -> str:
    value = form.get(name)
    return value.strip() if isinstance(value, str) else ""
