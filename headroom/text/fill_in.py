"""FillIn: prompts that ask a model for the text between two texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.formats.checkpoint import Checkpoint
from headroom.text.tokenizer import Tokenizer

# The tokens before the text that comes first, before the text that comes after the gap, and before
# the text of the gap, as models with fill-in-the-middle training name them.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, StarCoder 2
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")  # Codestral: the suffix comes first, and no third token
# Tokens that follow a gap and are no part of it.
_ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<file_sep>", "<reponame>"),
    *("<|file_separator|>", "\u2581<EOT>", "<EOT>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillIn:
    """The tokens with which a model is asked to fill a gap."""

    prefix: int  # before the text that comes before the gap
    suffix: int  # before the text that comes after the gap
    middle: int | None  # before the text of the gap; None: the suffix comes first
    stop_ids: frozenset[int]  # end the text of the gap, besides the model's own stop tokens

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
    """Return the tokens that a file names or that are known by name; None if it has none."""
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
