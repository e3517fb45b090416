"""Find messages that the ZeroMQ broker dropped."""

import time
from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, count, warning
from unstuck.domain.durations import brief
from unstuck.metrics.catalogue import MDP_DROPPED
from unstuck.metrics.labels import decode_labels
from unstuck.store.contract import Ledger
from unstuck.store.diagnosis import Diagnosis

MAX_NAMED = 5
ROUTINE = frozenset({"a reply that came too late"})
"""What happens after every death, and loses nothing."""


def look_at_dropped(ledger: Ledger, within_s: float) -> dict[str, int]:
    """Return how many messages were dropped lately, by why."""
    counts = ledger.counter_sums(MDP_DROPPED.name, int((time.time() - within_s) // 60))
    found = {decode_labels(one.labels)["why"]: round(one.value) for one in counts}
    return {why: messages for why, messages in found.items() if messages and why not in ROUTINE}


def check_dropped(facts: Facts, _diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
    if not facts.dropped:
        return
    messages = sum(facts.dropped.values())
    worst = sorted(facts.dropped, key=lambda why: (-facts.dropped[why], why))[:MAX_NAMED]
    yield warning(
        Code.MDP_DROPPED,
        f"The ZeroMQ broker dropped {count(messages, 'message')} in the last {brief(limits.dropped_s)}",
        "; ".join(f"{facts.dropped[why]} × {why}" for why in worst) + ".",
        "Correct the peers that send them. If requests or replies are too large, raise `mdp.max_message_bytes` or "
        "`mdp.max_frames`; if a client has too many open, `mdp.max_requests_per_client`.",
        messages=messages,
        reasons={why: facts.dropped[why] for why in worst},
    )
