"""Events to text: what an answer shows, with which tokens, and how it ends."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from headroom.engine.request import TokenEvent
from headroom.server.refusals import RefusalError
from headroom.server.stream import AnswerReader, Delta
from headroom.text.tokenizer import Tokenizer
from tests.server.fakes import BOS, EOS, TIMINGS, FakeTokenizer


def read(tokens: Sequence[int], reason: Any = "length", stops: Sequence[str] = ()) -> list[Delta]:
    reader = AnswerReader(0, cast(Tokenizer, FakeTokenizer()), stops)
    deltas: list[Delta] = []
    for count, token in enumerate(tokens, start=1):
        event = TokenEvent(
            request_id="a",
            token=token,
            finish_reason=reason if count == len(tokens) else None,
            prompt_tokens=3,
            generated_tokens=count,
            timings=TIMINGS,
        )
        deltas.append(reader.read(event))
        if deltas[-1].end is not None:
            break
    return deltas


def test_half_a_character_is_never_shown() -> None:
    deltas = read([*"é🙂".encode()])
    assert [delta.text for delta in deltas] == ["", "é", "", "", "", "🙂"]
    assert [[token.offset for token in delta.tokens] for delta in deltas] == [
        [], [0, 0], [], [], [], [1, 1, 1, 1],
    ]  # fmt: skip


def test_a_character_cut_off_by_the_end_is_shown_as_a_replacement() -> None:
    deltas = read([97, 0xC3])
    assert [delta.text for delta in deltas] == ["a", "\ufffd"]
    assert [token.id for token in deltas[-1].tokens] == [0xC3]


def test_the_token_that_ends_an_answer_is_counted_but_not_shown() -> None:
    deltas = read([97, EOS], reason="stop")
    assert [delta.text for delta in deltas] == ["a", ""]
    assert deltas[-1].tokens == ()
    assert deltas[-1].end is not None
    assert (deltas[-1].end.finish_reason, deltas[-1].end.generated_tokens) == ("stop", 2)


def test_a_control_token_inside_an_answer_is_hidden_but_told() -> None:
    deltas = read([97, BOS, 98])
    assert "".join(delta.text for delta in deltas) == "ab"
    assert [token.id for delta in deltas for token in delta.tokens] == [97, BOS, 98]


def test_text_that_may_become_a_stop_is_held_with_its_tokens_until_it_is_not() -> None:
    deltas = read([*b"abcabd"], stops=["abd!"])
    assert [delta.text for delta in deltas] == ["", "", "abc", "", "", "abd"]
    assert [len(delta.tokens) for delta in deltas] == [0, 0, 3, 0, 0, 3]


def test_a_stop_text_takes_its_tokens_with_it() -> None:
    deltas = read([*b"ab--cd"], stops=["--"])
    assert "".join(delta.text for delta in deltas) == "ab"
    assert [token.id for delta in deltas for token in delta.tokens] == [97, 98]
    end = deltas[-1].end
    assert end is not None
    assert (end.finish_reason, end.generated_tokens, end.prompt_tokens) == ("stop", 4, 3)


def test_a_stop_text_in_the_last_token_makes_the_reason_stop() -> None:
    end = read([*b"ab-"], reason="length", stops=["-"])[-1].end
    assert end is not None
    assert end.finish_reason == "stop"


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("cancelled", 503)])
def test_an_end_that_is_no_answer_is_an_error(reason: str, status: int) -> None:
    with pytest.raises(RefusalError) as caught:
        read([97], reason=reason)
    assert caught.value.status == status
