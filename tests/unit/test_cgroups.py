"""Rooms get controllers where a tree is ours to divide, and nowhere else. The tree here is a fake in a folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from unstuck.runner import cgroups
from unstuck.runner.cgroups import MemoryLimits, RunnerCgroup, RunnerCgroups
from unstuck.runner.containment import Containment

MB = 1 << 20


class Tree:
    """A cgroup v2 tree as the kernel would show it: a new group has the controllers that its parent hands down."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.delegated: set[Path] = set()

    def group(self, path: Path, members: tuple[int, ...] = (), controllers: str = "cpu memory pids") -> Path:
        path.mkdir(exist_ok=True)
        (path / "cgroup.type").write_text("domain\n")
        (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in members))
        (path / "cgroup.controllers").write_text(controllers)
        (path / "cgroup.subtree_control").write_text("")
        for controller, files in (
            ("memory", ("memory.max", "memory.swap.max", "memory.oom.group")),
            ("pids", ("pids.max",)),
        ):
            for name in files if controller in controllers.split() else ():
                (path / name).write_text("max\n")
        return path

    def is_delegated(self, path: Path) -> bool:
        return path in self.delegated


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    built = Tree(tmp_path)
    handed: dict[Path, str] = {}

    def write(file: Path, text: str) -> bool:
        if file.name == "cgroup.subtree_control":
            if cgroups.members(file.parent):
                return False  # the rule of the kernel: no controllers below a group that holds processes
            text = f"{handed.get(file.parent, '')} {text.lstrip('+')}".strip()
            handed[file.parent] = text
        if not file.exists():
            return False
        file.write_text(text)
        return True

    def make(group: Path) -> bool:
        if group.exists():
            return False
        built.group(group, controllers=handed.get(group.parent, ""))
        return True

    for name, replacement in (("write_file", write), ("make_cgroup", make)):
        monkeypatch.setattr(cgroups, name, replacement)
    return built


Build = Callable[[Path], RunnerCgroups]


@pytest.fixture
def build(tree: Tree) -> Build:
    def built(own: Path) -> RunnerCgroups:
        base, why_not = cgroups.choose_base(own, tree.top, tree.is_delegated)
        hall = cgroups.make_runner_cgroups(base, "unstuck-mark-1-2", why_not)
        assert hall is not None
        return hall

    return built


# Where the hall stands ------------------------------------------------------------------------


def test_beside_the_leaf_that_systemd_put_us_in_rooms_get_both_controllers(tree: Tree, build: Build) -> None:
    service = tree.group(tree.top / "unstuck.service")
    leaf = tree.group(service / "main", members=(10, 11))
    tree.delegated.add(service)
    hall = build(leaf)
    assert (hall.path.parent, hall.controllers, hall.why_not) == (service, ("memory", "pids"), "")
    assert cgroups.read_words(hall.path / "cgroup.subtree_control") == {"memory", "pids"}


@pytest.mark.parametrize("members", [(10, 11), (10, 11, 99)])
def test_a_delegated_cgroup_that_the_worker_itself_lives_in_is_not_changed(
    tree: Tree, build: Build, members: tuple[int, ...]
) -> None:
    service = tree.group(tree.top / "unstuck.service", members=members)
    tree.delegated.add(service)
    hall = build(service)
    assert (hall.path.parent, hall.controllers) == (service, ())
    assert "DelegateSubgroup=" in hall.why_not
    assert cgroups.members(service) == list(members)
    assert cgroups.read_words(service / "cgroup.subtree_control") == set()


def test_a_container_whose_root_the_worker_lives_in_is_not_changed(tree: Tree, build: Build) -> None:
    tree.group(tree.top, members=(10,))
    hall = build(tree.top)
    assert (hall.path.parent, hall.controllers) == (tree.top, ())
    assert "the worker itself lives in" in hall.why_not
    assert cgroups.members(tree.top) == [10]


def test_beside_other_processes_in_the_delegated_cgroup_nothing_is_changed(tree: Tree, build: Build) -> None:
    service = tree.group(tree.top / "unstuck.service", members=(99,))
    leaf = tree.group(service / "main", members=(10, 11))
    tree.delegated.add(service)
    hall = build(leaf)
    assert (hall.path.parent, hall.controllers) == (leaf, ())
    assert f"processes live in {service} itself" in hall.why_not
    assert cgroups.read_words(service / "cgroup.subtree_control") == set()


def test_what_was_not_delegated_is_not_changed(tree: Tree, build: Build) -> None:
    slice_ = tree.group(tree.top / "system.slice")
    service = tree.group(slice_ / "unstuck.service", members=(10,))
    hall = build(service)
    assert (hall.path.parent, hall.controllers) == (service, ())
    assert "Delegate=yes" in hall.why_not
    assert cgroups.read_words(slice_ / "cgroup.subtree_control") == set()


