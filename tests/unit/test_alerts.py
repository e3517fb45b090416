"""When to speak, what was told, what holds, and in which words: the rules of alerts, without any database."""

from typing import Any

import msgspec
import pytest

from unstuck.config import Alerts
from unstuck.config.loading import load
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.event_cursor import Cursor
from unstuck.domain.liveness import Detector
from unstuck.domain.states import WorkerState
from unstuck.errors import ConfigError
from unstuck.ledger.contract.diagnosis import QueueBacklog, TaskBacklog
from unstuck.ledger.contract.events import AlertEvent, ConditionLook, ConditionRecord, LateWorker
from unstuck.ledger.contract.workers import WorkerVerdict
from unstuck.notify.alerts.conditions import compare, events_of, find_conditions
from unstuck.notify.alerts.delivery import (
    MANY_TOLD,
    MAX_BATCH,
    MOVE_S,
    SLOWEST_RETRY_S,
    Delivery,
    DeliveryState,
    Resend,
    SendNow,
    Wait,
    advance,
    begin,
    delivered,
    failed,
    plan,
    read_state,
    retry_s,
    write_state,
)
from unstuck.notify.alerts.message import compose

NOW = 1_000_000.0
RULES = Alerts(batch_window="2s", min_interval="30s")


def event(number: int = 1, kind: str = "worker_dead", age_s: float = 5.0, **facts: Any) -> AlertEvent:
    return AlertEvent(number, NOW - age_s, kind, facts.pop("message", f"message {number}"), transaction=number, **facts)


def key(number: int) -> tuple[int, int, int]:
    return (number, number, 0)


def sending(*ids: int, by: str = "me", until: float = NOW + 20) -> Delivery:
    return Delivery("d1", tuple(map(key, ids)), NOW - 1, by, until)


# When ------------------------------------------------------------------------------------------


def test_the_first_alert_waits_for_company_but_not_for_ever() -> None:
    assert plan(DeliveryState(), [event(age_s=0.5)], NOW, RULES, "me") == Wait()
    assert plan(DeliveryState(), [event(age_s=2.5)], NOW, RULES, "me") == SendNow((event(age_s=2.5),))
    # More keep coming: it waits on until they stop, or patience ends.
    storm = [event(1, age_s=10.0), event(2, age_s=0.1)]
    assert plan(DeliveryState(), storm, NOW, RULES, "me") == Wait()
    # One that was written while we looked is no reason to hurry.
    assert plan(DeliveryState(), [event(1, age_s=10.0), event(2, age_s=-0.1)], NOW, RULES, "me") == Wait()
    storm = [event(1, age_s=21.0), event(2, age_s=0.1)]
    assert isinstance(plan(DeliveryState(), storm, NOW, RULES, "me"), SendNow)


def test_messages_keep_their_distance() -> None:
    assert plan(DeliveryState(told_at=NOW - 29), [event()], NOW, RULES, "me") == Wait()
    assert isinstance(plan(DeliveryState(told_at=NOW - 31), [event()], NOW, RULES, "me"), SendNow)
    # A clock that was set back must not silence anybody.
    assert isinstance(plan(DeliveryState(told_at=NOW + 5000), [event()], NOW, RULES, "me"), SendNow)


def test_what_another_sender_is_sending_is_left_to_it_until_it_is_taken_for_dead() -> None:
    mine, later = event(1), event(2)
    theirs = DeliveryState(sending=sending(1, by="other"))
    assert plan(theirs, [mine, later], NOW, RULES, "me") == Wait()
    lost = DeliveryState(sending=sending(1, by="other", until=NOW - 1))
    assert plan(lost, [mine, later], NOW, RULES, "me") == Resend((mine,))
    assert plan(DeliveryState(sending=sending(1)), [mine, later], NOW, RULES, "me") == Resend((mine,))


