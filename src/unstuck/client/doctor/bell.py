"""Find out whether workers can be woken, or must find new jobs by polling."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, info, named, warning
from unstuck.client.doctor.metadata import told
from unstuck.domain.durations import brief
from unstuck.store.diagnosis import Diagnosis


def check_bell(facts: Facts, diagnosis: Diagnosis, _limits: Limits) -> Iterator[Finding]:
    poll = brief(facts.settings.poll_interval_s)
    price = f"An idle worker then finds a new job only when it looks, every {poll}."
    silenced = [worker.name for worker in facts.living if told(worker, "notify", bool) is False]
    if diagnosis.bell == "off" or silenced:
        where = f"for {named(silenced)}" if silenced else "in the settings"
        yield info(
            Code.NOTIFY_OFF,
            "Wake-ups are switched off",
            f"notify is false {where}. {price}",
            "Set notify = true, unless that is meant.",
            workers=silenced,
        )
    if diagnosis.bell == "pooled":
        yield warning(
            Code.POOLER_WITHOUT_LISTEN_URL,
            "A pooler stands before the database, and there is no listen_url",
            f"Nobody can LISTEN through a pooler in transaction mode. {price}",
            "Set listen_url to the direct address of the server.",
        )
    elif diagnosis.bell == "silent":
        yield warning(
            Code.NOTIFY_SILENT,
            "NOTIFY does not arrive",
            f"The doctor rang and listened, as workers do: {diagnosis.bell_note or 'nothing was heard'}. {price}",
            "See that listen_url leads to the same server and database as url, directly and not through a pooler."
            if facts.settings.listen_url
            else "See that nothing between here and the server swallows NOTIFY; else set listen_url.",
            note=diagnosis.bell_note,
        )
    if diagnosis.pooler:
        yield info(
            Code.POOLER,
            "A pooler stands between here and the database",
            "Sessions prove nothing behind it: a lost host is noticed by its lease (heartbeat_timeout) and not by "
            "its session.",
            "Nothing; or give workers the direct address as url.",
        )
    deaf = [worker for worker in facts.living if worker.id in diagnosis.deaf]
    if deaf:
        yield warning(
            Code.BELL_UNREACHABLE,
            f"The bell of {named([worker.name for worker in deaf])} cannot be reached from here",
            "Bells are Unix sockets: either the process has just died, or it is in another network namespace "
            f"(container), where none from here are heard. {price}",
            f"See whether process {deaf[0].pid} on {deaf[0].host} lives. If it does, run what enqueues and what works "
            "in one network namespace; or nothing, if the delay does not matter.",
            workers=[worker.id for worker in deaf],
        )
