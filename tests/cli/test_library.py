"""What list, rm and serve share: where the models of aliases are."""

from pathlib import Path

from headroom.cli.library import alias_paths, library, time_text
from headroom.formats.aliases import add_alias
from headroom.options import Options


def test_aliases_lead_to_paths_or_to_nothing(tmp_path: Path, tiny_path: Path) -> None:
    file = tmp_path / "aliases.json"
    add_alias(file, "here", str(tiny_path))
    add_alias(file, "gone", "org/none")
    add_alias(file, "planned", "qwen3-0.6b")
    options = Options(home=str(tmp_path), aliases=str(file))
    assert alias_paths(options) == {"gone": None, "here": tiny_path.absolute(), "planned": None}
    (listed,) = library(options)
    assert (listed.stored.path, listed.aliases) == (tiny_path, ("here",))


def test_times_are_iso_8601() -> None:
    assert time_text(0) == "1970-01-01T00:00:00+00:00"
