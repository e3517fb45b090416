"""What the worker makes of its runners' ends: real runners, no ledger."""

import os
import selectors
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.crash.bench_kit import House, frame, house
from tests.fleet import wait_for

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.autopsy import DeathKind
from unstuck.domain.endings import Ending
from unstuck.domain.outcomes import Cancelled, Died, Overran
from unstuck.domain.policy import Policy
from unstuck.domain.states import AttemptState, JobState
from unstuck.store.records import Claimed
from unstuck.worker.bench import RunnerBorn, RunnerExit
from unstuck.worker.holds import Hold
from unstuck.worker.outbox import Outbox
from unstuck.worker.pace import Pace
from unstuck.worker.runners import Runners

RETRY = Policy(on_crash="retry")
FAIL = Policy()


class Shift:
    """Runners at work, with the floor's loop in the hands of the test."""

    def __init__(self, built: House, slots: int = 1) -> None:
        self.house = built
        self.selector = selectors.DefaultSelector()
        self.outbox = Outbox()
        self.runners = Runners(
            built.bench, built.trace, "w-test", Settings(), slots, self.selector, self.outbox, Pace()
        )
        self.runners.confirm(host.boottime_s())
        self._tokens = iter(range(1, 1000))

    def hold(self, task: str, *args: object, policy: Policy = FAIL, is_async: bool = False) -> Hold:
        token = next(self._tokens)
        made = frame(token, task, *args)
        job = Claimed(token, token, task, "default", True, made.payload, "json", b"", 0, 0, 1)
        return Hold(job, policy, is_async, 30.0, host.boottime_s())

    def give(self, *holds: Hold, depth: int = 0) -> None:
        self.runners.ready.extend(holds)
        self.runners.feed(depth)

    def step(self, timeout_s: float = 0.02) -> None:
        for key, events in self.selector.select(timeout_s):
            key.data(events)
        self.runners.tick(host.boottime_s())

    def until(self, look: object, what: str) -> None:
        wait_for(lambda: self.step() or look(), what)  # type: ignore[operator,func-returns-value]

    def entered(self, hold: Hold) -> None:
        self.until(lambda: self.house.trace.entered(0) == hold.token, f"job {hold.token} to be entered")

    def endings(self, count: int = 1) -> list[Ending]:
        self.until(lambda: len(self.outbox.endings) >= count, f"{count} endings")
        return list(self.outbox.endings)


@contextmanager
def shift(folder: Path, slots: int = 1) -> Iterator[Shift]:
    with house(folder, slots=slots + 1) as built:
        yield Shift(built, slots)


def test_a_job_that_ended_just_before_it_was_cancelled_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        first = at_work.hold("add", 1, 2, policy=RETRY)
        go_on = tmp_path / "go-on"
        second = at_work.hold("wait_for", str(go_on), policy=RETRY)
        at_work.runners.ready.append(first)
        at_work.runners.feed(0)
        crew = at_work.runners.given[first.token]
        crew.since_s = host.boottime_s() + 60  # quick enough to queue behind
        at_work.give(second, depth=1)
        # Its report lies in the stream, unread; the runner is in the next job.
        wait_for(lambda: at_work.house.trace.entered(0) == second.token, "the second to be entered")
        at_work.runners.stop(first.token, Cancelled("by request"), DeathKind.OPERATOR, host.boottime_s())
        assert [done.token for done in at_work.outbox.done] == [first.token]
        go_on.touch()
        at_work.until(lambda: len(at_work.outbox.done) == 2, "the second to succeed")
        assert not at_work.outbox.endings


def test_what_never_began_is_kept_through_drain_deadline_and_lease_and_not_failed(tmp_path: Path) -> None:
    for fate in (Died("drain", counts=False, drained=True), Overran("too long"), Died("lease", counts=False)):
        with shift(tmp_path) as at_work:
            wait_for(lambda at=at_work: at.house.trace.nursery()[0], "the nursery to be equipped")  # type: ignore[misc]
            nursery = at_work.house.trace.nursery()[0]
            os.kill(nursery, signal.SIGSTOP)
            try:
                hold = at_work.hold("add", 1, 2)
                at_work.give(hold)
                at_work.runners.stop(hold.token, fate, DeathKind.LEASE, host.boottime_s())
            finally:
                os.kill(nursery, signal.SIGCONT)
            assert list(at_work.runners.ready) == [hold]
            assert not at_work.outbox.endings
            at_work.runners.feed(0)
            at_work.until(lambda at=at_work: at.outbox.done, "it to run as if nothing had been")  # type: ignore[misc]


def test_a_frozen_nursery_is_replaced_and_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstuck.worker.runners.BIRTH_S", 0.2)
    with shift(tmp_path) as at_work:
        wait_for(lambda: at_work.house.trace.nursery()[0], "the nursery to be equipped")
        os.kill(at_work.house.trace.nursery()[0], signal.SIGSTOP)
        hold = at_work.hold("add", 1, 2)
        at_work.give(hold)
        at_work.until(lambda: hold in at_work.runners.ready, "the job to come back from the frozen nursery")
        monkeypatch.setattr("unstuck.worker.runners.BIRTH_S", 10.0)
        at_work.runners.feed(0)
        at_work.until(lambda: at_work.outbox.done, "the job to run")


