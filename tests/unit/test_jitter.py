"""What an app draws from `random` after it seeded it does not depend on threads of ours."""

import re
from pathlib import Path

import unstuck

DRAWS = re.compile(r"\brandom\.(random|uniform|choice|randint|randrange|shuffle|sample)\(")
DEMO = "demo"
"""An app of its own."""


def test_no_module_draws_from_the_generator_of_the_app() -> None:
    folder = Path(unstuck.__file__).parent
    paths = [path for path in folder.rglob("*.py") if DEMO not in path.relative_to(folder).parts]
    assert paths
    assert [path.name for path in paths if DRAWS.search(path.read_text())] == []
