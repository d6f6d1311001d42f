"""The tokenizer.json that is written for a GGUF vocabulary encodes and decodes as it does."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer as Coder

from headroom.formats.vocabulary import Vocabulary
from headroom.text.tokenizer import Tokenizer
from headroom.text.tokenizer_file import tokenizer_file
from tests.text.small_vocabularies import gemma_vocabulary, sentencepiece_vocabulary


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


def with_blanks(vocabulary: Vocabulary, texts: list[str], merges: list[str]) -> Vocabulary:
    """Return a vocabulary with more user-defined tokens and merges."""
    return replace(
        vocabulary,
        tokens=[*vocabulary.tokens, *texts],
        types=[*vocabulary.types, *[4] * len(texts)],
        scores=[*vocabulary.scores, *[-100.0] * len(texts)] if vocabulary.scores else [],
        merges=[*vocabulary.merges, *merges],
    )


@pytest.mark.parametrize(
    "vocabulary",
    [
        gemma_vocabulary(),
        with_blanks(gemma_vocabulary(), ["    ", "o  h"], ["▁▁ ▁▁"]),
        with_blanks(sentencepiece_vocabulary(), ["   ", "  "], []),
        with_blanks(sentencepiece_vocabulary(), ["   ", "      "], []),
        with_blanks(gemma_vocabulary(), ["    "], ["▁▁ ▁▁", "     "]),
    ],
    ids=["one run", "longer runs", "sentencepiece", "runs of runs", "a merge of blanks"],
)
def test_a_file_of_user_defined_runs_of_blanks_can_be_read_back(vocabulary: Vocabulary) -> None:
    written = Coder.from_str(tokenizer_file(vocabulary))
    known = Tokenizer.from_vocabulary(vocabulary, blank_prefix=False)
    runs = {i for i, kind in enumerate(vocabulary.types) if kind == 4}
    seen = set()
    for text in (
        "  ", "   ", "    hello", "hello   hello", "hello     \n\n hell", "hello  hello <eos>",
        "hello      hello",
    ):  # fmt: skip
        ids = known.encode(text, add_bos=False)
        seen |= set(ids) & runs
        assert written.encode(text, add_special_tokens=False).ids == ids
        assert written.decode(ids, skip_special_tokens=False) == known.decode(ids) == text
    assert seen == runs
    texts = [token for token, id_ in written.get_vocab().items() if id_ in runs]
    assert len(texts) == len(runs)


def test_the_file_is_one_line() -> None:
    assert "\n" not in tokenizer_file(sentencepiece_vocabulary())
