"""`headroom bench`: how fast a model runs here, against what the memory bandwidth allows."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headroom.cli.loading import ready_model
from headroom.cli.progress import step_bar
from headroom.cli.settings import add_flags, with_settings
from headroom.errors import KernelError, OptionError
from headroom.options import Options
from headroom.units import counted

if TYPE_CHECKING:
    from headroom.bench.figures import BenchSettings
    from headroom.kernels.native.measure import Measured

CPU_KERNELS = "cpu"  # given instead of a model: measure the CPU kernels alone
PIPED_WIDTH = 200  # columns of tables that go to a file or a pipe


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """The flags of the command, made from these fields."""

    prompts: Annotated[
        str | None, typer.Option(help="tokens of the prompts (512,2048)", metavar="N,N")
    ] = None
    contexts: Annotated[
        str | None,
        typer.Option(help="tokens of context before the decoded ones (32,16384)", metavar="N,N"),
    ] = None
    batch: Annotated[
        str | None, typer.Option(help="sequences that decode together (1,4,8,16)", metavar="N,N")
    ] = None
    tokens: Annotated[int | None, typer.Option(help="tokens that each sequence decodes (128)")] = (
        None
    )
    rounds: Annotated[
        int | None, typer.Option(help="measurements of each prompt; the median counts (3)")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="how freely tokens are drawn (1)", min=0, max=100)
    ] = None
    patience: Annotated[
        float | None,
        typer.Option(help="maximum seconds for the prompts of a context (300)", min=0),
    ] = None
    only: Annotated[
        str | None,
        typer.Option(
            help="kinds of figures to measure: prompts, decode, verify, parts, prefix, agent, "
            "draft",
            metavar="KIND,KIND",
        ),
    ] = None
    prefix: Annotated[
        bool,
        typer.Option("--prefix", help="also measure prompts that begin like earlier ones"),
    ] = False
    agent: Annotated[
        bool,
        typer.Option("--agent", help="also measure an agent's session, whose prompts grow"),
    ] = False
    accept: Annotated[
        str | None,
        typer.Option(
            help="also measure guessing ahead with such shares of right guesses (0.6,0.8,0.9)",
            metavar="P,P",
        ),
    ] = None
    schema: Annotated[
        bool, typer.Option("--schema", help="also measure decoding under a typical JSON schema")
    ] = False
    schema_file: Annotated[
        Path | None,
        typer.Option(help="a JSON schema to measure instead of the typical one", metavar="FILE"),
    ] = None
    routing_trace: Annotated[
        Path | None,
        typer.Option(
            help="a routing trace whose choices replace those of the routers", metavar="FILE"
        ),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="short prompts and contexts, few tokens")
    ] = False
    parts: Annotated[
        bool, typer.Option("--parts/--no-parts", help="also measure the parts of a step")
    ] = True
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="llama-bench PATH: also run that program on the same file",
            metavar="llama-bench PATH",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False


def bench(*, options: Options, **flags: Any) -> None:
    """Measure how fast a model runs here, against what the memory bandwidth allows.

    MODEL is a model as in other commands, or synth:SIZE:QUANT (synth:qwen3.5-27b:q4_k_m) for a
    model with random weights, which is written first; `cpu` measures the CPU kernels alone.
    """
    given = BenchFlags(**flags)
    if options.model == CPU_KERNELS:
        check_kernel_flags(given, options)
        bench_kernels(options, as_json=given.as_json)
        return
    # torch takes seconds to import; --help must not wait for it.
    from headroom.bench.peer import find_peer
    from headroom.bench.report import report_json
    from headroom.bench.run import run_bench
    from headroom.cli.bench_tables import report_tables

    settings = bench_settings(given)
    peer = find_peer(*given.compare) if given.compare else None
    path = model_path(options)
    with step_bar("planning") as show:
        report = run_bench(
            path, options, settings, peer=peer, routing_trace=given.routing_trace, report=show
        )
    if given.as_json:
        print(json.dumps(report_json(report)))
        return
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(width=PIPED_WIDTH)
    for table in report_tables(report):
        console.print(table)


def bench_settings(given: BenchFlags) -> "BenchSettings":
    """Return what the flags ask to measure."""
    from headroom.bench.figures import QUICK, BenchSettings

    changes: dict[str, Any] = {
        "prompts": _numbers("prompts", given.prompts),
        "contexts": _numbers("contexts", given.contexts),
        "batches": _numbers("batch", given.batch),
        "tokens": given.tokens,
        "rounds": given.rounds,
        "temperature": given.temperature,
        "patience_s": given.patience,
        "accept": _shares(given.accept),
        "only": tuple(word.strip() for word in given.only.split(",")) if given.only else None,
        "schema": _schema(given),
    }
    base = QUICK if given.quick else BenchSettings()
    if not given.parts:
        changes["only"] = tuple(kind for kind in changes["only"] or base.only if kind != "parts")
    usual = base.only if changes["only"] is None else changes["only"]
    asked = [name for name in ("prefix", "agent") if getattr(given, name)]
    asked += ["draft"] if given.accept is not None else []
    changes["only"] = tuple(dict.fromkeys([*usual, *asked]))
    return replace(base, **{name: value for name, value in changes.items() if value is not None})


def check_kernel_flags(given: BenchFlags, options: Options) -> None:
    """Refuse flags that say how a model is measured: `bench cpu` has no model."""
    usual = BenchFlags()
    names = [x.name for x in fields(given) if getattr(given, x.name) != getattr(usual, x.name)]
    flags = [
        f"--{'no-parts' if name == 'parts' else name.replace('_', '-')}"
        for name in names
        if name != "as_json"
    ]
    if options.device not in (None, "cpu"):
        flags.append("--device")
    if flags:
        raise OptionError(
            f"bench cpu measures the CPU kernels without a model, and takes no {', '.join(flags)}.",
            hint="It takes --threads, --pin-threads and --json.",
            param="model",
        )


def model_path(options: Options) -> Path:
    """Return the model's file; a `synth:` model is written first if it is not there."""
    from headroom.bench.models import parse_synth
    from headroom.cli.synth import SynthOptions, write
    from headroom.families.synth.values import Source

    synthesised = parse_synth(options.model)
    if synthesised is None:
        return ready_model(options)
    path = synthesised.path(options.home_path)
    if not path.exists():
        write(Source(synthesised.recipe, 0), path, synthesised.mix, SynthOptions())
    return path


