"""Layout: which device holds what, for settings that are all decided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headroom.memory.budget import (
    NOT_ALLOCATED,
    Line,
    PlanSettings,
    Rules,
    embed_bytes,
    lookup_bytes,
)
from headroom.memory.devices import DeviceKind, DeviceSpec
from headroom.memory.experts import HotExperts, spread_experts
from headroom.memory.lines import draft_lines, layer_bytes, runtime_lines, stage_lines
from headroom.memory.shape import ModelShape
from headroom.memory.spans import Span, split_by_balance, split_by_filling, split_by_weights
from headroom.units import gib


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """What one device holds."""

    name: str
    kind: DeviceKind
    total_bytes: int
    lines: tuple[Line, ...]
    layers: tuple[int, int]  # first and last layer
    hot_by_layer: tuple[int, ...] = ()  # routed experts held here, for each of its layers
    total_experts: int = 0  # routed experts of its layers

    @property
    def hot_experts(self) -> int:
        """Routed experts held here."""
        return sum(self.hot_by_layer)

    @property
    def free_bytes(self) -> int:
        """What no line takes; negative where the lines do not fit."""
        return self.total_bytes - sum(line.bytes for line in self.lines)

    @property
    def allocated(self) -> dict[str, int]:
        """The lines that the engine allocates, by name."""
        return {line.name: line.bytes for line in self.lines if line.name not in NOT_ALLOCATED}


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What host memory holds beside the devices; empty where a device is the host itself."""

    total_bytes: int
    lines: tuple[Line, ...]

    @property
    def free_bytes(self) -> int:
        """What no line takes; negative where the lines do not fit."""
        return self.total_bytes - sum(line.bytes for line in self.lines)


def biggest_line(lines: Sequence[Line]) -> Line:
    """Return the largest line that settings or weights are to blame for."""
    own = [line for line in lines if line.name not in NOT_ALLOCATED]
    return max(own or lines, key=lambda line: line.bytes)


@dataclass(frozen=True, slots=True)
class Layout:
    """All devices that run layers, and the host."""

    devices: tuple[DevicePlan, ...]
    host: HostPlan

    @property
    def fits(self) -> bool:
        """Whether every device and the host hold their lines."""
        return self.host.free_bytes >= 0 and all(x.free_bytes >= 0 for x in self.devices)

    @property
    def hot_experts(self) -> int:
        """Routed experts held on the devices."""
        return sum(device.hot_experts for device in self.devices)


def lay_out(
    model: ModelShape, devices: Sequence[DeviceSpec], settings: PlanSettings, rules: Rules
) -> Layout:
    """Return the best way to share the layers that the settings allow, fitting or not."""
    stages = [device for device in devices if device.runs_layers]
    best, best_rank = None, (False, 0, 0.0)
    for spans in _span_choices(model, stages, settings, rules):
        layout = _Builder(model, tuple(devices), settings, rules, spans).build()
        rank = (layout.fits, layout.hot_experts, -_seconds(model, stages, settings, spans))
        if best is None or rank > best_rank:
            best, best_rank = layout, rank
    assert best is not None
    return best


def _seconds(
    model: ModelShape,
    stages: Sequence[DeviceSpec],
    settings: PlanSettings,
    spans: tuple[Span, ...],
) -> float:
    """Return how long the devices read what one token needs; 0 where there is no choice."""
    if len(stages) == 1:
        return 0.0
    total = 0.0
    for device, (first, last) in zip(stages, spans, strict=True):
        for layer in model.layers[first : last + 1]:
            moved = layer_bytes(layer, settings) + layer.experts_used * layer.expert_bytes
            total += moved / device.bandwidth
    return total


