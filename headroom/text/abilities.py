"""Abilities: tokenizer, chat template, thoughts and tool calls of a model, read from its files."""

from dataclasses import dataclass
from typing import Any

from headroom.formats.checkpoint import Checkpoint
from headroom.text.chat_template import ChatTemplate
from headroom.text.reasoning import Reasoning, find_reasoning
from headroom.text.thought_budget import EFFORT_SHARES
from headroom.text.tokenizer import Tokenizer
from headroom.text.tool_formats import ToolFormat, find_tool_format


@dataclass(frozen=True, slots=True)
class Abilities:
    """How to talk to a model; read without its weights."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model only continues text
    reasoning: Reasoning | None  # None: the model writes no thoughts
    tool_format: ToolFormat

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Abilities":
        """Return the abilities of the model in a checkpoint."""
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        template = None
        if checkpoint.chat_template is not None:
            template = ChatTemplate(
                checkpoint.chat_template, tokenizer.bos_token, tokenizer.eos_token
            )
        return cls(
            tokenizer,
            template,
            find_reasoning(tokenizer, template),
            find_tool_format(tokenizer, template),
        )

    def reasoning_facts(self) -> dict[str, Any]:
        """Return whether and how the model writes thoughts, as JSON."""
        if self.reasoning is None:
            return {"supported": False}
        return {
            "supported": True,
            "start": self.reasoning.start,
            "end": self.reasoning.end,
            "default": "on" if self.reasoning.opened else "by the model",
            "efforts": list(EFFORT_SHARES),
        }

    def stop_tokens(self) -> list[str]:
        """Return the tokens that end an answer, as text, in the order of their ids."""
        return [self.tokenizer.token_text(token) for token in sorted(self.tokenizer.stop_ids)]
