"""Switch workers and hosts off and on: `workers disable`, `workers enable`."""

from collections.abc import Collection
from typing import Annotated

import typer

from unstuck.cli.common import Common, Misuse, command
from unstuck.cli.show import count
from unstuck.client import views

Who = Annotated[
    str | None, typer.Argument(metavar="ID|NAME", help="A worker: its id, the beginning of its id, or its name.")
]
Host = Annotated[str | None, typer.Option("--host", metavar="HOST", help="Every worker of this host, also new ones.")]


@command()
def disable(
    common: Common,
    worker: Who = None,
    host: Host = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Shown wherever the worker is shown.")
    ] = "an operator switched it off",
) -> None:
    """Have a worker, or all of a host, take no more jobs: it finishes what it runs, lives on, and can be enabled."""
    _one_of(worker, host)
    with common.reading() as operator:
        if host is not None:
            here, unserved = operator.disable_host(host, reason)
            said = f"Host {host} is disabled; {count(len(here), 'worker')} there take nothing more."
        else:
            assert worker is not None
            record, unserved = operator.disable_worker(worker, reason)
            here, said = [record], f"Worker {record.name} ({record.id}) on {record.host} is disabled."
    if common.as_json:
        ids = [record.id for record in here]
        common.show.json({"workers": ids, "host": host, "disabled": True, "unserved": sorted(unserved)})
        return
    common.show.say(said, "green")
    _warn_of_unserved(common, unserved)


@command()
def enable(common: Common, worker: Who = None, host: Host = None) -> None:
    """Let a disabled worker or host take jobs again, with a clean record."""
    _one_of(worker, host)
    with common.reading() as operator:
        if host is not None:
            here, changed = operator.enable_host(host)
            what = f"Host {host}"
        else:
            assert worker is not None
            record, changed = operator.enable_worker(worker)
            here, what = [record], f"Worker {record.name} ({record.id}) on {record.host}"
    if common.as_json:
        still = views.disabled_view(here[0].disabled) if host is None else None
        common.show.json({"workers": [one.id for one in here], "host": host, "changed": changed, "disabled": still})
        return
    common.show.say(f"{what} is enabled." if changed else f"{what} was not disabled.", "green" if changed else "yellow")
    if host is None and (left := here[0].disabled) is not None and left.of_host:
        common.show.say(f"Its host is disabled: `unstuck workers enable --host {here[0].host}`.", "yellow")


def _one_of(worker: str | None, host: str | None) -> None:
    if (worker is None) == (host is None):
        raise Misuse("Name one worker, or one host with --host.")


def _warn_of_unserved(common: Common, unserved: Collection[str]) -> None:
    if unserved:
        common.show.say(f"Nobody serves {', '.join(sorted(unserved))} now: its jobs wait.", "yellow")