def _span_choices(
    model: ModelShape, stages: Sequence[DeviceSpec], settings: PlanSettings, rules: Rules
) -> Iterator[tuple[Span, ...]]:
    """Yield the ways to share layers that are worth trying, the one to prefer first."""
    last = len(model.layers) - 1
    if len(stages) == 1:
        yield ((0, last),)
        return
    if rules.split:
        yield split_by_weights(len(model.layers), rules.split)
        return
    core = [layer_bytes(layer, settings) for layer in model.layers]
    rooms = []
    for index, device in enumerate(stages):
        first, final = index == 0, index == len(stages) - 1
        lines = stage_lines(model, (0, last) if final else (0, last - 1), device, settings, rules)
        shared = sum(line.bytes for line in (*lines, *runtime_lines(device)))
        shared -= sum(core if final else core[:-1])
        shared += embed_bytes(model, settings) if first and device.holds_all else 0
        rooms.append(device.total_bytes - shared)
    whole = [size + layer.all_expert_bytes for size, layer in zip(core, model.layers, strict=True)]
    yield split_by_balance(whole, rooms)
    for backwards in (False, True):  # all that fits on the faster device
        if spans := split_by_filling(whole, rooms, backwards=backwards):
            yield spans
    if whole != core:
        yield split_by_balance(core, rooms)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Puts the lines of one way to share the layers together."""

    model: ModelShape
    devices: tuple[DeviceSpec, ...]
    settings: PlanSettings
    rules: Rules
    spans: tuple[Span, ...]

    def build(self) -> Layout:
        stages = [device for device in self.devices if device.runs_layers]
        lines = [self._fixed_lines(index, device) for index, device in enumerate(stages)]
        hot = [
            self._hot(device, span, own)
            for device, span, own in zip(stages, self.spans, lines, strict=True)
        ]
        host_lines = self._host_lines(stages, hot)
        for own, kept in zip(lines, hot, strict=True):
            if kept.total:
                own.insert(1, Line("hot_experts", kept.bytes, f"{kept.total} routed experts"))
        self._move_embeddings(stages, lines, host_lines)
        host = next((device for device in self.devices if device.kind == "cpu"), None)
        for index, device in enumerate(stages):
            if device.holds_all and host_lines:  # the host's memory is this device's own
                lines[index] += host_lines
                host_lines = []
        plans = tuple(map(self._device_plan, stages, lines, hot, self.spans))
        if host is None or host.runs_layers:
            total = host.total_bytes if host else 0
            return Layout(plans, HostPlan(total, tuple(host_lines)))
        return Layout(plans, HostPlan(host.total_bytes, (*host_lines, *runtime_lines(host))))

    def _fixed_lines(self, index: int, device: DeviceSpec) -> list[Line]:
        """Return all lines of a device but its hot experts."""
        lines = stage_lines(self.model, self.spans[index], device, self.settings, self.rules)
        final = index == len(self.spans) - 1
        alone = len(self.spans) == 1
        if self.model.tied and final and not alone:
            lines.insert(1, self._table("head", "the token table as head"))
        if index == 0 and device.holds_all:
            note = "also the head" if self.model.tied and alone else ""
            lines.insert(1, self._table("embeddings", note, lookup=True))
        elif index == 0 and self.model.tied and alone:
            lines.insert(1, self._table("embeddings", "also the head"))
        if final and self.rules.draft is not None:
            lines += draft_lines(self.rules.draft, self.model, self.settings, self.rules)
        return lines + runtime_lines(device)

    def _hot(self, device: DeviceSpec, span: Span, lines: Sequence[Line]) -> HotExperts:
        """Return the experts that a device keeps: all if no memory stands behind it."""
        layers = self.model.layers[span[0] : span[1] + 1]
        total = sum(layer.all_expert_bytes for layer in layers)
        if device.holds_all:
            return HotExperts(tuple(layer.experts for layer in layers), total)
        room = device.total_bytes - sum(line.bytes for line in lines)
        if self.rules.expert_bytes is not None and self.model.expert_bytes:
            room = min(room, self.rules.expert_bytes * total // self.model.expert_bytes)
        return spread_experts(layers, max(0, room))

    def _host_lines(self, stages: Sequence[DeviceSpec], hot: Sequence[HotExperts]) -> list[Line]:
        lines = []
        cold_bytes = self.model.expert_bytes - sum(kept.bytes for kept in hot)
        cold = self.model.total_experts - sum(kept.total for kept in hot)
        if cold:
            lines.append(Line("cold_experts", cold_bytes, f"{cold} routed experts"))
        if stages[0].holds_all:
            return lines
        if not (self.model.tied and len(stages) == 1):
            lines.append(self._table("embeddings", "rows are read by the host", lookup=True))
        elif lookup := lookup_bytes(self.model, self.settings):
            lines.append(Line("embeddings", lookup, "tables of which the host reads rows"))
        return lines

    def _move_embeddings(
        self, stages: Sequence[DeviceSpec], lines: list[list[Line]], host_lines: list[Line]
    ) -> None:
        """Move the token table from the host to the first device where there is room."""
        if [line.name for line in host_lines] != ["embeddings"]:
            return  # experts come first: with cold ones there is no room to speak of
        if any(line.name == "embeddings" for line in lines[0]):
            return
        free = stages[0].total_bytes - sum(line.bytes for line in lines[0])
        if free >= host_lines[0].bytes:
            host_lines.pop()
            lines[0].insert(1, self._table("embeddings", "there is room", lookup=True))

    def _table(self, name: str, note: str, *, lookup: bool = False) -> Line:
        model, settings = self.model, self.settings
        size, beside = embed_bytes(model, settings), lookup_bytes(model, settings)
        why = f"{model.vocab} x {model.hidden}, {settings.weights}" + (f", {note}" if note else "")
        if lookup and beside:
            return Line(name, size + beside, f"{why}, and {gib(beside)} of per-layer tables")
        return Line(name, size, why)

    def _device_plan(
        self, device: DeviceSpec, lines: list[Line], hot: HotExperts, span: Span
    ) -> DevicePlan:
        return DevicePlan(
            name=device.name,
            kind=device.kind,
            total_bytes=device.total_bytes,
            lines=tuple(line for line in lines if line.bytes),
            layers=span,
            hot_by_layer=hot.counts if self.model.total_experts else (),
            total_experts=sum(x.experts for x in self.model.layers[span[0] : span[1] + 1]),
        )
