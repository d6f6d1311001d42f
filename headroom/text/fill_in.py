"""FillIn: prompts for fill-in-the-middle: the model writes the text between two texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.formats.checkpoint import Checkpoint
from headroom.text.tokenizer import Tokenizer

# Names of the tokens before the prefix (the text before the gap), before the suffix (the text after
# the gap) and before the middle (the text that the model writes).
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, StarCoder 2
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")  # Codestral: the suffix comes first; no third token
# Tokens that end the middle.
_ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<file_sep>", "<reponame>"),
    *("<|file_separator|>", "\u2581<EOT>", "<EOT>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillIn:
    """The tokens of a fill-in-the-middle prompt."""

    prefix: int  # the token before the prefix
    suffix: int  # the token before the suffix
    middle: int | None  # the token before the middle; None: the suffix comes first in the prompt
    stop_ids: frozenset[int]  # end the middle, besides the model's own stop tokens

    def prompt(self, tokenizer: Tokenizer, before: str | Sequence[int], after: str) -> list[int]:
        """Return the prompt whose continuation is the text between `before` and `after`."""
        ends = tokenizer.encode(after, special=False, add_bos=False)
        starts = (
            tokenizer.encode(before, special=False, add_bos=False)
            if isinstance(before, str)
            else list(before)
        )
        bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        if starts[:1] == bos:
            starts = starts[1:]
        if self.middle is None:
            return [*bos, self.suffix, *ends, self.prefix, *starts]
        return [*bos, self.prefix, *starts, self.suffix, *ends, self.middle]


def find_fill_in(checkpoint: Checkpoint, tokenizer: Tokenizer) -> FillIn | None:
    """Return the model's tokens for filling in; None if it has none.

    A file may name the tokens by id. Otherwise they are looked up by the names that models use.
    """
    stops = frozenset(token for name in _ENDS if (token := tokenizer.find(name)) is not None)
    named = checkpoint.vocabulary.special_ids if checkpoint.vocabulary is not None else {}
    ids = [named.get(f"fim_{part}") for part in ("pre", "suf", "mid")]
    for names in _NAMES:
        if None in ids:
            ids = [tokenizer.find(name) for name in names]
    prefix, suffix, middle = ids
    if prefix is not None and suffix is not None and middle is not None:
        return FillIn(prefix=prefix, suffix=suffix, middle=middle, stop_ids=stops)
    prefix, suffix = (tokenizer.find(name) for name in _SUFFIX_FIRST)
    if prefix is not None and suffix is not None:
        return FillIn(prefix=prefix, suffix=suffix, middle=None, stop_ids=stops)
    return None
