"""Cuts a chat that is longer than the context: the oldest turns are left out."""

from dataclasses import replace

from headroom.errors import ContextLengthError
from headroom.llm import LLM
from headroom.text.conversation import Conversation

# A chat that is cut leaves one eighth of the context for the answer, or as many tokens as the
# answer may have if that is less.
ANSWER_SHARE = 8


def cut_to_fit(llm: LLM, chat: Conversation, max_tokens: int | None) -> Conversation:
    """Return a chat without its oldest turns, as many as needed to fit it into the context.

    A turn is a message of the user and all that follows it. The system message at the beginning
    and the last turn stay.
    """
    room = max(1, llm.context // ANSWER_SHARE)
    if max_tokens is not None and max_tokens > 0:
        room = min(room, max_tokens)
    kept = 1 if chat.messages[0]["role"] == "system" else 0
    starts = [
        place
        for place, message in enumerate(chat.messages)
        if place >= kept and message["role"] == "user"
    ]

    def without(turns: int) -> Conversation:
        rest = chat.messages[starts[turns] :] if turns else chat.messages[kept:]
        return replace(chat, messages=[*chat.messages[:kept], *rest])

    def fits(turns: int) -> bool:
        try:
            prompt = llm.prepare_chat(without(turns), must_fit=True)
        except ContextLengthError:
            return False
        return len(prompt.tokens) + room <= llm.context

    # Binary search for the fewest turns to leave out: each trial encodes the whole prompt.
    low, high = 0, max(0, len(starts) - 1)
    if fits(0):
        return chat
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return without(low)
