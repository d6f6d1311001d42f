"""Chats that are cut to fit into the context."""

from typing import Any

import pytest

from headroom.server.cut_chats import cut_to_fit
from headroom.text.conversation import Conversation
from tests.server.fakes import FakeLLM


def turns(*sizes: int) -> list[dict[str, Any]]:
    """Return a turn of each size: a question, and an answer to all but the last one."""
    messages: list[dict[str, Any]] = []
    for number, size in enumerate(sizes):
        messages.append({"role": "user", "content": str(number) * size})
        messages.append({"role": "assistant", "content": "Yes."})
    return messages[:-1]


def kept(messages: list[dict[str, Any]], max_tokens: int | None = None) -> list[str]:
    cut = cut_to_fit(FakeLLM(), Conversation(messages=messages), max_tokens)
    return [turn["content"][:4] for turn in cut.messages]


SYSTEM = {"role": "system", "content": "Brief."}


def test_a_chat_that_fits_is_kept_whole() -> None:
    assert kept([SYSTEM, *turns(9, 9)]) == ["Brie", "0000", "Yes.", "1111"]


def test_the_oldest_turns_go_and_the_system_message_stays() -> None:
    assert kept([SYSTEM, *turns(2000, 1500, 1500)]) == ["Brie", "1111", "Yes.", "2222"]
    assert kept(turns(2000, 1500, 1500)) == ["1111", "Yes.", "2222"]


@pytest.mark.parametrize(
    ("max_tokens", "first"), [(None, "1111"), (-1, "1111"), (5, "0000"), (4000, "1111")]
)
def test_an_eighth_of_the_context_is_left_unless_the_answer_is_shorter(
    max_tokens: int | None, first: str
) -> None:
    assert kept(turns(2000, 1800), max_tokens)[0] == first


def test_the_last_turn_stays_even_if_it_does_not_fit() -> None:
    assert kept(turns(9, 5000)) == ["1111"]
    assert kept([SYSTEM]) == ["Brie"]
