"""Mutation run: change the code in small ways, and list the changes that no test notices.

`make mutants` runs this script. mutmut makes the mutants, notes which tests run which function, and
runs these tests for each mutant in a process forked from one that has imported everything. This
script draws the sample, leaves out mutants of texts for people, and prints what became of the
mutants of each package, with the diffs of the survivors.
"""

import argparse
import ast
import json
import math
import os
import random
import re
import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import mutmut.__main__ as tool
import pytest
from mutmut.configuration import config
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.stats import load_stats, status_by_exit_code
from mutmut.utils.format_utils import mangled_name_from_mutant_name
from mutmut.workers.isolation import MutantResult, MutantRunner, get_mutant_runner

PACKAGES = ("engine", "plan", "text", "experts")
CAUGHT = ("killed", "timeout", "segfault")
LISTED = Path(__file__).with_name("survivors.md")
# Functions whose mutants are not counted.
LEFT_OUT = {
    "headroom.engine.request.x_setting": "runs at import, before a mutant is chosen",
    "headroom.text.pre_tokenizers.x__words": "runs at import, before a mutant is chosen",
    "headroom.text.spelling.x__printable_bytes": "runs at import, before a mutant is chosen",
    "headroom.text.string_schemas.x__ipv6": "runs at import, before a mutant is chosen",
    "headroom.experts.cuda_ffn.x_shared_expert_tiles": "runs on a GPU alone",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one function."""

    name: str  # mutmut's: module, function, and the number of the change
    package: str
    path: Path  # of the file that it changes

    @property
    def function(self) -> str:
        """The changed function's name as mutmut writes it, without the number of the change."""
        return mangled_name_from_mutant_name(self.name)


def without_prose(source: str) -> str:
    """Return a function's syntax tree as text, with one word for every string that has a space.

    `strict=` of zip is dropped: like `assert`, it only states that both sides are equally long.
    """
    tree = ast.parse(textwrap.dedent(source))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    function.name = "function"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = "prose"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            node.keywords = []
    return ast.dump(tree)


def changes_prose_alone(mutant: Mutant, spans: dict[str, list[int]], lines: list[str]) -> bool:
    """Return whether the mutant differs from the code in the words of a text for people alone."""
    texts = []
    for name in (mutant.name, f"{mutant.function}__mutmut_orig"):
        first, last = spans[name.rpartition(".")[2]]
        texts.append(without_prose("".join(lines[first - 1 : last])))
    return texts[0] == texts[1]


def make_mutants(jobs: int) -> None:
    """Write the mutants of every package into `mutants/`, where they are not there already."""
    set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir(exist_ok=True)
    with tool.CatchOutput(spinner_title="Generating mutants"):
        tool.copy_src_dir()
        tool.copy_also_copy_files()
        tool.setup_source_paths()
        tool.create_mutants(jobs)
    import_from_mutants()


def import_from_mutants() -> None:
    """Let `headroom` be imported from `mutants/`: an editable install redirects it to the sources.

    The finder that redirects imports also finds the C++ module, which is copied to the mutants.
    """
    for finder in list(sys.meta_path):
        if "headroom" not in getattr(finder, "known_source_files", ()):
            continue
        sys.meta_path.remove(finder)
        for name, file in finder.known_wheel_files.items():
            if file.endswith(".so"):
                shutil.copy(Path(finder.dir, file), Path("mutants", *name.split(".")[:-1]))


def find_mutants(package: str) -> list[Mutant]:
    """Return the mutants of a package without those that are not counted."""
    found = []
    for meta in sorted(Path("mutants", "headroom", package).rglob("*.py.meta")):
        mutated = meta.with_suffix("")
        names = json.loads(meta.read_text())["exit_code_by_key"]
        spans = json.loads(Path(f"{mutated}.spans").read_text())["spans"]
        lines = mutated.read_text().splitlines(keepends=True)
        path = mutated.relative_to("mutants")
        mutants = [Mutant(name, package, path) for name in names]
        found += [
            mutant
            for mutant in mutants
            if mutant.function not in LEFT_OUT and not changes_prose_alone(mutant, spans, lines)
        ]
    return found


def choose_tests(mutant: Mutant, most_s: float) -> list[str]:
    """Return the tests that run the mutant's function, and take at most `most_s` seconds.

    Tests of the function's own package come first, and the quickest of them.
    """
    seconds = state().duration_by_test
    own = f"tests/{mutant.package}/"
    tests = sorted(
        state().tests_by_mangled_function_name.get(mutant.function, ()),
        key=lambda test: (not test.startswith(own), seconds[test]),
    )
    chosen, total = [], 0.0
    for test in tests:
        if chosen and total + seconds[test] > most_s:
            continue
        chosen.append(test)
        total += seconds[test]
    return chosen


def run_mutants(mutants: list[Mutant], runner: MutantRunner, most_s: float) -> dict[str, str]:
    """Return what became of each mutant, by its name: "killed", "survived", "no tests", ..."""
    outcome: dict[str, str] = {}

    def note(result: MutantResult) -> None:
        outcome[result.mutant_name] = status_by_exit_code[result.exit_code]
        word = outcome[result.mutant_name]
        print(f"{len(outcome)}/{len(mutants)} {word} {result.mutant_name}", flush=True)

    runner.startup()
    try:
        for mutant in mutants:
            tests = choose_tests(mutant, most_s)
            test_s = sum(state().duration_by_test[test] for test in tests)
            limit_s = (test_s + config().timeout_constant) * config().timeout_multiplier
            while not runner.has_capacity():
                note(runner.wait_for_result())
            # mutmut halves the limit of CPU time to have the limit of elapsed time.
            runner.submit(mutant.name, tests, math.ceil(2 * limit_s), test_s)
        runner.signal_work_complete()
        while runner.pending_count():
            note(runner.wait_for_result())
    finally:
        runner.shutdown()
    return outcome


def changed_lines(diff: str) -> str:
    """Return the removed and the added lines of a diff as one line."""
    lines = [line for line in diff.splitlines() if re.match(r"[-+](?![-+])", line)]
    return " ".join(f"{line[0]} {' '.join(line[1:].split())}" for line in lines)


def report(mutants: list[Mutant], outcome: dict[str, str]) -> None:
    """Print the diffs of the survivors, then the number of each outcome for each package."""
    listed = LISTED.read_text()
    known: Counter[str] = Counter()
    for mutant in mutants:
        if outcome[mutant.name] in CAUGHT:
            continue
        diff = get_diff_for_mutant(mutant.name, path=mutant.path)
        equivalent = changed_lines(diff) in listed
        known[mutant.package] += equivalent
        print(f"\n{outcome[mutant.name]}{', listed' if equivalent else ''}: {mutant.name}")
        print(diff)
    print()
    for package in dict.fromkeys(mutant.package for mutant in mutants):
        counts = Counter(outcome[m.name] for m in mutants if m.package == package)
        caught = sum(counts[word] for word in CAUGHT)
        words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        share = f"{caught} of {counts.total()} caught ({100 * caught / counts.total():.0f} %)"
        print(f"{package}: {share}; {words}; {known[package]} of the survivors are listed")
    caught = sum(word in CAUGHT for word in outcome.values())
    print(f"all: {caught} of {len(outcome)} caught ({100 * caught / len(outcome):.1f} %)")


def main() -> None:
    """Read the command line, then make, draw and run mutants, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--sample", type=int, default=40, help="mutants of each package; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn")
    parser.add_argument("--only", action="append", help="a mutant's name; instead of a sample")
    parser.add_argument(
        "--seconds", type=float, default=400, help="of tests for one mutant, at most"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()

    # mutmut 3.8 reads a private name that pytest 9.2 dropped.
    if not hasattr(pytest.Item, "_nodeid"):
        pytest.Item._nodeid = property(lambda item: item.nodeid)
    make_mutants(arguments.jobs)
    runner = get_mutant_runner(arguments.jobs)
    tool.collect_or_load_stats(runner, apply_config_invalidation=True)
    assert load_stats()
    drawn: list[Mutant] = []
    for package in arguments.packages:
        mutants = find_mutants(package)
        print(f"{package}: {len(mutants)} mutants")
        if arguments.only:
            mutants = [mutant for mutant in mutants if mutant.name in arguments.only]
        elif arguments.sample:
            count = min(arguments.sample, len(mutants))
            mutants = random.Random(f"{arguments.seed} {package}").sample(mutants, count)
        drawn += mutants
    report(drawn, run_mutants(drawn, runner, arguments.seconds))


if __name__ == "__main__":
    main()
