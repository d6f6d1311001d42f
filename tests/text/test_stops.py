"""StopFinder: the shown text does not depend on how the text is cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.errors import RequestError
from headroom.text.stops import StopFinder


def search_whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return what comes before the stop that is complete first, by trying every end."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))], True
    return text, False


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@settings(max_examples=500, deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 100), max_size=30),
)
def test_streaming_in_any_pieces_shows_what_cutting_the_whole_text_shows(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopFinder(stops)
    shown = ""
    for piece in pieces_of(text, cuts):
        shown += finder.push(piece)
        # Nothing is shown that a stop could still take back.
        assert search_whole(text, stops)[0].startswith(shown)
    shown += finder.finish()
    assert (shown, finder.stopped) == search_whole(text, stops)


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stop: str) -> None:
    finder = StopFinder([stop])
    shown = "".join(finder.push(character) for character in text)
    if not finder.stopped:
        held = text[len(shown) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_a_stop_across_pieces_is_found_and_not_shown() -> None:
    finder = StopFinder(["</end>"])
    assert [finder.push(piece) for piece in ("a<", "/e", "nd", ">b", "c")] == ["a", "", "", "", ""]
    assert finder.stopped
    assert finder.found == "</end>"
    assert finder.finish() == ""


def test_text_that_only_began_like_a_stop_is_shown() -> None:
    finder = StopFinder(["###"])
    assert [finder.push(piece) for piece in ("a##", "b", "#")] == ["a", "##b", ""]
    assert finder.finish() == "#"
    assert not finder.stopped


def test_the_stop_that_is_complete_first_wins() -> None:
    finder = StopFinder(["bcdef", "cd", "bcd"])
    assert finder.push("abcdef") == "a"


def test_without_stops_everything_is_shown_at_once() -> None:
    assert StopFinder(()).push("text") == "text"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="A stop text is empty") as caught:
        StopFinder(["x", ""])
    assert caught.value.param == "stop"
