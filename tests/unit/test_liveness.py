"""What the evidence carries: who is suspect, who is dead, and who is left alone."""

import math

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from unstuck.domain.liveness import KERNEL, NOT_CUT_OFF_S, Detector, Process, Session, Verdict, Vitals, judge
from unstuck.domain.states import LIVING, WORKER_TRANSITIONS, WorkerState

GRACE_S = 2.0

spans_s = st.one_of(st.floats(0, 400), st.sampled_from([0.0, 6.0, 29.999, 30.0, 240.0]))
timeouts_s = st.one_of(st.floats(1, 300), st.just(math.inf))


@st.composite
def vitals_of_the_living(draw: st.DrawFn) -> Vitals:
    running = draw(st.lists(timeouts_s, max_size=3))
    finite = [timeout_s for timeout_s in running if math.isfinite(timeout_s)]
    state = draw(st.sampled_from(sorted(LIVING)))
    return Vitals(
        state=state,
        silent_s=draw(spans_s),
        suspect_after_s=draw(st.floats(1, 300)),
        session=draw(st.sampled_from(Session)),
        session_missing_s=draw(spans_s) if state is WorkerState.SUSPECT else 0.0,
        process=draw(st.sampled_from(Process)),
        rebooted=draw(st.booleans()),
        waits_for_s=max(running, default=None),
        shortest_s=min(finite, default=None),
        interval_s=draw(st.floats(0.1, 60)),
        watched_s=draw(st.one_of(spans_s, st.just(math.inf))),
        quiet_s=draw(spans_s),
        suspected_by=draw(st.sampled_from([Detector.SESSION, Detector.LEASE])) if state == "suspect" else None,
        since_beat_s=draw(spans_s),
        sessions_doubted_s=draw(st.one_of(spans_s, st.just(math.inf))),
    )


def healthy(**changes: object) -> Vitals:
    facts: dict[str, object] = {
        "state": WorkerState.ACTIVE,
        "silent_s": 1.0,
        "suspect_after_s": 30.0,
        "session": Session.PRESENT,
        "session_missing_s": 0.0,
        "process": Process.UNKNOWN,
        "rebooted": False,
        "waits_for_s": None,
    }
    return Vitals(**{**facts, **changes})  # type: ignore[arg-type]


def ask(vitals: Vitals, *, neighbours: bool = True, session: bool = True, lease: bool = True) -> Verdict | None:
    return judge(vitals, session_grace_s=GRACE_S, neighbours=neighbours, session=session, lease=lease)


@given(vitals_of_the_living(), st.booleans(), st.booleans(), st.booleans())
def test_every_verdict_is_a_legal_change_on_evidence_that_was_allowed_to_speak(
    vitals: Vitals, neighbours: bool, session: bool, lease: bool
) -> None:
    verdict = ask(vitals, neighbours=neighbours, session=session, lease=lease)
    if verdict is None:
        return
    assert verdict.state in WORKER_TRANSITIONS[vitals.state]
    assert verdict.state in (WorkerState.SUSPECT, WorkerState.DEAD)
    assert verdict.evidence
    assert neighbours or verdict.detector is not Detector.NEIGHBOUR
    assert session or verdict.detector is not Detector.SESSION
    assert lease or verdict.detector is not Detector.LEASE


@given(vitals_of_the_living())
def test_of_those_who_are_well_nothing_is_ever_said(vitals: Vitals) -> None:
    if vitals.well:
        assert ask(vitals) is None


@given(vitals_of_the_living())
def test_the_kernel_is_believed_at_once_and_kills_outright(vitals: Vitals) -> None:
    verdict = ask(vitals)
    certain = vitals.rebooted or vitals.process is Process.GONE
    assert (verdict is not None and verdict.detector in KERNEL) == certain
    if certain:
        assert verdict is not None
        assert verdict.state is WorkerState.DEAD


@given(vitals_of_the_living())
def test_a_process_that_we_see_running_is_condemned_by_its_lease_alone(vitals: Vitals) -> None:
    if vitals.process is Process.ALIVE and not vitals.rebooted:
        verdict = ask(vitals)
        assert verdict is None or verdict.detector is Detector.LEASE


@given(vitals_of_the_living())
def test_nobody_dies_by_silence_while_a_job_may_still_wait_for_it(vitals: Vitals) -> None:
    verdict = ask(vitals, neighbours=False, session=False)
    if verdict is None or vitals.rebooted:
        return
    assert vitals.silent_s >= vitals.patience_s
    dead = vitals.silent_s >= vitals.suspect_after_s and vitals.silent_s >= (vitals.waits_for_s or 0)
    assert verdict.state is (WorkerState.DEAD if dead else WorkerState.SUSPECT)


@given(vitals_of_the_living())
def test_a_lost_session_is_a_suspicion_first_and_a_death_only_after_the_grace(vitals: Vitals) -> None:
    verdict = ask(vitals, lease=False)
    if verdict is None or verdict.detector is not Detector.SESSION:
        return
    assert vitals.session is Session.MISSING
    assert vitals.since_beat_s < vitals.sessions_doubted_s, "something else may have ended its session"
    if verdict.state is WorkerState.DEAD:
        assert vitals.state is WorkerState.SUSPECT
        assert vitals.suspected_by is Detector.SESSION
        assert vitals.session_missing_s >= GRACE_S
    else:
        assert vitals.quiet_s < NOT_CUT_OFF_S
        assert vitals.quiet_s < 2 * vitals.interval_s + 1, "it had missed a heartbeat: only its lease decides"


