"""Find out whose a unique key is, and do what was asked for where it is another's."""

import time

import apsw

from unstuck.domain.errors import DuplicateJob
from unstuck.domain.states import AttemptState
from unstuck.store.records import NewJob, Ties
from unstuck.store.sqlite.verbs import SQL, write_event

PERIOD = "period"
_PLAIN = Ties()


def unique_for(job: NewJob) -> str | None:
    """Say what its key is good for; None: until it ends."""
    if job.unique_key is None or job.more is None:
        return None
    return PERIOD if job.more.unique_for_s is not None else job.more.unique


def owner_of(cursor: apsw.Cursor, job: NewJob) -> int | None:
    """Give who has the key, if anybody."""
    if unique_for(job) == PERIOD:
        found = cursor.execute(SQL["find_kept_key"], (job.unique_key, time.time())).get
    else:
        found = cursor.execute(SQL["find_live_key"], (job.unique_key,)).get
    return None if found is None else int(found)


def replaces(cursor: apsw.Cursor, job: NewJob, job_id: int, owner: int) -> bool:
    """Say whether this job goes in although another has its key: that one is cancelled, if it is still pending."""
    match (job.more or _PLAIN).on_duplicate:
        case "refuse":
            raise DuplicateJob(owner, job.unique_key)
        case "replace":
            return _displace(cursor, owner, job_id)
        case None:
            return False


def keep_key(cursor: apsw.Cursor, job: NewJob, job_id: int) -> None:
    if job.more is not None and job.more.unique_for_s is not None:
        cursor.execute(SQL["keep_key"], (job.unique_key, job_id, time.time() + job.more.unique_for_s))


def _displace(cursor: apsw.Cursor, owner: int, by: int) -> bool:
    from unstuck.store.sqlite.ties import settled

    found = cursor.execute(SQL["displace_job"], (owner, time.time(), f"replaced by job {by}")).fetchall()
    if not found:
        return False
    message = f"Replaced by job {by}, which has the same unique key"
    write_event(cursor, "cancelled", message, job_id=owner)
    if found[0][0]:
        settled(cursor, [(owner, AttemptState.CANCELLED)])
    return True
