"""Messages between an engine and its workers: what to load, steps, and the rows that come back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch

from headroom.errors import DeviceError
from headroom.experts.placement import ExpertPlacement
from headroom.experts.telemetry import (
    CacheTotals,
    ColdFigures,
    ColdPaces,
    ColdReading,
    PolicyState,
)
from headroom.layers.batch import Batch, Span
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.cost_model import ColdPath
from headroom.plan.settings import FeatureRequest
from headroom.split.wire import Header, WireError

LOST = 70  # exit status of a worker that ends because its engine or a worker next to it is gone
SHARED_GROUPS = ("model", "engine")  # of settings that a worker obeys, too

# Which results of a step's output rows can be asked for after the step.
ROW_KINDS = ("logits", "normed", "hidden")
# Methods of a stage's caches that the engine may call in a worker: those that move something, those
# that are given bytes, and those that return bytes.
CACHE_MOVES = (
    *("save_state", "load_state", "copy_page", "save_page", "load_page"),
    *("drop_host_pages", "drop_snapshots"),
)
CACHE_WRITES = ("write_page", "write_snapshot")
CACHE_READS = ("read_page", "read_snapshot")
# Methods of a stage's exchanges that the engine may call in a worker.
EXCHANGE_MOVES = ("begin", "ready", "wait", "turn", "end")


class WorkerLostError(DeviceError):
    """A worker has ended or hangs; what it computed is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """What one worker loads, and where it finds the workers beside it."""

    worker: int  # the number of its stage
    model: str  # the path of the model on the engine's machine
    identity: str  # of the model's contents
    options: Options
    devices: tuple[DeviceSpec, ...]  # of all workers, in the order of the stages
    plan_digest: str  # of the plan that these devices and options give
    placement: ExpertPlacement | None  # None: all experts are hot
    features: FeatureRequest | None  # layers whose output rows are sent with each step; None: none
    meeting: tuple[str, int]  # where the workers of this start find each other
    group: str  # a name that only this start uses

    @property
    def workers(self) -> int:
        """The number of workers."""
        return sum(device.runs_layers for device in self.devices)

    def message(self) -> Header:
        """Return the order as a message."""
        shared = {
            setting.name: getattr(self.options, setting.name)
            for setting in fields(Options)
            if setting.metadata["group"] in SHARED_GROUPS
        }
        return {
            "type": "load",
            "worker": self.worker,
            "model": self.model,
            "identity": self.identity,
            "options": shared,
            "devices": [asdict(device) for device in self.devices],
            "plan": self.plan_digest,
            "placement": None if self.placement is None else asdict(self.placement),
            "features": None if self.features is None else asdict(self.features),
            "meeting": list(self.meeting),
            "group": self.group,
        }

    @classmethod
    def read(cls, header: Header) -> "LoadOrder":
        """Return the order that a message gives."""
        placement, features = header["placement"], header["features"]
        host, port = header["meeting"]
        return cls(
            worker=int(header["worker"]),
            model=str(header["model"]),
            identity=str(header["identity"]),
            options=Options(**header["options"]),
            devices=tuple(DeviceSpec(**device) for device in header["devices"]),
            plan_digest=str(header["plan"]),
            placement=None if placement is None else _read_placement(placement),
            features=None
            if features is None
            else FeatureRequest(tuple(map(int, features["layers"])), str(features["type"])),
            meeting=(str(host), int(port)),
            group=str(header["group"]),
        )


def step_message(
    step: int, batch: Batch, logits: Sequence[int], keep: bool
) -> tuple[Header, list[torch.Tensor]]:
    """Return a step as a message.

    The last worker answers with the logits of some output rows. `keep`: other results of the step
    will be asked for.
    """
    spans = [
        [span.first_row, span.rows, span.start, span.state_slot, span.tree is not None]
        for span in batch.spans
    ]
    tensors = [batch.tokens, batch.positions, batch.kv_slots, batch.output_rows]
    for span in batch.spans:
        tensors.append(span.pages)
        if span.tree is not None:
            tensors.append(span.tree)
    header = {"type": "step", "step": step, "spans": spans, "logits": list(logits), "keep": keep}
    return header, tensors


