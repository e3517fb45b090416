"""Refuse numbers that no ledger can keep, before anything is written, in the same words for both databases."""

from collections.abc import Collection, Iterable

from unstuck.domain.limits import MAX_CONCURRENCY_LIMIT
from unstuck.domain.states import Transport
from unstuck.errors import NameTaken, RefusedValue
from unstuck.ledger.contract.jobs import JobExtras, NewJob
from unstuck.ledger.contract.workers import Exchange, NewWorker, ReplyAddress
from unstuck.ledger.contract.workflows import NewWorkflow

MAX_PRIORITY = 1000
EARLIEST_S = -62_135_596_800.0
"""The first day that a calendar can name, in seconds since 1970."""
LATEST_S = 253_370_764_800.0
"""The year 9999: what comes later has no date, and infinity cannot even be compared with now."""
LONGEST_S = 1e10
"""Three hundred years."""
LARGEST_ID = 2**63 - 1
CLIENT_BYTES = range(16, 256)
"""How long an identity may be: shorter ones are not unique enough to be found again, longer ones ZeroMQ has not."""
MAX_PLACES = 2**31 - 1


def name_taken(new_worker: NewWorker) -> NameTaken:
    """Return the error of a worker whose name a living worker of another kind has."""
    other = "over HTTP or ZeroMQ" if new_worker.transport is Transport.PYTHON else "in Python"
    return NameTaken(
        f"A living worker {other} is named {new_worker.name!r}. Choose another name, or stop that worker first "
        "(`unstuck workers` lists both kinds)."
    )


def check_jobs(jobs: Iterable[NewJob]) -> None:
    """Raise RefusedValue for a time, a timeout or a priority that one of the databases could not live with."""
    for job in jobs:
        if not -MAX_PRIORITY <= job.priority <= MAX_PRIORITY:
            raise RefusedValue(f"A priority must be between -1000 and 1000, not {job.priority}.")
        # Written so that NaN, which is neither above nor below, is refused too.
        if job.run_at is not None and not EARLIEST_S <= job.run_at <= LATEST_S:
            raise RefusedValue(f"run_at must be a moment before the year 9999, not {job.run_at}.")
        if not -LONGEST_S <= job.delay_s <= LONGEST_S:
            raise RefusedValue(f"A delay of {job.delay_s} seconds cannot be waited out. Choose a shorter one.")
        for limit_s in (job.timeout_s, job.heartbeat_timeout_s):
            if limit_s is not None and not 0 <= limit_s <= LONGEST_S:
                raise RefusedValue(f"A timeout of {limit_s} seconds can never be seen to pass. Choose a shorter one.")
        if job.more is not None:
            _check_extras(job.more)


def _check_extras(more: JobExtras) -> None:
    if more.concurrency_limit is not None and not 1 <= more.concurrency_limit <= MAX_CONCURRENCY_LIMIT:
        raise RefusedValue(f"A line has 1 to {MAX_CONCURRENCY_LIMIT} places, not {more.concurrency_limit}.")
    for name, value_s in (
        ("expiry", more.expires_in_s),
        ("time to be kept", more.retain_s),
        ("unique period", more.unique_for_s),
    ):
        if value_s is not None and not 0 <= value_s <= LONGEST_S:
            raise RefusedValue(f"{value_s} seconds is no {name} that can be measured. Choose another.")


def check_workflow(workflow: NewWorkflow) -> None:
    """Raise RefusedValue for a job of it that could not be enqueued."""
    check_jobs([workflow.root, *(node.job for node in workflow.nodes if node.job is not None)])


def check_ids(job_ids: Collection[int]) -> None:
    """Raise RefusedValue for what cannot be the id of a job, whoever typed it."""
    if job_ids and (min(job_ids) < -LARGEST_ID or max(job_ids) > LARGEST_ID):
        wrong = next(job_id for job_id in job_ids if abs(job_id) > LARGEST_ID)
        raise RefusedValue(f"{wrong} is not the id of a job: ids have at most 64 bits. Check what was typed.")


def check_exchange(exchange: Exchange) -> None:
    """Raise RefusedValue for what one of the databases could not keep."""
    assert len(exchange.reply_addresses) in (0, len(exchange.jobs)), "a letter, or None, for each job, or none at all"
    check_jobs(exchange.jobs)
    check_jobs(one.job for one in exchange.once)
    check_ids(exchange.answered)
    for reply_address in (*exchange.reply_addresses, *(one.reply_address for one in exchange.once)):
        if reply_address is not None:
            _check_reply_address(reply_address)


def _check_reply_address(reply_address: ReplyAddress) -> None:
    if len(reply_address.client) not in CLIENT_BYTES:
        raise RefusedValue(f"The identity of a client must have 16 to 255 bytes, not {len(reply_address.client)}.")
    if not 0 <= reply_address.place < reply_address.places <= MAX_PLACES:
        raise RefusedValue(f"There is no place {reply_address.place} among {reply_address.places} calls.")
