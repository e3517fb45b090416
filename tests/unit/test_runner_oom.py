"""A kill for want of memory is told from any other, only while it is fresh, and only as surely as it is known."""

from pathlib import Path

import pytest

from unstuck.runner.oom import CounterWatch, OomWatch, memory_of, shared_counter
from unstuck.runner.oom_verdict import Kills, Scope, judge

OURS = frozenset({1, 2, 3})
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
        watch.look(now_s, OURS)
    assert not watch.explain("", OURS, 1, 0).struck


def test_a_kill_is_remembered_while_its_victim_dies(tmp_path: Path) -> None:
    file = counter(tmp_path / "memory.events", 3)
    watch = OomWatch(file)
    counter(file, 4)
    for now_s in (10.0, 10.2, 10.4):
        watch.look(now_s, OURS)
    assert watch.explain("", OURS, 1, 0).struck


def test_a_system_that_does_not_tell_is_lived_with(tmp_path: Path) -> None:
    watch = OomWatch(None, host=tmp_path / "nothing here")
    watch.look(1.0, OURS)
    assert not watch.explain("", OURS, 1, 0).struck


# Whose counter it is --------------------------------------------------------------------------


def test_the_room_of_a_runner_is_asked_and_nobody_else(tmp_path: Path) -> None:
    shared, room = counter(tmp_path / "memory.events", 0), tmp_path / "runner-1"
    counter(room / "memory.events", 0)
    watch = OomWatch(shared)
    watch.watch_room(str(room))
    counter(shared, 7)
    assert not watch.explain(str(room), OURS, 1, 0).struck, "others were killed, this one was not"
    counter(room / "memory.events", 1)
    (room / "memory.max").write_text(f"{512 * MB}\n")
    (room / "memory.peak").write_text(f"{511 * MB}\n")
    found = watch.explain(str(room), OURS, 1, 300 * MB)
    assert (found.struck, found.sure) == (True, True)
    assert found.words == (
        "out of memory: the kernel killed it, by the count of its own cgroup "
        "(the runner held up to 300 MB, its cgroup may hold 512 MB and once held 511 MB)"
    )


@pytest.mark.parametrize(("members", "sure"), [("1\n2\n", True), ("1\n2\n99\n", False)])
def test_a_shared_cgroup_proves_it_only_if_nobody_else_lives_there(tmp_path: Path, members: str, sure: bool) -> None:
    file = counter(tmp_path / "memory.oom_control", 0)
    (tmp_path / "cgroup.procs").write_text(members)
    watch = OomWatch(file)
    counter(file, 1)
    found = watch.explain("", OURS, 1, 0)
    assert (found.struck, found.sure) == (True, sure)
    assert ("probably" in found.words and "1 process that is no runner" in found.words) is not sure


def test_somebody_who_lived_there_a_moment_ago_may_have_been_the_victim(tmp_path: Path) -> None:
    file = counter(tmp_path / "memory.oom_control", 0)
    (tmp_path / "cgroup.procs").write_text("1\n99\n")
    watch = OomWatch(file)
    watch.look(10.0, OURS)
    (tmp_path / "cgroup.procs").write_text("1\n")
    counter(file, 1)
    assert not watch.explain("", OURS, 1, 0).sure


def test_who_lives_in_a_cgroup_below_without_a_count_of_its_own_is_charged_here(tmp_path: Path) -> None:
    file = counter(tmp_path / "memory.events", 0)
    (tmp_path / "cgroup.procs").write_text("")
    for name, has_count in (("charged-here", False), ("charged-elsewhere", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("98\n99\n" if has_count else "77\n")
        if has_count:
            counter(tmp_path / name / "memory.events", 0)
    watch = OomWatch(file)
    counter(file, 1)
    assert "1 process that is no runner" in watch.explain("", OURS, 1, 0).words


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
        (Kills("cgroup", 2, 2), True, True, "where only a runner can have been it"),
        (Kills("cgroup", 1, 2), True, False, "but 2 runners were ended by SIGKILL"),
        (Kills("cgroup", 1, 1, strangers=4), True, False, "shared with 4 processes that are no runner"),
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
    assert not judge(Kills(scope, 0, 1, 0, 512 * MB, 512 * MB, 512 * MB)).struck
