"""Reasoning: the marks around a model's thoughts, found in its vocabulary and chat template."""

from dataclasses import dataclass, replace

from headroom.errors import RequestError
from headroom.text.chat_template import ChatTemplate
from headroom.text.tokenizer import Tokenizer

# Token before a thought, token after it, and the text that follows the first one: as in Qwen and
# Laguna, as in Gemma 4, and as in Mistral's reasoning models.
_MARKERS = (
    ("<think>", "</think>", ""),
    ("<|channel>", "<channel|>", "thought\n"),
    ("[THINK]", "[/THINK]", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The marks around a model's thoughts."""

    start: str  # text before a thought
    end: str  # text after a thought
    start_id: int  # the first token of `start`
    end_id: int  # the only token of `end`
    opened: bool  # by default, prompts of the chat template end inside a thought
    closing: str = ""  # `end` with the white space around it that the chat template writes

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside a thought, so that the answer begins inside it."""
        return prompt.rstrip().endswith(self.start.rstrip())

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends with a thought that is over, so that the answer has none."""
        return prompt.rstrip().endswith(self.end)


def find_reasoning(tokenizer: Tokenizer, template: ChatTemplate | None) -> Reasoning | None:
    """Return the marks that a model uses; None where it writes no thoughts.

    Vocabularies of models that never think may hold the marks, too: where there is a chat template,
    it must contain them.
    """
    for start, end, label in _MARKERS:
        start_id, end_id = tokenizer.find(start), tokenizer.find(end)
        if start_id is None or end_id is None:
            continue
        if template is not None and end not in template.source:
            continue
        found = Reasoning(
            start=start + label,
            end=end,
            start_id=start_id,
            end_id=end_id,
            opened=False,
            closing=end,
        )
        if template is None:
            return found
        opened = found.is_open(_usual_prompt(template))
        return replace(found, opened=opened, closing=_closing(template, end))
    return None


def _usual_prompt(template: ChatTemplate) -> str:
    try:
        return template.render([{"role": "user", "content": "Hello."}])
    except RequestError:  # for example, a template that wants more than one message
        return ""


def _closing(template: ChatTemplate, end: str) -> str:
    """Return what a chat template writes between the thought and the text of an answer."""
    thought, text = "A probe of thoughts.", "A probe of texts."
    answer = {"role": "assistant", "content": text, "reasoning_content": thought}
    try:
        chat = template.render(
            [{"role": "user", "content": "Hello."}, answer],
            add_generation_prompt=False,
            enable_thinking=True,
        )
    except RequestError:
        return end
    between = chat.partition(thought)[2].partition(text)[0]
    # Templates that leave out thoughts of earlier turns, or write them elsewhere, tell nothing.
    return between if between.strip() == end else end