def cache_message(do: str, *arguments: int) -> Header:
    """Return a message that changes what the workers' caches hold."""
    assert do in (*CACHE_MOVES, *CACHE_WRITES)
    return {"type": "caches", "do": do, "arguments": list(arguments)}


def read_batch(header: Header, tensors: Sequence[torch.Tensor]) -> Batch:
    """Return the batch of a step's message."""
    tokens, positions, kv_slots, output_rows, *rest = tensors
    others, spans = iter(rest), []
    for first_row, rows, start, state_slot, has_tree in header["spans"]:
        pages = next(others)
        tree = next(others) if has_tree else None
        spans.append(Span(first_row, rows, start, pages, state_slot, tree))
    return Batch(
        tokens=tokens,
        positions=positions,
        kv_slots=kv_slots,
        spans=tuple(spans),
        output_rows=output_rows,
    )


def _read_placement(told: Header) -> ExpertPlacement:
    return ExpertPlacement(
        _ids(told["hot"]), str(told["source"]), tuple(told["promised"]), _ids(told["pinned"])
    )


def _ids(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in rows)


@dataclass(frozen=True, slots=True)
class ToldLayer:
    """What a worker tells of a layer with cold experts."""

    expert_bytes: int  # of one expert
    link_copies: int  # how many times an exchange sends the bytes of an expert over the link
    path: ColdPath  # who computes cold experts in decode steps


@dataclass(frozen=True, slots=True)
class ColdReport:
    """What a worker has loaded of experts of which some are cold."""

    layers: tuple[ToldLayer | None, ...]  # by layer of the model; None: dense, hot, or another's
    cold_bytes: int  # of all experts in host memory
    pinned: bool  # whether its GPU can read all cold experts in place
    is_cached: bool  # whether steps of some layers change which experts are in slots
    same_bits: bool  # whether hot and cold experts give the same results
    exchanges: bool  # whether hot and cold experts can change places

    @classmethod
    def read(cls, told: Header) -> "ColdReport":
        """Return the report that a message gives."""
        layers = tuple(None if one is None else ToldLayer(**one) for one in told["layers"])
        return cls(**{**told, "layers": layers})


def read_reading(told: Header) -> ColdReading:
    """Return what cold experts cost, as a message gives it."""
    cache, paces, policy = told["cache"], told["paces"], told["policy"]
    return ColdReading(
        figures=ColdFigures(**told["figures"]),
        pick_bytes=tuple(told["pick_bytes"]),
        cache=None
        if cache is None
        else CacheTotals(**{name: tuple(values) for name, values in cache.items()}),
        cache_bytes=tuple(told["cache_bytes"]),
        paces=None if paces is None else ColdPaces(**paces),
        policy=None if policy is None else PolicyState(**policy),
    )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker has loaded."""

    planned: Mapping[str, int]  # bytes by the plan's line
    allocated: Mapping[str, int]
    weights_bytes: int
    weights_s: float
    capture_s: float
    page_bytes: int  # of one page in all its layers
    snapshot_bytes: int  # of one snapshot of its layers
    cold: ColdReport | None = None  # None: all its experts are hot

    def message(self) -> Header:
        """Return the report as a message."""
        return {"type": "ready", **asdict(self)}

    @classmethod
    def read(cls, header: Header) -> "LoadReport":
        """Return the report that a message gives."""
        told = {field.name: header[field.name] for field in fields(cls)}
        cold = told["cold"]
        return cls(**{**told, "cold": None if cold is None else ColdReport.read(cold)})


def expect(header: Header, kind: str) -> Header:
    """Return a message of one type; refuse others."""
    if header["type"] != kind:
        raise WireError(f"A message of type {header['type']!r} came instead of {kind!r}.")
    return header
