"""The example with a screen of the page on ZeroMQ does what it says."""

from pathlib import Path

from tests.desktop.screen import Screen
from tests.mdp.guide import play


def test_the_example_of_a_client_with_a_screen_works(screen: Screen, tmp_path: Path) -> None:
    play("qt client", tmp_path)