@given(vitals_of_the_living())
def test_nothing_is_said_twice_of_a_suspect(vitals: Vitals) -> None:
    verdict = ask(vitals)
    if verdict is not None and vitals.state is WorkerState.SUSPECT:
        assert verdict.state is WorkerState.DEAD


@given(vitals_of_the_living(), st.floats(0, 400))
def test_more_silence_never_makes_a_worker_look_healthier(vitals: Vitals, more_s: float) -> None:
    order = {None: 0, WorkerState.SUSPECT: 1, WorkerState.DEAD: 2}
    later = msgspec.structs.replace(vitals, silent_s=vitals.silent_s + more_s)
    before, after = ask(vitals), ask(later)
    assert order[before.state if before else None] <= order[after.state if after else None]


def test_a_worker_that_beats_is_left_alone() -> None:
    assert ask(healthy()) is None
    assert ask(healthy(process=Process.ALIVE, silent_s=29.9)) is None


def test_a_hidden_session_or_a_foreign_process_proves_nothing() -> None:
    assert ask(healthy(session=Session.UNKNOWN, process=Process.UNKNOWN)) is None


def test_a_silent_worker_with_a_patient_job_is_suspect_until_that_job_gives_up() -> None:
    suspect = ask(healthy(silent_s=31.0, waits_for_s=240.0, shortest_s=240.0))
    assert suspect is not None
    assert suspect.state is WorkerState.SUSPECT
    still = healthy(state=WorkerState.SUSPECT, silent_s=100.0, waits_for_s=240.0, shortest_s=240.0)
    assert ask(still) is None
    dead = ask(healthy(state=WorkerState.SUSPECT, silent_s=240.0, waits_for_s=240.0, shortest_s=240.0))
    assert dead is not None
    assert dead.state is WorkerState.DEAD
    assert "no heartbeat for 4m" in dead.evidence


def test_a_job_that_asked_for_less_makes_its_worker_suspect_earlier() -> None:
    verdict = ask(healthy(silent_s=6.0, waits_for_s=6.0, shortest_s=6.0))
    assert verdict is not None
    assert verdict.state is WorkerState.SUSPECT


def test_a_job_without_heartbeat_keeps_its_worker_suspect_until_the_deadline_ends_it() -> None:
    assert ask(healthy(state=WorkerState.SUSPECT, silent_s=9999.0, waits_for_s=math.inf)) is None
    gone = ask(healthy(state=WorkerState.SUSPECT, silent_s=9999.0, waits_for_s=None))
    assert gone is not None
    assert gone.state is WorkerState.DEAD


def test_a_lease_that_ran_out_is_not_held_up_by_a_long_session_grace() -> None:
    vitals = healthy(state=WorkerState.SUSPECT, session=Session.MISSING, session_missing_s=1.0, silent_s=31.0)
    verdict = judge(vitals, session_grace_s=3600.0, neighbours=True, session=True)
    assert verdict is not None
    assert (verdict.state, verdict.detector) == (WorkerState.DEAD, Detector.LEASE)


def test_without_any_grace_a_lost_session_still_makes_a_suspect_first() -> None:
    verdict = judge(healthy(session=Session.MISSING), session_grace_s=0.0, neighbours=True, session=True)
    assert verdict is not None
    assert verdict.state is WorkerState.SUSPECT


def test_a_worker_that_was_silent_before_its_session_ended_may_be_cut_off_and_only_its_lease_decides() -> None:
    cut_off = healthy(session=Session.MISSING, silent_s=17.0, quiet_s=17.0)
    assert ask(cut_off) is None
    suspect = healthy(
        state=WorkerState.SUSPECT,
        suspected_by=Detector.LEASE,
        session=Session.MISSING,
        session_missing_s=60.0,
        silent_s=31.0,
        waits_for_s=240.0,
    )
    assert ask(suspect) is None
    assert ask(msgspec.structs.replace(suspect, suspected_by=Detector.SESSION)) is not None


def test_a_session_that_may_be_missing_for_another_reason_proves_nothing_until_the_next_heartbeat() -> None:
    missing = healthy(session=Session.MISSING, since_beat_s=4.0, sessions_doubted_s=3.0)
    assert ask(missing) is None
    assert missing.well, "no round need look at it any closer"
    suspect = msgspec.structs.replace(
        missing, state=WorkerState.SUSPECT, suspected_by=Detector.SESSION, session_missing_s=60.0
    )
    assert ask(suspect) is None
    assert ask(msgspec.structs.replace(suspect, since_beat_s=2.0)) is not None
    assert ask(msgspec.structs.replace(missing, silent_s=31.0)) is not None, "its lease decides"
    # A clock that was set may show a heartbeat of the future.
    assert ask(msgspec.structs.replace(missing, since_beat_s=-1.0, sessions_doubted_s=0.0)) is None


def test_a_worker_that_was_killed_in_the_middle_of_its_work_is_seen_by_its_session() -> None:
    suspect = ask(healthy(session=Session.MISSING, silent_s=29.0, quiet_s=0.8))
    assert suspect is not None
    assert (suspect.state, suspect.detector) == (WorkerState.SUSPECT, Detector.SESSION)


def test_after_an_outage_everyone_has_a_moment_to_be_heard_before_a_lease_runs_out() -> None:
    silent = healthy(silent_s=31.0, interval_s=5.0, watched_s=9.4)
    assert ask(silent) is None
    assert ask(msgspec.structs.replace(silent, watched_s=9.5)) is not None


def test_a_database_that_fails_again_and_again_does_not_hide_a_death_for_ever() -> None:
    silent = healthy(silent_s=39.4, interval_s=5.0, watched_s=1.0)
    assert ask(silent) is None
    assert ask(msgspec.structs.replace(silent, silent_s=39.5)) is not None
