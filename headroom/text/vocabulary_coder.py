"""From the vocabulary in a GGUF file to the `tokenizers` object that encodes with it."""

from collections.abc import Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as Coder
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer, Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers

from headroom.errors import ModelError
from headroom.formats.vocabulary import BLANK_MARK, Vocabulary
from headroom.text.pre_tokenizers import word_rule
from headroom.text.spelling import Spelling

# Token types as GGUF numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

MAX_TOKEN_CHARACTERS = 1024  # of a SentencePiece token; the longest of published ones have 64

SPELLINGS = {
    "gpt2": Spelling.BYTE_LEVEL,
    "gemma4": Spelling.BLANK_MARKS,
    "llama": Spelling.BLANK_MARKS,
}


def spelling_of(vocabulary: Vocabulary) -> Spelling:
    """Return how the vocabulary spells bytes, or refuse a tokenizer model that is not known."""
    if (spelling := SPELLINGS.get(vocabulary.model)) is None:
        raise ModelError(
            f"The tokenizer model {vocabulary.model!r} is not known.",
            hint=f"Known are {', '.join(SPELLINGS)}.",
        )
    return spelling


def ids_of_types(types: Sequence[int], *wanted: int) -> list[int]:
    """Return the ids of all tokens of the wanted types, in order."""
    return [token_id for token_id, kind in enumerate(types) if kind in wanted]


def build_coder(vocabulary: Vocabulary, tokens: Sequence[str], blank_prefix: bool) -> Coder:
    """Return the coder of a GGUF vocabulary, with its control and user-defined tokens."""
    ids = _ids_by_text(tokens)
    by_marks = False  # whether user-defined tokens are found after blanks have become marks
    if spelling_of(vocabulary) is Spelling.BYTE_LEVEL:
        coder = _byte_level_coder(vocabulary, ids)
    else:
        blank_prefix = blank_prefix and vocabulary.model != "gemma4"
        by_marks = not blank_prefix
        coder = _blank_mark_coder(vocabulary, tokens, ids, blank_prefix)
    special = ids_of_types(vocabulary.types, UNKNOWN, CONTROL)
    plain = ids_of_types(vocabulary.types, USER_DEFINED)
    # A text that is twice in the vocabulary encodes to the first id; the second is never used.
    coder.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in special]
    )
    coder.add_tokens([_user_token(tokens[i], coder, by_marks) for i in plain])
    return coder


def _user_token(text: str, coder: Coder, by_marks: bool) -> AddedToken:
    """Return a user-defined token with the text by which the coder's vocabulary has it."""
    if not by_marks or " " not in text:
        return AddedToken(text, normalized=False)
    held = coder.token_to_id(text) is not None
    return AddedToken(text if held else text.replace(" ", BLANK_MARK), normalized=True)


def _ids_by_text(tokens: Sequence[str]) -> dict[str, int]:
    last = len(tokens) - 1
    return dict(
        zip(reversed(tokens), range(last, -1, -1), strict=True)
    )  # the first of equal texts wins


def _byte_level_coder(vocabulary: Vocabulary, ids: dict[str, int]) -> Coder:
    rule = word_rule(vocabulary.pre)
    merges = _split_merges(vocabulary.merges)
    coder = Coder(_bpe(ids, merges, ignore_merges=rule.whole_words))
    if (normalizer := rule.normalizer()) is not None:
        coder.normalizer = normalizer
    coder.pre_tokenizer = rule.pre_tokenizer()
    return coder


def _blank_mark_coder(
    vocabulary: Vocabulary, tokens: Sequence[str], ids: dict[str, int], blank_prefix: bool
) -> Coder:
    if vocabulary.model == "gemma4":
        merges = _split_merges(vocabulary.merges)
    else:
        merges = merges_from_scores(tokens, vocabulary.types, vocabulary.scores)
    # Merges of texts with blanks never apply, since the coder sees marks in their place.
    merges = [(left, right) for left, right in merges if " " not in left + right]
    # The file spells user-defined runs of blanks as blanks, while its merges spell them as marks.
    for token_id in ids_of_types(vocabulary.types, USER_DEFINED):
        text = tokens[token_id]
        marked = text.replace(" ", BLANK_MARK)
        if marked in ids or ids[text] != token_id:
            continue
        ids[marked] = token_id
        # A coder that is saved has one text for each id. With a prefix both texts stay: the coder
        # would put the prefix before the text of marks as well, and never find the token.
        if not blank_prefix:
            del ids[text]
    unknown = vocabulary.special_ids.get("unknown")
    unknown_token = None if unknown is None else tokens[unknown]
    coder = Coder(_bpe(ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown_token))
    marks = Replace(" ", BLANK_MARK)
    normalizer: Normalizer = Normalizers([Prepend(BLANK_MARK), marks]) if blank_prefix else marks
    coder.normalizer = normalizer
    return coder


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **settings: object) -> BPE:
    try:
        return BPE(ids, merges, **settings)
    except Exception as error:  # the library raises no narrower class
        raise ModelError(f"The tokenizer's merges do not fit its vocabulary: {error}.") from error


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        blank = merge.find(" ", 1)  # a blank at the start belongs to the left token
        if blank < 0:
            raise ModelError(f"The tokenizer's merge {merge!r} does not name two tokens.")
        pairs.append((merge[:blank], merge[blank + 1 :]))
    return pairs


def possible_cuts(length: int, lengths: Sequence[int]) -> list[int]:
    """Return where a token of this length can be cut into two tokens of the given lengths."""
    known = set(lengths)
    return [cut for cut in lengths if 0 < cut < length and length - cut in known]


def merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the merges that a SentencePiece vocabulary implies, best score first.

    Every way to cut a token into two tokens is a merge, worth the score of the whole. Cuts are
    tried only where tokens of both lengths exist, and tokens have at most MAX_TOKEN_CHARACTERS, so
    that the work grows with the vocabulary and not with the square of a token's length.
    """
    if len(scores) != len(tokens):
        raise ModelError(
            f"The tokenizer has {len(tokens)} tokens and {len(scores)} scores; "
            "a SentencePiece vocabulary needs one for each."
        )
    # Merges never make control, unknown and byte tokens: their spelling is not their text.
    mergeable = ids_of_types(types, NORMAL, USER_DEFINED) if types else range(len(tokens))
    score_of = {tokens[i]: scores[i] for i in reversed(mergeable)}
    lengths = sorted({len(token) for token in score_of})
    if lengths and lengths[-1] > MAX_TOKEN_CHARACTERS:
        raise ModelError(
            f"The tokenizer has a token of {lengths[-1]} characters; at most "
            f"{MAX_TOKEN_CHARACTERS} are taken."
        )
    cuts_of = {length: possible_cuts(length, lengths) for length in lengths}
    ranked = []
    for whole, score in score_of.items():
        for cut in cuts_of[len(whole)]:
            left, right = whole[:cut], whole[cut:]
            if left in score_of and right in score_of:
                ranked.append((-score, -cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]
