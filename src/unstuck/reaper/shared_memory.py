"""Remove the shared memory that killed workers left on this host and nobody else will remove.

Whoever settles the jobs of a dead worker on its own host removes its page (`scene.forget`). A page stays behind if the
jobs were settled from another host, or if the worker was killed before it had registered. What those jobs said last is
read first, and added to the reports of their deaths. Only pages are removed that
are ours beyond doubt: of this user, in our layout, of this ledger, with everyone dead who lived by them.
"""

import os
import stat
import time
from functools import partial
from pathlib import Path

from unstuck.domain.errors import LedgerError
from unstuck.logs import logger
from unstuck.runner.last_words import WORDS_PREFIX, page_path, read_words, words_path
from unstuck.runner.trace import PREFIX, Trace, trace_folder
from unstuck.store.contract import Ledger

EVERY_S = 300.0
OTHERS_KEPT_S = 7 * 86_400.0
"""Pages of another ledger are left to its own workers; after this time nobody seems to work with it any more."""

log = logger("unstuck.reaper")


def remove_leftovers(ledger: Ledger, folder: Path | None = None) -> int:
    """Remove the pages of the dead that hold nothing any more, and return how many."""
    folder = folder or trace_folder()
    _remove_orphans(folder)
    paths = sorted(folder.glob(f"{PREFIX}*"))
    if not paths:
        return 0
    abandoned: list[Trace] = []
    removed = 0
    try:
        ours = ledger.ledger_id()
        abandoned = [page for path in paths if (page := Trace.open_abandoned(path, partial(_may_be_removed, ours)))]
        living = {worker.id for worker in ledger.workers(living_only=True)} if abandoned else set()
        for page in abandoned:
            if _is_of_use(ledger, page, living):
                continue
            words = words_path(page.path)
            if said := read_words(words):
                # Their jobs were settled from another host, which could not read this.
                ledger.add_last_words(list(said.values()))
            try:
                words.unlink(missing_ok=True)
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


def _remove_orphans(folder: Path) -> None:
    """Remove last words without a page: they are made after it, and removed before it by all who know of them."""
    for words in folder.glob(f"{WORDS_PREFIX}*"):
        try:
            found = words.lstat()
            if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and not page_path(words).exists():
                words.unlink()
        except OSError:
            pass  # Somebody else may do this, or did.


def _may_be_removed(ours: str, page: Trace) -> bool:
    """Return whether the page is of our ledger, or of one that is not in use any more."""
    return page.ledger_id() == ours or time.time() - page.path.stat().st_ctime >= OTHERS_KEPT_S


def _is_of_use(ledger: Ledger, page: Trace, living: set[str]) -> bool:
    """Return whether a reaper may still want to read the page: it says which jobs of the dead had begun."""
    worker_id = page.path.name.removeprefix(PREFIX)
    # Not declared dead yet, or not settled yet: whoever does that reads the page, and removes it.
    return worker_id in living or bool(ledger.held_by(worker_id, 1))