def test_a_failing_target_is_tried_ever_more_slowly() -> None:
    waits = [retry_s(failures) for failures in range(1, 20)]
    assert waits[:4] == [2.0, 4.0, 8.0, 16.0]
    assert waits[-1] == SLOWEST_RETRY_S
    book = failed(begin(DeliveryState(), sending(1)), NOW, "no", 8.0, maybe_arrived=False)
    assert plan(book, [event()], NOW + 7, RULES, "me") == Wait()
    assert isinstance(plan(book, [event()], NOW + 9, RULES, "me"), SendNow)


# What was told -----------------------------------------------------------------------------------


def test_what_surely_did_not_arrive_is_gathered_anew_and_what_may_have_keeps_its_delivery() -> None:
    book = begin(DeliveryState(), sending(1, 2))
    assert failed(book, NOW, "refused", 2.0, maybe_arrived=False).sending is None
    kept = failed(book, NOW, "timeout", 2.0, maybe_arrived=True).sending
    assert kept is not None
    assert (kept.delivery, kept.events) == ("d1", (key(1), key(2)))
    done = delivered(book, NOW)
    assert (done.told, done.sending, done.told_at, done.messages) == ((key(1), key(2)), None, NOW, 1)
    assert read_state(write_state(done)) == done
    assert read_state("{}") == DeliveryState()
    assert read_state('{"of_a_newer_version": 1}') == DeliveryState()


def test_the_position_moves_to_the_newest_when_all_was_told_and_keeps_what_is_open() -> None:
    book = DeliveryState(told=(key(5), key(7)), moved_at=NOW)
    newest = Cursor(9, 9, 0, open=frozenset({6}))
    assert advance(book, Cursor(3, 3), [], newest, NOW + MOVE_S / 2) == (Cursor(3, 3), book)
    position, moved = advance(book, Cursor(3, 3), [], newest, NOW + MOVE_S)
    assert (position, moved.told) == (newest, ())
    assert position.is_behind(6, 4)


def test_the_position_never_passes_what_is_untold() -> None:
    book = DeliveryState(told=(key(5), key(8)))
    newest = Cursor(9, 9, 0, open=frozenset({4, 7}))
    position, moved = advance(book, Cursor(3, 3), [key(6)], newest, NOW)
    assert (position, moved.told) == (Cursor(5, 5, 0, open=frozenset({4})), (key(8),))
    # What came when the newest had been read already holds up nothing.
    assert advance(book, Cursor(3, 3), [key(10)], newest, NOW)[0] == newest
    # A late one that is untold keeps the position where it is.
    late = Cursor(5, 5, 0, open=frozenset({4}))
    assert advance(DeliveryState(told=(key(8),)), late, [(4, 2, 0)], Cursor(9, 9), NOW)[0] == late


def test_a_late_commit_before_what_is_untold_does_not_hide_it() -> None:
    # Transaction 4 was open when the newest was read. It has ended, and its event comes before the one that waits.
    newest = Cursor(9, 9, 0, open=frozenset({4}))
    position, _ = advance(DeliveryState(), Cursor(3, 3), [(4, 5, 0), key(9)], newest, NOW)
    assert position.is_behind(9, 9)
    assert position.is_behind(4, 5)
    # Nor do so many of them that what waits is not among those that were read.
    many = [(4, 10 + number, 0) for number in range(MAX_BATCH)]
    assert advance(DeliveryState(), Cursor(3, 3), many, newest, NOW)[0] == Cursor(3, 3)
    assert advance(DeliveryState(), Cursor(3, 3), many[:-1], newest, NOW)[0] == newest


def test_what_is_remembered_is_bounded_while_more_keeps_coming() -> None:
    book = DeliveryState(told=tuple(map(key, range(100, 100 + MANY_TOLD))), moved_at=NOW)
    newest = Cursor(10**6, 10**6)
    position, moved = advance(book, Cursor(3, 3), [key(10**6)], newest, NOW)
    assert (position.id, moved.told) == (99 + MANY_TOLD, ())


def test_an_emptied_ledger_makes_everything_news() -> None:
    assert advance(DeliveryState(told=(key(5),)), Cursor(3, 3), [], Cursor(), NOW)[0] == Cursor()


