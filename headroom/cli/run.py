"""`headroom run`: answer one prompt."""

import json
import logging
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headroom.cli.answer_output import AnswerOutput, AnswerStats, Thoughts, cut_note
from headroom.cli.attachments import Attachment, read_attachments
from headroom.cli.completion import first_model_name
from headroom.cli.loading import open_llm, ready_model
from headroom.cli.progress import waiting
from headroom.cli.quiet_keys import quiet_keys
from headroom.cli.settings import with_settings
from headroom.engine.request import SamplingParams
from headroom.errors import (
    ContextLengthError,
    FormatError,
    HeadroomError,
    OptionError,
    RequestError,
)
from headroom.families.files import open_checkpoint, refuse_plan_name
from headroom.families.registry import KNOWN, split_mix
from headroom.formats.aliases import find_alias, usable_aliases, with_aliases
from headroom.formats.hub import KNOWN_MODELS, SHORT_NAMES
from headroom.formats.hub_names import parse_hub_name
from headroom.options import Options
from headroom.text.conversation import Conversation, OutputFormat, Thinking
from headroom.units import counted

if TYPE_CHECKING:
    from headroom.answers import AnswerDelta, Completion
    from headroom.llm import LLM, AnswerStream

log = logging.getLogger(__name__)

WORDS_HELP = (
    "one word: the prompt, for the default model; two: the model and the prompt; a prompt of - is "
    "read from standard input; other input from a pipe or a file comes before the prompt"
)


@with_settings("engine", "workers", "program", sampling=True, parallel=1, log_level="warning")
def run(
    options: Options,
    sampling: dict[str, Any],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help=WORDS_HELP,
            show_default=False,
            autocompletion=first_model_name,
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="instructions that come before the prompt")] = "",
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="a text file to attach; may be repeated"),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="a JSON schema that the answer matches", metavar="FILE")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    thoughts: Annotated[
        Thoughts, typer.Option(help="how the model's thoughts are seen on a terminal")
    ] = "shown",
    think: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="whether the model thinks before it answers"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Answer one prompt; the text is shown as it comes."""
    if raw:
        refuse_with_raw({"--system": system, "--schema": schema, "--think": think})
    files = read_attachments(file or [])
    aliases = usable_aliases(options)
    asked = read_words(words or [], piped_text(), attached=bool(files), aliases=aliases)
    options = with_aliases(replace(options, model=asked.model or options.model))
    wanted, path = None, None
    if schema is not None:
        wanted, path = read_schema(schema), ready_model(options)
        check_schema(wanted, path)
    text = make_text(asked.prompt, files, raw=raw)
    chat = Conversation(
        messages=prompt_messages(system, text),
        output_format=wanted,
        thinking=Thinking(enabled=think),
    )
    with open_llm(options, path) as llm:
        params = llm.sampling(**sampling)
        try:
            deltas = llm.stream(text, params) if raw else llm.stream_chat(chat, params)
        except ContextLengthError as error:
            raise with_sizes(error, files, llm) from error
        answer = collect(deltas) if as_json else show(deltas, thoughts)
        if as_json:
            print(json.dumps(completion_json(answer, params)))
        warn_if_cut(answer, params, llm.context)
        if schema is not None:
            check_answer(answer, schema)


def refuse_with_raw(given: Mapping[str, object]) -> None:
    """Refuse flags that say how a chat template is used."""
    for flag, value in given.items():
        if value not in (None, ""):
            raise typer.BadParameter(f"{flag} needs the chat template, which --raw leaves out.")


@dataclass(frozen=True, slots=True)
class AskedWords:
    """What positional arguments and standard input stand for."""

    model: str  # "" for the default
    prompt: str


def piped_text() -> str:
    """Return what a pipe or a file gives on standard input; "" if nobody gives anything."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or no file at all
        return ""
    given = stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
    return sys.stdin.read() if given else ""


