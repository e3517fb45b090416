"""What jobs print is kept, bounded, with the beginning, the end, and a word about the rest."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstuck.runner.output import Bounded
from unstuck.worker.bench_output import PUNCH_BYTES, OutputFile


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(0, 50))
def test_a_buffer_keeps_the_first_and_the_last(parts: list[bytes], limit: int) -> None:
    whole = b"".join(parts)
    buffer = Bounded(limit)
    for part in parts:
        buffer.add(part)
    content = buffer.content()
    if len(whole) <= limit:
        assert content == whole
    elif limit:
        half = limit // 2
        assert content.startswith(whole[: limit - half])
        assert content.endswith(whole[len(whole) - half :])
        assert f"{len(whole) - limit:,} bytes left out".encode() in content
    else:
        assert content == b""


@pytest.fixture
def file() -> Iterator[OutputFile]:
    opened = OutputFile("test", 100)
    yield opened
    opened.close()


def written(file: OutputFile, data: bytes) -> int:
    os.write(file.fd, data)
    return os.fstat(file.fd).st_size


def test_each_job_gets_its_own_range(file: OutputFile) -> None:
    first = written(file, b"one")
    assert file.peek() == b"one"
    second = written(file, b"two")
    assert file.take(0, first) == b"one"
    assert file.peek() == b"two"
    assert file.take(first, second) == b"two"
    assert file.peek() == b""


def test_memory_of_what_was_read_is_given_back(file: OutputFile) -> None:
    at = 0
    for _ in range(10):
        end = written(file, b"x" * PUNCH_BYTES)
        assert file.take(at, end).endswith(b"x" * 50)
        at = end
    assert os.fstat(file.fd).st_blocks * 512 < PUNCH_BYTES


def test_trimming_keeps_what_will_be_read(file: OutputFile) -> None:
    written(file, b"head" + b"-" * 96)
    for _ in range(5):
        written(file, b"x" * 2 * PUNCH_BYTES)
        file.trim()
        assert os.fstat(file.fd).st_blocks * 512 <= PUNCH_BYTES
    end = written(file, b"tail")
    content = file.take(0, end)
    assert content.startswith(b"head-")
    assert content.endswith(b"xtail")
    assert b"\0" not in content


def test_a_file_that_was_truncated_is_read_from_its_beginning(file: OutputFile) -> None:
    end = written(file, b"x" * 50)
    file.take(0, end)
    os.ftruncate(file.fd, 0)
    assert file.peek() == b""
    assert file.take(end, written(file, b"new")) == b"new"


def test_a_limit_of_zero_keeps_nothing() -> None:
    file = OutputFile("test", 0)
    end = written(file, b"words")
    assert file.peek() == b""
    assert file.take(0, end) == b""
    file.close()