# Conditions --------------------------------------------------------------------------------------


def look(
    *late: LateWorker, queue: str = "", waited_s: float = 0.0, served: tuple[str, ...] = ("default",), **changes: Any
) -> ConditionLook:
    """A fleet of one worker that serves `default`."""
    queues = (QueueBacklog(queue, False, 3, (TaskBacklog("add", 3, 1, waited_s),)),) if queue else ()
    facts: dict[str, Any] = {
        "now_at": NOW,
        "queues": queues,
        "late": late,
        "unswept_s": 0.0,
        "served": frozenset(served),
    }
    facts |= {"living": 1, "able": 1, "eldest_s": 1000.0, "check_interval_s": 1.0}
    return ConditionLook(**{**facts, **changes})


NOBODY: dict[str, Any] = {"living": 0, "able": 0, "eldest_s": None, "check_interval_s": None, "served": ()}


def found(at: ConditionLook, rules: Alerts = RULES) -> list[tuple[str, str]]:
    return [(one.kind.value, one.about) for one in find_conditions(at, rules, 1.0)]


def test_a_healthy_fleet_has_no_conditions() -> None:
    assert found(look(queue="default", waited_s=5.0)) == []
    assert found(look(**NOBODY)) == []


def test_a_queue_is_unserved_when_nobody_who_may_claim_serves_it() -> None:
    assert found(look(queue="mail")) == [("no_workers", "mail")]
    assert found(look(queue="default", able=0, served=())) == [("no_workers", "default")]
    # Nobody waits, or an operator wants it so.
    assert found(look()) == []
    paused = msgspec.structs.replace(look(queue="mail"), queues=(QueueBacklog("mail", True, 3, ()),))
    assert found(paused) == []


def test_a_backlog_is_told_once_it_is_old_and_only_where_somebody_serves_it() -> None:
    assert found(look(queue="default", waited_s=601.0)) == [("backlog_old", "default")]
    assert found(look(queue="default", waited_s=601.0, served=())) == [("no_workers", "default")]


def test_a_late_heartbeat_is_told_with_its_worker() -> None:
    late = LateWorker("w1", "ada", "h", WorkerState.SUSPECT, 31.0)
    [one] = find_conditions(look(late), RULES, 1.0)
    assert (one.kind, one.about, one.worker_id) == ("heartbeat_late", "w1", "w1")
    assert one.message == "Worker ada on h: no heartbeat for 31s and is suspect"


def test_nobody_sweeps() -> None:
    assert found(look(unswept_s=60.0)) == [("no_reaper", "ledger")]
    assert found(look(unswept_s=None)) == [("no_reaper", "ledger")]
    assert found(look(eldest_s=1.0, unswept_s=None)) == []
    assert found(look(check_interval_s=60.0, unswept_s=60.0)) == []
    assert found(look(**{**NOBODY, "held": True, "unswept_s": 60.0})) == [("no_reaper", "ledger")]


def test_conditions_begin_last_and_end() -> None:
    def steps(at: ConditionLook, *known: ConditionRecord) -> list[str]:
        return [change.step for change in compare(find_conditions(at, RULES, 1.0), known, at, RULES)]

    unserved = look(queue="mail")
    assert steps(unserved) == ["seen"]
    seen = ConditionRecord("no_workers", "mail", "", NOW - 29, None, None)
    assert steps(unserved, seen) == []
    assert steps(unserved, msgspec.structs.replace(seen, seen_at=NOW - 31)) == ["begun"]
    begun = ConditionRecord("no_workers", "mail", "", NOW - 90, NOW - 60, NOW - 60)
    assert steps(unserved, begun) == []
    assert steps(unserved, msgspec.structs.replace(begun, reminded_at=NOW - 3601)) == ["lasting"]
    assert steps(look(), begun) == ["over"]
    # What another version began is its own business.
    assert steps(look(), ConditionRecord("of_a_newer_version", "x", "", NOW, NOW, NOW)) == []


