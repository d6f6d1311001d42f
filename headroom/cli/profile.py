"""`headroom profile`: runs prompts and writes how often each expert was chosen."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headroom.cli.loading import open_llm, ready_model
from headroom.cli.prompts import FilePrompt, read_prompts
from headroom.cli.settings import with_settings
from headroom.errors import ModelError, OptionError
from headroom.formats.json_files import check_folder, check_replaceable
from headroom.options import OFF, Options
from headroom.units import counted

if TYPE_CHECKING:
    from headroom.experts.placement import LayerSkew
    from headroom.experts.stats import RoutingHistory, StatsModel
    from headroom.experts.traces.taps import TraceRecorder
    from headroom.llm import LLM

DEFAULT_TOKENS = 128


@with_settings("model", "engine", "program", log_level="warning")
def profile(
    options: Options,
    prompts: Annotated[
        Path,
        typer.Option(
            help='text with one prompt a line, or JSON lines with "prompt" or "messages"',
            show_default=False,
        ),
    ],
    tokens: Annotated[
        int, typer.Option(help="tokens to generate after each prompt", min=1)
    ] = DEFAULT_TOKENS,
    out: Annotated[
        Path | None,
        typer.Option(
            help="file to write (default: where an engine looks: beside the model, else in the "
            "home folder)"
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="also record which experts each token chose, token by token", metavar="FILE"
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Run prompts and write their routing statistics, by which experts are placed.

    An existing file is replaced, not added to.
    """
    if options.workers is not None:
        raise OptionError(
            "Worker processes do not count which experts are chosen.",
            hint="Leave out HEADROOM_WORKERS, or `workers` in the config file.",
            param="workers",
        )
    asked = read_prompts(prompts)
    found_at = ready_model(options)
    model = counted_model(found_at)
    path = target_path(out, options, model)
    recorder = None if trace is None else open_recorder(trace, model)
    # The engine itself neither reads nor saves statistics.
    alone = replace(options, routing_stats="off", swap_every="off")
    with open_llm(alone, found_at, recorder) as llm:
        generated = run_prompts(llm, asked, tokens, raw)
    assert llm.engine.upkeep is not None
    history = llm.engine.upkeep.history()
    write(path, history, model.identity)
    found = {"path": str(path), "model": llm.name, "prompts": len(asked), "tokens": generated}
    if recorder is not None and trace is not None:
        source = f"{counted(len(asked), 'prompt')} through {llm.name}"
        found["trace"] = write_trace(trace, recorder, model.identity, source)
    show(found, history, as_json)


def counted_model(path: Path) -> "StatsModel":
    """Return the model whose choices are counted; refuse one without experts."""
    # torch takes seconds to import; --help must not wait for it.
    from headroom.experts.stats import stats_model
    from headroom.families.files import open_checkpoint
    from headroom.plan.describe import describe

    checkpoint = open_checkpoint(path)
    shape = describe(checkpoint).shape
    model = stats_model(checkpoint.path, checkpoint.identity, shape, checkpoint.files)
    if not model.has_experts:
        raise ModelError(
            f"{checkpoint.path} has no routed experts.", hint="Dense models need no statistics."
        )
    return model


def target_path(out: Path | None, options: Options, model: "StatsModel") -> Path:
    """Return the file to write, or refuse it; by default the one that an engine would use."""
    from headroom.experts.stats import default_paths, open_stats, writable

    named, param = options.routing_stats, "out"
    if out is not None:
        paths: tuple[Path, ...] = (out.expanduser(),)
        check_folder(paths[0], "out")
    elif named == OFF:
        raise OptionError(
            f"--routing-stats {OFF} keeps no statistics, and a profile is nothing else.",
            hint="Leave it out, or name a file with --out.",
            param="routing_stats",
        )
    elif named is not None:
        paths, param = (Path(named).expanduser(),), "routing_stats"
        open_stats(named, model, options.home_path, time.time())  # refuses what an engine refuses
    else:
        paths = default_paths(model, options.home_path)
    for path in paths:
        if writable(path):
            try:
                check_replaceable(path, "routing statistics", param, model.files)
            except OptionError as error:
                if out is None and named is None:  # the user did not name the file
                    error.hint = f"Delete {path}, or name another file with --out."
                raise
            return path
    raise OptionError(
        f"{paths[-1]} cannot be written.", hint="Name a file with --out.", param="out"
    )


