"""The rules of the house that a machine can check: imports, docstrings, prints, settings."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "headroom").rglob("*.py"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

BASE = {"errors", "units", "log", "options", "progress"}  # what every package may import
TABLE_ROW = re.compile(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", re.MULTILINE)
# Who may import whom besides itself: CONTRIBUTING.md says it, so that page and test cannot differ.
MAY_IMPORT: dict[str, set[str]] = {
    row[1]: {word.strip() for word in row[2].split(",") if word.strip()}
    for row in TABLE_ROW.finditer((ROOT / "CONTRIBUTING.md").read_text())
}
# The package's front door names what users import; `headroom/__main__.py` is a second way in.
MAY_IMPORT["__init__"] = {"answers", "engine", "llm", "plan", "text"}
MAY_IMPORT["__main__"] = {"cli"}
# The files of the early packages that need torch: they measure, or ask torch about GPUs.
WITH_TORCH = ("machine/measure.py", "machine/torch_gpus.py")

# Packages that need little but the standard library, and what else each may import.
THIRD_PARTY: dict[str, set[str]] = {
    **{name: set() for name in BASE},
    "formats": {"numpy", "huggingface_hub"},
    "families": {"numpy"},
    "machine": set(),
    "plan": {"numpy", "rich"},
}
# Tests about more than one module, or about the project's other files.
THEMES = {
    *("cli/test_end_to_end.py", "server/test_openai_client.py", "formats/test_fuzz.py"),
    *("families/test_families.py", "families/test_long_prompts.py", "kernels/cuda/test_kernels.py"),
    *("test_docs.py", "test_golden.py", "test_perplexity.py", "test_packaging.py"),
    *("test_house_rules.py", "test_hostile_models.py", "server/test_prefix_cache.py"),
}
# Tests that mirror no package: they run on a GPU, test what is measured beside the package, or run
# other people's clients.
ELSEWHERE = ("gpu", "benchmarks", "clients")
TESTS = [
    path
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if path.relative_to(ROOT / "tests").parts[0] not in ELSEWHERE
]
SERVER_ONLY = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client")


def path_id(path: Path) -> str:
    return path.relative_to(ROOT / "headroom").as_posix()


def step_of(path: Path) -> str:
    """Return the package, or the module at the top, that a file belongs to."""
    return Path(path_id(path)).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> Iterator[str]:
    """Yield the full name of every import of a file, those inside functions included."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path_id(path)}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Yield public classes and functions without a docstring; a Protocol's own speaks for it."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    members = [node.body for node in classes if public(node) and not is_protocol(node)]
    for body in [tree.body, *members]:
        for node in body:
            if (
                isinstance(node, (ast.ClassDef, *FUNCTION))
                and public(node)
                and ast.get_docstring(node) is None
            ):
                yield f"line {node.lineno}: {node.name}"


def public(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not node.name.startswith("_")


def is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.dump(base) for base in node.bases)


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", FILES, ids=path_id)
def test_a_file_imports_only_what_its_package_may(path: Path) -> None:
    step = step_of(path)
    allowed = {step, "__version__", *BASE, *MAY_IMPORT.get(step, set())}
    for name in imported(path):
        if name.startswith("headroom."):
            assert name.split(".")[1] in allowed, f"{path_id(path)} imports {name}"


def test_the_table_of_packages_is_complete_and_points_one_way() -> None:
    steps = {step_of(path) for path in FILES} - {*BASE, "__init__", "__main__"}
    order = [name for name in MAY_IMPORT if not name.startswith("__")]
    assert set(order) == steps
    for index, name in enumerate(order):
        assert MAY_IMPORT[name] <= set(order[:index]), f"{name} imports a later package"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if step_of(p) in THIRD_PARTY and path_id(p) not in WITH_TORCH],
    ids=path_id,
)
def test_the_early_packages_need_little_but_the_standard_library(path: Path) -> None:
    allowed = {"headroom", *sys.stdlib_module_names, *THIRD_PARTY[step_of(path)]}
    assert {name.split(".")[0] for name in imported(path)} <= allowed


@pytest.mark.parametrize("path", FILES, ids=path_id)
def test_every_module_class_and_function_says_what_it_is_for(path: Path) -> None:
    tree = parse(path)
    assert ast.get_docstring(tree), f"{path_id(path)} has no docstring"
    assert list(undocumented(tree)) == []


@pytest.mark.parametrize("path", [p for p in FILES if step_of(p) != "cli"], ids=path_id)
def test_only_the_command_line_prints(path: Path) -> None:
    calls = [node.func for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
    assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "print"]


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "options.py"], ids=path_id)
def test_only_options_reads_the_environment(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "environb", "getenv"), f"line {node.lineno}"
    assert not {"os.environ", "os.getenv"} & set(imported(path))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_test_file_is_named_for_the_module_that_it_tests(path: Path) -> None:
    place = path.relative_to(ROOT / "tests")
    if place.as_posix() in THEMES:
        return
    # A module of the mirrored package or below it, or a helper of the tests beside it.
    modules = {found.stem for found in (ROOT / "headroom" / place.parent).rglob("[!_]*")}
    modules |= {found.stem for found in path.parent.glob("[!_]*.py") if found not in TESTS}
    name = path.stem.removeprefix("test_")
    assert any(name == module or name.startswith(f"{module}_") for module in modules)


def test_the_themes_of_tests_are_there() -> None:
    assert {path.relative_to(ROOT / "tests").as_posix() for path in TESTS} >= THEMES


@pytest.mark.parametrize("path", FILES, ids=path_id)
def test_no_file_leaves_work_for_later(path: Path) -> None:
    words = ("TODO", "FIXME", "XXX", "NotImplementedError")
    assert not [word for word in words if word in path.read_text()]


@pytest.mark.parametrize(
    "module",
    [
        "headroom",
        "headroom.formats.hub",
        "headroom.plan.plan",
        "headroom.plan.describe",
        "headroom.text.tokenizer",
    ],
)
def test_readers_planner_and_tokenizer_work_without_torch(module: str) -> None:
    assert python(f"import sys, {module}; print('torch' in sys.modules)").strip() == "False"


def test_the_help_text_does_not_wait_for_torch() -> None:
    assert python("import sys, headroom.cli.main; print('torch' in sys.modules)").strip() == "False"


def test_the_engine_does_not_wait_for_torchs_compiler() -> None:
    code = "import sys, torch; had = set(sys.modules); import headroom.llm; "
    found = python(f"{code} print(set(sys.modules) - had)")
    assert "'headroom.llm'" in found
    assert "'torch._dynamo'" not in found


@pytest.mark.parametrize("module", ["headroom.llm", "headroom.plan.plan", "headroom.bench.run"])
def test_engine_and_planner_work_where_the_server_extra_is_missing(module: str) -> None:
    python(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {SERVER_ONLY}: raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"import {module}"
    )
