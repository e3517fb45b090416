"""Tell nodes that were in hand when their workflow was taken up again that they need not stop."""

from collections.abc import Collection
from functools import partial

from unstuck.store.postgres import arrays
from unstuck.store.postgres.holders import HolderVerbs


def unstop_nodes(verbs: HolderVerbs, job_ids: Collection[int]) -> None:
    """Those of the workflows that these jobs, which were queued again, are of."""
    for (job_id,) in verbs.read("nodes_to_unstop", ids=arrays.int8s(list(job_ids))) if job_ids else ():
        # Each alone: who waits for one while holding another might wait for ever.
        verbs.past_locks(verbs.read_lane, partial(verbs.read_lane.write, verbs.sql["unstop"], {"id": job_id}))
