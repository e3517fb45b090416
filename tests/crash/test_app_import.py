"""Every way in which an app cannot be found or imported has a sentence of its own, with the cure."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unstuck.errors import ConfigError
from unstuck.runner.loader import load_app
from unstuck.worker.fork_client import ForkServerClient

GOOD = """
from unstuck.runner.tasks import AppDefinition

class Fake:
    def use_ledger(self, url): pass
    def definition(self):
        return AppDefinition(
            tasks={}, queues=frozenset(), limits={}, schedules=(), settings=b"{}", note="", pack_follow_up=print
        )
app = Fake()
worker_app = Fake()
class holder:
    inner = Fake()
a_function = lambda: 1
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    (tmp_path / "shop.py").write_text(GOOD)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def refusal(target: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_app(target)
    return str(caught.value)


@pytest.mark.parametrize("target", ["shop:app", "shop", "shop:worker_app", "shop:holder.inner"])
def test_an_app_is_found_in_the_working_directory(here: Path, target: str) -> None:
    assert load_app(target).settings == b"{}"


@pytest.mark.parametrize("target", ["", ":app", "shop:", "shop app", "shop:app:x", "a..b:app"])
def test_what_names_no_app_is_refused_with_an_example(here: Path, target: str) -> None:
    assert "module:attribute, for example app:app" in refusal(target)


@pytest.mark.parametrize(
    ("target", "cure"), [("shop.py", "Use shop:app"), ("./shop.py:app", "Use shop:app"), ("a/b.py:x", "Use a.b:x")]
)
def test_a_file_is_not_a_module(here: Path, target: str, cure: str) -> None:
    assert cure in refusal(target)


def test_a_missing_module_is_guessed(here: Path) -> None:
    message = refusal("shops:app")
    assert f"no module 'shops' in {here}" in message
    assert "Did you mean 'shop'?" in message


def test_a_missing_package_is_named(here: Path) -> None:
    assert "no module 'warehouse'" in refusal("warehouse.tasks:app")


def test_a_missing_dependency_of_the_app_is_shown_with_its_traceback(here: Path) -> None:
    (here / "needy.py").write_text("import no_such_library\n")
    message = refusal("needy:app")
    assert "'needy' could not be imported" in message
    assert "needy.py" in message
    assert "No module named 'no_such_library'" in message


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("def f():\n    1/0\nf()\n", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)\n", "SystemExit: 3"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_raises_is_shown_with_the_users_traceback_alone(here: Path, source: str, last: str) -> None:
    (here / "broken.py").write_text(source)
    message = refusal("broken:app")
    assert message.endswith(last)
    assert "broken.py" in message
    assert "importlib" not in message
    assert "loader.py" not in message


def test_what_unstuck_refuses_in_an_app_is_one_sentence_with_its_place(here: Path) -> None:
    (here / "unsafe.py").write_text(
        "from unstuck import App\n"
        "app = App()\n"
        "@app.task(heartbeat_interval=60, heartbeat_timeout=100)\n"
        "def my_task(): ...\n"
    )
    assert refusal("unsafe:app") == (
        f"{here / 'unsafe.py'}, line 3: Task 'my_task' has unsafe heartbeat config. "
        "Interval (60s) must be <= half of timeout (100s) to prevent false positives."
    )


def test_a_missing_attribute_is_guessed_and_apps_come_first(here: Path) -> None:
    assert "has no 'apps'. Did you mean 'app'?" in refusal("shop:apps")
    assert "Did you mean 'app'?" in refusal("shop:zzz")
    (here / "bare.py").write_text("x = 1\n")
    assert "Write `app = App()` in it." in refusal("bare")


@pytest.mark.parametrize(
    ("target", "what"),
    [("shop:a_function", "of type function"), ("shop:number", "of type int"), ("shop:Fake", "the class Fake")],
)
def test_what_is_not_an_app_is_named(here: Path, target: str, what: str) -> None:
    message = refusal(target)
    assert what in message
    assert "Point to the App object" in message


def test_the_bench_hands_the_users_error_on(here: Path) -> None:
    (here / "broken.py").write_text("def f():\n    raise ValueError('\\ud800 oops')\nf()\n")
    with pytest.raises(ConfigError, match="oops") as caught:
        ForkServerClient("broken:app").start()
    assert "in f" in str(caught.value)


def test_an_app_that_breaks_when_asked_is_shown_too(here: Path) -> None:
    (here / "late.py").write_text(f"{GOOD}\nFake.definition = lambda self: 1/0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        ForkServerClient("late:app").start()


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("import os; os._exit(4)", "exited with code 4"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    ],
)
def test_an_import_that_ends_its_process_is_explained(here: Path, line: str, how: str) -> None:
    (here / "deadly.py").write_text(line)
    with pytest.raises(ConfigError, match=how):
        ForkServerClient("deadly:app").start()


def test_an_import_that_never_ends_is_given_up(here: Path) -> None:
    (here / "slow.py").write_text("import time; time.sleep(600)")
    with pytest.raises(ConfigError, match=r"took more than 0\.3s"):
        ForkServerClient("slow:app", import_timeout_s=0.3).start()
