"""Layout: which device holds what, for settings that are all decided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headroom.machine.devices import DeviceKind, DeviceSpec
from headroom.plan.cost_model import ColdSpeeds, cold_speeds_of
from headroom.plan.experts import (
    HotExperts,
    bounce_bytes,
    expert_staging_bytes,
    keep_with_staging,
    largest_expert,
)
from headroom.plan.lines import (
    NOT_ALLOCATED,
    Line,
    cached_layers,
    embed_bytes,
    host_page_bytes,
    host_pages_line,
    layer_bytes,
    lookup_bytes,
    runtime_lines,
    snapshots_bytes,
    snapshots_line,
    stage_lines,
)
from headroom.plan.settings import PlanRequest, PlanSettings, PlanStage
from headroom.plan.shape import LayerRange, LayerShape
from headroom.plan.sharing import (
    FixedBytes,
    LayerUnits,
    RangeValuer,
    check_device_count,
    layer_times,
    share_layers,
    split_by_balance,
    split_by_filling,
    split_by_weights,
)
from headroom.units import counted, gib


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """What one device holds."""

    name: str
    kind: DeviceKind
    total_bytes: int
    lines: tuple[Line, ...]
    layers: LayerRange
    settings: PlanSettings  # the plan's, with the types and kernels of this device
    hot_by_layer: tuple[int, ...] = ()  # routed experts held here, for each of its layers
    total_experts: int = 0  # routed experts of its layers
    holds_all: bool = False  # no host memory is behind it: a CPU, or unified memory
    cold_speeds: ColdSpeeds | None = None  # where some experts of its layers are cold

    @property
    def hot_experts(self) -> int:
        """Routed experts held here."""
        return sum(self.hot_by_layer)

    @property
    def free_bytes(self) -> int:
        """Bytes that no line takes; negative if the lines do not fit."""
        return self.total_bytes - sum(line.bytes for line in self.lines)

    @property
    def allocated(self) -> dict[str, int]:
        """The lines that the engine allocates, by name."""
        return {line.name: line.bytes for line in self.lines if line.name not in NOT_ALLOCATED}


class Pinning(Enum):
    """Whether the cold experts' host memory is pinned (a GPU reads it in place), or why not."""

    PINNED = "pinned"
    TURNED_OFF = "turned off"  # by --no-pin
    OVER_LIMIT = "over the limit"  # the control group does not allow that much


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What host memory holds for the devices; empty if a device is the host itself."""

    total_bytes: int
    lines: tuple[Line, ...]
    pinning: Pinning | None = None  # of cold experts; None where host memory holds none

    @property
    def free_bytes(self) -> int:
        """Bytes that no line takes; negative if the lines do not fit."""
        return self.total_bytes - sum(line.bytes for line in self.lines)


def biggest_line(lines: Sequence[Line]) -> Line:
    """Return the largest line that the engine allocates: only those can be made smaller."""
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
        """The hot experts of devices that have host memory behind them."""
        return sum(device.hot_experts for device in self.devices if not device.holds_all)


def lay_out(
    stages: Sequence[PlanStage],
    devices: Sequence[DeviceSpec],  # those of the stages, and the host behind them
    request: PlanRequest,
    placed: Sequence[int] | None = None,
) -> Layout:
    """Return the best way to share the layers that the settings allow, fitting or not.

    `placed` is the number of hot experts of every layer, if a placement was chosen already. Without
    it as many are hot as fit, the same number in every layer.
    """
    best, best_rank = None, (False, 0, 0)
    for ranges in _range_choices(stages, devices, request):
        layout = _Builder(tuple(stages), tuple(devices), request, ranges, placed).build()
        rank = (layout.fits, layout.hot_experts, -_picoseconds(stages, ranges))
        if best is None or rank > best_rank:
            best, best_rank = layout, rank
    assert best is not None
    return best


def _picoseconds(stages: Sequence[PlanStage], ranges: tuple[LayerRange, ...]) -> int:
    """Return the time in which the devices read what one token needs, one after the other."""
    if len(stages) == 1:
        return 0  # there is no choice
    return sum(
        sum(layer_times(stage)[first : last + 1])
        for stage, (first, last) in zip(stages, ranges, strict=True)
    )


def _range_choices(
    stages: Sequence[PlanStage], devices: Sequence[DeviceSpec], request: PlanRequest
) -> Iterator[tuple[LayerRange, ...]]:
    """Yield the ways to share the layers that are worth comparing, the preferred one first."""
    layers = stages[0].model.layers
    if len(stages) == 1:
        yield (LayerRange(0, len(layers) - 1),)
        return
    check_device_count(len(layers), len(stages))
    units = LayerUnits.of(layers)
    if request.split:
        ranges = split_by_weights(len(layers), request.split)
        units.check(ranges)
        yield ranges
        return
    units.check_count(len(stages))

    def fixed_bytes(index: int, layer_range: LayerRange) -> int:
        ranges = tuple(layer_range for _ in stages)  # only the device's own range is read
        builder = _Builder(tuple(stages), tuple(devices), request, ranges)
        return sum(line.bytes for line in builder.fixed_lines(index))

    value_of = RangeValuer(stages, request, fixed_bytes)
    found = share_layers(len(units), len(stages), units.value_of(value_of))
    if found is not None:
        yield units.ranges(found)
    if found is None or any(stage.device.holds_all for stage in stages):
        # A CPU that runs layers also holds the other devices' cold experts, whatever its range is.
        yield from map(units.ranges, _rough_choices(stages, units, fixed_bytes))


def _joined(lines: Sequence[Line]) -> list[Line]:
    """Return lines of which those with the same name are one."""
    joined: dict[str, Line] = {}
    for line in lines:
        known = joined.get(line.name)
        size = line.bytes + (0 if known is None else known.bytes)
        joined[line.name] = replace(line if known is None else known, bytes=size)
    return list(joined.values())


def _rough_choices(
    stages: Sequence[PlanStage], units: LayerUnits, fixed_bytes: FixedBytes
) -> Iterator[tuple[LayerRange, ...]]:
    """Yield ranges of units by their bytes and the room of devices, whether they fit or not."""
    model, settings = stages[0].model, stages[0].settings  # bytes differ little from stage to stage
    last = len(model.layers) - 1
    core = [layer_bytes(layer, settings) for layer in model.layers]
    rooms = []
    for index, stage in enumerate(stages):
        layer = last if index == len(stages) - 1 else 0
        own = layer_bytes(stage.model.layers[layer], stage.settings)
        other_bytes = fixed_bytes(index, LayerRange(layer, layer)) - own
        rooms.append(stage.device.total_bytes - other_bytes)
    whole = [size + layer.all_expert_bytes for size, layer in zip(core, model.layers, strict=True)]
    whole, core = units.sums(whole), units.sums(core)
    yield split_by_balance(whole, rooms)
    for backwards in (False, True):  # fill one device first, then the next
        if ranges := split_by_filling(whole, rooms, backwards=backwards):
            yield ranges
    if whole != core:
        yield split_by_balance(core, rooms)


@dataclass(frozen=True, slots=True)
class _HostExperts:
    """What host memory holds of the routed experts."""

    experts: int  # cold ones
    bytes: int  # with the copies of hot experts, if those are kept
    spare_bytes: int  # buffers through which they pass
    pinning: Pinning


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds the lines of all devices and the host for given ranges of layers."""

    stages: tuple[PlanStage, ...]
    devices: tuple[DeviceSpec, ...]
    request: PlanRequest
    ranges: tuple[LayerRange, ...]
    placed: Sequence[int] | None = None  # hot experts by layer; None: as many as fit

    def build(self) -> Layout:
        stages = range(len(self.stages))
        lines = [self.fixed_lines(index) for index in stages]
        hot = [self._hot(index, lines[index]) for index in stages]
        cold = self._cold(hot)
        host_lines = [*self._cold_lines(cold), *self._other_host_lines()]
        pinning = cold.pinning if cold else None
        for own, kept in zip(lines, hot, strict=True):
            if kept.staging:
                why = "buffers through which cold experts are copied, and one for an exchange"
                own.insert(1, Line("expert_staging", kept.staging, why))
            if kept.total:
                own.insert(1, Line("hot_experts", kept.bytes, counted(kept.total, "routed expert")))
        self._move_embeddings(lines, host_lines)
        for stage, own in zip(self.stages, lines, strict=True):
            if stage.device.holds_all and host_lines:  # the host's memory is this device's own
                own[:] = _joined([*own, *host_lines])
                host_lines = []
        plans = tuple(self._device_plan(index, lines[index], hot[index]) for index in stages)
        host = self._host
        if host is None or host.runs_layers:
            total = host.total_bytes if host else 0
            return Layout(plans, HostPlan(total, tuple(host_lines), pinning))
        host_lines += runtime_lines(host)
        return Layout(plans, HostPlan(host.total_bytes, tuple(host_lines), pinning))

    def fixed_lines(self, index: int) -> list[Line]:
        """Return all lines of a stage's device but its hot experts."""
        stage = self.stages[index]
        device, model = stage.device, stage.model
        final = index == len(self.ranges) - 1
        alone = len(self.ranges) == 1
        lines = stage_lines(model, self.ranges[index], device, stage.settings, self.request)
        if model.tied and final and not alone:
            lines.insert(1, _table(stage, "head", "the token table as head", head=True))
        if index == 0 and device.holds_all:
            tied = model.tied and alone
            note = "also the head" if tied else ""
            lines.insert(1, _table(stage, "embeddings", note, head=tied, lookups=True))
        elif index == 0 and model.tied and alone:
            lines.insert(1, _table(stage, "embeddings", "also the head", head=True))
        return lines + runtime_lines(device)

    def _layers(self, index: int) -> tuple[LayerShape, ...]:
        """Return the layers of a stage, as its kernels hold them."""
        first, last = self.ranges[index]
        return self.stages[index].model.layers[first : last + 1]

    @property
    def _host(self) -> DeviceSpec | None:
        return next((device for device in self.devices if device.kind == "cpu"), None)

    def _hot(self, index: int, lines: Sequence[Line]) -> HotExperts:
        """Return the experts that a stage keeps hot: all if no host memory is behind its device."""
        stage, layers = self.stages[index], self._layers(index)
        device, (first, last) = stage.device, self.ranges[index]
        total = sum(layer.all_expert_bytes for layer in layers)
        if device.holds_all:
            return HotExperts(tuple(layer.experts for layer in layers), total)
        if self.placed is not None:
            counts = tuple(self.placed[first : last + 1])
            size = sum(n * layer.expert_bytes for n, layer in zip(counts, layers, strict=True))
            staging = _expert_staging(stage, layers) if size < total else 0
            return HotExperts(counts, size, staging)
        room, most = device.total_bytes - sum(line.bytes for line in lines), total
        if self.request.expert_bytes is not None and stage.model.expert_bytes:
            most = self.request.expert_bytes * total // stage.model.expert_bytes
        return keep_with_staging(layers, room, most, _expert_staging(stage, layers))

    def _cold(self, hot: Sequence[HotExperts]) -> _HostExperts | None:
        """Return what host memory holds of the experts; None where it holds none of them."""
        settings = self.stages[0].settings  # those that all stages share
        layers = [
            (layer, count)
            for index, kept in enumerate(hot)
            for layer, count in zip(self._layers(index), kept.counts, strict=True)
            if count < layer.experts
        ]
        if not layers or not settings.holds_cold:
            return None
        # Copies of hot experts are kept only in layers with cold ones: other layers exchange
        # nothing.
        size = sum(
            layer.expert_bytes * (layer.experts - (0 if settings.keep_host_copy else count))
            for layer, count in layers
        )
        if not settings.pin_experts:
            pinning = Pinning.TURNED_OFF
        else:
            limit = self._pinnable_bytes
            fits = limit is None or size <= limit
            pinning = Pinning.PINNED if fits else Pinning.OVER_LIMIT
        return _HostExperts(
            experts=sum(layer.experts - count for layer, count in layers),
            bytes=size,
            spare_bytes=self._spare_bytes(hot, pinning),
            pinning=pinning,
        )

    def _spare_bytes(self, hot: Sequence[HotExperts], pinning: Pinning) -> int:
        """Return the bytes of the buffers in host memory through which experts pass.

        Each device with cold experts has its own: room for an exchange, and where experts are not
        pinned, buffers through which prompts copy them. Dropped experts are never copied.
        """
        spare = 0
        for index, (stage, kept) in enumerate(zip(self.stages, hot, strict=True)):
            own = self._layers(index)
            cold = [x for x, n in zip(own, kept.counts, strict=True) if n < x.experts]
            if not cold:
                continue
            spare += largest_expert(cold)
            if self._bounces(stage.settings, pinning):
                spare += bounce_bytes(own)
        return spare

    @staticmethod
    def _bounces(settings: PlanSettings, pinning: Pinning) -> bool:
        """Return whether prompts copy cold experts through pinned buffers."""
        return pinning is not Pinning.PINNED and settings.uses_arena and settings.cold != "drop"

    def _cold_lines(self, cold: _HostExperts | None) -> list[Line]:
        """Return the host's lines for devices that do not hold all their experts."""
        if cold is None:
            return []
        what = counted(cold.experts, "routed expert")
        if self.stages[0].settings.keep_host_copy:
            what += " and copies of the hot ones"
        pinned = "pinned"
        if cold.pinning is Pinning.TURNED_OFF:
            pinned = "not pinned: --no-pin"
        elif cold.pinning is Pinning.OVER_LIMIT:
            pinned = f"not pinned: the control group allows {gib(self._pinnable_bytes or 0)}"
        why = "for an exchange"
        if any(self._bounces(stage.settings, cold.pinning) for stage in self.stages):
            why += ", and pinned buffers through which unpinned experts are copied"
        return [
            Line("cold_experts", cold.bytes, f"{what}, {pinned}"),
            Line("expert_spare", cold.spare_bytes, why),
        ]

    @property
    def _pinnable_bytes(self) -> int | None:
        return self._host.pinnable_bytes if self._host else None

    def _other_host_lines(self) -> list[Line]:
        """Return the host's lines other than those of experts."""
        lines, first = [], self.stages[0]
        snapshots = sum(
            snapshots_bytes(stage.model, self.ranges[index], stage.settings, self.request.draft)
            for index, stage in enumerate(self.stages)
            if not stage.device.holds_all
        )
        if snapshots:
            lines.append(snapshots_line(snapshots, first.settings))
        page = sum(
            host_page_bytes(
                cached_layers(stage.model, self.ranges[index], self.request.draft), stage.settings
            )
            for index, stage in enumerate(self.stages)
            if not stage.device.holds_all
        )
        if page and first.settings.host_pages:
            lines.append(host_pages_line(page, first.settings))
        if first.device.holds_all:
            return lines
        if not (first.model.tied and len(self.stages) == 1):
            lines.append(_table(first, "embeddings", "rows are read by the host", lookups=True))
        elif lookup := lookup_bytes(first.model, first.settings):
            lines.append(Line("embeddings", lookup, "tables of which the host reads rows"))
        return lines

    def _move_embeddings(self, lines: list[list[Line]], host_lines: list[Line]) -> None:
        """Move the token table from the host to the first device where there is room."""
        names = [line.name for line in host_lines]
        if "cold_experts" in names or "embeddings" not in names:
            return  # a device with cold experts has no room left
        if any(line.name == "embeddings" for line in lines[0]):
            return
        first = self.stages[0]
        free = first.device.total_bytes - sum(line.bytes for line in lines[0])
        index = names.index("embeddings")
        if free >= host_lines[index].bytes:
            host_lines.pop(index)
            lines[0].insert(1, _table(first, "embeddings", "there is room", lookups=True))

    def _device_plan(self, index: int, lines: list[Line], hot: HotExperts) -> DevicePlan:
        stage, host = self.stages[index], self._host
        device, experts = stage.device, sum(layer.experts for layer in self._layers(index))
        speeds = None
        if host is not None and not device.holds_all and hot.total < experts:
            speeds = cold_speeds_of(device, host)
        return DevicePlan(
            name=device.name,
            kind=device.kind,
            total_bytes=device.total_bytes,
            lines=tuple(line for line in lines if line.bytes),
            layers=self.ranges[index],
            settings=stage.settings,
            hot_by_layer=hot.counts if stage.model.total_experts else (),
            total_experts=experts,
            holds_all=device.holds_all,
            cold_speeds=speeds,
        )


def _expert_staging(stage: PlanStage, layers: Sequence[LayerShape]) -> int:
    """Return the bytes of the buffers through which cold experts are copied to a device."""
    if not stage.settings.holds_cold:
        return 0
    return expert_staging_bytes(layers, stage.model.hidden, stage.settings.expert_unpack_bytes)


def _table(
    stage: PlanStage, name: str, note: str, *, head: bool = False, lookups: bool = False
) -> Line:
    """Return the line of the token table, as a stage's kernels hold it.

    `head`: the stage multiplies with the table. `lookups`: the line has all other tables that are
    looked up, too.
    """
    model, settings = stage.model, stage.settings
    size = embed_bytes(model, settings, looked_up=not head)
    per_layer = lookup_bytes(model, settings)
    why = f"{model.vocab} x {model.hidden}, {settings.weights}" + (f", {note}" if note else "")
    if lookups and per_layer:
        return Line(name, size + per_layer, f"{why}, and {gib(per_layer)} of per-layer tables")
    return Line(name, size, why)
