"""Physical and fast cores, from a made-up tree of the kernel's files."""

from pathlib import Path

from headroom.machine.cores import physical_cores


def tree(root: Path, siblings: dict[int, str], fast: str = "") -> Path:
    """Write what the kernel tells of CPUs: the threads of each CPU's core, and the fast ones."""
    for cpu, listed in siblings.items():
        topology = root / "system" / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{listed}\n")
    if fast:
        (root / "cpu_core").mkdir()
        (root / "cpu_core" / "cpus").write_text(f"{fast}\n")
    return root


def test_of_two_threads_of_a_core_one_counts(tmp_path: Path) -> None:
    apart = tree(tmp_path / "apart", {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert physical_cores(range(4), apart) == [0, 1]
    adjacent = tree(tmp_path / "adjacent", {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    assert physical_cores(range(4), adjacent) == [0, 2]


def test_a_core_counts_by_whichever_of_its_threads_is_allowed(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    assert physical_cores({1, 2, 3}, root) == [1, 2]


def test_fast_cores_count_alone_where_there_are_some(tmp_path: Path) -> None:
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6"}
    root = tree(tmp_path, siblings, fast="0-3")
    assert physical_cores(range(7), root) == [0, 2]
    assert physical_cores({4, 5, 6}, root) == [4, 5, 6]


def test_every_cpu_is_a_core_where_the_system_tells_nothing(tmp_path: Path) -> None:
    assert physical_cores({3, 1, 2}, tmp_path) == [1, 2, 3]
    root = tree(tmp_path, {1: "no list"})
    assert physical_cores({1, 2}, root) == [1, 2]
