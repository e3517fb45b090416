"""Clean up after a worker that died on this host: kill its processes, read and remove its shared memory."""

import os
import select
import signal
import stat
import time
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

import msgspec

from unstuck import host
from unstuck.domain.autopsy import LastWords
from unstuck.domain.liveness import Process
from unstuck.errors import LedgerError
from unstuck.ledger.contract import Ledger
from unstuck.logs import logger
from unstuck.runner.containment import kill_marked
from unstuck.runner.last_output import WORDS_PREFIX, last_output_path, page_path, read_last_output
from unstuck.runner.status_page import ASYNC, PREFIX, SYNC, StatusPage, status_page_folder

GONE_WITHIN_S = 1.0


class Leftovers(msgspec.Struct, frozen=True):
    """What was found. Only what is certain may make a job cheaper."""

    all_gone: bool = False
    """Every process that the worker had registered is known to be gone."""
    begun_tokens: frozenset[int] | None = None
    """Tokens whose user code may have begun; None where that cannot be told, and so may be all."""
    words: dict[int, LastWords] | None = None
    """By token, what its jobs said last; None if that cannot be read."""


def kill(status_page: str, *, fork_server: bool = True, within_s: float = GONE_WITHIN_S) -> Leftovers:
    """Kill the fork server and the runners of a dead worker, wait until they are gone, and read their marks."""
    page = _open(status_page)
    if page is None:
        return Leftovers()
    until_s = host.boottime_s() + within_s
    try:
        # The fork server first: once it is gone, no replacement is forked while we count.
        gone = _end([page.fork_server()] if fork_server else [], until_s)
        gone &= _end([page.occupant(slot) for slot in range(page.slots)], until_s)
        if fork_server and page.mark():
            # A killed fork server cleans up no more: what its jobs had started is found by the mark it carries.
            kill_marked(page.mark())
        return Leftovers(gone, _entered(page) if gone else None, read_last_output(last_output_path(page.path)))
    finally:
        page.close()


def last_words(status_page: str) -> dict[int, LastWords] | None:
    """Return what the jobs of a worker on this host said last; None if that cannot be read."""
    return read_last_output(last_output_path(Path(status_page))) if status_page else None


def kill_attempts(status_page: str, tokens: Collection[int]) -> int:
    """End the runners that are inside these attempts, which are no longer theirs; give how many."""
    page = _open(status_page)
    if page is None:
        return 0
    killed = 0
    try:
        for slot in range(page.slots):
            # A runner with an event loop has other jobs too: its worker will end the one when it hears of it.
            if page.kind(slot) != SYNC or page.entered(slot) not in tokens:
                continue
            fd = host.pidfd(*page.occupant(slot))
            if fd is None:
                continue
            try:
                # Read again: it may have gone on to a job that is still its own.
                if page.entered(slot) in tokens and _kill(fd):
                    killed += 1
            finally:
                os.close(fd)
    finally:
        page.close()
    return killed


def remove_page(status_page: str) -> None:
    """Remove the shared memory of a worker that holds nothing any more."""
    page = _open(status_page)
    # Opened first: what a ledger calls a trace is removed only if it is one.
    if page is not None:
        page.close()
        try:
            last_output_path(page.path).unlink(missing_ok=True)
            page.unlink()
        except OSError:
            # Another user's, or gone already: a page in memory until the next boot, nothing else.
            pass


def _open(status_page: str) -> StatusPage | None:
    if not status_page:
        return None
    try:
        return StatusPage.open(Path(status_page))
    except (OSError, ValueError):
        return None


def _entered(page: StatusPage) -> frozenset[int] | None:
    tokens: set[int] = set()
    for slot in range(page.slots):
        tokens |= page.recently_entered(slot)
        _, started = page.occupant(slot)
        # The kind is written before a runner is asked for, its birth only after the fork: it may run user code by then.
        if page.kind(slot) == ASYNC or (started != "0" and page.kind(slot) != SYNC):
            # Somebody ran here who does not mark what he enters one by one.
            return None
        if not page.remembers_all(slot):
            return None
    return frozenset(tokens)


def _end(processes: Iterable[tuple[int, str]], until_s: float) -> bool:
    """Kill them and wait; True when each is known to be gone."""
    waiting = select.poll()
    fds: set[int] = set()
    sure = True
    try:
        for pid, started in processes:
            if pid <= 0:
                continue
            fd = host.pidfd(pid, started)
            if fd is None:
                sure &= host.process_state(pid, started) is Process.GONE
                continue
            fds.add(fd)
            waiting.register(fd, select.POLLIN)
            sure &= _kill(fd)
        left = set(fds)
        while sure and left and (rest_s := until_s - host.boottime_s()) > 0:
            for fd, _ in waiting.poll(rest_s * 1000):
                waiting.unregister(fd)
                left.discard(fd)
        return sure and not left
    finally:
        for fd in fds:
            os.close(fd)


def _kill(fd: int) -> bool:
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return True


EVERY_S = 300.0
OTHERS_KEPT_S = 7 * 86_400.0
"""Pages of another ledger are left to its own workers; after this time nobody seems to work with it any more."""

log = logger("unstuck.recovery")


def remove_leftovers(ledger: Ledger, folder: Path | None = None) -> int:
    """Remove the pages of the dead that hold nothing any more, and return how many."""
    folder = folder or status_page_folder()
    _remove_orphans(folder)
    paths = sorted(folder.glob(f"{PREFIX}*"))
    if not paths:
        return 0
    abandoned: list[StatusPage] = []
    removed = 0
    try:
        ours = ledger.ledger_id()
        abandoned = [
            page for path in paths if (page := StatusPage.open_abandoned(path, partial(_may_be_removed, ours)))
        ]
        living = {worker.id for worker in ledger.workers.list(living_only=True)} if abandoned else set()
        for page in abandoned:
            if _is_of_use(ledger, page, living):
                continue
            words = last_output_path(page.path)
            if said := read_last_output(words):
                # Their jobs were settled from another host, which could not read this.
                ledger.recovery.add_last_words(list(said.values()))
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


def _may_be_removed(ours: str, page: StatusPage) -> bool:
    """Return whether the page is of our ledger, or of one that is not in use any more."""
    return page.ledger_id() == ours or time.time() - page.path.stat().st_ctime >= OTHERS_KEPT_S


def _is_of_use(ledger: Ledger, page: StatusPage, living: set[str]) -> bool:
    """Return whether a reaper may still want to read the page: it says which jobs of the dead had begun."""
    worker_id = page.path.name.removeprefix(PREFIX)
    # Not declared dead yet, or not settled yet: whoever does that reads the page, and removes it.
    return worker_id in living or bool(ledger.recovery.held_jobs(worker_id, 1))
