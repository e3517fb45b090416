"""A short form of `make fuzz-mdp`: random and mutated frames over real sockets, on both databases."""

from pathlib import Path

import pytest
from tests.mdp import fuzz
from tests.mdp.broker import broker_on


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_random_frames_do_not_end_the_broker_and_others_are_served(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str, seed: int
) -> None:
    with broker_on(request, tmp_path, dialect, max_memory_bytes=fuzz.MAX_MEMORY_BYTES) as broker:
        seen = fuzz.run(broker, 5, seed)
    assert seen["said"] > 500
    assert seen["served"] >= 1
