from tests.crash.conftest import url  # noqa: F401