def open_recorder(path: Path, model: "StatsModel") -> "TraceRecorder":
    """Return what records the picks of routers; refuse a file that cannot take them."""
    from headroom.experts.stats import writable
    from headroom.experts.traces.taps import TraceRecorder

    check_folder(path, "trace")
    check_replaceable(path, "routing trace", "trace", model.files)
    if not writable(path):
        raise OptionError(
            f"{path} cannot be written.", hint="Name another file with --trace.", param="trace"
        )
    return TraceRecorder()


def write_trace(path: Path, recorder: "TraceRecorder", identity: str, source: str) -> str:
    """Write what was recorded, and return the file's name."""
    from headroom.experts.traces.trace import save_trace

    recorded = recorder.trace(identity, source)
    assert recorded is not None, "every profile runs at least one prompt"
    try:
        save_trace(path, recorded)
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.", param="trace") from error
    return str(path)


def run_prompts(llm: "LLM", asked: Sequence[FilePrompt], tokens: int, raw: bool) -> int:
    """Run all prompts; return how many tokens were read and generated."""
    whole = not raw and llm.template is not None
    ids = []
    for prompt in asked:
        if prompt.text is None or whole:
            encoded = llm.encode_chat(prompt.messages)
        else:
            encoded = llm.tokenizer.encode(prompt.text)
        if not 0 < len(encoded) < llm.context:
            raise OptionError(
                f"The prompt of line {prompt.line} has {len(encoded)} tokens and the context "
                f"holds {llm.context}.",
                hint="Shorten it, or raise --context.",
                param="prompts",
            )
        ids.append(encoded)
    with Console(stderr=True).status(f"running {counted(len(ids), 'prompt')}"):
        answers = llm.generate(ids, llm.sampling(max_tokens=tokens, seed=0))
    return sum(answer.prompt_tokens + answer.generated_tokens for answer in answers)


def write(path: Path, history: "RoutingHistory", identity: str) -> None:
    """Write the statistics in one step, so that a reader never sees half a file."""
    from headroom.experts.stats import save_history

    try:
        save_history(path, replace(history, saved_at=time.time()), identity)
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.", param="out") from error


def show(found: dict[str, Any], history: "RoutingHistory", as_json: bool) -> None:
    """Print how unevenly experts were chosen."""
    from headroom.experts.placement import measure_skew

    layers = measure_skew(history.counts)
    if as_json:
        rows = [layer_json(layer) for layer in layers]
        print(json.dumps({**found, "choices": history.total, "layers": rows}))
        return
    Console().print(skew_table(layers))
    print(
        f"{counted(found['prompts'], 'prompt')}, {counted(found['tokens'], 'token')}, "
        f"{history.total:.0f} choices, kept in {found['path']}"
    )
    if "trace" in found:
        print(f"trace written to {found['trace']}")


def layer_json(layer: "LayerSkew") -> dict[str, Any]:
    """Return one layer's skew as plain data; keys of `top` are percents of its experts."""
    from headroom.experts.placement import SHARES

    top = {f"{100 * share:.0f}": value for share, value in zip(SHARES, layer.top, strict=True)}
    return {
        "layer": layer.layer,
        "experts": layer.experts,
        "choices": layer.choices,
        "top": top,
    }


def skew_table(layers: "Sequence[LayerSkew]") -> Table:
    """Return the skew of all layers, and their mean, as a table."""
    from headroom.experts.placement import SHARES

    heads = [f"top {100 * share:.0f} % take" for share in SHARES]
    table = Table("layer", "experts", "choices", *heads, title="choices of experts")
    for layer in layers:
        cells = [f"{100 * share:.1f} %" for share in layer.top]
        table.add_row(str(layer.layer), str(layer.experts), f"{layer.choices:.0f}", *cells)
    if layers:
        means = [sum(column) / len(layers) for column in zip(*(x.top for x in layers), strict=True)]
        table.add_section()
        table.add_row("mean", "", "", *(f"{100 * mean:.1f} %" for mean in means))
    return table
