"""The tables of `headroom bench`."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from headroom.bench.expert_use import ExpertReport, ExpertUse
from headroom.bench.figures import (
    AgentFigure,
    DecodeFigure,
    DraftFigure,
    FirstToken,
    LoadParts,
    PartFigure,
    PromptFigure,
    VerifyFigure,
)
from headroom.bench.report import NOTES, ImposedRouting, Report
from headroom.layers.step_timing import STEP_PARTS
from headroom.units import counted, gib

LONGEST = 3  # kernels shown for each part
NAME_WIDTH = 40


def report_tables(report: Report) -> Iterator[RenderableType]:
    """Yield the texts and tables of a report, for a terminal."""
    yield _head(report)
    if report.imposed is not None:
        yield _imposed_text(report.imposed)
    if report.figures.prompts:
        yield _prompt_table(report)
    if report.figures.decodes:
        yield _decode_table(report)
    if any(figure.stages for figure in report.figures.decodes):
        yield _stage_table(report)
    if report.figures.schemas:
        yield _schema_table(report)
    if report.figures.prefixes:
        yield _prefix_table(report)
    if report.figures.agent is not None:
        yield _agent_table(report.figures.agent)
    if report.figures.drafts:
        yield _draft_table(report.figures.drafts)
    if report.figures.verify is not None:
        yield _verify_text(report.figures.verify)
    if report.figures.parts:
        yield _part_table(report)
    if report.peer:
        yield _peer_table(report)
        for text in report.peer_notes:
            yield f"note: {text}"
    yield _memory_text(report)
    if report.experts is not None:
        yield _experts_text(report.experts)
        if report.experts.locations.cold:
            yield _experts_table(report, report.experts)
    for text in report.figures.left_out:
        yield f"left out: {text}"
    for text in NOTES:
        yield f"note: {text}"


def _head(report: Report) -> str:
    device, settings, band = report.device, report.plan.settings, report.bandwidth
    return (
        f"{report.plan.model} on {device['name']} ({device['model']}), torch {device['torch']}, "
        f"products in {settings.compute_type}, cache {settings.k_type}/{settings.v_type}, "
        f"{_loading_text(report.loading)}; bandwidth {band.bytes_per_s / 1e9:.1f} GB/s ({band.how})"
    )


def _imposed_text(imposed: ImposedRouting) -> str:
    stats = imposed.stats
    return (
        f"routing: imposed by {imposed.file} ({imposed.source}), {counted(stats.tokens, 'token')} "
        f"in {counted(stats.sequences, 'sequence')}; {stats.summary()}"
    )


def _loading_text(loading: LoadParts) -> str:
    times = loading.times
    return (
        f"loaded in {loading.total_s:.1f} s (planning {loading.planning_s:.1f}, "
        f"{gib(times.weights_bytes)} of weights {times.weights_s:.1f} at "
        f"{times.bytes_per_s / 1e9:.1f} GB/s, compiling and capturing {times.capture_s:.1f}, "
        f"other {loading.other_s:.1f})"
    )


def _prompt_table(report: Report) -> Table:
    table = Table("tokens", "tok/s", "ms", "Tflop/s", title="prompts")
    for prompt in report.figures.prompts:
        table.add_row(
            str(prompt.tokens),
            f"{prompt.tokens_per_s:.1f}",
            f"{prompt.seconds * 1e3:.2f}",
            f"{prompt.operations / prompt.seconds / 1e12:.2f}",
        )
    return table


def _decode_table(report: Report) -> Table:
    heads = "batch", "context", "tok/s", "step ms", "network ms", "GB a step", "of limit"
    table = Table(*heads, title="decoding")
    for figure in report.figures.decodes:
        table.add_row(
            str(figure.batch),
            str(figure.context),
            f"{figure.tokens_per_s:.1f}",
            f"{figure.step_s * 1e3:.2f}",
            f"{figure.pipeline_s * 1e3:.2f}",
            f"{figure.traffic.total / 1e9:.3f}",
            f"{100 * report.share(figure):.0f} %",
        )
    return table


def _stage_table(report: Report) -> Table:
    """Return a table with a row for each decode figure, and a column for each stage."""
    predicted = report.plan.predicted.stages
    heads = [f"{stage.device} ms" for stage in predicted]
    table = Table("", *heads, "hand-over ms", title="stages of a step")
    for figure in report.figures.decodes:
        busy = [stage.busy_s for stage in figure.stages]
        handed = sum(stage.handover_s for stage in figure.stages)
        cells = [f"{1e3 * s:.2f} ({100 * s / sum(busy):.0f} %)" for s in busy]
        table.add_row(_decode_name(figure.batch, figure.context), *cells, f"{1e3 * handed:.3f}")
    whole = sum(stage.decode_s for stage in predicted)
    cells = [f"{1e3 * x.decode_s:.2f} ({100 * x.decode_s / whole:.0f} %)" for x in predicted]
    table.add_row("predicted for batch 1", *cells, "")
    return table


def _schema_table(report: Report) -> Table:
    heads = "batch", "context", "tok/s", "without", "loss", "step ms", "mask us"
    table = Table(*heads, title="decoding under a JSON schema")
    for figure in report.figures.schemas:
        table.add_row(
            str(figure.batch),
            str(figure.context),
            f"{figure.tokens_per_s:.1f}",
            f"{figure.free_tokens_per_s:.1f}",
            f"{100 * figure.loss:.1f} %",
            f"{figure.step_s * 1e3:.2f}",
            f"{figure.mask_s * 1e6:.0f}",
        )
    return table


def _prefix_table(report: Report) -> Table:
    more = f"{report.settings.longer} tokens more"
    heads = "tokens", "cold ms", "the same", more, "other from the middle on"
    table = Table(*heads, title="time to the first token")
    for figure in report.figures.prefixes:
        cold = figure.cold
        warm = [_warm_text(one, cold) for one in figure.warm.values()]
        table.add_row(str(cold.prompt), f"{cold.seconds * 1e3:.1f}", *warm)
    return table


def _warm_text(warm: FirstToken, cold: FirstToken) -> str:
    sooner = cold.seconds / warm.seconds
    return f"{warm.seconds * 1e3:.1f} ms ({sooner:.1f} x sooner, {warm.cached} cached)"


def _agent_table(figure: AgentFigure) -> Table:
    """Return a table with a row for each turn, and one for all of them."""
    heads = "turn", "prompt tokens", "computed", "ms", "ms without the cache", "sooner"
    equal = f"{figure.equal_answers} of {len(figure.warm)} answers equal those without the cache"
    title = "a session of an agent: time to the first token"
    table = Table(*heads, title=title, caption=equal)
    for number, (warm, cold) in enumerate(zip(figure.warm, figure.cold, strict=True), start=1):
        table.add_row(str(number), *_turn_cells([warm], [cold]))
    table.add_row("all", *_turn_cells(figure.warm, figure.cold))
    return table


def _turn_cells(warm: Sequence[FirstToken], cold: Sequence[FirstToken]) -> list[str]:
    seconds, without = (sum(turn.seconds for turn in turns) for turns in (warm, cold))
    return [
        str(sum(turn.prompt for turn in warm)),
        str(sum(turn.computed for turn in warm)),
        f"{seconds * 1e3:.1f}",
        f"{without * 1e3:.1f}",
        f"{without / seconds:.1f} x",
    ]


def _draft_table(figures: Sequence[DraftFigure]) -> Table:
    """Return a table with a row for each share of right guesses."""
    first = figures[0]
    equal = sum(figure.equal for figure in figures)
    table = Table(
        *("right", "tokens a step", "step", "tokens/s", "tokens/s without", "speed-up"),
        title=f"guessing {counted(first.guesses, 'token')} ahead after {first.context} tokens",
        caption=f"{equal} of {len(figures)} answers equal those without guesses",
    )
    for figure in figures:
        table.add_row(
            f"{figure.share:.0%}",
            f"{figure.accepted_length:.2f}",
            f"{figure.step_ratio:.2f} x",
            f"{figure.tokens / figure.seconds:.1f}",
            f"{figure.tokens / figure.plain_s:.1f}",
            f"{figure.speed_up:.2f} x",
        )
    return table


def _verify_text(verify: VerifyFigure) -> str:
    return (
        f"a step of {counted(verify.rows, 'row')} of one sequence after {verify.context} tokens: "
        f"{verify.step_s * 1e3:.2f} ms, {verify.ratio:.2f} x that of one row, "
        f"{verify.decode_s * 1e3:.2f} ms (network alone)"
    )


def _part_table(report: Report) -> Table:
    """Return a table with a column for each step whose parts were measured, in milliseconds."""
    figures = report.figures.parts
    names = [_name(figure) for figure in figures]
    table = Table("ms of a step", *names, title="parts")
    for part in STEP_PARTS:
        if any(part in figure.times.parts for figure in figures):
            cells = [_ms(figure.times.parts.get(part, 0.0), figure) for figure in figures]
            table.add_row(part, *cells)
            for kernel in _longest(figures, part):
                shown = [figure.times.kernels.get(part, {}).get(kernel) for figure in figures]
                texts = ["" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in shown]
                table.add_row(f"  {kernel[:NAME_WIDTH]}", *texts)
    table.add_row("gaps", *[_ms(figure.gaps_s, figure) for figure in figures])
    table.add_row("step", *[f"{figure.step_s * 1e3:.3f}" for figure in figures])
    return table


def _name(figure: PartFigure) -> str:
    if figure.what == "prompt":
        return _prompt_name(figure.context)
    if figure.what == "verify":
        return f"{counted(figure.batch, 'row')} after {figure.context}"
    name = _decode_name(figure.batch, figure.context)
    return f"{name}, network alone" if figure.what == "network" else name


def _prompt_name(tokens: int) -> str:
    return f"prompt of {tokens}"


def _decode_name(batch: int, context: int) -> str:
    return f"batch {batch} after {context}"


def _longest(figures: list[PartFigure], part: str) -> list[str]:
    """Return the kernels of a part that are among the longest in any of the steps."""
    tops = [list(figure.times.kernels.get(part, {}))[:LONGEST] for figure in figures]
    return list(dict.fromkeys(kernel for top in tops for kernel in top))


def _ms(seconds: float, figure: PartFigure) -> str:
    return f"{seconds * 1e3:.3f} ({100 * seconds / figure.step_s:.0f} %)"


def _peer_table(report: Report) -> Table:
    peer = report.peer[0]
    title = f"against {peer.build}, {peer.where}"
    table = Table("", "headroom", "peer", "ratio", title=title)
    for row in report.ratios():
        ours, theirs = f"{row['tokens_per_s']:.1f}", f"{row['peer_tokens_per_s']:.1f}"
        table.add_row(row["what"], ours, theirs, f"{row['ratio']:.2f} x")
    return table


def _experts_text(experts: ExpertReport) -> str:
    where, totals = experts.locations, experts.totals
    text = f"experts: {sum(where.hot)} hot, {where.cold} cold"
    if where.cold:
        pinned = "pinned" if where.pinned else "not pinned"
        ways = ", ".join(
            f"{path} in {counted(n, 'layer')}" for path, n in where.layers_by_path.items()
        )
        text += f" ({gib(where.cold_bytes)}, {pinned}), placement: {where.source}, cold: {ways}"
    text += f"; {100 * (totals.hit_rate or 0.0):.1f} % of all choices hot"
    return f"{text}, {counted(totals.exchanges, 'exchange')}" if totals.exchanges else text


def _experts_table(report: Report, experts: ExpertReport) -> Table:
    """Return a table with a row for each figure: its hit rate, and the cost of cold experts."""
    ways = [path for path, speed in experts.bandwidths.items() if speed]
    heads = [f"{path} MB a token, GB/s of {experts.bandwidths[path] / 1e9:.0f}" for path in ways]
    table = Table("", "hot", *heads, "ms a token", "GPU busy", title="cold experts")
    figures: list[tuple[str, DecodeFigure | PromptFigure]] = [
        *((_prompt_name(x.tokens), x) for x in report.figures.prompts),
        *((_decode_name(x.batch, x.context), x) for x in report.figures.decodes),
    ]
    busy = {_name(part): part.gpu_share for part in report.figures.parts}
    for name, figure in figures:
        if (use := figure.experts) is not None:
            share = busy.get(name)
            cells = [_way(use, path) for path in ways]
            shown = "" if share is None else f"{100 * share:.0f} %"
            hot = f"{100 * (use.change.hit_rate or 0.0):.1f} %"
            table.add_row(name, hot, *cells, _times(use), shown)
    return table


def _way(use: ExpertUse, path: str) -> str:
    size = use.read_bytes.get(path, 0)
    if not size:
        return ""
    return f"{size / use.tokens / 1e6:.2f}, {size / use.seconds / 1e9:.1f}"


def _times(use: ExpertUse) -> str:
    times = use.change.seconds.items()
    return ", ".join(f"{word} {1e3 * seconds / use.tokens:.3f}" for word, seconds in times)


def _memory_text(report: Report) -> str:
    memory = report.memory
    return (
        f"memory: {gib(memory['peak_bytes'])} of {gib(memory['planned_bytes'])} planned, "
        f"{100 * memory['share']:.0f} % ({memory['peak_is']})"
    )
