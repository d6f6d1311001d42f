"""AnswerLimits: all that limits the tokens of the answers to one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.errors import RequestError
from headroom.text.conversation import Conversation, OutputFormat, Thinking, Tool, ToolChoice
from headroom.text.grammar import Grammar, GrammarCompiler, GrammarState, check_remainders
from headroom.text.reasoning import Reasoning
from headroom.text.thought_budget import AnswerConstraint, ThoughtRules, thought_tokens
from headroom.text.tool_formats import ToolFormat
from headroom.text.tool_grammars import tool_grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """What limits the tokens of all answers to one prompt."""

    compiler: GrammarCompiler
    grammar: Grammar | None  # what the text must match; None: anything
    thinking: Thinking
    reasoning: Reasoning | None  # None: the model writes no thoughts
    opened: bool  # the prompt ends inside a thought
    may_open: bool  # the answer may begin with a thought
    room: int  # tokens that the context has left for an answer

    @classmethod
    def of(
        cls,
        compiler: GrammarCompiler,
        chat: Conversation,
        reasoning: Reasoning | None,
        form: ToolFormat | None = None,  # how the model writes calls; None if it writes none
        *,
        prompt: str,
        room: int,
    ) -> "AnswerLimits":
        """Return the limits; refuse an output format or a tool that cannot be compiled."""
        thinking = chat.thinking
        opened = reasoning is not None and reasoning.is_open(prompt)
        closed = reasoning is None or reasoning.is_closed(prompt)
        may_open = not closed and thinking.enabled is not False
        thinks = opened or may_open
        grammar = compile_chat(compiler, chat, form, after_thought=thinks)
        return cls(
            compiler=compiler,
            grammar=grammar,
            thinking=thinking,
            reasoning=reasoning if thinks else None,
            opened=opened,
            may_open=may_open,
            room=room,
        )

    def begin(self, max_tokens: int | None) -> "AnswerConstraint | GrammarState | None":
        """Return the limits of one answer of at most so many tokens; None if any may come."""
        grammar = None if self.grammar is None else self.grammar.begin()
        longest = self.room if max_tokens is None else min(max_tokens, self.room)
        budget = thought_tokens(self.thinking, longest)
        if self.opened and self.thinking.enabled is False:
            budget = 0  # a template that opens a thought whatever it is told
        if self.reasoning is None or (grammar is None and budget is None):
            return grammar
        rules = ThoughtRules(
            reasoning=self.reasoning, opened=self.opened, may_open=self.may_open, budget=budget
        )
        return AnswerConstraint(rules, self.compiler, grammar)


def compile_chat(
    compiler: GrammarCompiler,
    chat: Conversation,
    form: ToolFormat | None,  # how the model writes calls; None if it writes none
    *,
    after_thought: bool,
) -> Grammar | None:
    """Return the grammar of what a client asks for; None if any text may come.

    Where the text must match a format and tools may be called, an answer is either.
    """
    choice, wanted = chat.tool_choice, chat.output_format
    if choice.mode == "required" and form is None:
        raise RequestError(
            "A tool call is required, and this model has no form of tool calls.",
            hint='Leave out tool_choice, or ask for JSON by "response_format".',
            param="tool_choice",
        )
    if form is None or not chat.tools or choice.mode == "none":
        if wanted is None:
            return None
        return compiler.compile([wanted], after_thought=after_thought, continues=chat.continues)
    if wanted is not None and choice.mode == "auto":
        only_calls = ToolChoice(mode="required", name=choice.name, parallel=choice.parallel)
        calls = _call_format(form, chat.tools, only_calls)
        formats = [wanted] if calls is None else [calls, wanted]
    elif (calls := _call_format(form, chat.tools, choice)) is not None:
        formats = [calls]
    else:
        return None
    try:
        return compiler.compile(formats, after_thought=after_thought, continues=chat.continues)
    except RequestError:
        for place, tool in enumerate(chat.tools):  # say which schema is at fault, and where
            param = f"tools[{place}].function.parameters"
            compiler.compile(
                [OutputFormat(kind="json_schema", value=dict(tool.parameters), param=param)]
            )
        raise


def _call_format(
    form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice
) -> OutputFormat | None:
    try:
        text = tool_grammar(form, tools, choice)
        if text is None:
            return None
        for place, tool in enumerate(tools):
            check_remainders(tool.parameters, f"tools[{place}].function.parameters")
    except RecursionError as error:
        raise RequestError(
            "The JSON schema of a tool is nested too deeply.", param="tools"
        ) from error
    return OutputFormat(kind="lark", value=text, param="tools")
