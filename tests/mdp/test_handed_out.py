"""What a broker notes of its old workers is read when it is dead, and only then."""

import itertools
import os
from pathlib import Path

import cbor2
from tests.mdp.broker import READY
from tests.mdp.fake_ledger import FakeLedger

from unstuck.config import MdpSettings
from unstuck.mdp.broker.core import BrokerCore
from unstuck.mdp.broker.handed_out import PREFIX, DeadBrokers, HandedOut, digest_of, find_abandoned
from unstuck.mdp.protocol import FINISHED

DIGEST = digest_of("sqlite:///ledger.db")


def kill(handed: HandedOut) -> None:
    """Let go of all that a process has, as the kernel does when it ends."""
    assert handed._memory is not None
    handed._memory.close()
    os.close(handed._fd)


def test_what_a_living_broker_noted_is_its_own(tmp_path: Path) -> None:
    handed = HandedOut.create(tmp_path, DIGEST)
    handed.add("worker1", 0.0)
    assert find_abandoned(tmp_path, DIGEST) == []
    handed.close()
    assert list(tmp_path.iterdir()) == [], "an end in order leaves nothing"


def test_the_next_broker_knows_what_each_worker_had(tmp_path: Path) -> None:
    handed = HandedOut.create(tmp_path, DIGEST)
    for name in ("idle", "busy", "quick", "done", "left"):
        handed.add(name, 0.0)
    handed.give("busy", 1, 11, quick=False)
    handed.give("quick", 2, 12, quick=True)
    handed.give("done", 3, 13, quick=True)
    handed.take("done")
    handed.give("left", 4, 14, quick=False)
    handed.remove("left", 0.0)
    handed.add("later", 1.0)
    handed.add("much later", 61.0)
    kill(handed)
    assert find_abandoned(tmp_path, digest_of("sqlite:///other.db")) == []
    found = find_abandoned(tmp_path, DIGEST)
    assert {one.worker_id: (one.working_on, one.is_quick) for one in found} == {
        "idle": (None, False),
        "busy": ((1, 11), False),
        "quick": ((2, 12), True),
        "done": (None, False),
        "much later": (None, False),
        "later": (None, False),
    }
    assert find_abandoned(tmp_path, DIGEST) == [], "whoever found it first settles it"
    for one in found:
        assert len(list(tmp_path.iterdir())) == 1
        one.record.settled(one.worker_id)
    assert list(tmp_path.iterdir()) == []


def test_what_only_a_broker_at_the_same_address_can_know_is_left_to_that_one(tmp_path: Path) -> None:
    handed = HandedOut.create(tmp_path, DIGEST, "tcp://127.0.0.1:1")
    handed.add("idle", 0.0)
    handed.add("busy", 0.0)
    handed.give("busy", 1, 11, quick=False)
    kill(handed)
    other, next_one = (
        DeadBrokers(tmp_path, DIGEST, "tcp://127.0.0.1:2"),
        DeadBrokers(tmp_path, DIGEST, "tcp://127.0.0.1:1"),
    )
    found = other.find()
    assert {one.worker_id: one.may_be_given_up for one in found} == {"idle": False, "busy": False}
    assert next_one.find() == [], "the other one has it"
    for one in found:
        one.record.settled(one.worker_id)
    assert other.find() == [], "it did what it can"
    found = next_one.find()
    assert {one.worker_id: one.may_be_given_up for one in found} == {"idle": False, "busy": True}
    for one in found:
        one.record.settled(one.worker_id)
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_dies_before_all_is_settled_leaves_it_to_the_next(tmp_path: Path) -> None:
    handed = HandedOut.create(tmp_path, DIGEST)
    handed.add("a", 0.0)
    handed.add("b", 0.0)
    kill(handed)
    first = find_abandoned(tmp_path, DIGEST)
    first[0].record.settled("a")
    os.close(first[0].record.fd)
    again = find_abandoned(tmp_path, DIGEST)
    assert [one.worker_id for one in again] == ["a", "b"]
    os.close(again[0].record.fd)


def test_a_worker_that_reported_an_error_has_no_request_any_more(tmp_path: Path) -> None:
    handed, ledger, numbers = HandedOut.create(tmp_path, DIGEST), FakeLedger(), itertools.count(1)
    core = BrokerCore(MdpSettings(), lambda: f"id{next(numbers)}", lambda: 0.0, handed)
    core.on_message(b"worker", [b"", b"MDPW01", READY, b"echo"], 3, 0.0)
    core.on_message(b"client", [b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    while (batch := core.take_batch()) is not None:
        core.on_batch_done(ledger.do(batch), 0.0)
    (address,) = [frames[3] for to, frames in core.take_sends() if to == b"worker"]
    error = cbor2.dumps({"error": "ValueError", "message": "no", "traceback": ""})
    core.on_message(b"worker", [b"", b"MDPW01", FINISHED, address, error], None, 0.0)
    kill(handed)
    [found] = find_abandoned(tmp_path, DIGEST)
    assert found.working_on is None
    found.record.close()


def test_files_that_no_broker_wrote_are_left_alone(tmp_path: Path) -> None:
    short = tmp_path / f"{PREFIX}{DIGEST}-short"
    short.write_bytes(b"x")
    (tmp_path / f"{PREFIX}{DIGEST}-link").symlink_to(short)
    (tmp_path / f"{PREFIX}{DIGEST}-folder").mkdir()
    os.mkfifo(tmp_path / f"{PREFIX}{DIGEST}-pipe")
    assert find_abandoned(tmp_path, DIGEST) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_without_a_folder_it_goes_without(tmp_path: Path) -> None:
    handed = HandedOut.create(tmp_path / "missing", DIGEST)
    handed.add("worker1", 0.0)
    handed.give("worker1", 1, 2, quick=False)
    handed.take("worker1")
    handed.remove("worker1", 0.0)
    handed.close()


def test_what_nobody_came_for_is_removed_after_a_day(tmp_path: Path) -> None:
    living, dead = HandedOut.create(tmp_path, DIGEST), HandedOut.create(tmp_path, DIGEST)
    kill(dead)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert find_abandoned(tmp_path, digest_of("another")) == []
    assert len(list(tmp_path.iterdir())) == 1, "that of a living broker stays"
    living.close()
    assert list(tmp_path.iterdir()) == []
