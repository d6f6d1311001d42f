"""How text is cut into words before merging: one rule per name that GGUF files give."""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from headroom.errors import ModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LINES = r"[^\n]+|[\n]+"  # runs of newlines, and what stands between them


def _words(letter: str, digits: str) -> str:
    """Return the pattern of one word: a contraction, letters, digits, symbols or white space."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letter}]+"
    symbols = rf" ?[^\s{letter}\p{{N}}]+[\r\n]*"
    return "|".join((CONTRACTIONS, word, digits, symbols, SPACES))


ONE_DIGIT = _words(r"\p{L}", r"\p{N}")
THREE_DIGITS = _words(r"\p{L}", r"\p{N}{1,3}")
MARKS_ARE_LETTERS = _words(r"\p{L}\p{M}", r"\p{N}")

# A word ends where an upper-case letter follows a lower-case one.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASE_CHANGES = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        SPACES,
    )
)


@dataclass(frozen=True, slots=True)
class WordRule:
    """One way of cutting text into words, for byte-level BPE."""

    patterns: tuple[str, ...]  # each cuts the pieces of the one before; none: GPT-2's own pattern
    single_digits: bool = False  # cut out every digit before the patterns
    composes: bool = False  # text is brought into Unicode's composed form (NFC) first
    whole_words: bool = False  # a word that is in the vocabulary is taken without merging

    def normalizer(self) -> Normalizer | None:
        """Return what happens to the text before it is cut."""
        return NFC() if self.composes else None

    def pre_tokenizer(self) -> PreTokenizer:
        """Return the cutting itself, ending in the change from bytes to printable characters."""
        steps: list[PreTokenizer] = [Digits(individual_digits=True)] if self.single_digits else []
        steps += [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return Sequence(steps)


# Qwen's published tokenizers compose their text; other programs that read GGUF files do not.
WORD_RULES = {
    "smollm": WordRule((), single_digits=True),
    "qwen2": WordRule((ONE_DIGIT,), composes=True),
    "qwen35": WordRule((MARKS_ARE_LETTERS,), composes=True),
    "laguna": WordRule((LINES, ONE_DIGIT)),
    "llama-bpe": WordRule((THREE_DIGITS,), whole_words=True),
    "tekken": WordRule((CASE_CHANGES,), whole_words=True),
}


def word_rule(name: str) -> WordRule:
    """Return the rule that a GGUF file names as `tokenizer.ggml.pre`."""
    if (rule := WORD_RULES.get(name)) is None:
        known = ", ".join(WORD_RULES)
        raise ModelError(
            f"The tokenizer's word rule {name!r} is not known."
            if name
            else "The file does not name its tokenizer's word rule (tokenizer.ggml.pre).",
            hint=f"Known are {known}.",
        )
    return rule
