"""Texts far beyond a context: they are refused or cut before all of them is encoded.

A tokenizer takes 100 to 300 bytes of memory for each character.
"""

from headroom.errors import ContextLengthError
from headroom.text.tokenizer import Tokenizer

# Shorter texts are encoded at once: those with at most so many characters, or at most so many for
# each token of the context. Prose has 4 to 5 characters per token.
CHARACTERS = 1 << 16
CHARACTERS_PER_TOKEN = 8
# Where a text is cut changes at most so many of the tokens before the cut.
EDGE_TOKENS = 64


def first_tokens(tokenizer: Tokenizer, text: str, most: int) -> list[int] | None:
    """Return more than `most` tokens with which a long text begins.

    Return None if the text is not much longer, or has few tokens for its length.
    """
    size = max(CHARACTERS, CHARACTERS_PER_TOKEN * most)
    while size < len(text):
        tokens = tokenizer.encode(text[:size])[:-EDGE_TOKENS]
        if len(tokens) > most:
            return tokens
        size *= 2
    return None


def check_not_far_beyond(tokenizer: Tokenizer, text: str, context: int) -> None:
    """Raise ContextLengthError if the beginning of a long text already exceeds the context."""
    tokens = first_tokens(tokenizer, text, context)
    if tokens is not None:
        raise ContextLengthError(
            f"The prompt has at least {len(tokens)} tokens and the context holds {context}, "
            "the answer included.",
            hint="Shorten the prompt or raise --context.",
            param="prompt",
            tokens=len(tokens),
            context=context,
        )
