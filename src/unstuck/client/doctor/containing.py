"""Say what becomes of the processes that jobs start, and whom the kernel kills when memory runs out."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, capital, info, named, warning
from unstuck.client.doctor.metadata import noted
from unstuck.store.diagnosis import Diagnosis


def check_containment(facts: Facts, _diagnosis: Diagnosis | None, _limits: Limits) -> Iterator[Finding]:
    """Workers say what they found; where none is on this host, the doctor looks itself."""
    rooms: dict[str, set[str]] = {}
    grouped: set[str] = set()
    for worker in facts.living:
        sentence = noted(worker, "containment", str)
        if sentence:
            rooms.setdefault(sentence, set()).add(worker.host)
        if noted(worker, "oom_group", bool):
            grouped.add(worker.host)
    if not any(facts.host.name in hosts for hosts in rooms.values()):
        if facts.host.containment:
            rooms.setdefault(facts.host.containment, set()).add(facts.host.name)
        if facts.host.oom_group:
            grouped.add(facts.host.name)
    for sentence, hosts in rooms.items():
        names = named(sorted(hosts))
        strong = sentence.startswith("cgroup")
        yield info(
            Code.CONTAINMENT,
            f"Containment on {names}: {sentence.partition(':')[0]}",
            f"{capital(sentence.partition(': ')[2] or sentence)}.",
            "" if strong else "To be sure, delegate a cgroup v2 to the worker (systemd: Delegate=yes).",
            hosts=sorted(hosts),
            containment=sentence,
        )
    if grouped:
        yield warning(
            Code.OOM_GROUP,
            f"On {named(sorted(grouped))} the kernel kills a whole worker when one job takes too much memory",
            "memory.oom.group is 1 in the worker's cgroup: out of memory, nobody in it is spared, and every job of the "
            "worker dies with the culprit.",
            "systemd: OOMPolicy=continue. Kubernetes: singleProcessOOMKill: true in the kubelet's configuration.",
            hosts=sorted(grouped),
        )
