"""The file in which a worker keeps the last words of its jobs for others on the host."""

import os
from pathlib import Path

import pytest

from unstuck.domain.autopsy import LastWords, ProgressMark
from unstuck.runner.last_output import (
    MAX_RECORDS,
    RECORD_BYTES,
    STREAM_BYTES,
    LastOutputFile,
    last_output_path,
    read_last_output,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "words"


def made(path: Path, jobs: int = 2) -> LastOutputFile:
    file = LastOutputFile.create(path, jobs)
    assert file is not None
    return file


def test_what_was_kept_is_read_by_another(path: Path) -> None:
    file = made(path)
    file.note_progress(1, 11, ProgressMark(137, 150, "nearly", 5.0))
    file.note_output(1, 11, b"one\n", None)
    file.note_output(1, 11, None, b"warned\n")
    file.note_memory(11, 4096)
    file.note_progress(2, 12, ProgressMark(None, None, "", 6.0))
    assert read_last_output(path) == {
        11: LastWords(1, 11, ProgressMark(137, 150, "nearly", 5.0), "one", "warned", 4096),
        12: LastWords(2, 12, ProgressMark(None, None, "", 6.0)),
    }


def test_a_record_is_used_again_and_shows_nothing_of_the_one_before(path: Path) -> None:
    file = made(path, jobs=1)
    file.note_output(1, 11, b"a secret", b"another")
    file.note_output(2, 12, b"no room", None)
    assert list(read_last_output(path) or ()) == [11]
    file.forget(11)
    assert read_last_output(path) == {}
    file.note_progress(2, 12, ProgressMark(1, None, "", 5.0))
    assert read_last_output(path) == {12: LastWords(2, 12, ProgressMark(1, None, "", 5.0))}


def test_a_job_that_says_nothing_takes_no_record(path: Path) -> None:
    file = made(path, jobs=1)
    file.note_output(1, 11, b"", b"")
    file.note_memory(11, 4096)
    assert read_last_output(path) == {}


def test_too_much_is_cut_and_what_cannot_be_stored_is_written_out(path: Path) -> None:
    file = made(path)
    file.note_output(1, 11, b"x" * (STREAM_BYTES * 2) + b"\nend\0\xff", None)
    file.note_progress(1, 11, ProgressMark(1, 2, "é" * 10_000, 5.0))
    found = (read_last_output(path) or {})[11]
    assert found.stdout.endswith("\nend\\x00\\xff")
    assert found.progress is not None
    assert 0 < len(found.progress.message) <= 512


def test_half_a_word_is_not_read(path: Path) -> None:
    """A worker that is killed while it copies has set the length to nothing before."""
    file = made(path)
    file.note_output(1, 11, b"old", b"kept")
    at = file._memory.find(b"old")
    lengths = at - 512 - 64 + 48
    file._memory[lengths + 4 : lengths + 8] = b"\0\0\0\0"
    file._memory[at : at + 2] = b"ne"
    assert read_last_output(path) == {11: LastWords(1, 11, None, "", "kept")}


@pytest.mark.parametrize("content", [b"", b"x" * 63, b"x" * 500, os.urandom(RECORD_BYTES)])
def test_a_file_that_is_none_of_ours_is_not_read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert read_last_output(path) is None
    assert read_last_output(path.with_name("missing")) is None


def test_links_and_pipes_in_the_shared_folder_are_not_followed(path: Path) -> None:
    made(path).note_output(1, 11, b"mine", None)
    link = path.with_name("link")
    link.symlink_to(path)
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    assert [read_last_output(one) for one in (link, pipe)] == [None, None]


def test_where_there_is_no_room_a_worker_goes_without(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert LastOutputFile.create(path, 2) is None
    assert not path.exists()


def test_it_belongs_to_the_page_of_a_worker_and_is_bounded(tmp_path: Path) -> None:
    path = last_output_path(tmp_path / "unstuck-abc")
    assert path.name == "unstuck_words-abc"
    made(path, jobs=100_000)
    assert path.stat().st_size <= 64 + MAX_RECORDS * RECORD_BYTES
    assert path.stat().st_mode & 0o077 == 0
