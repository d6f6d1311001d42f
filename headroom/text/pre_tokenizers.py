"""Rules that cut text into words before BPE merges, by the names that GGUF files use."""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from headroom.errors import ModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LINES = r"[^\n]+|[\n]+"  # runs of newlines, and the text between them


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
    """How text is cut into words for byte-level BPE."""

    patterns: tuple[str, ...]  # applied in turn to the pieces of the last; empty: GPT-2's pattern
    single_digits: bool = False  # every digit is a word; cut before the patterns apply
    composes: bool = False  # text is first normalised to NFC
    whole_words: bool = False  # a word in the vocabulary is one token, without merges

    def normalizer(self) -> Normalizer | None:
        """Return the normaliser that runs before the cutting; None if there is none."""
        return NFC() if self.composes else None

    def pre_tokenizer(self) -> PreTokenizer:
        """Return the steps that cut text, and then map bytes to printable characters."""
        steps: list[PreTokenizer] = [Digits(individual_digits=True)] if self.single_digits else []
        steps += [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return Sequence(steps)


# Qwen's published tokenizers normalise to NFC; other programs that read GGUF files do not.
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
