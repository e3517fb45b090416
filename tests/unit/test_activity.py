"""Charts are made of what was counted minute by minute; what was not counted is an honest gap."""

import math

import pytest

from unstuck.client.activity import activity, quantile
from unstuck.metrics.catalogue import DEATHS, JOB_RUN, JOBS_ENDED
from unstuck.metrics.labels import encode_labels
from unstuck.store.records import MinuteCount


def counted(minute: int, name: str, value: float, **labels: str) -> MinuteCount:
    return MinuteCount(minute, name, encode_labels(labels), value)


def test_every_minute_is_there_and_states_queues_and_causes_are_added_up() -> None:
    minutes = activity(
        [
            counted(101, JOBS_ENDED.name, 3, queue="a", state="succeeded"),
            counted(101, JOBS_ENDED.name, 2, queue="b", state="succeeded"),
            counted(101, JOBS_ENDED.name, 1, queue="a", state="failed"),
            counted(101, DEATHS.name, 1, process="runner", cause="signal"),
            counted(101, JOB_RUN.name, 4, le="0.1"),
        ],
        100,
        103,
    )
    assert [minute.at for minute in minutes] == [6000.0, 6060.0, 6120.0]
    assert minutes[1].ended == {"succeeded": 5, "failed": 1}
    assert minutes[1].ended_by_queue == {"a": 4, "b": 2}
    assert minutes[1].deaths == {"signal": 1}
    assert minutes[1].run_p50_s == pytest.approx(0.075)  # Halfway between 0.05 and 0.1.
    assert minutes[1].wait_p50_s is None
    assert minutes[0].ended == {}
    assert minutes[0].run_p95_s is None


def test_quantiles_are_found_in_their_bucket() -> None:
    buckets = {0.1: 50.0, 1.0: 40.0, 10.0: 10.0, math.inf: 0.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.1)
    assert quantile(buckets, 0.7) == pytest.approx(0.1 + 0.9 * 0.5)
    assert quantile(buckets, 0.95) == pytest.approx(1.0 + 9.0 * 0.5)
    assert quantile({0.1: 0.0, math.inf: 5.0}, 0.5) == 0.1
    assert quantile({0.1: 0.0}, 0.5) is None
