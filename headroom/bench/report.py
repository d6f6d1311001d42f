"""Report: everything that one run of `headroom bench` found, and its JSON."""

from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headroom import __version__
from headroom.bench.expert_use import ExpertReport
from headroom.bench.figures import (
    AgentFigure,
    BenchSettings,
    DecodeFigure,
    DraftFigure,
    Figures,
    FirstToken,
    LoadParts,
    PartFigure,
    PrefixFigure,
    PromptFigure,
    SchemaFigure,
)
from headroom.bench.peer import PeerRun, ratios
from headroom.bench.resources import Bandwidth
from headroom.experts.traces.trace_stats import TraceStats
from headroom.plan.plan import Plan
from headroom.plan.show.report import plan_json

JSON_VERSION = 1
NOTES = (
    "prompt and decode figures go through the engine, sampling included; contexts are made by "
    "reading prompts of random tokens",
    "figures of the network alone are whole steps without engine and sampling, over a cache that "
    "holds what earlier prompts left",
    "the limit is the bandwidth over the bytes of a step: weights, the experts that its rows are "
    "expected to visit by the choices counted in this run, cache, and state read and written",
)


@dataclass(frozen=True, slots=True)
class ImposedRouting:
    """The routing trace whose picks replaced those of the routers."""

    file: str
    source: str  # what it was recorded from, or how it was made
    stats: TraceStats
    device_bytes: int  # of the device, beside the plan

    def as_json(self) -> dict[str, Any]:
        """Return the trace and its statistics as JSON."""
        head = {"file": self.file, "source": self.source, "device_bytes": self.device_bytes}
        return head | asdict(self.stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one run of `headroom bench` found."""

    path: Path
    settings: BenchSettings
    plan: Plan
    device: dict[str, Any]
    loading: LoadParts
    figures: Figures
    bandwidth: Bandwidth
    memory: dict[str, Any]
    experts: ExpertReport | None = None  # None: the model has no routed experts
    imposed: ImposedRouting | None = None  # None: the routers chose
    peer: tuple[PeerRun, ...] = ()
    peer_notes: tuple[str, ...] = ()  # how its run differed from ours

    def ratios(self) -> list[dict[str, Any]]:
        """Return our figures and the peer's, for what both have measured."""
        return ratios(self.figures, self.peer)

    def share(self, figure: DecodeFigure) -> float:
        """Return the measured speed as a share of what the bandwidth allows."""
        return figure.tokens_per_s / figure.limit(self.bandwidth.bytes_per_s)


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON; other programs read its keys, so they carry a version."""
    figures, path = report.figures, report.path
    verify = figures.verify
    result: dict[str, Any] = {
        "version": JSON_VERSION,
        "headroom": __version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": {
            "name": report.plan.model,
            "file": path.name,
            "bytes": path.stat().st_size if path.is_file() else None,
        },
        "device": report.device,
        "settings": asdict(report.settings),
        "load_s": report.loading.total_s,
        "load": report.loading.as_json(),
        "bandwidth": asdict(report.bandwidth),
        "prompts": [_prompt_json(figure, report) for figure in figures.prompts],
        "decodes": [_decode_json(figure, report) for figure in figures.decodes],
        "schema": [_schema_json(figure) for figure in figures.schemas],
        "prefix": [_prefix_json(figure) for figure in figures.prefixes],
        "agent": None if figures.agent is None else _agent_json(figures.agent),
        "draft": [_draft_json(figure) for figure in figures.drafts],
        "verify": None if verify is None else asdict(verify) | {"ratio": verify.ratio},
        "parts": [_part_json(figure) for figure in figures.parts],
        "memory": report.memory,
        "experts": None if report.experts is None else report.experts.as_json(),
        "routing_trace": None if report.imposed is None else report.imposed.as_json(),
        "left_out": figures.left_out,
        "notes": list(NOTES),
        "plan": plan_json(report.plan),
    }
    if report.peer:
        peer = report.peer[0]
        result["compare"] = {
            "peer": peer.build,
            "backends": peer.backends,
            "gpu": peer.gpu,
            "cpu": peer.cpu,
            "runs": len(report.peer),
            "figures": report.ratios(),
            "notes": list(report.peer_notes),
        }
    return result


def _prompt_json(figure: PromptFigure, report: Report) -> dict[str, Any]:
    return {
        "tokens": figure.tokens,
        "seconds": figure.seconds,
        "tokens_per_s": figure.tokens_per_s,
        "operations_per_s": figure.operations / figure.seconds,
        "experts": report.experts and report.experts.use_json(figure.experts),
    }


def _decode_json(figure: DecodeFigure, report: Report) -> dict[str, Any]:
    return {
        "batch": figure.batch,
        "context": figure.context,
        "mean_context": figure.mean_context,
        "tokens_per_s": figure.tokens_per_s,
        "step_s": figure.step_s,
        "pipeline_step_s": figure.pipeline_s,
        "pipeline_tokens_per_s": figure.batch / figure.pipeline_s,
        "step_bytes": asdict(figure.traffic) | {"total": figure.traffic.total},
        "limit_tokens_per_s": figure.limit(report.bandwidth.bytes_per_s),
        "share": report.share(figure),
        "stages": [asdict(stage) for stage in figure.stages],
        "experts": report.experts and report.experts.use_json(figure.experts),
    }


def _schema_json(figure: SchemaFigure) -> dict[str, Any]:
    return {
        "batch": figure.batch,
        "context": figure.context,
        "free_tokens_per_s": figure.free_tokens_per_s,
        "tokens_per_s": figure.tokens_per_s,
        "loss": figure.loss,
        "step_s": figure.step_s,
        "mask_s": figure.mask_s,
    }


def _first_token_json(found: FirstToken) -> dict[str, Any]:
    return {
        "prompt_tokens": found.prompt,
        "cached_tokens": found.cached,
        "first_token_s": found.seconds,
    }


def _prefix_json(figure: PrefixFigure) -> dict[str, Any]:
    cold = figure.cold.seconds
    return {
        "tokens": figure.cold.prompt,
        "cold": _first_token_json(figure.cold),
        **{
            name: _first_token_json(warm) | {"ratio": cold / warm.seconds}
            for name, warm in figure.warm.items()
        },
    }


def _agent_json(figure: AgentFigure) -> dict[str, Any]:
    sides = {"with_cache": figure.warm, "without_cache": figure.cold}
    return {
        "turns": len(figure.warm),
        "answer_tokens": figure.answer_tokens,
        "equal_answers": figure.equal_answers,
        "ratio": figure.cold_s / figure.warm_s,
        **{
            name: {
                "prompt_s": sum(turn.seconds for turn in turns),
                "computed_tokens": sum(turn.computed for turn in turns),
                "prompts": [_first_token_json(turn) for turn in turns],
            }
            for name, turns in sides.items()
        },
    }


def _draft_json(figure: DraftFigure) -> dict[str, Any]:
    return asdict(figure) | {
        "accepted_length": figure.accepted_length,
        "speed_up": figure.speed_up,
        "step_ratio": figure.step_ratio,
    }


def _part_json(figure: PartFigure) -> dict[str, Any]:
    return {
        "what": figure.what,
        "batch": figure.batch,
        "context": figure.context,
        "step_s": figure.step_s,
        "parts": figure.times.parts | {"gaps": figure.gaps_s},
        "steps": figure.times.steps,
        "recorded_step_s": figure.times.step_s,
        "gpu_share": figure.gpu_share,
        "link_share": figure.link_share,
        "kernels": figure.times.kernels,
    }
