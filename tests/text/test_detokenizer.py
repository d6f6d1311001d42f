"""Detokenizer: pieces are whole characters, and join to the decoded text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.text.detokenizer import Detokenizer
from headroom.text.tokenizer import Tokenizer
from tests.text.small_vocabularies import gemma_vocabulary, sentencepiece_vocabulary
from tests.text.text_corpus import corpus_lines

SENTENCEPIECE = Tokenizer.from_vocabulary(sentencepiece_vocabulary())
GEMMA = Tokenizer.from_vocabulary(gemma_vocabulary())


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, show_control: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, show_control=show_control)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def check_any_tokens(tokenizer: Tokenizer) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40), st.booleans())
    def check(ids: list[int], show_control: bool) -> None:
        pieces = pieces_of(tokenizer, ids, show_control=show_control)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=not show_control)

    check()


def test_byte_level_pieces_join_to_the_decoded_text(smollm2: Tokenizer) -> None:
    check_any_tokens(smollm2)


def test_byte_fallback_pieces_join_to_the_decoded_text() -> None:
    check_any_tokens(SENTENCEPIECE)
    check_any_tokens(GEMMA)


def test_no_half_character_comes_out_of_whole_text(smollm2: Tokenizer) -> None:
    for tokenizer in (smollm2, SENTENCEPIECE, GEMMA):
        for line in corpus_lines(400):
            ids = tokenizer.encode(line.replace("\ufffd", ""))
            *pieces, rest = pieces_of(tokenizer, ids, show_control=True)
            assert "\ufffd" not in "".join(pieces)
            assert rest == ""


def test_a_character_comes_out_with_its_last_byte() -> None:
    ids = SENTENCEPIECE.encode("👍", add_bos=False)
    assert pieces_of(SENTENCEPIECE, ids, show_control=False) == ["", "", "", "", "👍", ""]


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    ids = SENTENCEPIECE.encode("é👍", add_bos=False)[:-1]
    assert pieces_of(SENTENCEPIECE, ids, show_control=False)[-2:] == ["", "\ufffd"]


def test_control_tokens_are_shown_only_when_asked_for(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a<|im_end|>b")
    assert "".join(pieces_of(smollm2, ids, show_control=False)) == "ab"
    assert "".join(pieces_of(smollm2, ids, show_control=True)) == "a<|im_end|>b"


def test_only_the_first_blank_of_a_sentencepiece_text_is_dropped() -> None:
    ids = SENTENCEPIECE.encode("hello hello")
    assert pieces_of(SENTENCEPIECE, ids, show_control=False) == ["", "hello", " hello", ""]


def test_control_tokens_are_hidden_by_default() -> None:
    hidden = Detokenizer(SENTENCEPIECE)
    assert "".join(map(hidden.push, SENTENCEPIECE.encode("<s>hello</s>", add_bos=False))) == "hello"
