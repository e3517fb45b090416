"""What a door shows of arguments and results, whatever somebody wrote into the ledger."""

from typing import Any

import pytest

from unstuck.client.views import call_view, value_view


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b'{"args":[1],"kwargs":{"a":2}}', ([1], {"a": 2})),
        (b"[1,2]", ([[1, 2]], {})),
        (b"", ([""], {})),
        (b'{"args":[1,', (['{"args":[1,'], {})),
        (b'{"args":["\xff"]}', (['{"args":["\ufffd"]}'], {})),
        # As text it would show secrets that only a reader of JSON finds.
        (b"[" * 100_000, (["(too much to show)"], {})),
    ],
    ids=["a call", "a list", "nothing", "cut off", "no text", "lists without end"],
)
def test_arguments_that_cannot_be_read_are_shown_as_they_are(payload: bytes, shown: tuple[Any, Any]) -> None:
    assert call_view(payload, "json") == shown


def test_what_is_no_json_is_shown_as_bytes() -> None:
    assert value_view(b"\x80\x04", "pickle") == {"type": "pickle", "base64": "gAQ="}
    assert value_view(None, "json") is None
