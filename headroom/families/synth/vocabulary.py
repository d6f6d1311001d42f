"""Vocabularies of every family: bytes, some English, special tokens in their places, padding."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from headroom.errors import OptionError
from headroom.families.synth.templates import GEMMA, LAGUNA, QWEN3, QWEN35, SMOLLM
from headroom.formats.gguf_writer import Value
from headroom.formats.metadata import SPECIAL_TOKENS, Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Words whose pieces become tokens, so that text is not read byte by byte.
WORDS = (
    "the", "and", "ing", "tion", "that", "have", "for", "not", "with", "you", "this", "but",
    "his", "from", "they", "say", "her", "she", "will", "one", "all", "would", "there", "their",
    "what", "out", "about", "who", "get", "which", "when", "make", "can", "like", "time", "just",
    "know", "take", "people", "into", "year", "your", "good", "some", "could", "them", "see",
    "other", "than", "then", "now", "look", "only", "come", "over", "think", "also", "back",
    "after", "use", "two", "how", "our", "work", "first", "well", "way", "even", "new", "want",
    "because", "any", "these", "give", "day", "most", "water", "world", "answer", "question",
)  # fmt: skip
BLANK_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a family's tokenizer is made."""

    model: str
    pre: str
    template: str
    special: tuple[str, ...]  # spelled as the family does
    shown: frozenset[str]  # of those, the ones that are text and not control
    start: int  # id of the first special token in the real model
    roles: Mapping[str, str]  # "bos", "eos" ... to tokens
    add_bos: bool = False


_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
_QWEN_SHOWN = frozenset(
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
)
_QWEN_ROLES = {"bos": "<|endoftext|>", "eos": "<|im_end|>", "padding": "<|endoftext|>"}
_LAGUNA_SPECIAL = {
    2: "\u3008|EOS|\u3009", 9: "\u3008|PAD|\u3009", 18: "<think>", 19: "</think>", 20: "<system>",
    21: "</system>", 22: "<user>", 23: "<assistant>", 24: "</assistant>", 25: "</user>",
    26: "<tool_call>", 27: "</tool_call>",
}  # fmt: skip
_GEMMA_SPECIAL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>",
    48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>",
    52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>",
    106: "<turn|>",
}  # fmt: skip

_QWEN3 = _Kind("gpt2", "qwen2", QWEN3, _QWEN_SPECIAL, _QWEN_SHOWN, 151643, _QWEN_ROLES)
_QWEN35 = _Kind(
    "gpt2", "qwen35", QWEN35, (*_QWEN_SPECIAL, "<|mask|>"), _QWEN_SHOWN, 248044,
    {**_QWEN_ROLES, "mask": "<|mask|>"},
)  # fmt: skip
_GEMMA = _Kind(
    "gemma4", "gemma4", GEMMA, tuple(_GEMMA_SPECIAL.values()),
    frozenset(("<|channel>", "<channel|>", "<|think|>")), 0,
    {"bos": "<bos>", "eos": "<eos>", "eot": "<turn|>", "unknown": "<unk>", "padding": "<pad>",
     "mask": "<mask>"}, add_bos=True,
)  # fmt: skip
KINDS = {
    "llama": _Kind(
        "gpt2", "smollm", SMOLLM, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), frozenset(), 0,
        {"bos": "<|im_start|>", "eos": "<|im_end|>", "padding": "<|im_end|>",
         "unknown": "<|endoftext|>"},
    ),
    "qwen3": _QWEN3,
    "qwen3moe": _QWEN3,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "laguna": _Kind(
        "gpt2", "laguna", LAGUNA, tuple(_LAGUNA_SPECIAL.values()),
        frozenset(("<think>", "</think>", "<tool_call>", "</tool_call>")), 0,
        {"bos": "\u3008|EOS|\u3009", "eos": "\u3008|EOS|\u3009", "eot": "</assistant>",
         "padding": "\u3008|PAD|\u3009"},
    ),
    "gemma4": _GEMMA,
}  # fmt: skip
_PLACES = {"laguna": _LAGUNA_SPECIAL, "gemma4": _GEMMA_SPECIAL}
GEMMA_VOCAB = 262144


def family_of_vocabulary(family: str, vocab: int) -> str:
    """Return the family whose vocabulary a model has: a draft has its target's."""
    if family != "dflash":
        return family
    return "gemma4" if vocab == GEMMA_VOCAB else "qwen35"


def chat_template(family: str, vocab: int) -> str:
    """Return the chat template of a family."""
    return KINDS[family_of_vocabulary(family, vocab)].template


def make_vocabulary(family: str, vocab: int) -> Vocabulary:
    """Return a family's tokenizer, its special tokens at the real model's ids where they fit."""
    family = family_of_vocabulary(family, vocab)
    kind = KINDS[family]
    plain, merges = _gemma_tokens() if kind.model == "gemma4" else _byte_tokens()
    least = len(plain) + len(kind.special) + max(_PLACES.get(family, {0: ""}))
    if vocab < least:
        raise OptionError(
            f"A vocabulary of {vocab} tokens is too small for {family}.",
            hint=f"It needs {least} at least.",
        )
    start = kind.start if kind.start + len(kind.special) <= vocab else len(plain)
    places = _PLACES.get(family) or dict(enumerate(kind.special, start))
    tokens, types = _laid_out(vocab, plain, places, kind)
    ids = {text: i for i, text in places.items()}
    return Vocabulary(
        model=kind.model,
        pre=kind.pre,
        tokens=tokens,
        types=types,
        scores=[0.0] * vocab if kind.model == "gemma4" else (),
        merges=merges,
        special_ids={name: ids[text] for name, text in kind.roles.items()},
        add_bos=kind.add_bos,
        add_eos=False,
    )


def vocabulary_keys(vocabulary: Vocabulary, template: str) -> dict[str, Value]:
    """Return a tokenizer and a chat template as GGUF's keys."""
    values: dict[str, Value] = {
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
    vocab: int, plain: Iterable[tuple[str, int]], places: Mapping[int, str], kind: _Kind
) -> tuple[list[str], list[int]]:
    """Return all tokens and their types: special ones in place, the others around them."""
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
    """Return every byte as byte-level tokenizers spell it, and pieces of words."""
    alphabet = byte_alphabet()
    pieces, merges = _word_pieces(alphabet[ord(" ")])
    return [(text, NORMAL) for text in (*alphabet, *pieces)], merges


def _gemma_tokens() -> tuple[list[tuple[str, int]], list[str]]:
    """Return every byte by its number, printable characters, and pieces of words."""
    letters = [chr(code) for code in range(33, 127)]
    pieces, merges = _word_pieces(BLANK_MARK)
    plain = [BLANK_MARK, "\n", "\t", *letters, *pieces]
    return [(f"<0x{i:02X}>", BYTE) for i in range(256)] + [(text, NORMAL) for text in plain], merges


def _word_pieces(blank: str) -> tuple[list[str], list[str]]:
    """Return words, their beginnings, words after a blank, and the merges that make them."""
    merges: dict[str, str] = {}
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges.setdefault(word[:end], f"{word[: end - 1]} {word[end - 1]}")
    merges |= {blank + word: f"{blank} {word}" for word in WORDS}
    return list(merges), list(merges.values())


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in byte-level tokenizers."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
