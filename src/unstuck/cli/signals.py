"""Send a signal to a job: `signal` wakes the one that waits for it, or keeps it until it does."""

from typing import Annotated

import msgspec
import typer

from unstuck.cli.common import Common, Misuse, command, job_id


@command()
def signal(
    common: Common,
    id: Annotated[str, typer.Argument(metavar="JOB", help="The job's number.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signal that it waits for.")],
    value: Annotated[str | None, typer.Argument(metavar="[VALUE]", help="What comes with it, as JSON.")] = None,
) -> None:
    """Send a signal to a job that waits for it, now or later (`ctx.wait_signal`)."""
    number = job_id(id)
    try:
        data = b"null" if value is None else value.encode()
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Misuse(f"VALUE must be JSON ({error}). Write text as '\"text\"'.") from None
    with common.reading() as operator:
        answer = operator.signal(number, name, data)
    if common.as_json:
        common.show.json({"id": number, "signal": name, "answer": answer})
        return
    what = "and goes on" if answer == "woken" else "and takes it when it comes to it"
    common.show.say(f"Job {number} was sent signal {name!r} {what}.", "green")
