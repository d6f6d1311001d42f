"""Layout: which device holds what, for settings that are all decided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from headroom.machine.devices import DeviceKind, DeviceSpec
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
    draft_lines,
    embed_bytes,
    layer_bytes,
    lookup_bytes,
    runtime_lines,
    snapshot_bytes,
    stage_lines,
)
from headroom.plan.settings import PlanRequest, PlanSettings
from headroom.plan.shape import LayerRange, LayerShape, ModelShape
from headroom.plan.sharing import (
    FixedBytes,
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
    hot_by_layer: tuple[int, ...] = ()  # routed experts held here, for each of its layers
    total_experts: int = 0  # routed experts of its layers
    holds_all: bool = False  # no host memory is behind it: a CPU, or unified memory

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
    model: ModelShape,
    devices: Sequence[DeviceSpec],
    settings: PlanSettings,
    request: PlanRequest,
    placed: Sequence[int] | None = None,
) -> Layout:
    """Return the best way to share the layers that the settings allow, fitting or not.

    `placed` is the number of hot experts of every layer, if a placement was chosen already. Without
    it as many are hot as fit, the same number in every layer.
    """
    best, best_rank = None, (False, 0, 0)
    for ranges in _range_choices(model, devices, settings, request):
        layout = _Builder(model, tuple(devices), settings, request, ranges, placed).build()
        rank = (layout.fits, layout.hot_experts, -_picoseconds(model, devices, settings, ranges))
        if best is None or rank > best_rank:
            best, best_rank = layout, rank
    assert best is not None
    return best


def _picoseconds(
    model: ModelShape,
    devices: Sequence[DeviceSpec],
    settings: PlanSettings,
    ranges: tuple[LayerRange, ...],
) -> int:
    """Return the time in which the devices read what one token needs, one after the other."""
    stages = [device for device in devices if device.runs_layers]
    if len(stages) == 1:
        return 0  # there is no choice
    return sum(
        sum(layer_times(model, device, settings)[first : last + 1])
        for device, (first, last) in zip(stages, ranges, strict=True)
    )


def _range_choices(
    model: ModelShape, devices: Sequence[DeviceSpec], settings: PlanSettings, request: PlanRequest
) -> Iterator[tuple[LayerRange, ...]]:
    """Yield the ways to share the layers that are worth comparing, the preferred one first."""
    stages = [device for device in devices if device.runs_layers]
    last = len(model.layers) - 1
    if len(stages) == 1:
        yield (LayerRange(0, last),)
        return
    check_device_count(len(model.layers), len(stages))
    if request.split:
        yield split_by_weights(len(model.layers), request.split)
        return

    def fixed_bytes(index: int, layer_range: LayerRange) -> int:
        ranges = tuple(layer_range for _ in stages)  # only the device's own range is read
        builder = _Builder(model, tuple(devices), settings, request, ranges)
        return sum(line.bytes for line in builder.fixed_lines(index, stages[index]))

    value_of = RangeValuer(model, stages, settings, request, fixed_bytes)
    found = share_layers(len(model.layers), len(stages), value_of)
    if found is not None:
        yield found
    if found is None or any(device.holds_all for device in stages):
        # A CPU that runs layers also holds the other devices' cold experts, whatever its range is.
        yield from _rough_choices(model, stages, settings, fixed_bytes)


def _rough_choices(
    model: ModelShape,
    stages: Sequence[DeviceSpec],
    settings: PlanSettings,
    fixed_bytes: FixedBytes,
) -> Iterator[tuple[LayerRange, ...]]:
    """Yield ranges by the bytes of layers and the room of devices, whether they fit or not."""
    core = [layer_bytes(layer, settings) for layer in model.layers]
    rooms = []
    for index, device in enumerate(stages):
        layer = len(core) - 1 if index == len(stages) - 1 else 0
        other_bytes = fixed_bytes(index, LayerRange(layer, layer)) - core[layer]
        rooms.append(device.total_bytes - other_bytes)
    whole = [size + layer.all_expert_bytes for size, layer in zip(core, model.layers, strict=True)]
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
    largest_bytes: int  # of one expert in a layer that has cold ones
    pinning: Pinning


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds the lines of all devices and the host for given ranges of layers."""

    model: ModelShape
    devices: tuple[DeviceSpec, ...]
    settings: PlanSettings
    request: PlanRequest
    ranges: tuple[LayerRange, ...]
    placed: Sequence[int] | None = None  # hot experts by layer; None: as many as fit

    def build(self) -> Layout:
        stages = [device for device in self.devices if device.runs_layers]
        lines = [self.fixed_lines(index, device) for index, device in enumerate(stages)]
        hot = [
            self._hot(device, layer_range, own)
            for device, layer_range, own in zip(stages, self.ranges, lines, strict=True)
        ]
        cold = self._cold(hot)
        host_lines = [*self._cold_lines(cold), *self._other_host_lines(stages)]
        pinning = cold.pinning if cold else None
        for own, kept in zip(lines, hot, strict=True):
            if kept.staging:
                why = "buffers through which cold experts are copied, and one for an exchange"
                own.insert(1, Line("expert_staging", kept.staging, why))
            if kept.total:
                own.insert(1, Line("hot_experts", kept.bytes, counted(kept.total, "routed expert")))
        self._move_embeddings(stages, lines, host_lines)
        host = next((device for device in self.devices if device.kind == "cpu"), None)
        for index, device in enumerate(stages):
            if device.holds_all and host_lines:  # the host's memory is this device's own
                lines[index] += host_lines
                host_lines = []
        plans = tuple(map(self._device_plan, stages, lines, hot, self.ranges))
        if host is None or host.runs_layers:
            total = host.total_bytes if host else 0
            return Layout(plans, HostPlan(total, tuple(host_lines), pinning))
        host_lines += runtime_lines(host)
        return Layout(plans, HostPlan(host.total_bytes, tuple(host_lines), pinning))

    def fixed_lines(self, index: int, device: DeviceSpec) -> list[Line]:
        """Return all lines of a device but its hot experts."""
        final = index == len(self.ranges) - 1
        alone = len(self.ranges) == 1
        neighbours = (index > 0) + (not final)
        lines = stage_lines(
            self.model, self.ranges[index], device, self.settings, self.request, neighbours
        )
        if self.model.tied and final and not alone:
            lines.insert(1, self._table("head", "the token table as head"))
        if index == 0 and device.holds_all:
            note = "also the head" if self.model.tied and alone else ""
            lines.insert(1, self._table("embeddings", note, lookup=True))
        elif index == 0 and self.model.tied and alone:
            lines.insert(1, self._table("embeddings", "also the head"))
        if final and self.request.draft is not None:
            lines += draft_lines(self.request.draft, self.model, self.settings, self.request)
        return lines + runtime_lines(device)

    def _hot(
        self, device: DeviceSpec, layer_range: LayerRange, lines: Sequence[Line]
    ) -> HotExperts:
        """Return the experts that a device keeps hot: all if no host memory is behind it."""
        layers = self.model.layers[layer_range.first : layer_range.last + 1]
        total = sum(layer.all_expert_bytes for layer in layers)
        if device.holds_all:
            return HotExperts(tuple(layer.experts for layer in layers), total)
        if self.placed is not None:
            counts = tuple(self.placed[layer_range.first : layer_range.last + 1])
            size = sum(n * layer.expert_bytes for n, layer in zip(counts, layers, strict=True))
            staging = self._expert_staging(layers) if size < total else 0
            return HotExperts(counts, size, staging)
        room, most = device.total_bytes - sum(line.bytes for line in lines), total
        if self.request.expert_bytes is not None and self.model.expert_bytes:
            most = self.request.expert_bytes * total // self.model.expert_bytes
        return keep_with_staging(layers, room, most, self._expert_staging(layers))

    def _expert_staging(self, layers: Sequence[LayerShape]) -> int:
        """Return the bytes of the buffers through which cold experts are copied to a device."""
        if not self.settings.holds_cold:
            return 0
        unpacks = self.settings.expert_unpack_bytes
        return expert_staging_bytes(layers, self.model.hidden, unpacks)

    def _cold(self, hot: Sequence[HotExperts]) -> _HostExperts | None:
        """Return what host memory holds of the experts; None where it holds none of them."""
        counts = [count for kept in hot for count in kept.counts]
        layers = [(x, n) for x, n in zip(self.model.layers, counts, strict=True) if n < x.experts]
        if not layers or not self.settings.holds_cold:
            return None
        # Copies of hot experts are kept only in layers with cold ones: other layers exchange
        # nothing.
        size = sum(
            layer.expert_bytes * (layer.experts - (0 if self.settings.keep_host_copy else count))
            for layer, count in layers
        )
        if not self.settings.pin_experts:
            pinning = Pinning.TURNED_OFF
        else:
            limit = self._pinnable_bytes
            fits = limit is None or size <= limit
            pinning = Pinning.PINNED if fits else Pinning.OVER_LIMIT
        return _HostExperts(
            experts=sum(layer.experts - count for layer, count in layers),
            bytes=size,
            largest_bytes=largest_expert([layer for layer, _ in layers]),
            pinning=pinning,
        )

    def _cold_lines(self, cold: _HostExperts | None) -> list[Line]:
        """Return the host's lines for devices that do not hold all their experts."""
        if cold is None:
            return []
        what = counted(cold.experts, "routed expert")
        if self.settings.keep_host_copy:
            what += " and copies of the hot ones"
        pinned = "pinned"
        if cold.pinning is Pinning.TURNED_OFF:
            pinned = "not pinned: --no-pin"
        elif cold.pinning is Pinning.OVER_LIMIT:
            pinned = f"not pinned: the control group allows {gib(self._pinnable_bytes or 0)}"
        spare, why = cold.largest_bytes, "for an exchange"
        # Dropped experts are never copied to a GPU, so they need no buffers.
        unpinned = cold.pinning is not Pinning.PINNED
        if unpinned and self.settings.uses_arena and self.settings.cold != "drop":
            spare += bounce_bytes(self.model.layers)
            why += ", and pinned buffers through which unpinned experts are copied"
        return [
            Line("cold_experts", cold.bytes, f"{what}, {pinned}"),
            Line("expert_spare", spare, why),
        ]

    @property
    def _pinnable_bytes(self) -> int | None:
        host = next((device for device in self.devices if device.kind == "cpu"), None)
        return host.pinnable_bytes if host else None

    def _other_host_lines(self, stages: Sequence[DeviceSpec]) -> list[Line]:
        """Return the host's lines other than those of experts."""
        lines = []
        if budget := self.request.snapshot_bytes:
            each = snapshot_bytes(self.model, self.settings)
            why = f"saved prefixes: {budget // each} of a whole context, {gib(each)} each"
            lines.append(Line("snapshots", budget, why))
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
        names = [line.name for line in host_lines]
        if "cold_experts" in names or "embeddings" not in names:
            return  # a device with cold experts has no room left
        if any(line.name == "embeddings" for line in lines[0]):
            return
        free = stages[0].total_bytes - sum(line.bytes for line in lines[0])
        index = names.index("embeddings")
        if free >= host_lines[index].bytes:
            host_lines.pop(index)
            lines[0].insert(1, self._table("embeddings", "there is room", lookup=True))

    def _table(self, name: str, note: str, *, lookup: bool = False) -> Line:
        model, settings = self.model, self.settings
        size, per_layer = embed_bytes(model, settings), lookup_bytes(model, settings)
        why = f"{model.vocab} x {model.hidden}, {settings.weights}" + (f", {note}" if note else "")
        if lookup and per_layer:
            return Line(name, size + per_layer, f"{why}, and {gib(per_layer)} of per-layer tables")
        return Line(name, size, why)

    def _device_plan(
        self, device: DeviceSpec, lines: list[Line], hot: HotExperts, layer_range: LayerRange
    ) -> DevicePlan:
        return DevicePlan(
            name=device.name,
            kind=device.kind,
            total_bytes=device.total_bytes,
            lines=tuple(line for line in lines if line.bytes),
            layers=layer_range,
            hot_by_layer=hot.counts if self.model.total_experts else (),
            total_experts=sum(
                x.experts for x in self.model.layers[layer_range.first : layer_range.last + 1]
            ),
            holds_all=device.holds_all,
        )
