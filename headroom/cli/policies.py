"""`headroom experts --policies`: replays a routing trace through every policy of a cache."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headroom.errors import OptionError

if TYPE_CHECKING:
    from headroom.cli.experts import PlannedExperts
    from headroom.experts.placement import LayerExperts
    from headroom.experts.traces.replay import Replay
    from headroom.experts.traces.trace import RoutingTrace
    from headroom.experts.traces.trace_stats import TraceStats

AUTO = "auto"  # of --link: the table that the plan's speeds ask for


@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """The flags of `headroom experts` that replay a trace."""

    policies: Annotated[
        bool, typer.Option("--policies", help="replay --trace through every policy of a cache")
    ] = False
    trace: Annotated[
        Path | None, typer.Option(help="a routing trace of the model", metavar="FILE")
    ] = None
    slots: Annotated[
        str | None,
        typer.Option(
            help="slots of each layer, as in 102,40% (default: what the plan has room for)",
            metavar="N,N%",
        ),
    ] = None
    sequences: Annotated[
        str | None,
        typer.Option(help="sequences that run together, as in 1,4,16 (1)", metavar="N,N"),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(
            help="also leave misses to the CPU: of 0, 1, 2, ... misses of a layer so many cross "
            "the link, as in 0,1,1,2; auto: by the speeds of the plan",
            metavar="N,N",
        ),
    ] = None

    def check(self) -> None:
        """Refuse flags that would say nothing."""
        if self.policies and self.trace is None:
            raise OptionError(
                "--policies replays a routing trace, and none is named.",
                hint="Name one with --trace: headroom profile --trace records one, "
                "headroom synth-trace makes one.",
                param="trace",
            )
        names = [
            name
            for name in ("trace", "slots", "sequences", "link")
            if getattr(self, name) is not None
        ]
        if names and not self.policies:
            raise OptionError(f"--{names[0]} says nothing without --policies.", param=names[0])


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """All replays of a trace."""

    model: str
    device: str
    trace: "RoutingTrace"
    file: Path
    stats: "TraceStats"
    expert_bytes: tuple[int, ...]  # of each traced layer
    replays: "tuple[Replay, ...]"


def replay_policies(found: "PlannedExperts", flags: PolicyFlags) -> PolicyReport:
    """Replay a trace with all slots, sequences and tables that the flags ask for."""
    from headroom.experts.cache import POLICIES
    from headroom.experts.traces.replay import ReplaySettings, replay, replay_halves
    from headroom.experts.traces.taps import traced_layers
    from headroom.experts.traces.trace import check_shape, load_trace
    from headroom.experts.traces.trace_stats import trace_stats
    from headroom.split.placing import expert_layers

    assert flags.trace is not None
    trace = load_trace(flags.trace)
    check_shape(trace, own := traced_layers(found.shape), flags.trace)
    sequences = _sequences(flags.sequences, trace.tokens // 2)
    every_layer = expert_layers(found.shape, found.plan)
    layers = [every_layer[layer.layer] for layer in own]
    tables = link_tables(flags.link, found, layers, max(sequences))
    settings = [
        ReplaySettings(policy, together, table)
        for together in sequences
        for table in tables
        for policy in POLICIES
    ]
    replays: list[Replay] = []
    with Console(stderr=True).status("replaying the trace"):
        if flags.slots is None:
            residents = [found.residency().placement.hot[layer.layer] for layer in own]
            if all(len(x) == layer.experts for x, layer in zip(residents, own, strict=True)):
                raise OptionError(
                    f"All experts fit on {found.plan.devices[0].name}, so that none is missed.",
                    hint="Say how many slots a layer has with --slots, or name a smaller --device.",
                    param="slots",
                )
            replays += [replay(trace, residents, one) for one in settings]
        else:
            for slots in _slots(flags.slots, [layer.experts for layer in own]):
                replays += [replay_halves(trace, slots, one) for one in settings]
        stats = trace_stats(trace)
    return PolicyReport(
        found.plan.model,
        found.plan.devices[0].name,
        trace,
        flags.trace,
        stats,
        tuple(layer.expert_bytes for layer in layers),
        tuple(replays),
    )


def link_tables(
    text: str | None, found: "PlannedExperts", layers: "Sequence[LayerExperts]", sequences: int
) -> list[tuple[int, ...] | None]:
    """Return the tables to replay with; None sends all misses over the link."""
    from headroom.plan.cost_model import link_shares

    if text is None:
        return [None]
    if text == AUTO:
        if (speeds := found.plan.cold_speeds) is None:
            raise OptionError(
                f"--link {AUTO} needs cold experts, and the plan has none.",
                hint="Name a smaller --device, or write the table, as in 0,1,1,2,2.",
                param="link",
            )
        used = max(layer.used for layer in layers)
        size = max(layer.expert_bytes for layer in layers)
        # As the engine does, the table takes into account that an expert that crosses may stay.
        return [None, link_shares(speeds, size, used, used * sequences, fills=True)]
    table = _numbers("link", text, least=0)
    if any(share > misses for misses, share in enumerate(table)):
        raise OptionError(
            f"--link is {text}: entry n may be at most n.",
            hint="Begin with 0, as in 0,1,1,2,2.",
            param="link",
        )
    return [None, table]


def policies_json(report: PolicyReport) -> dict[str, Any]:
    """Return all replays as plain data."""
    return {
        "model": report.model,
        "device": report.device,
        "trace": {
            "file": report.file.name,
            "source": report.trace.source,
            **asdict(report.stats),
        },
        "replays": [_replay_json(one, report) for one in report.replays],
    }


def policy_table(report: PolicyReport) -> Table:
    """Return a line for each replay; misses are distinct experts of a layer in a step."""
    figures = ("hits", "misses", "linked", "filled", "link MB", "CPU MB")
    title = f"{report.model}, {report.file.name}: misses of a layer in a step, bytes of a token"
    table = Table("slots of a layer", "policy", *figures, title=title)
    before = None
    for one in report.replays:
        case = _case_text(one)
        if before not in (None, case):
            table.add_section()
        sizes = one.bytes_per_token(report.expert_bytes)
        table.add_row(
            "" if case == before else case,
            one.settings.policy + ("" if _allowed(one, report) else " (too few slots)"),
            f"{100 * one.hit_rate:.1f} %",
            f"{one.misses:.2f}",
            f"{one.linked:.2f}",
            f"{one.filled:.2f}",
            f"{sizes['link'] / 1e6:.1f}",
            f"{sizes['cpu'] / 1e6:.1f}",
        )
        before = case
    return table


def show_policies(report: PolicyReport, *, as_json: bool) -> None:
    """Print all replays."""
    if as_json:
        print(json.dumps(policies_json(report)))
        return
    console = Console()
    console.print(policy_table(report))
    print(f"trace: {report.trace.source}; {report.stats.summary()}")


def _replay_json(one: "Replay", report: PolicyReport) -> dict[str, Any]:
    return {
        "policy": one.settings.policy,
        "allowed": _allowed(one, report),
        "sequences": one.settings.sequences,
        "link": one.settings.link,
        "slots": one.slots,
        "tokens": one.tokens,
        "hit_rate": one.hit_rate,
        "layer_hit_rates": one.layer_hit_rates,
        "misses_per_layer_step": one.misses,
        "linked_per_layer_step": one.linked,
        "filled_per_layer_step": one.filled,
        "bytes_per_token": one.bytes_per_token(report.expert_bytes),
    }


def _allowed(one: "Replay", report: PolicyReport) -> bool:
    """Whether every layer has slots enough for the policy."""
    from headroom.experts.cache import policies_for

    return all(
        one.settings.policy in policies_for(slots, layer.used)
        for slots, layer in zip(one.slots, report.trace.layers, strict=True)
    )


def _slots(text: str, experts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the slots of each layer for each word of --slots."""
    for word in text.split(","):
        number, percent = word.strip().removesuffix("%"), word.strip().endswith("%")
        try:
            value = float(number) / 100 if percent else int(number)
        except ValueError:
            value = -1
        slots = tuple(round(value * x) if percent else int(value) for x in experts)
        if value < 0 or value > (1 if percent else min(experts)):
            raise OptionError(
                f"--slots has {word.strip()!r}, and layers have {min(experts)} experts.",
                hint="Write numbers of slots or percents of the experts, as in 102,40%.",
                param="slots",
            )
        yield slots


def _case_text(one: "Replay") -> str:
    low, high, together = min(one.slots), max(one.slots), one.settings.sequences
    slots = str(low) if low == high else f"{low}-{high}"
    text = slots if together == 1 else f"{slots}, {together} sequences"
    return text if one.settings.link is None else f"{text}, CPU helps"


def _sequences(text: str | None, most: int) -> tuple[int, ...]:
    if text is None:
        return (1,)
    numbers = _numbers("sequences", text, least=1)
    if max(numbers) > most:
        raise OptionError(
            f"--sequences has {max(numbers)}, and half of the trace has {most} tokens.",
            hint="Choose fewer, or a longer trace.",
            param="sequences",
        )
    return numbers


def _numbers(name: str, text: str, least: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        raise OptionError(
            f"--{name} is {text!r}.",
            hint=f"Write whole numbers from {least} on with commas between them.",
            param=name,
        )
    return numbers