def bench_kernels(options: Options, *, as_json: bool) -> None:
    """Measure products and experts against the machine's read bandwidth."""
    from headroom.kernels.native.measure import SIZE, measure_kernels
    from headroom.kernels.native.module import MISSING, MODULE, POOL

    if MODULE is None:
        raise KernelError("There are no C++ kernels to measure.", hint=f"The module is {MISSING}.")
    if options.threads or options.pin_threads:
        POOL.set(options.threads or POOL.ops.threads, pin=options.pin_threads)
    rows = list(measure_kernels())
    head = {"isa": POOL.ops.isa, "threads": POOL.ops.threads, "size": SIZE}
    if as_json:
        print(json.dumps(head | {"kernels": [asdict(row) for row in rows]}))
        return
    title = f"{head['isa']} kernels on {counted(POOL.ops.threads, 'thread')}, {SIZE} x {SIZE}"
    Console().print(kernel_table(title, rows))


def kernel_table(title: str, rows: "list[Measured]") -> Table:
    """Return the measured kernels as a table."""
    table = Table("kernel", "GB/s", "of read bandwidth", title=title)
    for row in rows:
        table.add_row(row.name, f"{row.gb_per_s:.1f}", f"{100 * row.share:.0f} %")
    return table


def _schema(given: BenchFlags) -> Mapping[str, Any] | None:
    """Return the JSON schema that decoding is measured under; None if none is asked for."""
    if given.schema_file is None:
        if not given.schema:
            return None
        from headroom.bench.schema import TYPICAL

        return TYPICAL
    try:
        found = json.loads(given.schema_file.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--schema-file {given.schema_file} is not a JSON file: {error}.", param="schema_file"
        ) from error
    if not isinstance(found, dict):
        raise OptionError(
            f"--schema-file {given.schema_file} holds no JSON object.", param="schema_file"
        )
    return found


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise OptionError(
            f"--{name} is {text!r}.",
            hint="Write whole numbers with commas between them, as in 1,4,16.",
            param=name,
        ) from error


def _shares(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise OptionError(
            f"--accept is {text!r}.",
            hint="Write shares from 0 to 1 with commas between them, as in 0.6,0.9.",
            param="accept",
        ) from error


add_flags(bench, BenchFlags)
bench = with_settings("model", "engine", "workers", "program")(bench)
