"""Vocabulary: the tokenizer that a GGUF file's keys describe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from headroom.errors import FormatError
from headroom.formats.mapped import MappedStrings
from headroom.formats.metadata import Metadata

SPECIAL_TOKENS = (
    *("bos", "eos", "eot", "eom", "unknown", "padding", "mask"),
    *("fim_pre", "fim_suf", "fim_mid"),
)
BLANK_MARK = "\u2581"  # stands for a blank in SentencePiece vocabularies
_BOS_BY_DEFAULT = ("llama", "gemma4")  # tokenizer models that begin every text with bos
_NO_TOKEN = (-1, 0xFFFFFFFF)  # ids by which some writers say that there is no such token


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A GGUF file's tokenizer; texts are decoded from the mapped file only when they are read."""

    model: str  # tokenizer.ggml.model: gpt2, llama or gemma4
    pre: str  # tokenizer.ggml.pre, the rule that splits words; "" if the file names none
    tokens: Sequence[str] = field(repr=False)
    types: Sequence[int] = field(repr=False)  # one per token, or empty
    scores: Sequence[float] = field(repr=False)  # one per token, or empty
    merges: Sequence[str] = field(repr=False)
    special_ids: Mapping[str, int]  # ids of the SPECIAL_TOKENS that the file names
    add_bos: bool
    add_eos: bool = False  # texts to embed end with eos


def read_vocabulary(metadata: Metadata) -> Vocabulary | None:
    """Return the tokenizer that a GGUF file's keys describe; None where there are no such keys."""
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    model = metadata.get_str("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _numbers(metadata, "tokenizer.ggml.token_type", "bBhHiIqQ", len(tokens))
    scores = _numbers(metadata, "tokenizer.ggml.scores", "fd", len(tokens))
    return Vocabulary(
        model=model,
        pre=metadata.get_str("tokenizer.ggml.pre", ""),
        tokens=tokens,
        types=types,
        scores=scores,
        merges=_strings(metadata, "tokenizer.ggml.merges"),
        special_ids=_special_ids(metadata, len(tokens)),
        add_bos=metadata.get_bool("tokenizer.ggml.add_bos_token", model in _BOS_BY_DEFAULT),
        add_eos=metadata.get_bool("tokenizer.ggml.add_eos_token", False),
    )


def _strings(metadata: Metadata, key: str) -> Sequence[str]:
    value = metadata.values.get(key, ())
    if isinstance(value, MappedStrings):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 0:
        return ()
    raise FormatError(f"{metadata.path}: {key} is {short(value)}, not a list of texts.")


def _numbers(metadata: Metadata, key: str, formats: str, count: int) -> Sequence[Any]:
    value = metadata.values.get(key, memoryview(b""))
    if not isinstance(value, memoryview) or (len(value) and value.format not in formats):
        raise FormatError(f"{metadata.path}: {key} is {short(value)}, not a list of numbers.")
    if len(value) not in (0, count):
        raise FormatError(f"{metadata.path}: {key} has {len(value)} entries for {count} tokens.")
    return value


def _special_ids(metadata: Metadata, count: int) -> dict[str, int]:
    ids: dict[str, int] = {}
    for name in SPECIAL_TOKENS:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in metadata or (token := metadata.get_int(key)) in _NO_TOKEN:
            continue
        if not 0 <= token < count:
            raise FormatError(f"{metadata.path}: {key} is {token}, but there are {count} tokens.")
        ids[name] = token
    return ids
