"""AnswerText: tokens to shown text, stops across token borders."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.text.answer import AnswerText
from headroom.text.answer_parser import AnswerParser, AnswerParts
from headroom.text.reasoning import Reasoning
from headroom.text.tokenizer import Tokenizer
from tests.text.small_vocabularies import sentencepiece_vocabulary

TOKENIZER = Tokenizer.from_vocabulary(sentencepiece_vocabulary())


def shown(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, bool]:
    answer = AnswerText(tokenizer, stops)
    text = "".join(answer.push(token_id).text for token_id in ids) + answer.finish().text
    return text, answer.stopped


def test_a_stop_inside_and_across_tokens_ends_the_answer(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("One two three.\nUser: four")
    assert shown(smollm2, ids, ["\nUser:"]) == ("One two three.", True)
    assert shown(smollm2, ids, ["o t"]) == ("One tw", True)
    assert shown(smollm2, ids, ["five"]) == ("One two three.\nUser: four", False)


def test_text_after_a_stop_is_never_shown(smollm2: Tokenizer) -> None:
    answer = AnswerText(smollm2, ["b"])
    assert [answer.push(token_id).text for token_id in smollm2.encode("a b c")] == ["a", " ", ""]
    assert answer.finish().text == ""


def test_a_stop_may_end_with_a_broken_character() -> None:
    ids = TOKENIZER.encode("hello👍", add_bos=False)[:-1]
    assert shown(TOKENIZER, ids, ["o\ufffd"]) == ("hell", True)


def test_what_is_held_back_comes_out_in_its_order_at_the_end() -> None:
    ids = TOKENIZER.encode("hello👍", add_bos=False)[:-1]
    # "o" may begin the first stop, and the broken character, which comes last, the second.
    assert shown(TOKENIZER, ids, ["ox", "\ufffdx"]) == ("hello\ufffd", False)


def test_characters_are_counted_as_decoded_and_as_shown() -> None:
    answer = AnswerText(TOKENIZER, ["ox", "\ufffdx"])
    text = ""
    for token_id in TOKENIZER.encode("hello👍", add_bos=False)[:-1]:
        text += answer.push(token_id).text
        assert answer.shown == len(text) <= answer.decoded
    assert (answer.decoded, answer.shown) == (5, 4)  # "o" is held, the character not complete
    text += answer.finish().text
    assert answer.decoded == answer.shown == len(text) == 6


def test_control_tokens_are_hidden_unless_the_parser_reads_them(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a<|im_end|>b")
    assert shown(smollm2, ids, []) == ("ab", False)
    marks = Reasoning(start="<t>", end="<|im_end|>", start_id=ids[0], end_id=ids[1], opened=True)
    answer = AnswerText(smollm2, parser=AnswerParser(marks, in_thought=True))
    parts = AnswerParts()
    for token_id in ids:
        parts += answer.push(token_id)
    assert parts + answer.finish() == AnswerParts(thought="a", text="b")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30),
    st.text("helo é", min_size=1, max_size=3),
)
def test_an_answer_is_the_decoded_text_up_to_the_stop(ids: list[int], stop: str) -> None:
    before, found, _ = TOKENIZER.decode(ids, skip_special=True).partition(stop)
    assert shown(TOKENIZER, ids, [stop]) == (before, found == stop)
