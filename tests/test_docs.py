"""The pages name files, pages and modules that are there, in lines that can be read."""

import re
from pathlib import Path

import pytest

from headroom.cli.main import command_flags

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|cu|cuh|cpp|h|inl|md))`")
MODULE = re.compile(r"`(?:headroom\.)?((?:\w+\.)+\w+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Flags of scripts of this repository, of tools that it runs, and of every command.
OTHER_FLAGS = {
    *("--folder", "--seconds", "--flags", "--sm", "--models", "--full", "--card", "--minutes"),
    *("--strict", "--check", "--editable", "--dist", "--build"),
    *("--help", "--debug", "--install-completion", "--show-completion"),
    *("--target", "--tag", "--init", "--gpus", "--time", "--rm", "--profile", "--now"),
    *("--no-deps", "--wheel-dir", "--nnodes", "--nproc-per-node"),
    *("--node-rank", "--master-addr", "--max-restarts"),  # of torchrun
}
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]+)?\)")
BASES = (ROOT, ROOT / "headroom", ROOT / "headroom/kernels")  # what paths start from
COMMANDS = ("headroom ", "make ", "python ", "curl ", "LLM(")  # how lines of commands begin
COLUMNS, ROW_COLUMNS = 100, 180  # of text and commands, and of a row in a table
PACKAGES = {path.name for path in (ROOT / "headroom").iterdir() if path.is_dir()} | {"llm"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = [name for name in FILE.findall(page.read_text()) if "*" not in name]
    missing = [x for x in named if not any((base / x).exists() for base in BASES)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    assert [
        link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_or_function_that_a_page_names_is_there(page: Path) -> None:
    for name in MODULE.findall(page.read_text()):
        parts = name.split(".")
        if parts[0] not in PACKAGES or parts[-1] in ("py", "md", "cu"):
            continue
        path = ROOT / "headroom"
        while parts and (path / parts[0]).is_dir():
            path /= parts.pop(0)
        file = path / f"{parts.pop(0)}.py" if parts else path / "__init__.py"
        assert file.exists(), f"{page.name} names {name}"
        if parts:
            defined = rf"^(?:def |class )?{parts[0]}\b"
            assert re.search(defined, file.read_text(), re.MULTILINE), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_is_there(page: Path) -> None:
    known = OTHER_FLAGS.union(*command_flags().values())
    assert sorted(set(FLAG.findall(page.read_text())) - known) == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_and_cells_of_a_page_are_short(page: Path) -> None:
    """What a program prints may be wider."""
    parts = page.read_text().split("```")
    texts = [line for part in parts[::2] for line in part.splitlines()]
    commands = [x for part in parts[1::2] for x in part.splitlines() if x.startswith(COMMANDS)]
    rows = [line for line in texts if line.startswith("|")]
    assert [x for x in (*texts, *commands) if x not in rows and len(x) > COLUMNS] == []
    assert [x for x in rows if len(x) > ROW_COLUMNS] == []
