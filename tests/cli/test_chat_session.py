"""ChatSession: what fits the context, settings, and files of conversations."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.cli.chat_session import ChatSession, ChatTurn, chat_path
from headroom.engine.request import SamplingParams
from headroom.errors import ContextLengthError, HeadroomError, OptionError, RequestError


def session(**more: Any) -> ChatSession:
    return ChatSession(SamplingParams(seed=1), {"temperature": 0.6}, **more)


def count_words(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"].split()) for message in messages)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 60), st.integers(16, 100))
def test_as_few_turns_are_left_out_as_the_answers_room_allows(
    sizes: list[int], question: int, context: int
) -> None:
    talk = session(turns=[ChatTurn("q " * size, "a") for size in sizes])
    asked = "w " * question
    room = context // 4
    # Brute force, from the whole conversation down to the question alone.
    fitting = [
        left_out
        for left_out in range(len(sizes) + 1)
        if sum(size + 1 for size in sizes[left_out:]) + question + room <= context
    ]
    if fitting:
        assert talk.fit(asked, count_words, context) == fitting[0]
    elif question < context:  # the answer may be short
        assert talk.fit(asked, count_words, context) == len(sizes)
    else:
        with pytest.raises(ContextLengthError, match=f"{question} tokens?, and the context holds"):
            talk.fit(asked, count_words, context)


def test_an_answer_of_few_tokens_needs_little_room() -> None:
    talk = session(turns=[ChatTurn("q " * 80, "a")])
    assert talk.fit("w", count_words, 100) == 1
    talk.set("max_tokens", "10")
    assert talk.fit("w", count_words, 100) == 0


def test_a_refused_message_is_told_with_the_system_text_that_takes_its_place() -> None:
    with pytest.raises(ContextLengthError, match="message and the system text have 70 tokens"):
        session(system="s " * 20).fit("w " * 50, count_words, 64)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("temperature", "warm", "temperature is 'warm', not a number."),
        ("top_k", "1.5", "top_k is '1.5', not a whole number."),
        ("temperature", "-1", "temperature is -1.0; it must be from 0 to 100."),
        ("temperature", "nan", "temperature is nan; it must be a number from 0 to 100."),
        ("temprature", "1", "There is no setting temprature. Did you mean temperature?"),
        ("colour", "red", "There is no setting colour. Known: thoughts, think, max_tokens, "),
        ("ignore_eos", "perhaps", "ignore_eos is 'perhaps'. Choose from on, off."),
        ("thoughts", "loud", "thoughts is 'loud'. Choose from shown, folded, hidden."),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(name: str, text: str, told: str) -> None:
    talk = session()
    with pytest.raises((OptionError, RequestError)) as refused:
        talk.set(name, text)
    assert str(refused.value).startswith(told)
    assert talk == session()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("temperature", "0.25", "temperature is 0.25."),
        ("max-tokens", "7", "max_tokens is 7."),
        ("ignore_eos", "on", "ignore_eos is on."),
        ("stop", "END", "stop is 'END'."),
        ("thoughts", "Folded", "thoughts is folded."),
    ],
)
def test_a_setting_changes_and_goes_back_to_its_default(name: str, text: str, told: str) -> None:
    talk = session()
    assert talk.set(name, text) == told
    assert talk != session()
    talk.set(name, "default")
    talk.set("temperature", "1")
    assert talk == session()


values = st.text(max_size=30)
sessions = st.builds(
    ChatSession,
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0, 100),
        top_k=st.integers(0, 100),
        max_tokens=st.none() | st.integers(1, 100),
        seed=st.integers(-(1 << 63) + 1, (1 << 63) - 1),
        stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
        ignore_eos=st.booleans(),
    ),
    defaults=st.just({}),
    system=values,
    turns=st.lists(st.builds(ChatTurn, values, values, values, st.booleans()), max_size=3),
    thoughts=st.sampled_from(["shown", "folded", "hidden"]),
    think=st.sampled_from(["on", "off", "auto"]),
)


@given(sessions)
def test_a_conversation_is_loaded_as_it_was_saved(
    tmp_path_factory: pytest.TempPathFactory, saved: ChatSession
) -> None:
    path = tmp_path_factory.getbasetemp() / "saved.json"
    saved.save(path, "fake")
    loaded = ChatSession(SamplingParams(), {})
    loaded.load(path)
    assert loaded == saved


def test_a_file_that_is_no_conversation_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    told = "is there and is not a conversation file; it is not written over. Name another file."
    with pytest.raises(OptionError, match=told):
        session().save(path, "fake")
    assert path.read_text() == '{"mine": 1}'
    with pytest.raises(OptionError, match="Cannot write"):
        session().save(tmp_path / "notes.json" / "below.json", "fake")


WHOLE: dict[str, Any] = {
    "version": 1,
    "model": "fake",
    "system": "",
    "thoughts": "shown",
    "think": "auto",
    "sampling": {"temperature": 0.5},
    "turns": [{"question": "a", "answer": "b"}],
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, "its version is 2, not 1"),
        ({"turns": [{"question": "a"}]}, "answer"),
        ({"turns": [{"question": 1, "answer": "b"}]}, "it has 1 in the place of a text"),
        ({"turns": "abc"}, "must be a mapping"),
        ({"sampling": {"temperature": "warm"}}, "temperature is 'warm', not a number"),
        ({"sampling": {"temperature": math.inf}}, "temperature is inf; it must be"),
        ({"sampling": {"heat": 1}}, "Unknown setting 'heat'"),
        ({"sampling": {"top_k": None}}, "top_k is 'None', not a whole number"),
        ({"sampling": 3}, "'int' object is not iterable"),
        ({"system": None}, "it has None in the place of a text"),
        ({"thoughts": "loud"}, "thoughts is 'loud'"),
        ({"think": 3}, "think"),
    ],
)
def test_a_wrong_file_is_refused_and_changes_nothing(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(WHOLE))
    session().load(path)
    path.write_text(json.dumps(WHOLE | change))
    talk = session(system="Be brief", turns=[ChatTurn("x", "y")])
    with pytest.raises(HeadroomError) as refused:
        talk.load(path)
    assert str(refused.value).startswith(f"{path} is not a conversation that /save wrote: ")
    assert told in str(refused.value)
    assert talk == session(system="Be brief", turns=[ChatTurn("x", "y")])


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[1]", b'{"version": 1, "turns": []}']
)
def test_a_broken_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="is not a conversation that /save wrote"):
        session().load(path)
    with pytest.raises(OptionError, match="Cannot read"):
        session().load(tmp_path)


def test_a_name_without_a_suffix_gets_one() -> None:
    assert chat_path("a/rivers") == Path("a/rivers.json")
    assert chat_path("rivers.txt") == Path("rivers.txt")
    assert chat_path("~/x.json") == Path.home() / "x.json"
    for wrong in ("/", "~nobody-of-this-name/x"):
        with pytest.raises(OptionError, match="names no file"):
            chat_path(wrong)
