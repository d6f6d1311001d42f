"""The tokenizer.json that is written for a GGUF vocabulary encodes and decodes as it does."""

import pytest
from tokenizers import Tokenizer as Coder

from headroom.formats.vocabulary import Vocabulary
from headroom.text.tokenizer import Tokenizer
from headroom.text.tokenizer_file import tokenizer_file
from tests.text.small_vocabularies import sentencepiece_vocabulary


def byte_level_vocabulary() -> Vocabulary:
    tokens = ["<s>", *"helo", "Ġ", "Ã", "¼", "he", "ll", "Ġhe"]
    return Vocabulary(
        model="gpt2",
        pre="smollm",
        tokens=tokens,
        types=[3, *[1] * (len(tokens) - 1)],
        scores=[],
        merges=["h e", "l l", "Ġ he"],
        special_ids={"bos": 0, "eos": 0},
        add_bos=False,
        add_eos=False,
    )


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        (byte_level_vocabulary(), "hello <s> hello hü"),
        (sentencepiece_vocabulary(), "  hello  world ü </s>"),
    ],
    ids=["byte level", "sentencepiece"],
)
def test_the_file_encodes_and_decodes_as_the_vocabulary(vocabulary: Vocabulary, text: str) -> None:
    written = Coder.from_str(tokenizer_file(vocabulary))
    known = Tokenizer.from_vocabulary(vocabulary, blank_prefix=False)
    ids = known.encode(text, add_bos=False)
    assert len(ids) > 5
    assert written.encode(text, add_special_tokens=False).ids == ids
    assert written.decode(ids, skip_special_tokens=False) == known.decode(ids) == text


def test_the_file_is_one_line() -> None:
    assert "\n" not in tokenizer_file(sentencepiece_vocabulary())
