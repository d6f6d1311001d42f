"""`headroom run`: answer one prompt."""

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from headroom.cli.loading import open_llm
from headroom.cli.settings import with_settings
from headroom.engine.request import SamplingParams
from headroom.families.files import refuse_plan_name
from headroom.families.registry import KNOWN, split_mix
from headroom.options import Options

if TYPE_CHECKING:
    from headroom.answers import AnswerDelta, Completion
    from headroom.llm import LLM

log = logging.getLogger(__name__)

Messages = list[dict[str, str]]
DIM, PLAIN = "\x1b[2m", "\x1b[0m"  # a terminal's sequences for faint and for normal text


@with_settings("engine", "program", sampling=True, parallel=1, log_level="warning")
def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="one word: the prompt, for the default model; two: the model and the prompt; "
            "a prompt of - is read from standard input",
            show_default=False,
        ),
    ],
    options: Options,
    sampling: dict[str, Any],
    system: Annotated[str, typer.Option(help="instructions that come before the prompt")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Answer one prompt; the text is shown as it comes."""
    model, prompt = split_words(words)
    if raw and system:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out.")
    options = replace(options, model=model or options.model)
    with open_llm(options) as llm:
        params = llm.sampling(**sampling)
        asked: str | Messages = prompt if raw else make_messages(system, prompt)
        if as_json:
            answer = complete(llm, asked, params)
            print(json.dumps(completion_json(answer, params)))
            warn_if_cut(answer, params, llm.context)
        else:
            warn_if_cut(show(stream(llm, asked, params)), params, llm.context)


def split_words(words: list[str]) -> tuple[str, str]:
    """Return the model ("" for the default) and the prompt that positional arguments stand for."""
    if len(words) > 2:
        raise typer.BadParameter(f"{len(words)} words where [MODEL] and one text were expected.")
    model, text = ("", words[0]) if len(words) == 1 else words
    if len(words) == 1 and split_mix(text)[0].lower() in KNOWN:
        refuse_plan_name(text)
    if len(words) == 1 and _is_model(text):
        raise typer.BadParameter(f"{text} is a model, and the text to go with it is missing.")
    return model, sys.stdin.read() if text == "-" else text


def _is_model(text: str) -> bool:
    """Whether a single word is a model, whose prompt was forgotten."""
    try:
        return Path(text, "config.json").is_file() or text.endswith(".gguf")
    except OSError:  # the text is longer than a file name may be
        return False


def make_messages(system: str, prompt: str) -> Messages:
    """Return the conversation of one prompt."""
    instructions = [{"role": "system", "content": system}] if system else []
    return [*instructions, {"role": "user", "content": prompt}]


def complete(llm: "LLM", asked: str | Messages, params: SamplingParams) -> "Completion":
    """Return the whole answer at once."""
    if isinstance(asked, str):
        return llm.generate(asked, params)[0]
    return llm.chat(asked, params)


def stream(llm: "LLM", asked: str | Messages, params: SamplingParams) -> "Iterable[AnswerDelta]":
    """Return the answer as it comes."""
    if isinstance(asked, str):
        return llm.stream(asked, params)
    return llm.stream_chat(asked, params)


def show(deltas: "Iterable[AnswerDelta]") -> "AnswerDelta":
    """Write an answer to standard output as it comes, and a line feed; return the last delta.

    Thoughts are shown dimmed on a terminal, and not at all elsewhere: a pipe gets the answer.
    """
    text, out = "", AnswerOutput(sys.stdout, thoughts=sys.stdout.isatty())
    for delta in deltas:
        out.write(delta)
        text = delta.text or text
    if not text.endswith("\n"):
        print(flush=True)
    return delta


class AnswerOutput:
    """Writes the deltas of an answer to a terminal or a file: thoughts dimmed, then the text."""

    def __init__(self, file: IO[str], *, thoughts: bool) -> None:
        self._file = file
        self._thoughts = thoughts
        self._thinking = False

    def write(self, delta: "AnswerDelta") -> None:
        """Write what a delta adds."""
        if delta.thought and self._thoughts:
            self._file.write(delta.thought if self._thinking else DIM + delta.thought)
            self._thinking = True
        if self._thinking and (delta.text or delta.finish_reason is not None):
            self._file.write(PLAIN + "\n\n")
            self._thinking = False
        self._file.write(delta.text)
        self._file.flush()


def warn_if_cut(answer: "AnswerDelta | Completion", params: SamplingParams, context: int) -> None:
    """Log a warning if the end of the context cut an answer short of what was asked for."""
    wanted, generated = params.max_tokens, answer.generated_tokens
    if answer.finish_reason == "length" and (wanted is None or generated < wanted):
        asked = "" if wanted is None else f", not {wanted} (--max-tokens)"
        log.warning(
            "answer: cut after %d tokens%s, where the context of %d tokens ends; raise --context",
            generated,
            asked,
            context,
        )


def completion_json(completion: "Completion", params: SamplingParams) -> dict[str, Any]:
    """Return an answer as `--json` prints it."""
    decode_s = completion.timings.decode_s
    times = asdict(completion.timings)
    if times["experts"] is None:  # the model has no cold experts
        del times["experts"]
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
