"""Keep the last words of running jobs where others on this host can read them if their whole worker is killed.

One file in shared memory beside the page of a worker (`trace`). The worker copies into it how far each job says it is,
at once, and the end of what it printed, some times per second. Whoever settles the jobs of a dead worker on the same
host stores them with the crash. Of a record that was being written when its worker died, the part that was not
complete is left out.
"""

import math
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Self

from unstuck.domain.autopsy import LastWords, ProgressMark, last_lines
from unstuck.runner.status_page import PREFIX

WORDS_PREFIX = "unstuck_words-"
MAGIC = 0x756E737477726431
_HEADER = struct.Struct("=QQ")  # magic, records
_HEADER_BYTES = 64
_RECORD = struct.Struct("=qqqdddIIII")
"""Token, job, bytes of memory, when it told its progress (0: never), done, total (NaN: not said), and four lengths: of
the message, of what follows it in stdout and stderr, and one spare."""
_LENGTHS_AT = 48
_U32 = struct.Struct("=I")
_MESSAGE_AT, MESSAGE_BYTES = 64, 512
STREAM_BYTES = 3808
_STDOUT_AT = _MESSAGE_AT + MESSAGE_BYTES
_STDERR_AT = _STDOUT_AT + STREAM_BYTES
RECORD_BYTES = _STDERR_AT + STREAM_BYTES
MAX_RECORDS = 256
"""Of a worker with more jobs at once, the first that have something to say are kept: two megabytes are enough."""


def last_output_path(status_page: Path) -> Path:
    """Return the file that belongs to the page of a worker."""
    return status_page.with_name(f"{WORDS_PREFIX}{status_page.name.removeprefix(PREFIX)}")


def page_path(words: Path) -> Path:
    """Return the page of the worker that a file of last words belongs to."""
    return words.with_name(f"{PREFIX}{words.name.removeprefix(WORDS_PREFIX)}")


class LastOutputFile:
    """The file as its worker writes it. Used in one thread."""

    def __init__(self, path: Path, memory: mmap.mmap, records: int) -> None:
        self.path = path
        self._memory = memory
        self._free = list(range(records))
        self._places: dict[int, int] = {}
        """By token, where its record is."""

    @classmethod
    def create(cls, path: Path, jobs: int) -> Self | None:
        """Make the file for a worker that runs this many jobs at once; None if there is no room for it."""
        records = min(jobs, MAX_RECORDS)
        size = _HEADER_BYTES + records * RECORD_BYTES
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            # Really taken, and not only promised: to write where there is no memory left would kill the worker.
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
        except OSError:
            path.unlink(missing_ok=True)
            return None
        finally:
            os.close(fd)
        _HEADER.pack_into(memory, 0, MAGIC, records)
        return cls(path, memory, records)

    def note_progress(self, job_id: int, token: int, mark: ProgressMark) -> None:
        at = self._place(job_id, token)
        if at is None:
            return
        message = mark.message.encode("utf-8", "backslashreplace")[:MESSAGE_BYTES]
        self._write(at, 0, _MESSAGE_AT, message)
        done, total = (math.nan if value is None else value for value in (mark.done, mark.total))
        struct.pack_into("=ddd", self._memory, at + 24, mark.at or 0.0, done, total)

    def note_output(self, job_id: int, token: int, stdout: bytes | None, stderr: bytes | None) -> None:
        """Keep the end of what a job printed; None: as it was."""
        if not stdout and not stderr and token not in self._places:
            return
        at = self._place(job_id, token)
        if at is None:
            return
        if stdout is not None:
            self._write(at, 1, _STDOUT_AT, stdout[-STREAM_BYTES:])
        if stderr is not None:
            self._write(at, 2, _STDERR_AT, stderr[-STREAM_BYTES:])

    def note_memory(self, token: int, memory_bytes: int) -> None:
        """Keep how much memory its process has, if it has said anything."""
        if (place := self._places.get(token)) is not None:
            struct.pack_into("=q", self._memory, _HEADER_BYTES + place * RECORD_BYTES + 16, memory_bytes)

    def forget(self, token: int) -> None:
        """Give the record of an attempt back that is over, or is no longer ours."""
        place = self._places.pop(token, None)
        if place is not None:
            struct.pack_into("=q", self._memory, _HEADER_BYTES + place * RECORD_BYTES, 0)
            self._free.append(place)

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)

    def _place(self, job_id: int, token: int) -> int | None:
        place = self._places.get(token)
        if place is None:
            if not self._free:
                return None
            place = self._places[token] = self._free.pop()
            at = _HEADER_BYTES + place * RECORD_BYTES
            # The token last: a record counts from then on.
            _RECORD.pack_into(self._memory, at, 0, job_id, 0, 0.0, math.nan, math.nan, 0, 0, 0, 0)
            struct.pack_into("=q", self._memory, at, token)
        return _HEADER_BYTES + place * RECORD_BYTES

    def _write(self, at: int, number: int, where: int, data: bytes) -> None:
        length_at = at + _LENGTHS_AT + 4 * number
        # Empty while it is being written: half of the old and half of the new would be a lie.
        _U32.pack_into(self._memory, length_at, 0)
        self._memory[at + where : at + where + len(data)] = data
        _U32.pack_into(self._memory, length_at, len(data))


def read_last_output(path: Path) -> dict[int, LastWords] | None:
    """Return, by token, what a dead worker left; None if there is nothing to be read."""
    content = _content(path)
    if content is None or len(content) < _HEADER_BYTES:
        return None
    magic, records = _HEADER.unpack_from(content, 0)
    if magic != MAGIC or records > MAX_RECORDS or len(content) < _HEADER_BYTES + records * RECORD_BYTES:
        return None
    found = (_read(content, _HEADER_BYTES + place * RECORD_BYTES) for place in range(records))
    return {words.token: words for words in found if words is not None}


def _content(path: Path) -> bytes | None:
    """Return what is in a plain file of this user. The shared folder is open to others, who may put anything there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return None
        return os.read(fd, _HEADER_BYTES + MAX_RECORDS * RECORD_BYTES)
    except OSError:
        return None
    finally:
        os.close(fd)


def _read(content: bytes, at: int) -> LastWords | None:
    token, job_id, memory_bytes, told_at, done, total, message, stdout, stderr, _ = _RECORD.unpack_from(content, at)
    if not token:
        return None
    progress = None
    if told_at:
        text = _text(content, at + _MESSAGE_AT, min(message, MESSAGE_BYTES))
        progress = ProgressMark(_known(done), _known(total), text, told_at)
    return LastWords(
        job_id,
        token,
        progress,
        last_lines(_text(content, at + _STDOUT_AT, min(stdout, STREAM_BYTES))),
        last_lines(_text(content, at + _STDERR_AT, min(stderr, STREAM_BYTES))),
        memory_bytes or None,
    )


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number


def _text(content: bytes, at: int, length: int) -> str:
    # No database stores NUL in a text.
    return content[at : at + length].decode("utf-8", "backslashreplace").replace("\0", "\\x00")
