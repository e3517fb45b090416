"""Find hosts whose clock differs from the database's. Deadlines go by the database's clock alone; people do not."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, named, warning
from unstuck.client.doctor.metadata import noted
from unstuck.domain.durations import brief
from unstuck.store.diagnosis import Diagnosis

_HURT = (
    "Leases and deadlines go by the database's clock and are safe; times that programs on this host give (run_at) and "
    "times in its logs are off by as much."
)
_CURE = "Have the clock set by NTP (chrony, systemd-timesyncd) on {}."


def check_clocks(facts: Facts, diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
    if diagnosis.clock_off_s is None:
        # One host, one clock.
        return
    if abs(diagnosis.clock_off_s) > limits.clock_s:
        yield _differs(facts.host.name, "", diagnosis.clock_off_s, "measured now")
    worst: dict[str, tuple[float, list[str]]] = {}
    for worker in facts.living:
        clock_at = noted(worker, "clock_at", float)
        if clock_at is None or worker.host == facts.host.name:
            continue
        off_s = clock_at - worker.created_at
        if abs(off_s) > limits.clock_s:
            before_s, names = worst.get(worker.host, (0.0, []))
            worst[worker.host] = (max(before_s, off_s, key=abs), [*names, worker.name])
    for host, (off_s, names) in worst.items():
        yield _differs(host, f" of {named(names)}", off_s, "measured when its workers registered")


def _differs(host: str, whose: str, off_s: float, how: str) -> Finding:
    side = "ahead of" if off_s > 0 else "behind"
    return warning(
        Code.CLOCK_DIFFERS,
        f"The clock of host {host} is {brief(abs(off_s))} {side} the database's",
        f"It was {how}{whose}. {_HURT}",
        _CURE.format(host),
        host=host,
        off_s=round(off_s, 3),
    )
