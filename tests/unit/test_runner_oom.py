"""A kill for want of memory is told from any other, and only while it is fresh."""

from pathlib import Path

from unstuck.runner.oom import OomWatch


def test_each_kill_explains_one_death(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 9\noom_kill 3\n")
    watch = OomWatch(counter)
    assert not watch.struck()
    counter.write_text("low 0\noom 9\noom_kill 5\n")
    assert watch.struck()
    assert watch.struck()
    assert not watch.struck()


def test_a_kill_of_long_ago_explains_nothing(tmp_path: Path) -> None:
    counter = tmp_path / "memory.oom_control"
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    watch = OomWatch(counter)
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    for now_s in (10.0, 12.0):
        watch.look(now_s)
    assert not watch.struck()


def test_a_kill_is_remembered_while_its_victim_dies(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 3\n")
    watch = OomWatch(counter)
    counter.write_text("oom_kill 4\n")
    for now_s in (10.0, 10.2, 10.4):
        watch.look(now_s)
    assert watch.struck()


def test_a_system_that_does_not_tell_is_lived_with(tmp_path: Path) -> None:
    watch = OomWatch(tmp_path / "nothing here")
    watch.look(1.0)
    assert not watch.struck()
