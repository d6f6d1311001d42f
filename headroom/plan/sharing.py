"""Sharing: the best spans of layers for several devices, found among all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headroom.machine.devices import DeviceSpec
from headroom.plan.budget import PlanSettings, Rules, verify_bytes
from headroom.plan.experts import keep_with_staging
from headroom.plan.lines import layer_bytes
from headroom.plan.shape import ModelShape
from headroom.plan.spans import Span
from headroom.plan.staging import expert_staging_bytes

PICOSECONDS = 1e12


@dataclass(frozen=True, slots=True)
class SpanValue:
    """How good it is that a device runs a span."""

    hot: int  # routed experts that it keeps and would otherwise read from the host
    time: int  # picoseconds to read what one token needs; whole, so that sums compare exactly
    fill: int  # millionths of the device that are taken


Judge = Callable[[int, int, int], SpanValue | None]  # of device, first, last; None: does not fit
_Choice = tuple[tuple[int, int, int], tuple[Span, ...]]  # what it costs, smallest first; spans
FixedBytes = Callable[[int, Span], int]  # of device and span: all lines but hot experts


def share_layers(layers: int, devices: int, judge: Judge) -> tuple[Span, ...] | None:
    """Return the spans with the most hot experts, then the least time, then the least filled.

    All ways to cut the layers are compared, by the best one for each number of layers given away
    so far; None where no way fits. A span that does not fit never fits with more layers.
    """
    best: dict[int, _Choice] = {0: ((0, 0, 0), ())}
    for device in range(devices):
        grown: dict[int, _Choice] = {}
        left = devices - device - 1  # devices that need a layer after this one
        for start, (key, spans) in best.items():
            for end in range(start + 1, layers - left + 1) if left else (layers,):
                value = judge(device, start, end - 1)
                if value is None:
                    break
                grown_key = (key[0] - value.hot, key[1] + value.time, max(key[2], value.fill))
                choice = (grown_key, (*spans, (start, end - 1)))
                if end not in grown or choice < grown[end]:
                    grown[end] = choice
        best = grown
    found = best.get(layers)
    return found and found[1]


@dataclass(slots=True)
class SpanJudge:
    """Weighs spans from sums over layers, so that a thousand of them cost little."""

    model: ModelShape
    stages: Sequence[DeviceSpec]
    settings: PlanSettings
    rules: Rules
    fixed_bytes: FixedBytes
    _held: list[int] = field(init=False)  # bytes of all layers before one
    _times: list[list[int]] = field(init=False)  # by device: time of all layers before one
    _alike: list[int] = field(init=False)  # a bit for each layer; equal layers share it
    _besides: dict[tuple[int, int], int] = field(init=False, default_factory=dict)
    _stagings: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        layers = self.model.layers
        held = [self._layer_held(index) for index in range(len(layers))]
        self._held = _sums(held)
        self._times = [_sums(layer_times(self.model, x, self.settings)) for x in self.stages]
        kinds = list(dict.fromkeys(layers))
        self._alike = [1 << kinds.index(layer) for layer in layers]

    def __call__(self, device: int, first: int, last: int) -> SpanValue | None:
        """Return the value of a span on a device, or None where its lines do not fit."""
        spec = self.stages[device]
        taken = self._held[last + 1] - self._held[first] + self._beside(device, first, last)
        layers = self.model.layers[first : last + 1]
        experts = sum(layer.all_expert_bytes for layer in layers) if self.model.expert_bytes else 0
        hot, room = 0, spec.total_bytes - taken
        if spec.holds_all:
            taken += experts
        elif experts:
            staging = self._staging(first, last)
            kept = keep_with_staging(layers, room, self._cap(experts), staging)
            hot, taken = kept.total, taken + kept.bytes + kept.staging
        if taken > spec.total_bytes:
            return None
        return SpanValue(
            hot=hot,
            time=self._times[device][last + 1] - self._times[device][first],
            fill=taken * 1_000_000 // max(1, spec.total_bytes),
        )

    def _cap(self, experts: int) -> int:
        budget = self.rules.expert_bytes
        return experts if budget is None else budget * experts // self.model.expert_bytes

    def _layer_held(self, index: int) -> int:
        layer = self.model.layers[index]
        draft = verify_bytes([layer], self.settings) if self.rules.draft else 0
        return layer_bytes(layer, self.settings) + draft

    def _kinds(self, first: int, last: int) -> int:
        """Return the bits of a span's layers: those of the same kinds need the same scratch."""
        kinds = 0
        for bit in self._alike[first : last + 1]:
            kinds |= bit
        return kinds

    def _staging(self, first: int, last: int) -> int:
        if not self.settings.holds_cold:
            return 0
        alike = self._kinds(first, last)
        if alike not in self._stagings:
            layers, unpacks = self.model.layers[first : last + 1], self.settings.expert_unpack_bytes
            self._stagings[alike] = expert_staging_bytes(layers, self.model.hidden, unpacks)
        return self._stagings[alike]

    def _beside(self, device: int, first: int, last: int) -> int:
        """Return what a device holds beside the layers of a span: all its other lines."""
        alike = self._kinds(first, last)
        if (device, alike) not in self._besides:
            held = self._held[last + 1] - self._held[first]
            self._besides[device, alike] = self.fixed_bytes(device, (first, last)) - held
        return self._besides[device, alike]


def layer_times(model: ModelShape, device: DeviceSpec, settings: PlanSettings) -> list[int]:
    """Return the picoseconds in which a device reads what one token needs of each layer."""
    return [
        int(
            (layer_bytes(layer, settings) + layer.experts_used * layer.expert_bytes)
            * (PICOSECONDS / device.bandwidth)
        )
        for layer in model.layers
    ]


def _sums(values: Sequence[int]) -> list[int]:
    """Return the sum before each value, and at last the sum of all."""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
