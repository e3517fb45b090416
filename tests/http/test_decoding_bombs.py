"""Bodies that would take a hundred times their bytes are refused before they are built, and the server goes on."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.decoding_bombs import MAX_BYTES, SIZE_BYTES, json_bombs
from tests.support.http_server import SecuredServer, guarded_door
from tests.support.signals import OwnProcess

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder: Path = tmp_path_factory.mktemp("bombs")
    with guarded_door(f"sqlite:///{folder}/jobs.db") as door:
        yield door
        assert "Traceback" not in door.served.said()


def most_bytes(door: SecuredServer) -> int:
    """Return the most memory that the server ever had."""
    status = Path(f"/proc/{door.served.process.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def cpu_s(door: SecuredServer) -> float:
    spent = OwnProcess(door.served.process.pid).cpu_times()
    return float(spent.user + spent.system)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("small objects", "too_many_values"),
        ("nested arrays", "too_many_values"),
        ("one-letter texts", "too_many_values"),
        ("slow floats", "too_many_values"),
        ("deep", "too_deep"),
        ("objects and wide text", "not_valid"),
    ],
)
def test_json_that_would_take_much_more_than_its_bytes_is_refused(door: SecuredServer, name: str, code: str) -> None:
    assert door.ask("GET", "/api/v1/workers", door.all).status_code == 200
    body = json_bombs()[name]()[:SIZE_BYTES]
    before_bytes, before_s = most_bytes(door), cpu_s(door)
    answer: httpx.Response = door.ask("POST", "/api/v1/jobs", door.all, content=body, headers=JSON)
    assert (answer.status_code // 100, answer.json()["code"]) == (4, code)
    assert most_bytes(door) - before_bytes < MAX_BYTES
    assert cpu_s(door) - before_s < 2
