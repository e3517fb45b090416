"""Frames and messages survive being cut anywhere, and nobody waits for anybody."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstuck.runner import child, messages
from unstuck.runner.oom import CounterWatch, Kills, OomWatch, Scope, judge, memory_of, shared_counter
from unstuck.runner.output import PUNCH_BYTES, Bounded, OutputFile
from unstuck.runner.packets import Channel
from unstuck.worker.exit_status import exit_cause


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=50)), max_size=20), st.data())
def test_frames_come_out_whole_however_they_are_cut(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(messages.frame(kind, body) for kind, body in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    buffer = messages.FrameBuffer()
    seen = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        seen += [(kind, bytes(body)) for kind, body in buffer.feed(stream[start:end])]
    assert seen == frames


def test_a_large_frame_is_not_copied_again_with_every_piece() -> None:
    body = bytes(16 * 1024 * 1024)
    stream = messages.frame(messages.JOB, body)
    buffer = messages.FrameBuffer()
    seen = []
    begun_s = time.process_time()
    for at in range(0, len(stream), 1024):
        seen += [len(piece) for _, piece in buffer.feed(stream[at : at + 1024])]
    assert seen == [len(body)]
    # Copied with every piece, it is 130 GB.
    assert time.process_time() - begun_s < 3.0


@pytest.mark.parametrize("rubbish", [b"rubbish rubbish", messages.HEADER.pack(messages.MAX_FRAME_BYTES + 1, 0)])
def test_rubbish_is_refused(rubbish: bytes) -> None:
    with pytest.raises(messages.CorruptStream):
        list(messages.FrameBuffer().feed(rubbish))


def test_a_frame_says_everything_of_a_job() -> None:
    job = messages.JobMessage(1, 2, "task", "queue", b"{}", "json", 3, 4)
    assert messages.job_decoder.decode(messages.encoder.encode(job)) == job


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


MB = 1 << 20


def counter(file: Path, kills: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"low 0\noom 9\noom_kill {kills}\n")
    return file


# Counting -------------------------------------------------------------------------------------


def test_each_kill_explains_one_death(tmp_path: Path) -> None:
    file = counter(tmp_path / "memory.events", 3)
    watch = CounterWatch(file)
    assert watch.fresh() == 0
    counter(file, 5)
    assert watch.fresh() == 2
    watch.explained()
    assert watch.fresh() == 1
    watch.age()
    watch.explained()
    assert watch.fresh() == 0


def test_a_kill_that_explained_a_death_explains_no_second_one_after_a_while(tmp_path: Path) -> None:
    file = counter(tmp_path / "memory.events", 0)
    watch = CounterWatch(file)
    counter(file, 1)
    watch.explained()
    watch.age()
    assert watch.fresh() == 0


def test_a_kill_of_long_ago_explains_nothing(tmp_path: Path) -> None:
    file = counter(tmp_path / "memory.oom_control", 3)
    watch = OomWatch(file)
    counter(file, 4)
    for now_s in (10.0, 12.0):
        watch.look(now_s)
    assert not watch.explain("", 1, 0).struck


def test_a_kill_is_remembered_while_its_victim_dies(tmp_path: Path) -> None:
    file = counter(tmp_path / "memory.events", 3)
    watch = OomWatch(file)
    counter(file, 4)
    for now_s in (10.0, 10.2, 10.4):
        watch.look(now_s)
    assert watch.explain("", 1, 0).struck


def test_a_system_that_does_not_tell_is_lived_with(tmp_path: Path) -> None:
    watch = OomWatch(None, host=tmp_path / "nothing here")
    watch.look(1.0)
    assert not watch.explain("", 1, 0).struck


# Whose counter it is --------------------------------------------------------------------------


def test_the_room_of_a_runner_is_asked_and_nobody_else(tmp_path: Path) -> None:
    shared, room = counter(tmp_path / "memory.events", 0), tmp_path / "runner-1"
    counter(room / "memory.events", 0)
    watch = OomWatch(shared)
    watch.watch_cgroup(str(room))
    counter(shared, 7)
    assert not watch.explain(str(room), 1, 0).struck, "others were killed, this one was not"
    counter(room / "memory.events", 1)
    (room / "memory.max").write_text(f"{512 * MB}\n")
    (room / "memory.peak").write_text(f"{511 * MB}\n")
    found = watch.explain(str(room), 1, 300 * MB)
    assert (found.struck, found.sure) == (True, True)
    assert found.words == (
        "out of memory: the kernel killed it, by the count of its own cgroup "
        "(the runner held up to 300 MB, its cgroup may hold 512 MB and once held 511 MB)"
    )


def test_a_kill_in_the_cgroup_that_is_shared_with_the_worker_proves_it(tmp_path: Path) -> None:
    file = counter(tmp_path / "memory.oom_control", 0)
    watch = OomWatch(file)
    counter(file, 1)
    found = watch.explain("", 1, 0)
    assert (found.struck, found.sure) == (True, True)
    assert found.words == "out of memory: the kernel killed 1 process just then in the worker's cgroup"


def proc(folder: Path, cgroup: str, mountinfo: str) -> Path:
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)
    return folder


def test_the_counter_of_either_version_is_found(tmp_path: Path) -> None:
    v1, v2 = tmp_path / "memory", tmp_path / "unified"
    counter(v1 / "box" / "memory.oom_control", 0)
    (v2 / "service" / "leaf").mkdir(parents=True)
    mounts = f"30 1 0:1 / {v1} rw - cgroup cgroup rw,memory\n31 1 0:2 / {v2} rw - cgroup2 cgroup2 rw\n"
    both = proc(tmp_path / "both", "4:memory:/box\n0::/service/leaf\n", mounts)
    assert shared_counter(both) == v1 / "box" / "memory.oom_control"
    only = proc(tmp_path / "only", "0::/service/leaf\n", mounts)
    assert shared_counter(only) is None
    # Without the controller in our leaf we are charged to the next one above that has it.
    found = counter(v2 / "service" / "memory.events", 0)
    assert shared_counter(only) == found
    local = counter(v2 / "service" / "memory.events.local", 0)
    assert shared_counter(only) == local


def test_a_cgroup_without_a_limit_has_none_to_tell(tmp_path: Path) -> None:
    assert memory_of(tmp_path) == (None, None)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_of(tmp_path) == (None, None)


# Judging --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "struck", "sure", "words"),
    [
        (Kills("room", 0, 1), False, False, ""),
        (Kills("room", 3, 1), True, True, "out of memory: the kernel killed it, by the count of its own cgroup"),
        (Kills("cgroup", 2, 2), True, True, "the kernel killed 2 processes just then in the worker's cgroup"),
        (Kills("cgroup", 1, 2), True, False, "but 2 runners were ended by SIGKILL"),
        (Kills("host", 1, 1), True, False, "another process may have been the victim"),
        (Kills("host", 1, 1, limit_bytes=1 << 62, rss_bytes=MB), True, False, "(the runner held up to 1 MB)"),
    ],
)
def test_only_what_can_mean_nothing_else_is_sure(found: Kills, struck: bool, sure: bool, words: str) -> None:
    evidence = judge(found)
    assert (evidence.struck, evidence.sure) == (struck, sure)
    assert words in evidence.words
    assert evidence.words.startswith("probably") == (struck and not sure)


@pytest.mark.parametrize("scope", ["room", "cgroup", "host"])
def test_without_a_fresh_kill_it_is_a_plain_sigkill(scope: Scope) -> None:
    # However close to the limit it was: to be large is no death.
    assert not judge(Kills(scope, 0, 1, 512 * MB, 512 * MB, 512 * MB)).struck


def test_a_fork_server_and_its_runners_may_be_of_different_releases() -> None:
    """The code is replaced while a worker runs: what starts after that reads what the older process writes."""
    keys = {
        child.RunnerConfig: "slot kind nursery_pid worker_id limits trace room "
        "stream permits stdout stderr stack signs line",
        child.SpawnRequest: "target seat url",
        messages.Configure: "trace worker_id limits",
        messages.StartRunner: "serial slot kind",
        messages.KillRunner: "serial",
        messages.RunnerStarted: "serial pid room",
        messages.RunnerExited: "serial pid status entered max_rss_bytes cpu_s why oom oom_sure oom_words",
    }
    assert {struct: " ".join(struct.__struct_encode_fields__) for struct in keys} == keys
