"""Aliases: one file, read and changed safely, whoever else changes it."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import FormatError, OptionError
from headroom.formats.aliases import (
    add_alias,
    find_alias,
    load_aliases,
    remove_alias,
    with_aliases,
)
from headroom.options import Options


def test_aliases_are_kept_until_they_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "in" / "aliases.json"
    assert load_aliases(path) == {}
    add_alias(path, "coder", "org/repo:m.gguf")
    add_alias(path, "Big", "/data/big")
    assert load_aliases(path) == {"Big": "/data/big", "coder": "org/repo:m.gguf"}
    assert remove_alias(path, "CODER") == "org/repo:m.gguf"
    assert load_aliases(path) == {"Big": "/data/big"}
    assert json.loads(path.read_text())["version"] == 1


def test_a_second_alias_of_one_name_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "aliases.json"
    add_alias(path, "coder", "a.gguf")
    with pytest.raises(OptionError, match=r"coder is an alias of a\.gguf already"):
        add_alias(path, "Coder", "b.gguf")
    assert load_aliases(path) == {"coder": "a.gguf"}
    with pytest.raises(OptionError, match=r"There is no alias 'x'\. There are: coder\."):
        remove_alias(path, "x")


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "-a", ".a", "a b", "ä", "a" * 65, "a\n"])
def test_names_that_could_be_paths_flags_or_tags_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be an alias"):
        add_alias(tmp_path / "aliases.json", name, "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expecting value"),
        ("[]", "it is not a JSON object"),
        ("{}", "it has no version 1 with aliases"),
        ('{"version": 2, "aliases": {}}', "it has no version 1 with aliases"),
        ('{"version": 1, "aliases": {"a": 3}}', "a model is not a text"),
    ],
)
def test_a_broken_file_is_named_and_never_written_over(
    text: str, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "aliases.json"
    path.write_text(text)
    for action in (load_aliases, lambda at: add_alias(at, "a", "m")):
        with pytest.raises(FormatError, match="is not a file of aliases: ") as refused:
            action(path)
        assert told in str(refused.value)
    assert path.read_text() == text


def test_a_broken_file_stops_nothing_but_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "aliases.json"
    path.write_text("{")
    options = Options(model="m.gguf", aliases=str(path))
    assert with_aliases(options) == options
    (record,) = caplog.records
    assert f"{path} is not a file of aliases" in record.getMessage()


def test_changes_made_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "aliases.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_alias(path, f"a{number}", "m"), range(24)))
    assert load_aliases(path) == {f"a{number}": "m" for number in range(24)}


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch(mode=stat.S_IRUSR)
    with pytest.raises(OptionError, match="Cannot write the aliases into"):
        add_alias(blocked / "aliases.json", "a", "m")


def test_options_name_the_model_and_keep_the_alias_as_served_name(tmp_path: Path) -> None:
    path = tmp_path / "aliases.json"
    add_alias(path, "Coder", "/data/m.gguf")
    add_alias(path, "small", "qwen3-0.6b")
    options = Options(model="CODER", draft="small", aliases=str(path))
    found = with_aliases(options)
    assert (found.model, found.served_name, found.draft) == (
        "/data/m.gguf", "coder", "qwen3-0.6b",
    )  # fmt: skip
    assert with_aliases(found) == found
    named = with_aliases(Options(model="coder", served_name="mine", aliases=str(path)))
    assert named.served_name == "mine"
    other = Options(model="other.gguf", aliases=str(path))
    assert with_aliases(other) == other


@given(st.dictionaries(st.from_regex(r"[a-z0-9][a-zA-Z0-9._-]{0,9}", fullmatch=True), st.text()))
def test_an_alias_is_found_in_any_case_and_nothing_else_is(aliases: dict[str, str]) -> None:
    for name in aliases:
        found = find_alias(name.upper(), aliases)
        assert found is not None
        assert found.lower() == name.lower()
    assert find_alias("no such alias", aliases) is None
