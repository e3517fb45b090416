"""What one word the suite says of all its parts."""

import pytest
from tests.run import FAILED, NOTHING, PASSED, verdict


@pytest.mark.parametrize(
    ("codes", "word"),
    [
        ([PASSED, PASSED], PASSED),
        ([PASSED, FAILED], FAILED),
        ([FAILED, PASSED], FAILED),
        ([NOTHING, PASSED], PASSED),
        ([FAILED, NOTHING], FAILED),
        ([NOTHING, NOTHING], NOTHING),
    ],
)
def test_a_failure_anywhere_is_the_verdict(codes: list[int], word: int) -> None:
    assert verdict(codes) == word
