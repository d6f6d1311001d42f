"""Reasoning: the marks around a model's thoughts, found in its vocabulary and chat template."""

from dataclasses import dataclass, replace

from headroom.errors import RequestError
from headroom.text.chat_template import ChatTemplate
from headroom.text.tokenizer import Tokenizer

# The token before a thought, the token after it, and the text that follows the first token.
_MARKERS = (
    ("<think>", "</think>", ""),  # Qwen, Laguna
    ("<|channel>", "<channel|>", "thought\n"),  # Gemma 4
    ("[THINK]", "[/THINK]", ""),  # Mistral
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The marks around a model's thoughts."""

    start: str  # text before a thought
    end: str  # text after a thought
    start_id: int  # the first token of `start`
    end_id: int  # the only token of `end`
    opened: bool  # the chat template's prompts end inside a thought unless it is told otherwise
    closing: str = ""  # `end`, with the white space that the chat template writes around it

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside a thought, which the answer continues."""
        return prompt.rstrip().endswith(self.start.rstrip())

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends with a finished thought, so that the answer has none."""
        return prompt.rstrip().endswith(self.end)


def find_reasoning(tokenizer: Tokenizer, template: ChatTemplate | None) -> Reasoning | None:
    """Return the marks around a model's thoughts; None if it writes no thoughts.

    The vocabulary of a model that never thinks may have the marks, too. So the chat template, if
    there is one, must contain the end mark.
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
    """Return the prompt of one user message; "" if the template refuses it."""
    try:
        return template.render([{"role": "user", "content": "Hello."}])
    except RequestError:
        return ""


def _closing(template: ChatTemplate, end: str) -> str:
    """Return the end mark with the white space that a chat template writes around it."""
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
    # Some templates leave out earlier thoughts, or write other text between: take the mark alone.
    return between if between.strip() == end else end