def test_the_root_of_everything_is_not_ours(tree: Tree, build: Build) -> None:
    tree.group(tree.top, members=(1, 10))
    (tree.top / "cgroup.type").unlink()  # the one thing that tells the root from all others
    hall = build(tree.top)
    assert hall.controllers == ()
    assert cgroups.read_words(tree.top / "cgroup.subtree_control") == set()


def test_a_tree_without_controllers_says_so(tree: Tree, build: Build) -> None:
    service = tree.group(tree.top / "unstuck.service", controllers="cpu pids")
    leaf = tree.group(service / "main", members=(10,))
    tree.delegated.add(service)
    hall = build(leaf)
    assert hall.controllers == ("pids",)
    assert "has no controller memory" in hall.why_not


# What a room bounds ---------------------------------------------------------------------------


@pytest.fixture
def hall(tree: Tree, build: Build) -> RunnerCgroups:
    service = tree.group(tree.top / "unstuck.service")
    tree.delegated.add(service)
    return build(tree.group(service / "main", members=(10,)))


def test_a_room_is_bounded_and_dies_as_one(hall: RunnerCgroups) -> None:
    room = cgroups.make_runner_cgroup(1, hall.path, 50)
    path = Path(room.path)
    assert room == RunnerCgroup(f"{hall.path}/runner-1", bounds_processes=True, bounds_memory=True)
    assert room.memory_path == room.path
    assert ((path / "pids.max").read_text(), (path / "memory.oom.group").read_text()) == ("50", "1")


def test_a_room_without_a_limit_of_processes_is_still_one(hall: RunnerCgroups) -> None:
    room = cgroups.make_runner_cgroup(1, hall.path, 0)
    assert (Path(room.path) / "pids.max").read_text() == "max"


def test_a_room_without_controllers_bounds_nothing(tree: Tree) -> None:
    room = cgroups.make_runner_cgroup(1, tree.group(tree.top / "v2", controllers=""), 50)
    assert room == RunnerCgroup(f"{tree.top}/v2/runner-1")
    assert room.memory_path == ""
    assert cgroups.make_runner_cgroup(1, None, 50) == RunnerCgroup()


def test_refusals_of_a_cgroup_above_are_not_blamed_on_the_room(tmp_path: Path) -> None:
    room = RunnerCgroup(str(tmp_path), bounds_processes=True)
    assert cgroups.refused_forks(room) == 0
    (tmp_path / "pids.events").write_text("max 3\n")
    (tmp_path / "pids.max").write_text("50\n")
    assert cgroups.refused_forks(room) == 3
    (tmp_path / "pids.peak").write_text("7\n")
    assert cgroups.refused_forks(room) == 0


def test_a_memory_limit_is_set_without_swap_and_taken_off_again(hall: RunnerCgroups) -> None:
    room, limits = cgroups.make_runner_cgroup(1, hall.path, 0).memory_path, MemoryLimits()
    memory, swap = Path(room) / "memory.max", Path(room) / "memory.swap.max"
    assert limits.set_memory_limit(room, 100 * MB)
    assert (memory.read_text(), swap.read_text()) == (str(100 * MB), "0")
    assert limits.set_memory_limit(room, 50 * MB)
    assert memory.read_text() == str(50 * MB)
    assert limits.set_memory_limit(room, None)
    assert (memory.read_text(), swap.read_text()) == ("max", "max")
    assert limits.set_memory_limit(room, None)


def test_a_runner_that_is_larger_already_is_not_killed_by_the_limit_of_its_next_job(hall: RunnerCgroups) -> None:
    room, limits = cgroups.make_runner_cgroup(1, hall.path, 0).memory_path, MemoryLimits()
    assert limits.set_memory_limit(room, 400 * MB)
    (Path(room) / "memory.stat").write_text(f"anon {300 * MB}\nfile 0\n")
    assert not limits.set_memory_limit(room, 200 * MB)
    assert (Path(room) / "memory.max").read_text() == "max", "the limit of the last job must not stay"


@pytest.mark.parametrize("room", ["", "/nowhere/runner-1"])
def test_without_a_room_the_kernel_enforces_nothing(room: str) -> None:
    limits = MemoryLimits()
    assert not limits.set_memory_limit(room, MB)
    assert limits.set_memory_limit(room, None), "nothing is set, and nothing has to be taken off"


# What is said ---------------------------------------------------------------------------------


def test_containment_says_what_is_bounded_and_why_not_more() -> None:
    assert Containment(RunnerCgroups(Path("/sys"), ("memory", "pids"))).describe() == (
        "cgroup v2: everything a job starts dies with its runner; bounded for each runner: memory and pids, "
        "memory.oom.group=1"
    )
    assert Containment(RunnerCgroups(Path("/sys"), (), "it is the root of all")).describe() == (
        "cgroup v2: everything a job starts dies with its runner; bounded for each runner: nothing; "
        "not more, because it is the root of all"
    )
    assert Containment(None, "there is no cgroup v2 here (version 1 is not used)").describe() == (
        "subreaper: what a job starts is killed with its runner as far as it can be found, and the kernel limits "
        "neither its processes nor its memory, because there is no cgroup v2 here (version 1 is not used)"
    )
