"""AnswerReader: token events become text, for the Python API and for the server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from headroom.answers import AnswerDelta, AnswerReader, join_deltas
from headroom.engine.engine import Engine
from headroom.engine.request import (
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    TopToken,
)
from headroom.text.answer_parser import AnswerParser
from headroom.text.conversation import Tool
from headroom.text.reasoning import Reasoning
from headroom.text.tokenizer import Tokenizer
from headroom.text.tool_formats import find_tool_format
from tests.server.fakes import BOS, EOS, TIMINGS, FakeTokenizer
from tests.text.small_vocabularies import sentencepiece_vocabulary
from tests.text.tool_models import tool_template, tool_tokenizer


class QuietEngine:
    """Takes cancellations, and says at its end what experts cost if `reports_costs`."""

    def __init__(self, *, reports_costs: bool = False) -> None:
        self.reports_costs = reports_costs
        self.cancelled: list[str] = []

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def make_reader(engine: QuietEngine, stops: Sequence[str] = ()) -> AnswerReader:
    params = SamplingParams(stop=tuple(stops))
    request = GenerationRequest(id="a", prompt=(1, 2, 3), params=params, stop_ids=frozenset())
    return AnswerReader(request, cast(Tokenizer, FakeTokenizer()), cast(Engine, engine))


def token_event(token: int | None, count: int, reason: Any = None, **more: Any) -> TokenEvent:
    return TokenEvent(
        request_id="a",
        token=token,
        finish_reason=reason,
        prompt_tokens=3,
        generated_tokens=count,
        timings=more.pop("timings", TIMINGS),
        **more,
    )


def read(
    tokens: Sequence[int], reason: Any = "length", stops: Sequence[str] = ()
) -> list[AnswerDelta]:
    reader = make_reader(QuietEngine(), stops)
    deltas: list[AnswerDelta] = []
    for count, token in enumerate(tokens, start=1):
        last = count == len(tokens)
        deltas.append(reader.read(token_event(token, count, reason if last else None)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def test_half_a_character_is_never_shown() -> None:
    deltas = read([*"é🙂".encode()])
    assert [delta.text for delta in deltas] == ["", "é", "", "", "", "🙂"]
    assert [[token.offset for token in delta.shown_tokens] for delta in deltas] == [
        [], [0, 0], [], [], [], [1, 1, 1, 1],
    ]  # fmt: skip


def test_a_character_cut_off_by_the_end_is_shown_as_a_replacement() -> None:
    deltas = read([97, 0xC3])
    assert [delta.text for delta in deltas] == ["a", "\ufffd"]
    assert [token.id for token in deltas[-1].shown_tokens] == [0xC3]


def test_the_token_that_ends_an_answer_is_counted_but_not_shown() -> None:
    deltas = read([97, EOS], reason="stop")
    assert [delta.text for delta in deltas] == ["a", ""]
    assert [delta.token for delta in deltas] == [97, EOS]
    assert deltas[-1].shown_tokens == ()
    assert (deltas[-1].finish_reason, deltas[-1].generated_tokens) == ("stop", 2)


def test_a_plain_token_that_ends_an_answer_is_not_shown_either() -> None:
    assert [delta.text for delta in read([97, 98], reason="stop")] == ["a", ""]


def test_a_control_token_inside_an_answer_is_not_in_the_text_but_among_the_tokens() -> None:
    deltas = read([97, BOS, 98])
    assert "".join(delta.text for delta in deltas) == "ab"
    assert [token.id for delta in deltas for token in delta.shown_tokens] == [97, BOS, 98]


def test_text_that_may_become_a_stop_is_held_with_its_tokens_until_it_is_not() -> None:
    deltas = read([*b"abcabd"], stops=["abd!"])
    assert [delta.text for delta in deltas] == ["", "", "abc", "", "", "abd"]
    assert [len(delta.shown_tokens) for delta in deltas] == [0, 0, 3, 0, 0, 3]
    assert [x.offset for delta in deltas for x in delta.shown_tokens] == [0, 1, 2, 3, 4, 5]


def test_a_stop_text_takes_its_tokens_with_it() -> None:
    deltas = read([*b"ab--cd"], stops=["--"])
    assert "".join(delta.text for delta in deltas) == "ab"
    assert [token.id for delta in deltas for token in delta.shown_tokens] == [97, 98]
    end = deltas[-1]
    assert (end.finish_reason, end.generated_tokens, end.prompt_tokens) == ("stop", 4, 3)


def test_a_stop_text_in_the_last_token_makes_the_reason_stop() -> None:
    assert read([*b"ab-"], reason="length", stops=["-"])[-1].finish_reason == "stop"


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_an_answer_that_the_engine_ended_keeps_the_engines_reason(reason: str) -> None:
    assert read([97], reason=reason)[-1].finish_reason == reason


def test_a_stop_text_cancels_the_request_and_ends_the_answer() -> None:
    engine = QuietEngine()
    reader = make_reader(engine, ["-"])
    assert reader.read(token_event(97, 1)).finish_reason is None
    assert engine.cancelled == []
    assert reader.read(token_event(ord("-"), 2)).finish_reason == "stop"
    assert engine.cancelled == ["a"]


def test_an_answer_that_the_engine_ended_itself_is_not_cancelled() -> None:
    engine = QuietEngine()
    reader = make_reader(engine, ["-"])
    assert reader.read(token_event(ord("-"), 1, "length")).finish_reason == "stop"
    assert engine.cancelled == []


def test_the_end_at_a_stop_text_waits_for_what_the_experts_cost() -> None:
    engine = QuietEngine(reports_costs=True)
    reader = make_reader(engine, ["-"])
    first = reader.read(token_event(97, 1))
    stopped = reader.read(token_event(ord("-"), 2))
    late = reader.read(token_event(98, 3, timings=replace(TIMINGS, decode_s=5.0)))
    cost = {"hit_rate": 0.5}
    parts = {"layers": 0.5}
    timings = replace(TIMINGS, decode_s=9.0, experts=cost, parts=parts)
    end = reader.read(token_event(None, 3, "cancelled", timings=timings))
    assert [first.text, stopped.text, late.text, end.text] == ["a", "", "", ""]
    assert engine.cancelled == ["a"]
    assert stopped.finish_reason is None
    assert late.is_empty
    assert (end.finish_reason, end.generated_tokens, end.token) == ("stop", 2, None)
    # The times up to the stop text.
    assert end.timings == replace(TIMINGS, experts=cost, parts=parts)
    whole = join_deltas([first, stopped, end])
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("a", (97, ord("-")), "stop")


def test_a_whole_answer_has_everything_that_its_deltas_had() -> None:
    logprobs = [TokenLogprobs(-0.5, (TopToken(1, -0.1),)), TokenLogprobs(-0.25, ())]
    reader = make_reader(QuietEngine())
    of_prompt = (None, TokenLogprobs(-2.0, ()))
    deltas = [
        reader.read(token_event(97, 1, logprobs=logprobs[0], prompt_logprobs=of_prompt)),
        reader.read(token_event(98, 2, "length", logprobs=logprobs[1])),
    ]
    whole = join_deltas(deltas)
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("ab", (97, 98), "length")
    assert (whole.prompt_tokens, whole.generated_tokens, whole.timings) == (3, 2, TIMINGS)
    assert whole.logprobs == tuple(logprobs)
    assert whole.prompt_logprobs == of_prompt
    assert [(x.id, x.offset, x.logprobs) for x in whole.shown_tokens] == [
        (97, 0, logprobs[0]),
        (98, 1, logprobs[1]),
    ]


def test_tokens_of_thoughts_are_counted_with_their_marks() -> None:
    marks = Reasoning(start="<think>", end="</think>", start_id=1, end_id=2, opened=False)
    params = SamplingParams()
    request = GenerationRequest(id="a", prompt=(1,), params=params, stop_ids=frozenset())
    reader = AnswerReader(
        request,
        cast(Tokenizer, FakeTokenizer()),
        cast(Engine, QuietEngine()),
        parser=AnswerParser(marks, in_thought=True),
    )
    text = "Hm.</think>Four."
    deltas = [
        reader.read(token_event(token, count, "length" if count == len(text) else None))
        for count, token in enumerate(text.encode(), start=1)
    ]
    answer = join_deltas(deltas)
    assert (answer.thought, answer.text) == ("Hm.", "Four.")
    assert (answer.thought_tokens, answer.generated_tokens) == (len("Hm.</think>"), len(text))
    assert deltas[1].thought_tokens == 2
    assert bytes(token.id for token in answer.shown_tokens) == b"Four."


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Four.", "Four."),
        (' I look. \n<tool_call>{"name": "now"}</tool_call>\n', " I look."),
        ('<tool_call>{"name": "now"}</tool_call> Done. <b>', "Done. <b>"),
        ('<tool_call>{"name": "then"}</tool_call>', '<tool_call>{"name": "then"}</tool_call>'),
        ("<tool_call>", "<tool_call>"),
        ('é <tool_call>{"name": "now", "arguments": {"a": [1', "é1"),
    ],
)
def test_only_tokens_of_the_text_are_shown(answer: str, text: str, thinks: bool) -> None:
    marks = Reasoning(start="<think>", end="</think>", start_id=1, end_id=2, opened=False)
    model = tool_tokenizer("qwen3")
    form = find_tool_format(model, tool_template("qwen3"))
    tools = [Tool(name="now")]
    written = f"Hm, {answer} </think>\n\n{answer}" if thinks else answer
    text = text.lstrip() if thinks else text
    for tokenizer in (model, cast(Tokenizer, FakeTokenizer())):
        tokens = tokenizer.encode(written, add_bos=False)
        reader = AnswerReader(
            GenerationRequest(id="a", prompt=(1,), params=SamplingParams(), stop_ids=frozenset()),
            tokenizer,
            cast(Engine, QuietEngine()),
            parser=AnswerParser(
                marks if thinks else None, in_thought=thinks, tools=tools, format=form
            ),
        )
        whole = join_deltas(
            [
                reader.read(token_event(token, count, "length" if count == len(tokens) else None))
                for count, token in enumerate(tokens, start=1)
            ]
        )
        assert whole.text == text
        shown = b"".join(tokenizer.token_bytes(token.id) for token in whole.shown_tokens)
        assert shown.decode() == text


def test_a_continuation_keeps_the_first_blank_and_a_turn_of_a_chat_drops_it() -> None:
    tokenizer = Tokenizer.from_vocabulary(sentencepiece_vocabulary())
    hello = tokenizer.encode("hello", add_bos=False)
    assert tokenizer.token_text(hello[0]).startswith(" ")

    def text_after(prompt: list[int], parser: AnswerParser | None) -> str:
        request = GenerationRequest(
            id="a", prompt=tuple(prompt), params=SamplingParams(), stop_ids=frozenset()
        )
        reader = AnswerReader(request, tokenizer, cast(Engine, QuietEngine()), parser=parser)
        events = [TokenEvent(request_id=request.id, token=token) for token in hello]
        return "".join(reader.read(event).text for event in events)

    prompt = tokenizer.encode("hello")
    assert text_after(prompt, None) == " hello"
    assert text_after(prompt, AnswerParser()) == "hello"
    assert text_after(prompt, AnswerParser(begun=True)) == " hello"  # of a turn that has begun
    assert tokenizer.bos_id is not None
    assert text_after([tokenizer.bos_id], None) == "hello"  # nothing comes before it