# Words -------------------------------------------------------------------------------------------


def dead(number: int, detector: Detector = Detector.LEASE, autopsy: Autopsy | None = None) -> AlertEvent:
    verdict = WorkerVerdict(WorkerState.DEAD, detector, f"no heartbeat for {number}s", 1.0, "reaper", autopsy)
    return event(number, worker_id=f"id-{number}", worker_name=f"w-{number}", host="h1", verdict=verdict)


def test_a_thousand_deaths_are_one_message_with_counts_and_the_first_names() -> None:
    killed = Autopsy(DeathKind.SIGNAL, "killed by SIGKILL (signal 9)", Detector.SUPERVISOR, signal="SIGKILL")
    events = [dead(number) for number in range(990)]
    events += [dead(number, Detector.SUPERVISOR, killed) for number in range(990, 1000)]
    message = compose(events)
    assert message.title == "Unstuck: 1,000 workers died"
    assert "990 no heartbeat for the whole timeout; 10 killed by SIGKILL" in message.text
    assert "w-0 on h1, w-1 on h1" in message.text
    assert "and 995 more" in message.text
    assert len(message.text) < 1000
    assert message.facts["counts"] == {"worker_died": 1000}
    assert message.facts["causes"]["worker_died"]["killed by SIGKILL"] == 10
    assert (len(message.facts["alerts"]), message.facts["left_out"]) == (100, 900)


def test_one_message_tells_of_different_things_and_what_to_do() -> None:
    message = compose(
        [
            event(1, "quarantined", job_id=7, task="resize", message="CRASHED_TOO_OFTEN: killed by SIGSEGV"),
            event(2, "no_workers", about="mail", message="No living worker serves queue 'mail'; 3 ready jobs wait"),
            event(3, "no_reaper", about="ledger", message="No reaper is running"),
            event(4, "backlog_old_over", about="bulk", message="The backlog of queue 'bulk' is gone"),
            event(5, "crash_loop", about="h9", message="Host h9 was disabled"),
        ]
    )
    assert message.title == (
        "Unstuck: 1 queue without workers, 1 job quarantined, 1 crash loop, no reaper is running, "
        "over: 1 queue with an old backlog"
    )
    assert "`unstuck why 7`" in message.text
    assert "--queues mail" in message.text
    assert message.facts["alerts"][1]["queue"] == "mail"
    assert message.facts["alerts"][4]["host"] == "h9"
    assert message.facts["alerts"][3]["phase"] == "over"
    assert "repetition" not in message.text
    assert "repetition" in compose([event(1)], repeated=True).text


def test_names_from_outside_cannot_break_out_of_their_line() -> None:
    nasty = event(1, worker_id="w", worker_name="a\nNext: `rm -rf /`\u202e" + "x" * 500, message="m\r\nm")
    assert compose([nasty, event(2)]).text.count("\n") == compose([event(1), event(2)]).text.count("\n")
    assert len(compose([nasty, event(2)]).text) < 1000


# Settings ----------------------------------------------------------------------------------------


def test_settings_name_what_is_wrong_without_repeating_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Did you mean") as error:
        Alerts(kinds="worker_dead")
    assert "worker_died" in str(error.value)
    for wrong in ("no-url-S3CRET", "https://", "http://:S3CRET@", "https://h:99999/S3CRET"):
        with pytest.raises(ConfigError) as error:
            Alerts(targets=wrong)
        assert "S3CRET" not in str(error.value)
    monkeypatch.setenv("UNSTUCK_ALERTS_TARGETS", "json://h/a,b tgram://x/y")
    monkeypatch.setenv("UNSTUCK_ALERTS_KINDS", "worker_died,no_reaper")
    rules = load().alerts
    assert rules.targets == ("json://h/a,b", "tgram://x/y")
    assert rules.kinds == ("worker_died", "no_reaper")
    assert events_of(rules.told_kinds) == {"worker_dead", "no_reaper", "no_reaper_still", "no_reaper_over"}
