"""Text that is wrapped while it comes, against the standard library's wrapping of whole texts."""

import io
import textwrap
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from headroom.cli.terminal_text import TerminalText

WIDTH = 24
words = st.lists(st.text("abcxyz,.'-", min_size=1, max_size=WIDTH), min_size=1, max_size=30)
anything = st.text(st.sampled_from("ab -1.\n\t`~|漢字é🙂"), max_size=200)


def shown(*pieces: str, width: int = WIDTH) -> str:
    file = io.StringIO()
    text = TerminalText(file, lambda: width)
    for piece in pieces:
        text.write(piece)
    text.finish()
    return file.getvalue()


@given(words)
def test_a_paragraph_is_wrapped_as_the_standard_library_wraps_it(found: list[str]) -> None:
    text = "x" + " ".join(found)  # a dash first would be an item of a list
    whole = textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    assert shown(text) == whole


@given(words)
def test_an_item_of_a_list_goes_on_below_its_own_text(found: list[str]) -> None:
    text = "x" + " ".join(found)
    whole = textwrap.fill(
        text,
        WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    assert shown(f"- {text}") == whole


@given(anything, st.lists(st.integers(0, 200)))
def test_what_is_shown_does_not_depend_on_the_pieces_that_came(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert shown(*pieces) == shown(text)


@given(anything)
def test_nothing_but_white_space_is_added_or_lost(text: str) -> None:
    assert "".join(shown(text).split()) == "".join(text.split())


@given(st.text(st.sampled_from("ab c漢字"), max_size=200).filter(lambda text: "\t" not in text))
def test_no_line_is_wider_than_the_terminal_unless_one_word_is(text: str) -> None:
    for line in shown(text).split("\n"):
        assert cell_len(line.rstrip()) <= WIDTH or " " not in line.strip()


@pytest.mark.parametrize("mark", ["```", "~~~~"])
def test_lines_of_a_code_block_stay_whole(mark: str) -> None:
    code = f"{mark}python\nif a:    # {'x ' * 30}\n\tb  \n{mark}\n"
    prose = "word " * 12
    assert shown(code + prose) == code + textwrap.fill(prose, WIDTH)


def test_a_code_block_may_be_inside_a_list_and_hold_shorter_marks() -> None:
    code = f"   ````\n   ```\n   {'long ' * 12}\n   ````\n"
    assert shown("1. see\n" + code + "end") == "1. see\n" + code + "end"


def test_marks_in_the_middle_of_a_line_open_no_code_block() -> None:
    text = "```a```\n" + "word " * 12
    assert shown(text) == "```a```\n" + textwrap.fill("word " * 12, WIDTH)


def test_a_word_that_is_longer_than_the_line_stays_whole() -> None:
    link = "https://example.org/" + "a" * 40
    assert shown(f"See {link} for more") == f"See\n{link}\nfor more"


def test_the_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert shown("a\x1b[2Jb\rc\x07\x9bd\x7f") == "a[2Jbcd"


def test_a_narrowed_terminal_wraps_what_comes_next() -> None:
    file, width = io.StringIO(), [40]
    text = TerminalText(file, lambda: width[0])
    text.write("one two three four five ")
    width[0] = 20
    text.write("six seven\n")
    assert file.getvalue() == "one two three four five\nsix seven\n"


def test_it_knows_whether_the_cursor_is_at_the_start_of_a_line() -> None:
    text = TerminalText(io.StringIO(), lambda: 40)
    assert text.at_line_start
    text.write("a")
    assert not text.at_line_start
    text.write("\n")
    assert text.at_line_start
