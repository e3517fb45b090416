"""What the evidence carries: who is suspect, who is dead, and who is left alone."""

import math

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from unstuck.domain.liveness import KERNEL, NOT_CUT_OFF_S, Detector, Evidence, Process, Session, Verdict, judge
from unstuck.domain.states import LIVE_STATES, WORKER_TRANSITIONS, WorkerState
from unstuck.domain.watch_clock import (
    Begin,
    Cause,
    Change,
    Extend,
    Keep,
    Period,
    SetBack,
    Tick,
    advance,
    grace_s,
    slack_s,
    watched_s,
)
from unstuck.recovery.watch import ReaperWatch

GRACE_S = 2.0

spans_s = st.one_of(st.floats(0, 400), st.sampled_from([0.0, 6.0, 29.999, 30.0, 240.0]))
timeouts_s = st.one_of(st.floats(1, 300), st.just(math.inf))


@st.composite
def vitals_of_the_living(draw: st.DrawFn) -> Evidence:
    running = draw(st.lists(timeouts_s, max_size=3))
    finite = [timeout_s for timeout_s in running if math.isfinite(timeout_s)]
    state = draw(st.sampled_from(sorted(LIVE_STATES)))
    return Evidence(
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


def healthy(**changes: object) -> Evidence:
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
    return Evidence(**{**facts, **changes})  # type: ignore[arg-type]


def ask(vitals: Evidence, *, neighbours: bool = True, session: bool = True, lease: bool = True) -> Verdict | None:
    return judge(vitals, session_grace_s=GRACE_S, peers=neighbours, session=session, lease=lease)


@given(vitals_of_the_living(), st.booleans(), st.booleans(), st.booleans())
def test_every_verdict_is_a_legal_change_on_evidence_that_was_allowed_to_speak(
    vitals: Evidence, neighbours: bool, session: bool, lease: bool
) -> None:
    verdict = ask(vitals, neighbours=neighbours, session=session, lease=lease)
    if verdict is None:
        return
    assert verdict.state in WORKER_TRANSITIONS[vitals.state]
    assert verdict.state in (WorkerState.SUSPECT, WorkerState.DEAD)
    assert verdict.evidence
    assert neighbours or verdict.detector is not Detector.PEER
    assert session or verdict.detector is not Detector.SESSION
    assert lease or verdict.detector is not Detector.LEASE


@given(vitals_of_the_living())
def test_of_those_who_are_well_nothing_is_ever_said(vitals: Evidence) -> None:
    if vitals.well:
        assert ask(vitals) is None


@given(vitals_of_the_living())
def test_the_kernel_is_believed_at_once_and_kills_outright(vitals: Evidence) -> None:
    verdict = ask(vitals)
    certain = vitals.rebooted or vitals.process is Process.GONE
    assert (verdict is not None and verdict.detector in KERNEL) == certain
    if certain:
        assert verdict is not None
        assert verdict.state is WorkerState.DEAD


@given(vitals_of_the_living())
def test_a_process_that_we_see_running_is_condemned_by_its_lease_alone(vitals: Evidence) -> None:
    if vitals.process is Process.ALIVE and not vitals.rebooted:
        verdict = ask(vitals)
        assert verdict is None or verdict.detector is Detector.LEASE


@given(vitals_of_the_living())
def test_nobody_dies_by_silence_while_a_job_may_still_wait_for_it(vitals: Evidence) -> None:
    verdict = ask(vitals, neighbours=False, session=False)
    if verdict is None or vitals.rebooted:
        return
    assert vitals.silent_s >= vitals.patience_s
    dead = vitals.silent_s >= vitals.suspect_after_s and vitals.silent_s >= (vitals.waits_for_s or 0)
    assert verdict.state is (WorkerState.DEAD if dead else WorkerState.SUSPECT)


@given(vitals_of_the_living())
def test_a_lost_session_is_a_suspicion_first_and_a_death_only_after_the_grace(vitals: Evidence) -> None:
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
def test_nothing_is_said_twice_of_a_suspect(vitals: Evidence) -> None:
    verdict = ask(vitals)
    if verdict is not None and vitals.state is WorkerState.SUSPECT:
        assert verdict.state is WorkerState.DEAD


@given(vitals_of_the_living(), st.floats(0, 400))
def test_more_silence_never_makes_a_worker_look_healthier(vitals: Evidence, more_s: float) -> None:
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
    verdict = judge(vitals, session_grace_s=3600.0, peers=True, session=True)
    assert verdict is not None
    assert (verdict.state, verdict.detector) == (WorkerState.DEAD, Detector.LEASE)


def test_without_any_grace_a_lost_session_still_makes_a_suspect_first() -> None:
    verdict = judge(healthy(session=Session.MISSING), session_grace_s=0.0, peers=True, session=True)
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


LAST = Period(100.0, 200.0)


def ticks(now: float, claim_s: float | None, cause: Cause | None = None) -> Change:
    return advance(LAST, now, Tick(claim_s, every_s=1.0, cause=cause))


def test_the_first_tick_of_a_ledger_begins_the_watch() -> None:
    assert advance(None, 50.0, Tick(None, 1.0)) == Begin(50.0, Cause.START)


def test_a_reaper_that_was_in_touch_all_along_extends_the_watch() -> None:
    assert ticks(201.0, 1.0) == Extend()


def test_a_tick_that_was_a_little_late_on_its_way_still_extends_it() -> None:
    assert ticks(201.9, 1.0) == Extend()


def test_a_reaper_that_knows_nothing_of_before_leaves_the_watch_to_others() -> None:
    assert ticks(201.5, None, Cause.START) == Keep()


@pytest.mark.parametrize("cause", [Cause.START, Cause.OUTAGE])
def test_a_hole_that_no_one_can_vouch_for_is_left_out(cause: Cause) -> None:
    assert ticks(240.0, None, cause) == Begin(240.0, cause)


def test_a_clock_that_was_set_forward_by_an_hour_adds_nothing() -> None:
    assert ticks(3801.0, 1.0) == Begin(3801.0, Cause.CLOCK)


def test_a_database_that_stood_still_adds_nothing_for_a_tick_that_waited_for_it() -> None:
    assert ticks(221.0, 1.0) == Begin(221.0, Cause.CLOCK)


def test_a_second_look_at_the_silent_vouches_for_all_that_it_claims() -> None:
    assert ticks(260.0, 50.0, Cause.START) == Begin(210.0, Cause.START)


def test_a_reaper_that_was_frozen_vouches_only_for_what_it_planned() -> None:
    assert ticks(260.0, 2.0, Cause.PAUSE) == Begin(258.0, Cause.PAUSE)


def test_another_run_of_the_server_begins_a_new_period() -> None:
    assert advance(LAST, 201.0, Tick(1.0, 1.0), same_server=False) == Begin(201.0, Cause.FAILOVER)


def test_a_clock_that_was_set_back_is_followed() -> None:
    assert ticks(100.0, 1.0) == SetBack(100.0)


def test_the_noise_of_clocks_is_no_step_back() -> None:
    assert ticks(199.95, 1.0) == Extend()


def test_silence_counts_only_within_watch_periods() -> None:
    periods = [Period(0.0, 100.0), Period(140.0, 150.0)]
    assert watched_s(periods, 95.0) == 15.0
    assert watched_s(periods, 120.0) == 10.0
    assert watched_s(periods, 145.0) == 5.0
    assert watched_s(periods, 160.0) == 0.0
    assert watched_s([], 0.0) == 0.0


def test_a_worker_that_was_silent_before_an_outage_stays_silent() -> None:
    before = watched_s([Period(0.0, 100.0)], 75.0)
    after = watched_s([Period(0.0, 100.0), Period(200.0, 205.0)], 75.0)
    assert (before, after) == (25.0, 30.0)


def test_everyone_gets_a_moment_to_reconnect_but_never_more_than_a_timeout() -> None:
    assert grace_s(30.0, 5.0) == 9.5
    assert grace_s(1.0, 0.5) == 1.0


def test_a_quick_fleet_allows_less_delay() -> None:
    assert slack_s(5.0) == 1.0
    assert slack_s(1.0) == 0.5
    assert slack_s(0.1) == 0.2


def test_a_frozen_reaper_does_not_count_again_what_others_counted_before_the_clock_was_set_forward() -> None:
    # Others watched until a second ago. The clock was set forward by 32 s since then, while it was frozen for 20 s.
    tick = Tick(7.5, every_s=7.5, cause=Cause.PAUSE, since_s=20.0, seen_at=181.0)
    assert advance(LAST, 233.0, tick) == Begin(233.0, Cause.PAUSE)


def test_a_starved_reaper_claims_its_part_if_the_clock_was_not_set() -> None:
    tick = Tick(7.5, every_s=7.5, cause=Cause.PAUSE, since_s=20.0, seen_at=200.0)
    assert advance(LAST, 220.5, tick) == Begin(213.0, Cause.PAUSE)


def test_a_claim_does_not_reach_over_a_step_of_the_clock_to_the_last_tick_of_another_reaper() -> None:
    # Another reaper was in touch a second ago. This one was 4.5 s ago, and the clock was set forward by 3.9 s since.
    tick = Tick(4.5, every_s=1.0, since_s=4.5, seen_at=196.5)
    assert advance(LAST, 201.0, tick) == Extend()
    assert advance(LAST, 204.9, tick) == Begin(204.9, Cause.CLOCK)


def test_a_clock_that_was_set_back_takes_nothing_from_a_claim() -> None:
    assert advance(LAST, 201.0, Tick(4.5, every_s=1.0, since_s=4.5, seen_at=300.0)) == Extend()


INTERVAL_S = 5.0


def in_touch(at_s: float) -> ReaperWatch:
    attention = ReaperWatch(every_s=1.0)
    attention.tick(at_s, INTERVAL_S)
    attention.reached(at_s, at_s, stale_s=0.0, connected_s=math.inf)
    attention.rest(at_s, 1.0)
    return attention


def test_a_reaper_that_just_started_claims_nothing() -> None:
    attention = ReaperWatch(every_s=1.0)
    tick = attention.tick(100.0, INTERVAL_S)
    assert (tick.claim_s, tick.cause) == (None, Cause.START)
    assert attention.awake


def test_a_reaper_on_time_claims_the_time_since_its_last_contact() -> None:
    attention = in_touch(100.0)
    tick = attention.tick(101.0, INTERVAL_S)
    assert (tick.claim_s, tick.cause) == (1.0, None)
    assert attention.awake


def test_what_others_had_not_watched_at_its_last_contact_is_claimed_too() -> None:
    attention = in_touch(100.0)
    attention.reached(101.0, 101.0, stale_s=0.4, connected_s=math.inf)
    assert attention.tick(102.0, INTERVAL_S).claim_s == 1.4


def test_a_frozen_reaper_claims_only_what_it_planned_and_accuses_no_one() -> None:
    attention = in_touch(100.0)
    tick = attention.tick(160.0, INTERVAL_S)
    assert (tick.claim_s, tick.cause) == (2.0, Cause.PAUSE)
    assert not attention.awake
    attention.reached(160.0, 160.0, stale_s=0.0, connected_s=math.inf)
    attention.rest(160.0, 1.0)
    assert attention.tick(161.0, INTERVAL_S).cause is None
    assert attention.awake


def test_no_claim_is_longer_than_every_living_worker_may_be_late() -> None:
    attention = ReaperWatch(every_s=0.5)
    attention.reached(100.0, 100.0, stale_s=0.0, connected_s=math.inf)
    attention.rest(100.0, 30.0)
    assert attention.tick(130.0, INTERVAL_S).claim_s == INTERVAL_S / 2


def test_a_long_round_is_not_claimed_as_a_whole() -> None:
    attention = in_touch(100.0)
    attention.rest(120.0, 1.0)
    assert attention.tick(121.0, 60.0).claim_s == 3.0


def test_a_reaper_that_was_cut_off_claims_nothing() -> None:
    attention = in_touch(100.0)
    attention.lost()
    tick = attention.tick(101.0, INTERVAL_S)
    assert (tick.claim_s, tick.cause) == (None, Cause.OUTAGE)
    assert not attention.awake


def test_it_is_steady_since_its_last_pause_outage_or_lost_connection() -> None:
    attention = in_touch(100.0)
    assert attention.steady_s(100.0) == math.inf
    attention.reached(110.0, 110.0, stale_s=0.0, connected_s=2.0)
    assert attention.steady_s(115.0) == 5.0
    attention.reached(116.0, 116.0, stale_s=0.0, connected_s=8.0)
    assert attention.steady_s(116.0) == 6.0
    attention.lost()
    assert attention.steady_s(120.0) == 0.0
    attention.reached(121.0, 121.0, stale_s=0.0, connected_s=0.5)
    assert attention.steady_s(124.0) == 3.0


def test_a_pause_is_no_lost_connection() -> None:
    attention = in_touch(100.0)
    assert attention.connected_s(100.0) == math.inf
    attention.tick(160.0, INTERVAL_S)
    attention.reached(160.0, 160.0, stale_s=0.0, connected_s=math.inf)
    assert (attention.steady_s(162.0), attention.connected_s(162.0)) == (2.0, math.inf)
    attention.reached(163.0, 163.0, stale_s=0.0, connected_s=0.5)
    assert attention.connected_s(165.0) == 2.0
    attention.lost()
    assert attention.connected_s(166.0) == 0.0
    attention.reached(167.0, 167.0, stale_s=0.0, connected_s=math.inf)
    assert attention.connected_s(170.0) == 3.0


def test_a_fleet_with_a_quick_worker_is_watched_as_closely_as_that_one_needs() -> None:
    attention = ReaperWatch(every_s=10.0)
    attention.reached(100.0, 100.0, stale_s=0.0, connected_s=math.inf)
    attention.rest(100.0, 10.0)
    tick = attention.tick(110.0, 3.0)
    assert (tick.claim_s, tick.every_s) == (1.5, 1.5)


def test_a_reaper_vouches_for_no_time_before_its_own_first_contact() -> None:
    # The watch was last extended 12 s before: others may have kept it, or the ledger was away until just now.
    attention = ReaperWatch(every_s=6.0)
    attention.tick(100.0, 12.0)
    attention.reached(100.0, 100.0, stale_s=12.0, connected_s=math.inf)
    attention.rest(100.0, 6.0)
    assert attention.tick(106.0, 12.0).claim_s == 6.0


def test_a_contact_in_the_middle_of_a_long_round_claims_the_work_since_the_last_one() -> None:
    attention = in_touch(100.0)
    attention.tick(101.0, INTERVAL_S)
    attention.reached(101.0, 101.0, stale_s=0.0, connected_s=math.inf)
    tick = attention.tick_amid(102.8, INTERVAL_S)
    assert (round(tick.claim_s or 0.0, 6), tick.cause) == (1.8, None)
    # One part of the round took longer than any pause may.
    attention.reached(102.8, 102.8, stale_s=0.0, connected_s=math.inf)
    assert attention.tick_amid(140.0, INTERVAL_S).claim_s == 2.0
    assert attention.awake
    assert attention.steady_s(140.0) == math.inf


def test_a_contact_in_the_middle_of_a_round_that_came_late_leaves_it_late() -> None:
    attention = in_touch(100.0)
    attention.tick(160.0, INTERVAL_S)
    attention.reached(160.0, 160.0, stale_s=0.0, connected_s=math.inf)
    attention.tick_amid(162.5, INTERVAL_S)
    assert not attention.awake
    assert attention.steady_s(162.5) == 2.5


def test_a_tick_says_what_both_clocks_showed_since_the_last_contact() -> None:
    attention = in_touch(100.0)
    attention.reached(101.0, 101.2, stale_s=0.0, connected_s=math.inf, at=5000.0)
    tick = attention.tick(103.0, INTERVAL_S)
    assert (tick.since_s, tick.seen_at) == (2.0, 5000.0)
    attention.lost()
    tick = attention.tick(104.0, INTERVAL_S)
    assert (tick.claim_s, tick.since_s, tick.seen_at) == (None, None, None)