def test_a_frozen_nursery_is_left_alone_while_others_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstuck.worker.runners.BIRTH_S", 0.2)
    with shift(tmp_path, slots=2) as at_work:
        go_on = tmp_path / "go-on"
        working = at_work.hold("wait_for", str(go_on))
        at_work.give(working)
        at_work.entered(working)
        nursery = at_work.house.trace.nursery()[0]
        os.kill(nursery, signal.SIGSTOP)
        try:
            hold = at_work.hold("add", 1, 2)
            at_work.give(hold)
            at_work.until(lambda: hold in at_work.runners.ready, "the job to come back")
            go_on.touch()
            at_work.until(lambda: at_work.outbox.done, "the other to end undisturbed")
        finally:
            os.kill(nursery, signal.SIGCONT)


def test_a_runner_killed_by_a_drain_before_it_began_gives_its_job_back(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        wait_for(lambda: at_work.house.trace.nursery()[0], "the nursery to be equipped")
        nursery = at_work.house.trace.nursery()[0]
        os.kill(nursery, signal.SIGSTOP)
        try:
            hold = at_work.hold("add", 1, 2)
            at_work.give(hold)
            at_work.runners.kill_all(Died("drain", counts=False, drained=True))
        finally:
            os.kill(nursery, signal.SIGCONT)
        at_work.until(lambda: at_work.runners.ready or at_work.outbox.done or at_work.outbox.endings, "its end")
        assert not at_work.outbox.endings


def test_no_job_begins_after_its_lease(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        at_work.runners.confirm(host.boottime_s() - 29.0)
        for policy in (RETRY, FAIL):
            hold = at_work.hold("add", 1, 2, policy=policy)
            at_work.give(hold)
            assert hold in at_work.runners.ready
        at_work.runners.confirm(host.boottime_s())
        at_work.runners.feed(0)
        at_work.until(lambda: at_work.outbox.done, "one of them to run once a beat was confirmed")


def test_a_lease_that_the_nursery_ended_first_is_no_crash(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        hold = at_work.hold("wait_for", str(tmp_path / "never"), policy=RETRY)
        at_work.give(hold)
        at_work.entered(hold)
        at_work.house.trace.set_kill_at(0, host.boottime_s() - 1)
        # As after a sleep of the machine: the nursery looks before we do.
        wait_for(lambda: at_work.house.bench.read and at_work.house.trace.occupant(0)[0] == 0, "the nursery to act")
        ending = at_work.endings()[0]
        assert ending.state is JobState.PENDING
        assert ending.attempt is AttemptState.CRASHED
        assert ending.counter == "none"


def test_a_birth_heard_of_after_the_death_leaves_nothing_to_watch(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        hold = at_work.hold("add", 1, 2)
        at_work.give(hold)
        crew = at_work.runners.given[hold.token]
        at_work.runners._saw_gone(crew)  # the end of its stream came first
        wait_for(lambda: at_work.house.bench.read() or crew.runner.pid, "its birth")
        assert crew.runner.pid is not None
        at_work.runners._watch_process(RunnerBorn(0, crew.runner.pid))
        fd = crew.runner.pidfd()
        assert fd is not None
        assert fd not in at_work.selector.get_map(), "a number that the next descriptor may have"


def test_runners_that_die_before_they_begin_are_not_asked_for_without_a_pause(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        hold = at_work.hold("add", 1, 2)
        at_work.give(hold)
        for _ in range(3):
            crew = at_work.runners.given[hold.token]
            failed = RunnerExit(crew.slot, 0, "a runner could not be started: Resource temporarily unavailable")
            at_work.runners._bury(crew, failed)
            assert list(at_work.runners.ready) == [hold]
            at_work.runners.feed(0)
            if at_work.runners.ready:
                break
        assert list(at_work.runners.ready) == [hold], "it waits, and may go to somebody else"
        wait_for(lambda: host.boottime_s() > at_work.runners.roster.rest_until_s, "the rest to be over")
        at_work.runners.feed(0)
        at_work.until(lambda: at_work.outbox.done, "it to run")


def test_what_an_async_job_raises_when_it_is_stopped_is_not_its_own_failure(tmp_path: Path) -> None:
    text = (
        "import asyncio\nasync def stubborn():\n  try: await asyncio.sleep(60)\n"
        "  except BaseException: raise RuntimeError('while cleaning up')\n"
        "app.definitions['asay'].__dict__['function'] = stubborn"
    )
    with shift(tmp_path) as at_work:
        teach = at_work.hold("aevaluate", text, is_async=True)
        at_work.give(teach)
        at_work.until(lambda: at_work.outbox.done, "the lesson")
        hold = at_work.hold("asay", is_async=True, policy=RETRY)
        at_work.give(hold)
        at_work.step()
        at_work.runners.stop(hold.token, Died("lease ran out", counts=False), DeathKind.LEASE, host.boottime_s())
        ending = at_work.endings()[0]
        assert (ending.state, ending.counter) == (JobState.PENDING, "none")
