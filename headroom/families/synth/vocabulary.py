"""Vocabularies of synthesised models: bytes, English words, special tokens in place, padding."""

from collections.abc import Iterable, Mapping

import numpy as np

from headroom.errors import OptionError
from headroom.families.family import Recipe, TokenizerKind
from headroom.families.registry import find_family
from headroom.formats.gguf_writer import GgufValue
from headroom.formats.vocabulary import BLANK_MARK, SPECIAL_TOKENS, Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Words whose pieces become tokens, so that text is not read byte by byte.
ENGLISH_WORDS = (
    "the", "and", "ing", "tion", "that", "have", "for", "not", "with", "you", "this", "but",
    "his", "from", "they", "say", "her", "she", "will", "one", "all", "would", "there", "their",
    "what", "out", "about", "who", "get", "which", "when", "make", "can", "like", "time", "just",
    "know", "take", "people", "into", "year", "your", "good", "some", "could", "them", "see",
    "other", "than", "then", "now", "look", "only", "come", "over", "think", "also", "back",
    "after", "use", "two", "how", "our", "work", "first", "well", "way", "even", "new", "want",
    "because", "any", "these", "give", "day", "most", "water", "world", "answer", "question",
)  # fmt: skip


def make_vocabulary(recipe: Recipe) -> Vocabulary:
    """Return a model's tokenizer, its special tokens at the real model's ids where they fit."""
    kind, vocab = tokenizer_kind(recipe), recipe.dims.vocab
    byte_level = kind.model == "gpt2"
    plain, merges = _byte_tokens() if byte_level else _blank_mark_tokens()
    special = kind.special or tuple(kind.places.values())
    least = max(len(plain) + len(special), max(kind.places, default=0) + 1)
    if vocab < least:
        raise OptionError(
            f"A vocabulary of {vocab} tokens is too small for {recipe.family}.",
            hint=f"It needs {least} at least.",
        )
    start = kind.start if kind.start + len(special) <= vocab else len(plain)
    places = kind.places or dict(enumerate(special, start))
    tokens, types = _laid_out(vocab, plain, places, kind)
    ids = {text: i for i, text in places.items()}
    return Vocabulary(
        model=kind.model,
        pre=kind.pre,
        tokens=tokens,
        types=types,
        scores=() if byte_level else [-float(i) for i in range(vocab)],
        merges=merges,
        special_ids={name: ids[text] for name, text in kind.roles.items()},
        add_bos=kind.add_bos,
    )


def tokenizer_kind(recipe: Recipe) -> TokenizerKind:
    """Return how a model's tokenizer is made; that of a draft is its target's."""
    return find_family(recipe.family).synthesis.tokenizer(recipe.dims.vocab)


def vocabulary_keys(vocabulary: Vocabulary, template: str) -> dict[str, GgufValue]:
    """Return the GGUF keys of a tokenizer and a chat template."""
    values: dict[str, GgufValue] = {
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.pre": vocabulary.pre,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": np.asarray(vocabulary.types, np.int32),
        "tokenizer.ggml.merges": vocabulary.merges,
    }
    if vocabulary.scores:
        values["tokenizer.ggml.scores"] = np.asarray(vocabulary.scores, np.float32)
    for name in SPECIAL_TOKENS:
        if name in vocabulary.special_ids:
            values[f"tokenizer.ggml.{name}_token_id"] = vocabulary.special_ids[name]
    values["tokenizer.ggml.add_bos_token"] = vocabulary.add_bos
    values["tokenizer.ggml.add_space_prefix"] = False
    values["tokenizer.chat_template"] = template
    return values


def _laid_out(
    vocab: int, plain: Iterable[tuple[str, int]], places: Mapping[int, str], kind: TokenizerKind
) -> tuple[list[str], list[int]]:
    """Return all tokens and their types: special tokens at their ids, the others between them."""
    tokens, types = [], []
    rest = iter(plain)
    for token_id in range(vocab):
        if (text := places.get(token_id)) is not None:
            shown, unknown = text in kind.shown, text == "<unk>"
            token = (text, USER_DEFINED if shown else UNKNOWN if unknown else CONTROL)
        else:
            token = next(rest, (f"[PAD{token_id}]", UNUSED))
        tokens.append(token[0])
        types.append(token[1])
    return tokens, types


def _byte_tokens() -> tuple[list[tuple[str, int]], list[str]]:
    """Return the tokens and merges of a byte-level vocabulary: bytes and pieces of words."""
    alphabet = byte_alphabet()
    pieces, merges = _word_pieces(alphabet[ord(" ")])
    return [(text, NORMAL) for text in (*alphabet, *pieces)], merges


def _blank_mark_tokens() -> tuple[list[tuple[str, int]], list[str]]:
    """Return the tokens and merges of a vocabulary that spells bytes as <0xHH>."""
    letters = [chr(code) for code in range(33, 127)]
    pieces, merges = _word_pieces(BLANK_MARK)
    plain = [BLANK_MARK, "\n", "\t", *letters, *pieces]
    return [(f"<0x{i:02X}>", BYTE) for i in range(256)] + [(text, NORMAL) for text in plain], merges


def _word_pieces(blank: str) -> tuple[list[str], list[str]]:
    """Return the pieces that words are merged from, and the merges, in the same order."""
    merges: dict[str, str] = {}
    for word in ENGLISH_WORDS:
        for end in range(2, len(word) + 1):
            merges.setdefault(word[:end], f"{word[: end - 1]} {word[end - 1]}")
    merges |= {blank + word: f"{blank} {word}" for word in ENGLISH_WORDS}
    return list(merges), list(merges.values())


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in byte-level tokenizers."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
