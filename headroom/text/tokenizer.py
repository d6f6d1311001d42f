"""Tokenizer: text to token ids and back, from a GGUF vocabulary or a tokenizer file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Coder

from headroom.errors import FormatError, ModelError, RequestError
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.vocabulary import BLANK_MARK, Vocabulary
from headroom.text.spelling import Spelling
from headroom.text.vocabulary_coder import (
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    build_coder,
    ids_of_types,
    spelling_of,
)

# Tokens that end an answer in published chat models, whatever eos token the file names.
STOP_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<turn|>",
    "<end_of_turn>",
    "<|tool_response>",
    "<eos>",
    "</assistant>",
)


MAX_REASON = 100  # characters of each end of an error of the library, which repeats wrong values


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What each token id stands for."""

    tokens: Sequence[str]  # by id, as the vocabulary spells them; "" for an unused id
    control: frozenset[int]  # never shown in an answer
    literal: frozenset[int]  # control and added tokens, which are plain text in the vocabulary
    spelling: Spelling
    drops_blank: bool  # encoding adds a blank before the text, so decoding removes one
    unused: frozenset[int] = frozenset()  # ids that only fill up the vocabulary

    def to_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        token = self.tokens[token_id]
        if token_id not in self.literal:
            return self.spelling.to_bytes(token)
        if self.spelling is Spelling.BLANK_MARKS:
            token = token.replace(BLANK_MARK, " ")
        return token.encode()


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The tokens with which a text begins and ends."""

    bos: int | None
    eos: int | None
    stops: frozenset[int]  # each of these ends an answer
    add_bos: bool  # whether prompts begin with bos
    end: tuple[int, ...] = ()  # tokens after a whole text, which is not to be continued


class Tokenizer:
    """Turns text into token ids and token ids into text."""

    def __init__(self, coder: Coder, table: TokenTable, special: SpecialIds) -> None:
        self._coder = coder
        self._plain_coder = _without_special_tokens(coder)
        self._table = table
        self.vocab_size = len(table.tokens)
        self.bos_id = special.bos
        self.eos_id = special.eos
        self.stop_ids = special.stops
        self.add_bos = special.add_bos
        self._end = special.end
        self.bos_token = "" if special.bos is None else table.tokens[special.bos]
        self.eos_token = "" if special.eos is None else table.tokens[special.eos]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """Return the tokenizer of a checkpoint."""
        embed = checkpoint.tensors.get("embed")
        rows = embed.shape[0] if embed is not None else 0
        if checkpoint.vocabulary is not None:
            # Old SentencePiece files do not have the setting; their tokenizers add the blank.
            blank_prefix = checkpoint.metadata.get_bool(
                "tokenizer.ggml.add_space_prefix", default=True
            )
            return cls.from_vocabulary(checkpoint.vocabulary, rows, blank_prefix=blank_prefix)
        if checkpoint.tokenizer_file is not None:
            return cls.from_file(checkpoint.tokenizer_file, checkpoint.tokenizer_config, rows)
        raise ModelError(
            f"{checkpoint.path} brings no tokenizer.",
            hint="A folder needs a tokenizer.json, a GGUF file its tokenizer.ggml keys.",
        )

    @classmethod
    def from_vocabulary(
        cls, vocabulary: Vocabulary, rows: int = 0, *, blank_prefix: bool = True
    ) -> "Tokenizer":
        """Return the tokenizer of a GGUF vocabulary, padded to the `rows` of the embedding."""
        tokens = list(vocabulary.tokens)
        coder = build_coder(vocabulary, tokens, blank_prefix)
        control = ids_of_types(vocabulary.types, CONTROL, UNKNOWN)
        table = TokenTable(
            tokens=_padded(tokens, rows),
            control=frozenset(control),
            literal=frozenset([*control, *ids_of_types(vocabulary.types, USER_DEFINED)]),
            spelling=spelling_of(vocabulary),
            drops_blank=vocabulary.model == "llama" and blank_prefix,
            unused=frozenset(ids_of_types(vocabulary.types, UNUSED)),
        )
        ids = vocabulary.special_ids
        ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
        special = SpecialIds(
            bos=ids.get("bos"),
            eos=ids.get("eos"),
            stops=_stop_ids(coder, ends),
            add_bos=vocabulary.add_bos,
            end=(ids["eos"],) if vocabulary.add_eos and "eos" in ids else (),
        )
        return cls(coder, table, special)

    @classmethod
    def from_file(cls, path: Path, config: Mapping[str, Any], rows: int = 0) -> "Tokenizer":
        """Return the tokenizer of a tokenizer.json and the tokenizer_config.json beside it."""
        try:
            coder = Coder.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            reason = str(error)
            if len(reason) > MAX_REASON:
                reason = f"{reason[:MAX_REASON]} ... {reason[-MAX_REASON:]}"
            raise FormatError(f"{path} is not a tokenizer file: {reason}.") from error
        coder.no_truncation()
        coder.no_padding()
        table = _table_of(coder, path, rows)
        for token in config.get("eos_token_ids", ()):
            if not 0 <= token < len(table.tokens):
                raise ModelError(
                    f"{path.parent}: eos_token_id is {token}, and there are {len(table.tokens)} "
                    "tokens.",
                    hint="Correct it in generation_config.json or config.json.",
                )
        return cls(coder, table, _special_ids_of(coder, config))

    def encode(self, text: str, *, special: bool = True, add_bos: bool | None = None) -> list[int]:
        """Return the tokens of a text; with `special=False`, marks like <eos> are plain text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The text is not Unicode at character {error.start}.",
                hint="Half a surrogate pair, or a byte that is not UTF-8, has no tokens.",
            ) from error
        coder = self._coder if special else self._plain_coder
        # The method for batches does not compute where each token begins in the text.
        ids = coder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        wants_bos = self.add_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_whole(self, text: str) -> list[int]:
        """Return the tokens of a text that is not to be continued, with the model's end token.

        Models for embeddings are trained to end texts so; most others have no such token.
        """
        ids = self.encode(text)
        return (
            ids if self._end and tuple(ids[-len(self._end) :]) == self._end else [*ids, *self._end]
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the tokens' text, with replacement characters for broken UTF-8."""
        shown = (i for i in ids if not (skip_special and self.is_control(i)))
        text = b"".join(map(self.token_bytes, shown)).decode(errors="replace")
        return text.removeprefix(" ") if self._table.drops_blank else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of a token; for a control token, the bytes of its name."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"Token {token_id} is outside the vocabulary of {self.vocab_size} tokens."
            )
        return self._table.to_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, with replacement characters for parts of characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def find(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary; None if it has none."""
        token_id: int | None = self._coder.token_to_id(token)
        return token_id

    def is_control(self, token_id: int) -> bool:
        """Whether a token is for control and never shown in an answer."""
        return token_id in self._table.control or token_id in self.stop_ids

    def is_unused(self, token_id: int) -> bool:
        """Whether an id has no token: a row of the embedding that no text needs."""
        return token_id in self._table.unused or not self._table.tokens[token_id]

    @property
    def drops_blank(self) -> bool:
        """Whether decoding removes the first blank, because encoding adds one."""
        return self._table.drops_blank


def _without_special_tokens(coder: Coder) -> Coder:
    """Return a coder with the same merges that knows no special tokens."""
    plain = Coder(coder.model)
    # The library does not let None be assigned; a new coder's settings are None.
    if coder.normalizer is not None:
        plain.normalizer = coder.normalizer
    if coder.pre_tokenizer is not None:
        plain.pre_tokenizer = coder.pre_tokenizer
    added = coder.get_added_tokens_decoder()
    plain.add_tokens([added[i] for i in sorted(added) if not added[i].special])
    return plain


def _padded(tokens: list[str], rows: int) -> list[str]:
    """Return the tokens, padded with "" to the embedding's rows: a model may emit any row."""
    return tokens + [""] * (rows - len(tokens))


def _stop_ids(coder: Coder, ends: Sequence[int]) -> frozenset[int]:
    named = (coder.token_to_id(token) for token in STOP_TOKENS)
    return frozenset(ends) | {token_id for token_id in named if token_id is not None}


def _table_of(coder: Coder, path: Path, rows: int) -> TokenTable:
    ids = coder.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    added = coder.get_added_tokens_decoder()
    steps = _decoder_steps(coder)
    kinds = {step["type"] for step in steps}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}:
        raise ModelError(
            f"{path} decodes by {', '.join(sorted(kinds)) or 'nothing'}, which is not supported.",
            hint="Supported are byte-level and SentencePiece-style tokenizers.",
        )
    return TokenTable(
        tokens=_padded(tokens, rows),
        control=frozenset(i for i, token in added.items() if token.special),
        literal=frozenset(added),
        spelling=Spelling.BYTE_LEVEL if "ByteLevel" in kinds else Spelling.BLANK_MARKS,
        drops_blank=any(_drops_blank(step) for step in steps),
    )


def _decoder_steps(coder: Coder) -> list[dict[str, Any]]:
    if coder.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(coder.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _drops_blank(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")


def _special_ids_of(coder: Coder, config: Mapping[str, Any]) -> SpecialIds:
    bos, eos = (_configured_id(coder, config.get(name)) for name in ("bos_token", "eos_token"))
    ends = list(config.get("eos_token_ids", ()))
    if eos is not None:
        ends.append(eos)
    # Without a setting, bos is added if the file's own post-processor adds it.
    whole = coder.encode("a", add_special_tokens=True).ids
    first, plain = whole[:1], coder.encode("a", add_special_tokens=False).ids
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), len(whole))
    add_bos = config.get("add_bos_token")
    return SpecialIds(
        bos=bos,
        eos=eos if eos is not None else next(iter(ends), None),
        stops=_stop_ids(coder, ends),
        add_bos=add_bos if isinstance(add_bos, bool) else bos is not None and first == [bos],
        end=tuple(whole[at + len(plain) :]),
    )


def _configured_id(coder: Coder, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return coder.token_to_id(text) if isinstance(text, str) else None
