"""AnswerLimits: which tokens the answers to one prompt may have: grammar and thought budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.errors import RequestError
from headroom.text.conversation import Conversation, OutputFormat, Thinking, Tool, ToolChoice
from headroom.text.grammar import Grammar, GrammarCompiler, GrammarState
from headroom.text.reasoning import Reasoning
from headroom.text.thought_budget import AnswerConstraint, ThoughtRules, thought_tokens
from headroom.text.tool_formats import ToolFormat
from headroom.text.tool_grammars import tool_grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """The limits that all answers to one prompt share; `begin` makes those of a single answer."""

    compiler: GrammarCompiler
    grammar: Grammar | None  # what the answer after its thought must match; None: any text may come
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
        """Return the limits of answers to a prompt.

        An output format or a tool that cannot be compiled to a grammar raises RequestError.
        """
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
        """Return the limits of one answer of at most `max_tokens`; None if any token may come."""
        grammar = None if self.grammar is None else self.grammar.begin()
        longest = self.room if max_tokens is None else min(max_tokens, self.room)
        budget = thought_tokens(self.thinking, longest)
        if self.opened and self.thinking.enabled is False:
            budget = 0  # the template has opened a thought although the client wants none
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
    """Return the grammar of the answers that a client asks for; None if any text may come.

    If there are an output format and tools, an answer is either calls or text of that format.
    """
    choice, wanted = chat.tool_choice, chat.output_format
    begun = ""
    if chat.continues and wanted is not None and not after_thought:
        # The format holds for the whole text, also for the words that the client has written.
        begun = chat.messages[-1].get("content") or ""
    if choice.mode == "required" and form is None:
        raise RequestError(
            "tool_choice requires a tool call, but this model cannot write tool calls.",
            hint='Leave out tool_choice, or ask for JSON with "response_format".',
            param="tool_choice",
        )
    if form is None or not chat.tools or choice.mode == "none":
        if wanted is None:
            return None
        return compiler.compile(
            [wanted], after_thought=after_thought, continues=chat.continues, begun=begun
        )
    _check_grammars(compiler, chat.tools)
    if wanted is not None and choice.mode == "auto":
        if form.name == "bare_json" and any(tool.grammar for tool in chat.tools):
            raise RequestError(
                "With this model, tools with a grammar and a format of the answer cannot be asked "
                "for together, because its calls are bare JSON.",
                hint="Leave out the grammar of the tool, or the format.",
                param=wanted.param,
            )
        only_calls = ToolChoice(mode="required", name=choice.name, parallel=choice.parallel)
        calls = _call_format(form, chat.tools, only_calls)
        formats = [wanted] if calls is None else [calls, wanted]
    elif (calls := _call_format(form, chat.tools, choice)) is not None:
        formats, begun = [calls], ""
    else:
        return None
    try:
        return compiler.compile(
            formats, after_thought=after_thought, continues=chat.continues, begun=begun
        )
    except RequestError as error:
        if error.param == "tools":  # the grammar that is written here means nothing to the client
            line = error.message.partition("\n")[0]
            error.message = line.replace("The Lark grammar", "The grammar of the tool calls", 1)
        raise


def _check_grammars(compiler: GrammarCompiler, tools: Sequence[Tool]) -> None:
    """Refuse a tool whose grammar cannot be compiled."""
    for tool in tools:
        if tool.grammar:
            try:
                compiler.compile([OutputFormat(kind="lark", value=tool.grammar, param=tool.param)])
            except RequestError as error:
                named = f"The Lark grammar of the tool {tool.name!r}"
                error.message = error.message.replace("The Lark grammar", named, 1)
                raise


def _call_format(
    form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice
) -> OutputFormat | None:
    """Return the grammar of tool calls as an output format; None if any answer may come."""
    try:
        text = tool_grammar(form, tools, choice)
    except RecursionError as error:
        raise RequestError(
            "The JSON schema of a tool is nested too deeply.",
            hint="Flatten the schema: move inner objects up, or to $defs.",
            param="tools",
        ) from error
    return None if text is None else OutputFormat(kind="lark", value=text, param="tools")
