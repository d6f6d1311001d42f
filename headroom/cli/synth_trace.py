"""`headroom synth-trace`: write a made-up routing trace for a model."""

import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headroom.cli.completion import model_names, one_of
from headroom.cli.settings import with_settings
from headroom.errors import ModelError, OptionError
from headroom.experts.traces.synth_trace import PRESETS
from headroom.experts.traces.synth_trace import synth_trace as draw_trace
from headroom.experts.traces.trace import (
    MOST_BYTES,
    MOST_EXPERTS,
    MOST_LAYERS,
    RoutingTrace,
    TracedLayer,
    save_trace,
)
from headroom.experts.traces.trace_stats import trace_stats
from headroom.formats.json_files import check_folder, check_replaceable
from headroom.options import Options
from headroom.units import counted, gib

if TYPE_CHECKING:
    from headroom.plan.shape import PlanSource

DEFAULT_PRESET = "qwen3-30b-a3b"
LAYERS_BY_HAND = re.compile(r"(\d+)x(\d+)x(\d+)")  # layers, experts, experts that a token uses


@with_settings("program", log_level="warning")
def synth_trace(
    options: Options,
    model: Annotated[
        str,
        typer.Argument(
            help="a file, a folder, a known name, synth:NAME, or LAYERSxEXPERTSxUSED (40x256x8)",
            show_default=False,
            autocompletion=model_names,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="the file to write", show_default=False)],
    preset: Annotated[
        str,
        typer.Option(help=f"one of {', '.join(PRESETS)}", autocompletion=one_of(PRESETS)),
    ] = DEFAULT_PRESET,
    tokens: Annotated[int, typer.Option(help="tokens of all sequences together", min=2)] = 2000,
    sequences: Annotated[
        int, typer.Option(help="documents, which have nothing but popular experts in common", min=1)
    ] = 4,
    seed: Annotated[int, typer.Option(help="the same seed gives the same file", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write a made-up routing trace for a model: which experts each token chooses in each layer.

    Its statistics are those that others measured on real models, which --preset names. Nothing is
    loaded. headroom bench --routing-trace imposes it, headroom experts --policies replays it.
    """
    if preset not in PRESETS:
        raise OptionError(
            f"--preset is {preset!r}.", hint=f"Presets: {', '.join(PRESETS)}.", param="preset"
        )
    if sequences > tokens:
        raise OptionError(
            f"--sequences is {sequences} and --tokens only {tokens}.", param="sequences"
        )
    layers, files = find_layers(model, options)
    check_size(layers, tokens)
    check_folder(out, "out")
    check_replaceable(out, "routing trace", "out", files)
    started = time.perf_counter()
    source = f"synth-trace --preset {preset} --tokens {tokens} --sequences {sequences}"
    drawn = draw_trace(
        layers,
        PRESETS[preset].model,
        tokens=tokens,
        sequences=sequences,
        seed=seed,
        source=f"{source} --seed {seed}",
    )
    try:
        save_trace(out, drawn)
    except OSError as error:
        raise OptionError(f"Cannot write {out}: {error.strerror}.", param="out") from error
    show(drawn, out, time.perf_counter() - started, as_json)


def show(drawn: RoutingTrace, out: Path, seconds: float, as_json: bool) -> None:
    """Print what was written, and its statistics."""
    stats, layer = trace_stats(drawn), drawn.layers[0]
    if as_json:
        found = {"path": str(out), "source": drawn.source, "layers": len(drawn.layers)}
        print(json.dumps(found | asdict(stats)))
        return
    print(
        f"{out}: {counted(len(drawn.layers), 'layer')}, {layer.used} of {layer.experts} experts, "
        f"{counted(drawn.tokens, 'token')} in {counted(len(drawn.starts), 'sequence')}, "
        f"{gib(drawn.ids.nbytes)} in {seconds:.1f} s"
    )
    print(stats.summary())


def find_layers(text: str, options: Options) -> tuple[tuple[TracedLayer, ...], tuple[Path, ...]]:
    """Return the layers with experts of a model or of numbers given by hand, and its files."""
    if by_hand := LAYERS_BY_HAND.fullmatch(text):
        count, experts, used = map(int, by_hand.groups())
        if not (0 < count <= MOST_LAYERS and 0 < used <= experts <= MOST_EXPERTS):
            raise OptionError(
                f"{text} is {count} layers with {used} of {experts} experts.",
                hint=f"There may be up to {MOST_LAYERS} layers and {MOST_EXPERTS} experts.",
                param="model",
            )
        return tuple(TracedLayer(layer, experts, used) for layer in range(count)), ()
    from headroom.experts.traces.taps import (
        traced_layers,  # imports torch; --help must not wait for it
    )

    found = find_model(text, options)
    layers = traced_layers(found.shape)
    if not layers:
        raise ModelError(
            f"{text} has no routed experts.", hint="Dense models have no routing to trace."
        )
    return layers, () if found.checkpoint is None else tuple(found.checkpoint.files)


def find_model(text: str, options: Options) -> "PlanSource":
    """Return the shape of a model by file, known name, URL or `synth:NAME`."""
    from headroom.bench.models import parse_synth
    from headroom.formats.mixes import find_mix
    from headroom.plan.shape import PlanSource
    from headroom.plan.shaping import shape_of
    from headroom.plan.sources import find_source

    if (synthesised := parse_synth(text)) is None:
        return find_source(text, options.home_path)
    return PlanSource(shape_of(text, synthesised.recipe.dims, find_mix(synthesised.mix)))


def check_size(layers: tuple[TracedLayer, ...], tokens: int) -> None:
    """Refuse a trace that would be too large to be read."""
    size = 2 * tokens * sum(layer.used for layer in layers)
    if size > MOST_BYTES:
        raise OptionError(
            f"{tokens} tokens take {gib(size)}, and a trace may have {gib(MOST_BYTES)}.",
            hint="Choose fewer --tokens.",
            param="tokens",
        )
