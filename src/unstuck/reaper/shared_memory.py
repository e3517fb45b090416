"""Remove the shared memory that killed workers left on this host and nobody else will remove.

Whoever settles the jobs of a dead worker on its own host removes its page (`scene.forget`). A page stays behind if the
jobs were settled from another host, or if the worker was killed before it had registered. Only pages are removed that
are ours beyond doubt: of this user, in our layout, of this ledger, with everyone dead who lived by them.
"""

import time
from pathlib import Path

from unstuck.domain.errors import LedgerError
from unstuck.logs import logger
from unstuck.runner.trace import PREFIX, Trace, trace_folder
from unstuck.store.contract import Ledger

EVERY_S = 300.0
OTHERS_KEPT_S = 7 * 86_400.0
"""Pages of another ledger are left to its own workers; after this time nobody seems to work with it any more."""

log = logger("unstuck.reaper")


def remove_leftovers(ledger: Ledger, folder: Path | None = None) -> int:
    """Remove the pages of the dead that hold nothing any more, and return how many."""
    abandoned = [
        page
        for path in sorted((folder or trace_folder()).glob(f"{PREFIX}*"))
        if (page := Trace.open_abandoned(path)) is not None
    ]
    if not abandoned:
        return 0
    removed = 0
    try:
        ours = ledger.ledger_id()
        living = {worker.id for worker in ledger.workers(living_only=True)}
        for page in abandoned:
            if _is_of_use(ledger, page, ours, living):
                continue
            try:
                page.unlink()
                removed += 1
            except OSError:
                pass  # Somebody else may do this.
    except LedgerError:
        pass  # The next round tries again.
    finally:
        for page in abandoned:
            page.close()
    if removed:
        log.info("Removed the shared memory of dead workers", pages=removed)
    return removed


def _is_of_use(ledger: Ledger, page: Trace, ours: str, living: set[str]) -> bool:
    """Return whether somebody may still want to read the page: it says which jobs of the dead had begun."""
    if page.ledger_id() != ours:
        return time.time() - page.path.stat().st_ctime < OTHERS_KEPT_S
    worker_id = page.path.name.removeprefix(PREFIX)
    # Not declared dead yet, or not settled yet: whoever does that reads the page, and removes it.
    return worker_id in living or bool(ledger.held_by(worker_id, 1))
