"""The fields of a request that say whether and how long the model thinks before it answers.

These are OpenAI's `reasoning_effort`, OpenRouter's `reasoning`, Anthropic's and DeepSeek's
`thinking`, Qwen's `enable_thinking` and `thinking_budget`, llama.cpp's `thinking_budget_tokens` and
`reasoning_budget`, Ollama's `think`, and variables of the chat template in `chat_template_kwargs`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from headroom.engine.request import MAX_COUNT
from headroom.server.invalid_bodies import wrong_value
from headroom.server.schemas import Body, invalid
from headroom.text.conversation import Thinking

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=0, le=MAX_COUNT)]  # tokens; 0: no thoughts
OpenBudget = Annotated[int, Field(ge=-1, le=MAX_COUNT)]  # tokens; 0: no thoughts, -1: no limit
# Variables of the chat template that the server sets itself.
RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


THINKING_LEVELS = ("low", "medium", "high", "max")  # of Ollama's `think`


def _check_think(value: object) -> bool | str | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value in THINKING_LEVELS:
        return value
    raise wrong_value(f"true, false or one of {', '.join(THINKING_LEVELS)}")


Think = Annotated[bool | str | None, PlainValidator(_check_think)]


class ThinkingBody(Body):
    """Anthropic's and DeepSeek's object: thoughts on or off, and how many tokens they may have."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class ReasoningBody(Body):
    """OpenRouter's object: thoughts on or off, their effort or budget, and whether to hide them."""

    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None


def _thinking_object(value: object) -> object:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


class TemplateFields(Body):
    """The field with variables for the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None

    def template_variables(self) -> dict[str, Any]:
        """Return the variables that the body gives to the chat template."""
        variables = self.chat_template_kwargs or {}
        for name in RESERVED:
            if name in variables:
                raise invalid(
                    f"chat_template_kwargs.{name}",
                    f"`chat_template_kwargs` cannot have `{name}`: the server sets it itself.",
                )
        if not isinstance(variables.get("enable_thinking"), bool | None):
            raise invalid(
                "chat_template_kwargs.enable_thinking", "`enable_thinking` must be true or false."
            )
        return variables


class ThinkingFields(TemplateFields):
    """The fields about thoughts."""

    reasoning_effort: Effort | None = None
    reasoning: ReasoningBody | None = None
    thinking: Annotated[ThinkingBody | None, BeforeValidator(_thinking_object)] = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    thinking_budget_tokens: OpenBudget | None = None
    reasoning_budget: OpenBudget | None = None
    think: Think = None
    include_reasoning: bool | None = None

    @property
    def shows_thoughts(self) -> bool:
        """Whether the client wants to see the thoughts."""
        excluded = self.reasoning is not None and bool(self.reasoning.exclude)
        return self.include_reasoning is not False and not excluded

    def asked_thinking(self) -> Thinking:
        """Return what the fields ask for; on and off win over an effort and a budget above 0."""
        reasoning = self.reasoning or ReasoningBody()
        level = self.think if isinstance(self.think, str) else None
        effort = self.reasoning_effort or reasoning.effort or level
        budgets = (
            self.thinking.budget_tokens if self.thinking else None,
            self.thinking_budget,
            self.thinking_budget_tokens,
            self.reasoning_budget,
            reasoning.max_tokens,
        )
        budget = next((budget for budget in budgets if budget not in (None, -1)), None)
        enabled = self._switch(reasoning)
        if enabled is None and (effort is not None or budget is not None):
            enabled = effort != "none"
        if enabled is False or budget == 0:
            return Thinking(enabled=False)
        return Thinking(enabled=enabled, effort=None if effort == "none" else effort, budget=budget)

    def _switch(self, reasoning: ReasoningBody) -> bool | None:
        """Return whether a field turns thoughts on or off; None if no field does."""
        if self.thinking is not None and self.thinking.type != "adaptive":
            return self.thinking.type == "enabled"
        think = self.think if isinstance(self.think, bool) else None
        variable = (self.chat_template_kwargs or {}).get("enable_thinking")
        switches = (self.enable_thinking, reasoning.enabled, think, variable)
        return next((switch for switch in switches if switch is not None), None)
