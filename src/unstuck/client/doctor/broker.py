"""Find messages that the ZeroMQ broker dropped."""

from collections.abc import Iterator

from unstuck.client.doctor.facts import Facts, Thresholds
from unstuck.client.doctor.findings import Finding, count, warning
from unstuck.domain.conditions import Code
from unstuck.domain.units import brief
from unstuck.ledger.contract.diagnosis import Diagnosis

MAX_NAMED = 5


def check_dropped(facts: Facts, _diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
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
