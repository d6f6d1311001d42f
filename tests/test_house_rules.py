"""The rules of the house that a machine can check: imports, docstrings, sizes, prints."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "headroom").rglob("*.py"))
# A GPU's kernels get every number as an argument of its own: they cannot be given objects.
DEVICE_CODE = ROOT / "headroom/kernels/triton/device"
MAX_LINES = 400
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

# Who may import whom, besides itself. Everything may import BASE.
BASE = {"errors", "units", "log", "options"}
MAY_IMPORT: dict[str, set[str]] = {
    "formats": set(),
    "text": {"formats"},
    "kernels": {"formats"},
    "memory": {"formats"},
    "layers": {"formats", "kernels", "memory"},
    "moe": {"kernels", "memory", "layers"},
    "models": {"formats", "memory", "layers", "moe"},
    "split": {"formats", "memory", "layers", "moe", "models"},
    "spec": {"memory", "layers", "models", "split"},
    "engine": {"memory", "layers", "split", "spec"},
    "bench": {"formats", "kernels", "memory", "layers", "models", "split", "engine"},
    "server": {"text", "engine", "llm"},
}
MAY_IMPORT["llm"] = set(MAY_IMPORT) - {"server", "bench"}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
# The package's front door names what users import; `headroom/__main__.py` is a second way in.
MAY_IMPORT["__init__"] = {"engine", "llm", "memory"}
MAY_IMPORT["__main__"] = {"cli"}
# One file may do what its package may not.
ALSO = {"memory/measure.py": {"kernels"}}

# Plain numbers that both who launches and who plans count with: the planner may import them.
PLAIN = {"headroom.kernels.cuda.sizes"}

STANDARD_ONLY = {*BASE, "formats", "memory"}  # packages of the standard library, and those below
THIRD_PARTY = {
    "formats": {"numpy", "huggingface_hub"},
    "memory": {"numpy", "rich"},
}
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
    allowed = {step, *BASE, *MAY_IMPORT.get(step, set()), *ALSO.get(path_id(path), set())}
    for name in imported(path):
        if name.startswith("headroom."):
            target = name.split(".")[1]
            if target == "__version__" or name.rpartition(".")[0] in PLAIN:
                continue
            assert target in allowed, f"{path_id(path)} imports {name}"


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if step_of(path) in STANDARD_ONLY or module_of(path) in PLAIN],
    ids=path_id,
)
def test_the_early_packages_need_little_but_the_standard_library(path: Path) -> None:
    allowed = {"headroom", *sys.stdlib_module_names, *THIRD_PARTY.get(step_of(path), set())}
    if path_id(path) in ALSO:
        allowed.add("torch")
    assert {name.split(".")[0] for name in imported(path)} <= allowed


@pytest.mark.parametrize("path", FILES, ids=path_id)
def test_every_module_class_and_function_says_what_it_is_for(path: Path) -> None:
    tree = parse(path)
    assert ast.get_docstring(tree), f"{path_id(path)} has no docstring"
    assert list(undocumented(tree)) == []


@pytest.mark.parametrize("path", FILES, ids=path_id)
def test_a_file_has_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_no_file_of_tests_and_benchmarks_has_more_lines_either(folder: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lines
    assert [path for path, count in lines.items() if count > MAX_LINES] == []


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != DEVICE_CODE], ids=path_id)
def test_no_function_takes_more_than_seven_arguments(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, FUNCTION):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            named = [a for a in arguments if a.arg not in ("self", "cls")]
            assert len(named) <= 7, f"{path_id(path)}:{node.lineno} {node.name}"


def test_nine_functions_of_ten_fit_in_30_lines() -> None:
    sizes = [
        (node.end_lineno or 0) - node.lineno + 1
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, FUNCTION)
    ]
    assert sum(size <= 30 for size in sizes) >= 0.9 * len(sizes)


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


@pytest.mark.parametrize("path", FILES, ids=path_id)
def test_no_file_leaves_work_for_later(path: Path) -> None:
    words = ("TODO", "FIXME", "XXX", "NotImplementedError")
    assert not [word for word in words if word in path.read_text()]


@pytest.mark.parametrize(
    "module",
    ["headroom", "headroom.formats.hub", "headroom.memory.plan", "headroom.text.tokenizer"],
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


@pytest.mark.parametrize("module", ["headroom.llm", "headroom.memory.plan", "headroom.bench.run"])
def test_engine_and_planner_work_where_the_server_extra_is_missing(module: str) -> None:
    python(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {SERVER_ONLY}: raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"import {module}"
    )
