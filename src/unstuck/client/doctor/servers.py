"""Look at which database servers the URLs of the ledger name."""

from collections.abc import Iterator
from urllib.parse import quote

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, info, named, warning
from unstuck.store.diagnosis import AddressLook, Diagnosis

_PRIMARY_ONLY = ("primary", "read-write")


def check_servers(_facts: Facts, diagnosis: Diagnosis, _limits: Limits) -> Iterator[Finding]:
    for address in diagnosis.several_hosts:
        if address.chosen not in _PRIMARY_ONLY:
            yield _several(address)


def _several(address: AddressLook) -> Finding:
    hosts = ",".join(quote(host, safe=":.-_[]") for host in address.hosts)
    user = f"{quote(address.user)}@" if address.user else ""
    cure = f"Write postgresql://{user}{hosts}/{address.database}?target_session_attrs=primary (with the password)."
    facts = {"setting": address.setting, "hosts": list(address.hosts), "target_session_attrs": address.chosen}
    if address.chosen is None:
        return info(
            Code.SEVERAL_HOSTS,
            f"{address.setting} names {len(address.hosts)} servers without target_session_attrs",
            f"Unstuck finds the primary among {named(address.hosts)} by itself. Other programs with this URL (psql, "
            "pg_dump, your application) take the first server that answers. If that is a standby, they read old data "
            "and cannot write.",
            cure,
            **facts,
        )
    return warning(
        Code.SEVERAL_HOSTS,
        f"{address.setting} names {len(address.hosts)} servers with target_session_attrs={address.chosen}",
        f"That may choose a standby among {named(address.hosts)}. Unstuck refuses a standby and tries again, so it may "
        "not get to the primary at all.",
        cure,
        **facts,
    )