def read_words(
    words: Sequence[str],
    piped: str,
    *,
    attached: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> AskedWords:
    """Return the model and the prompt; what was piped in comes before the prompt.

    A single word is the prompt. But if text is piped in or attached, it may be the model alone.
    """
    if len(words) > 2:
        raise typer.BadParameter(f"{len(words)} words where [MODEL] and one text were expected.")
    if not words and not piped and not attached:
        raise typer.BadParameter(
            "There is no prompt. Write one, pipe one in, or attach a file with -f; headroom chat "
            "talks with you."
        )
    model, text = words if len(words) == 2 else ("", words[0] if words else "")
    if len(words) == 1:
        if split_mix(text)[0].lower() in KNOWN:
            refuse_plan_name(text)
        named = _is_name(text) or find_alias(text, aliases or {}) is not None
        if (piped or attached) and (_is_model(text) or named):
            model, text = text, ""
        elif _is_model(text):
            raise typer.BadParameter(f"{text} is a model, and the text to go with it is missing.")
    if text == "-":
        text, piped = piped or sys.stdin.read(), ""
    parts = [piped.rstrip("\n"), text] if piped and text else [piped or text]
    return AskedWords(model, "\n\n".join(parts))


def _is_model(text: str) -> bool:
    """Whether a single word is a model, whose prompt was forgotten."""
    try:
        return Path(text, "config.json").is_file() or text.endswith(".gguf")
    except OSError:  # the text is longer than a file name may be
        return False


def _is_name(text: str) -> bool:
    """Whether a single word is the name of a model that can be pulled."""
    known = SHORT_NAMES.get(text.lower(), text.lower()) in KNOWN_MODELS
    try:
        return known or parse_hub_name(text) is not None
    except FormatError:  # an address of the hub where no model is
        return False


def make_text(prompt: str, files: Sequence[Attachment], *, raw: bool) -> str:
    """Return the text of the user's message: the attached files, then the prompt.

    Without a chat template the files are not framed: their text is continued.
    """
    if raw:
        return "".join(file.text for file in files) + prompt
    parts = [file.framed() for file in files]
    return "\n\n".join([*parts, prompt] if prompt else parts)


def prompt_messages(system: str, prompt: str) -> list[dict[str, str]]:
    """Return the conversation of one prompt."""
    instructions = [{"role": "system", "content": system}] if system else []
    return [*instructions, {"role": "user", "content": prompt}]


def read_schema(path: Path) -> OutputFormat:
    """Return the output format of a JSON schema in a file, or refuse the file."""
    try:
        found = json.loads(path.expanduser().read_text("utf-8"))
    except OSError as error:
        raise _wrong_schema(f"Cannot read --schema {path}: {error.strerror}.") from error
    except (ValueError, RecursionError, RuntimeError) as error:
        raise _wrong_schema(f"--schema {path} is not a JSON file: {error}.") from error
    if not isinstance(found, dict):
        raise _wrong_schema(
            f"--schema {path} holds a value of type {type(found).__name__}, not an object."
        )
    return OutputFormat(kind="json_schema", value=found, param=str(path))


def check_schema(wanted: OutputFormat, model: Path) -> None:
    """Refuse a schema that cannot be used, before the model is loaded."""
    from headroom.text.grammar import GrammarCompiler  # takes half a second to import
    from headroom.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(model))
    try:
        GrammarCompiler(tokenizer, tokenizer.vocab_size).compile([wanted])
    except RequestError as error:
        raise _wrong_schema(f"--schema {wanted.param}: {error.message}", error.hint) from error


def _wrong_schema(what: str, hint: str = "") -> OptionError:
    return OptionError(what, hint=hint, param="schema")


def with_sizes(
    error: ContextLengthError, files: Sequence[Attachment], llm: "LLM"
) -> ContextLengthError:
    """Return the error of a prompt that is too long, with the tokens of each attached file."""
    if not files:
        return error
    sizes = [f"{file.path} has {len(llm.tokenizer.encode(file.framed()))}" for file in files]
    return ContextLengthError(
        f"{error.message.rstrip('.')}: {', '.join(sizes)}.",
        hint="Attach fewer files or parts of them, or raise --context.",
        param="file",
        tokens=error.tokens,
        context=error.context,
    )


def check_answer(answer: "Completion", schema: Path) -> None:
    """Refuse an answer that ended before its JSON was complete.

    A complete answer matches the schema, because the grammar allows nothing else.
    """
    try:
        json.loads(answer.text)
    except ValueError as error:
        raise HeadroomError(
            f"The answer ends after {counted(answer.generated_tokens, 'token')}, before the JSON "
            f"that {schema} asks for is complete.",
            hint="Raise --max-tokens or --context, and give no --stop.",
        ) from error


def collect(deltas: "Iterable[AnswerDelta]") -> "Completion":
    """Return the whole answer that the deltas add up to."""
    from headroom.answers import join_deltas  # imports torch

    return join_deltas(list(deltas))


def show(deltas: "AnswerStream", thoughts: Thoughts) -> "Completion":
    """Write an answer to standard output as it comes, and return it.

    If a person sees it, a line about what it took follows on standard error.
    """
    seen, notes = Console(), Console(stderr=True, highlight=False)
    out = AnswerOutput(sys.stdout, terminal=seen.is_terminal, thoughts=thoughts)

    def shown() -> "Iterator[AnswerDelta]":
        with waiting(seen, notes):
            first = next(deltas)
        for delta in chain([first], deltas):
            out.write(delta)
            yield delta

    with quiet_keys() if seen.is_terminal else nullcontext():
        try:
            answer = collect(shown())
        finally:
            out.finish()  # a terminal does not stay dim after Ctrl-C
    if seen.is_terminal and notes.is_terminal:
        notes.print(AnswerStats.of(answer).line(), style="dim", soft_wrap=True)
    return answer


def warn_if_cut(answer: "Completion", params: SamplingParams, context: int) -> None:
    """Log a warning if the end of the context cut an answer short of what was asked for."""
    if (note := cut_note(answer, params, context)) is not None:
        log.warning("answer: %s", note)


def completion_json(completion: "Completion", params: SamplingParams) -> dict[str, Any]:
    """Return an answer as `--json` prints it."""
    decode_s = completion.timings.decode_s
    # Models without cold experts have no "experts", those of one stage no "stages".
    times = {name: x for name, x in asdict(completion.timings).items() if x is not None}
    rate = (completion.generated_tokens - 1) / decode_s if decode_s > 0 else None
    return {
        "text": completion.text,
        **({"thought": completion.thought} if completion.thought else {}),
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.generated_tokens,
            "total_tokens": completion.prompt_tokens + completion.generated_tokens,
        },
        "timings": {**times, "decode_tokens_per_s": rate},
        "seed": params.seed,
    }
