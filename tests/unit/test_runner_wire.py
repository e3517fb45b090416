"""Frames and messages survive being cut anywhere, and nobody waits for anybody."""

import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstuck.runner import wire
from unstuck.runner.channel import Channel
from unstuck.worker.bench_exits import exit_cause


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=50)), max_size=20), st.data())
def test_frames_come_out_whole_however_they_are_cut(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(wire.frame(kind, body) for kind, body in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    buffer = wire.FrameBuffer()
    seen = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        seen += [(kind, bytes(body)) for kind, body in buffer.feed(stream[start:end])]
    assert seen == frames


def test_a_large_frame_is_not_copied_again_with_every_piece() -> None:
    body = bytes(16 * 1024 * 1024)
    stream = wire.frame(wire.JOB, body)
    buffer = wire.FrameBuffer()
    seen = []
    begun_s = time.process_time()
    for at in range(0, len(stream), 1024):
        seen += [len(piece) for _, piece in buffer.feed(stream[at : at + 1024])]
    assert seen == [len(body)]
    # Copied with every piece, it is 130 GB.
    assert time.process_time() - begun_s < 3.0


@pytest.mark.parametrize("rubbish", [b"rubbish rubbish", wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1, 0)])
def test_rubbish_is_refused(rubbish: bytes) -> None:
    with pytest.raises(wire.CorruptStream):
        list(wire.FrameBuffer().feed(rubbish))


def test_a_frame_says_everything_of_a_job() -> None:
    job = wire.JobFrame(1, 2, "task", "queue", b"{}", "json", 3, 4)
    assert wire.job_decoder.decode(wire.encoder.encode(job)) == job


def test_messages_and_descriptors_cross_a_full_socket_in_order() -> None:
    ours, theirs = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    reader, writer = os.pipe()
    messages = [bytes([n]) * 10_000 for n in range(100)]
    for n, message in enumerate(messages):
        ours.send(message, [writer] if n % 3 == 0 else [])
    os.close(writer)
    assert ours.wants_write()
    seen: list[bytes] = []
    while len(seen) < len(messages):
        for message, fds in theirs.receive():
            assert len(fds) == (1 if len(seen) % 3 == 0 else 0)
            for fd in fds:
                os.write(fd, b"!")
                os.close(fd)
            seen.append(message)
        ours.flush()
    assert seen == messages
    assert not ours.wants_write()
    assert os.read(reader, 100) == b"!" * 34
    assert os.read(reader, 100) == b""  # every copy of the descriptor was closed
    os.close(reader)
    ours.close()
    assert theirs.receive() == []
    assert theirs.ended
    theirs.send(b"to nobody")
    assert not theirs.wants_write()
    theirs.close()


@pytest.mark.parametrize(
    ("status", "why", "expected"),
    [
        (0, "", ("exited with code 0", 0, None)),
        (3 << 8, "", ("exited with code 3", 3, None)),
        (9, "", ("killed by SIGKILL (signal 9)", None, 9)),
        (11 | 128, "", ("killed by SIGSEGV (signal 11)", None, 11)),
        (9, "its lease had ended", ("killed by SIGKILL (signal 9): its lease had ended", None, 9)),
        (None, "a runner could not be started: no memory", ("a runner could not be started: no memory", None, None)),
    ],
)
def test_ends_are_told_in_plain_words(status: int | None, why: str, expected: tuple[object, ...]) -> None:
    assert exit_cause(status, why) == expected
