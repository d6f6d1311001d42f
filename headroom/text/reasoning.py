"""Reasoning: how a model marks its thoughts, known by its vocabulary and its chat template."""

from dataclasses import dataclass, replace

from headroom.errors import RequestError
from headroom.text.chat_template import ChatTemplate
from headroom.text.tokenizer import Tokenizer

# The tokens around a thought and what follows the first of them, by family: Qwen and Laguna,
# Gemma 4.
_MARKERS = (("<think>", "</think>", ""), ("<|channel>", "<channel|>", "thought\n"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The marks around a model's thoughts."""

    start: str  # text before a thought
    end: str  # text after it
    start_id: int  # the token with which `start` begins
    end_id: int  # the token that `end` is
    opened: bool  # prompts of the chat template end inside a thought, if nothing else is asked

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends with an opened thought, so that the answer goes on with it."""
        return prompt.rstrip().endswith(self.start.rstrip())


def find_reasoning(tokenizer: Tokenizer, template: ChatTemplate | None) -> Reasoning | None:
    """Return the marks that a model uses; None where it does not think aloud.

    Vocabularies hold marks also for models that never think, so that a template has the last word.
    """
    for start, end, label in _MARKERS:
        start_id, end_id = tokenizer.find(start), tokenizer.find(end)
        if start_id is None or end_id is None:
            continue
        if template is not None and end not in template.source:
            continue
        found = Reasoning(
            start=start + label, end=end, start_id=start_id, end_id=end_id, opened=False
        )
        opened = template is not None and found.is_open(_usual_prompt(template))
        return replace(found, opened=opened)
    return None


def _usual_prompt(template: ChatTemplate) -> str:
    try:
        return template.render([{"role": "user", "content": "Hello."}])
    except RequestError:  # it wants more than one message, say; then nothing is known
        return ""
