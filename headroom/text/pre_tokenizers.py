"""Rules that cut text into words before BPE merges, by the names that GGUF files use."""

from dataclasses import dataclass
from difflib import get_close_matches

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from headroom.errors import ModelError

# Parts of patterns. Published tokenizers differ in few of them.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LINES = r"[^\n]+|[\n]+"  # runs of newlines, and the text between them
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UP_TO_THREE_DIGITS = r"\p{N}{1,3}"
HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"  # what lies between blanks and marks of punctuation


def _words(letter: str, digits: str, spaces: str = SPACES) -> str:
    """Return the pattern of one word: a contraction, letters, digits, symbols or white space."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letter}]+"
    symbols = rf" ?[^\s{letter}\p{{N}}]+[\r\n]*"
    return "|".join((CONTRACTIONS, word, digits, symbols, spaces))


ONE_DIGIT = _words(r"\p{L}", r"\p{N}")
THREE_DIGITS = _words(r"\p{L}", UP_TO_THREE_DIGITS)
ALL_DIGITS = _words(r"\p{L}", r"\p{N}+")
MARKS_ARE_LETTERS = _words(r"\p{L}\p{M}", r"\p{N}")
# White space in pieces whose lengths are powers of two.
SPACES_BY_SIZE = "|".join(
    (
        r"\s*[\r\n]+",
        *(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4)),
        r"\s{1,2}(?!\S)",
        r"\s{1}",
    )
)


def _case_changes(
    end: str, digits: str, *, letters: str = "", symbols: str = r"[^\s\p{L}\p{N}]+[\r\n/]*"
) -> str:
    """Return a pattern in which a word ends where an upper-case letter follows a lower-case one.

    `end` may follow the letters of a word; `letters` limits what counts as a letter.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return "|".join(
        (
            f"{before}{upper}*{lower}+{end}",
            f"{before}{upper}+{lower}*{end}",
            digits,
            f" ?{symbols}",
            SPACES,
        )
    )


CASE_CHANGES = _case_changes("", r"\p{N}")
CASES_AND_CONTRACTIONS = _case_changes(f"{CONTRACTIONS}?", UP_TO_THREE_DIGITS)
# Letters with their marks, symbols before letters, and no rule for digits.
LETTERS_AND_SYMBOLS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
)
# Groups of three digits, counted from the end of a number.
GROUPED_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
GROUPED_DECIMALS = r"\d{1,3}(?=(?:\d{3})*(?!\d))"
GROUPED_WHOLE_WORDS = r"\d{1,3}(?=(?:\d{3})*\b)"

# DeepSeek LLM: letters that have cases, by ranges. Characters that NFC would replace are escaped.
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$", HAN_AND_HANGUL, r"\p{N}+",
)  # fmt: skip
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, r"\p{N}")
DEEPSEEK_V3 = (UP_TO_THREE_DIGITS, HAN_AND_KANA, LETTERS_AND_SYMBOLS)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
CHAMELEON = (
    r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )",
    r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2,
)  # fmt: skip
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + HAN_AND_KANA,
    _case_changes(f"{CONTRACTIONS}?", r"\p{N}"),
)
# Kimi K2: runs of Han characters are words of their own.
KIMI_K2 = r"[\p{Han}]+|" + _case_changes(
    f"{CONTRACTIONS}?", UP_TO_THREE_DIGITS, letters=r"&&[^\p{Han}]",
    symbols=r"[^\s\p{L}\p{N}]+[\r\n]*",
)  # fmt: skip
ASIAN_SCRIPTS = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED_CODER = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|"
    + SPACES
)
EXAONE_MOE = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class WordRule:
    """How text is cut into words for byte-level BPE."""

    patterns: tuple[str, ...]  # applied in turn to the pieces of the last
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
        steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
        return Sequence(steps)


# Names of one rule stand together. Qwen's published tokenizers normalise to NFC; other programs
# that read GGUF files do not.
_RULES = (
    ("qwen2", WordRule((ONE_DIGIT,), composes=True)),
    ("qwen35", WordRule((MARKS_ARE_LETTERS,), composes=True)),
    ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
     WordRule((ONE_DIGIT,))),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     WordRule((THREE_DIGITS,), whole_words=True)),
    ("glm4 chatglm-bpe dbrx smaug-bpe", WordRule((THREE_DIGITS,))),
    ("minicpm5", WordRule((UP_TO_THREE_DIGITS, ALL_DIGITS), whole_words=True)),
    ("jais-2", WordRule((_words(r"\p{L}", UP_TO_THREE_DIGITS, SPACES_BY_SIZE),))),
    ("laguna", WordRule((LINES, ONE_DIGIT))),
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat mellum a.x-4.0 exaone4 "
     "modern-bert roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
     WordRule((GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
     WordRule((GPT2,), single_digits=True)),
    ("tekken", WordRule((CASE_CHANGES,), whole_words=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", WordRule((CASES_AND_CONTRACTIONS,))),
    ("granite-embed-multi-97m", WordRule((CASES_AND_CONTRACTIONS,), whole_words=True)),
    ("tiny_aya cohere2moe", WordRule((GROUPED_WHOLE_WORDS, CASES_AND_CONTRACTIONS))),
    ("kimi-k2", WordRule((KIMI_K2,))),
    ("youtu", WordRule(YOUTU, whole_words=True)),
    ("deepseek-llm", WordRule(DEEPSEEK_LLM)),
    ("deepseek-coder", WordRule(DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm", WordRule(DEEPSEEK_V3)),
    ("afmoe", WordRule((GROUPED_DIGITS, ASIAN_SCRIPTS, LETTERS_AND_SYMBOLS))),
    ("superbpe", WordRule((r"\p{N}+", GROUPED_DECIMALS))),
    ("falcon", WordRule(FALCON)),
    ("default", WordRule(DEFAULT)),
    ("bloom poro-chat gpt3-finnish", WordRule((SENTENCES,))),
    ("viking", WordRule((SENTENCES, r"\p{N}"))),
    ("chameleon", WordRule(CHAMELEON)),
    ("bailingmoe bailingmoe2 llada-moe", WordRule((BAILING,))),
    ("seed-coder", WordRule((SEED_CODER,))),
    ("exaone-moe", WordRule((EXAONE_MOE,))),
)  # fmt: skip
WORD_RULES = {name: rule for names, rule in _RULES for name in names.split()}


def word_rule(name: str) -> WordRule:
    """Return the rule that a GGUF file names as `tokenizer.ggml.pre`."""
    if (rule := WORD_RULES.get(name)) is None:
        alike = get_close_matches(name, WORD_RULES, n=3)
        told = f"Known are {', '.join(alike)} and others: " if alike else "All that are known: "
        raise ModelError(
            f"The tokenizer's word rule {name!r} is not known."
            if name
            else "The file does not name its tokenizer's word rule (tokenizer.ggml.pre).",
            hint=f"{told}docs/families.md lists them.",
        )
    return rule
