"""Sharing: which consecutive layers each of several devices runs.

`share_layers` compares all ways to cut the layers by what each device would keep and how fast it
would read. The `split_by_...` functions are simpler: by shares that the user gives, or by the
room of the devices where no way to cut fits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headroom.errors import OptionError, PlanError
from headroom.plan.cost_model import head_read_seconds, layer_read_seconds
from headroom.plan.experts import expert_staging_bytes, keep_with_staging
from headroom.plan.lines import layer_bytes, verify_bytes
from headroom.plan.settings import PlanRequest, PlanStage
from headroom.plan.shape import LayerRange, LayerShape, ModelShape

PICOSECONDS = 1e12


@dataclass(frozen=True, slots=True)
class RangeValue:
    """How good it is that a device runs a range of layers."""

    hot: int  # routed experts that the device keeps instead of the host
    time: int  # picoseconds to read what one token needs; an integer, so that sums are exact
    # What is to be balanced: if all devices work at once on different sequences, the time with that
    # of the head; else the millionths of the device's memory that are taken.
    load: int


# The value of a device's index, first and last layer; None: the lines do not fit.
ValueRange = Callable[[int, int, int], RangeValue | None]
_Choice = tuple[tuple[int, int, int], tuple[LayerRange, ...]]  # cost to minimise; ranges
FixedBytes = Callable[[int, LayerRange], int]  # of device and span: all lines but hot experts


def share_layers(layers: int, devices: int, value_of: ValueRange) -> tuple[LayerRange, ...] | None:
    """Return the ranges with the most hot experts, then the least time, then the best balance.

    None where no way to cut the layers fits. Dynamic programming compares all of them: for each
    device and each number of layers given to the devices so far, only the best way is kept. A
    range that does not fit never fits with more layers.
    """
    best: dict[int, _Choice] = {0: ((0, 0, 0), ())}
    for device in range(devices):
        grown: dict[int, _Choice] = {}
        left = devices - device - 1  # devices that need a layer after this one
        for start, (key, ranges) in best.items():
            for end in range(start + 1, layers - left + 1) if left else (layers,):
                value = value_of(device, start, end - 1)
                if value is None:
                    break
                grown_key = (key[0] - value.hot, key[1] + value.time, max(key[2], value.load))
                choice = (grown_key, (*ranges, LayerRange(start, end - 1)))
                if end not in grown or choice < grown[end]:
                    grown[end] = choice
        best = grown
    found = best.get(layers)
    return found and found[1]


@dataclass(slots=True)
class RangeValuer:
    """Values ranges from running sums over the layers, so that thousands of them cost little."""

    stages: Sequence[PlanStage]
    request: PlanRequest
    fixed_bytes: FixedBytes
    _held: list[list[int]] = field(init=False)  # by device: bytes of all layers before each layer
    _times: list[list[int]] = field(init=False)  # by device: time of all layers before each layer
    _heads: list[int] = field(init=False)  # by device: time of the head
    _alike: list[int] = field(init=False)  # one bit for each kind of layer
    _others: dict[tuple[int, int], int] = field(init=False, default_factory=dict)
    _stagings: dict[tuple[int, int], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._held = [_sums(self._layers_held(stage)) for stage in self.stages]
        self._times = [_sums(layer_times(stage)) for stage in self.stages]
        self._heads = [_head_time(stage) for stage in self.stages]
        layers = self.stages[0].model.layers
        kinds = list(dict.fromkeys(layers))
        self._alike = [1 << kinds.index(layer) for layer in layers]

    def __call__(self, device: int, first: int, last: int) -> RangeValue | None:
        """Return the value of a range on a device, or None where its lines do not fit."""
        spec, model = self.stages[device].device, self.stages[device].model
        taken = self._held_bytes(device, first, last) + self._other_bytes(device, first, last)
        layers = model.layers[first : last + 1]
        experts = sum(layer.all_expert_bytes for layer in layers) if model.total_experts else 0
        hot, room = 0, spec.total_bytes - taken
        if spec.holds_all:
            taken += experts
        elif experts:
            staging = self._staging(device, first, last)
            kept = keep_with_staging(layers, room, self._cap(experts, model), staging)
            hot, taken = kept.total, taken + kept.bytes + kept.staging
        if taken > spec.total_bytes:
            return None
        time = self._times[device][last + 1] - self._times[device][first]
        if self.stages[device].settings.worker:
            ends = last == len(model.layers) - 1
            load = time + self._heads[device] * ends
        else:
            load = taken * 1_000_000 // max(1, spec.total_bytes)
        return RangeValue(hot, time, load)

    def _cap(self, experts: int, model: ModelShape) -> int:
        budget = self.request.expert_bytes
        return experts if budget is None else budget * experts // model.expert_bytes

    def _layers_held(self, stage: PlanStage) -> list[int]:
        settings = stage.settings
        return [
            layer_bytes(layer, settings) + verify_bytes([layer], settings)
            for layer in stage.model.layers
        ]

    def _held_bytes(self, device: int, first: int, last: int) -> int:
        return self._held[device][last + 1] - self._held[device][first]

    def _kinds(self, first: int, last: int) -> int:
        """Return the bits of the kinds of layers in a range; equal bits mean equal scratch."""
        kinds = 0
        for bit in self._alike[first : last + 1]:
            kinds |= bit
        return kinds

    def _staging(self, device: int, first: int, last: int) -> int:
        settings, model = self.stages[device].settings, self.stages[device].model
        if not settings.holds_cold:
            return 0
        alike = self._kinds(first, last)
        if (device, alike) not in self._stagings:
            layers, unpacks = model.layers[first : last + 1], settings.expert_unpack_bytes
            self._stagings[device, alike] = expert_staging_bytes(layers, model.hidden, unpacks)
        return self._stagings[device, alike]

    def _other_bytes(self, device: int, first: int, last: int) -> int:
        """Return the bytes of a device's lines that are neither layers nor hot experts."""
        alike = self._kinds(first, last)
        if (device, alike) not in self._others:
            held = self._held_bytes(device, first, last)
            self._others[device, alike] = self.fixed_bytes(device, LayerRange(first, last)) - held
        return self._others[device, alike]


@dataclass(frozen=True, slots=True)
class LayerUnits:
    """Runs of layers that must stay together: a layer that reads another layer's cache, and all
    layers from the owner of that cache to it.
    """

    units: tuple[LayerRange, ...]

    @classmethod
    def of(cls, layers: Sequence[LayerShape]) -> "LayerUnits":
        """Return the units of a model; most models have one layer in each."""
        owners: dict[tuple[str, int], int] = {}  # the last owner of a cache, by kind and window
        starts = list(range(len(layers)))  # the first layer that each one must be together with
        for index, layer in enumerate(layers):
            kind = layer.kind, layer.window
            if layer.owns_kv:
                owners[kind] = index
            else:
                starts[index] = owners[kind]
        units: list[LayerRange] = []
        for index, start in enumerate(starts):
            first = start
            while units and units[-1].last >= start:
                first = min(first, units.pop().first)
            units.append(LayerRange(first, index))
        return cls(tuple(units))

    def __len__(self) -> int:
        return len(self.units)

    def ranges(self, of_units: Sequence[LayerRange]) -> tuple[LayerRange, ...]:
        """Return ranges of units as ranges of layers."""
        units = self.units
        return tuple(LayerRange(units[a].first, units[b].last) for a, b in of_units)

    def sums(self, values: Sequence[int]) -> list[int]:
        """Return the sum of some values of layers over each unit."""
        return [sum(values[first : last + 1]) for first, last in self.units]

    def value_of(self, value_of: ValueRange) -> ValueRange:
        """Return a function that values ranges of units by their layers."""
        return lambda device, first, last: value_of(
            device, self.units[first].first, self.units[last].last
        )

    def check(self, ranges: Sequence[LayerRange]) -> None:
        """Refuse ranges of layers that cut a unit."""
        for layer_range in ranges[1:]:
            cut = layer_range.first
            unit = next(unit for unit in self.units if unit.first <= cut <= unit.last)
            if unit.first != cut:
                raise PlanError(
                    f"The split cuts at layer {cut}, and layers {unit.first} to {unit.last} must "
                    "run on one device: some of them read the cache of an earlier one.",
                    hint="Choose other numbers for --split, or leave it out.",
                    param="split",
                )

    def check_count(self, devices: int) -> None:
        """Refuse more devices than units."""
        if devices > len(self.units):
            unit = max(self.units, key=lambda unit: unit.size)
            raise PlanError(
                f"{devices} devices cannot share {self.units[-1].last + 1} layers of which "
                f"layers {unit.first} to {unit.last} must run on one device.",
                hint=f"Name 1 to {len(self.units)} devices.",
            )


def layer_times(stage: PlanStage) -> list[int]:
    """Return the picoseconds in which a device reads what one token needs of each layer.

    All experts count as hot: ranges are compared by their hot experts before their times.
    """
    device, settings = stage.device, stage.settings
    return [
        int(PICOSECONDS * layer_read_seconds(layer, device, settings))
        for layer in stage.model.layers
    ]


def _head_time(stage: PlanStage) -> int:
    """Return the picoseconds in which a device reads the head."""
    return int(PICOSECONDS * head_read_seconds(stage.model, stage.device, stage.settings))


def _sums(values: Sequence[int]) -> list[int]:
    """Return the running sums: 0, the first value, the first two, ..., all of them."""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def parse_split(text: str, devices: int) -> tuple[float, ...]:
    """Return the shares of a text such as `2,1`, one for each device."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or any(not math.isfinite(share) or share <= 0 for share in shares):
        raise OptionError(
            f"--split is {text!r}.", hint="Write positive numbers, as in 2,1.", param="split"
        )
    if len(shares) != devices:
        raise OptionError(
            f"--split has {len(shares)} shares for {devices} devices.",
            hint="Write one share for each device.",
            param="split",
        )
    return shares


def split_by_weights(layers: int, weights: Sequence[float]) -> tuple[LayerRange, ...]:
    """Return one range for each weight, in proportion, each with at least one layer."""
    count, total = len(weights), sum(weights)
    check_device_count(layers, count)
    ranges, first, reached = [], 0, 0.0
    for index, weight in enumerate(weights):
        reached += weight
        end = layers if index == count - 1 else math.floor(reached / total * layers + 0.5)
        end = min(max(end, first + 1), layers - (count - index - 1))
        ranges.append(LayerRange(first, end - 1))
        first = end
    return tuple(ranges)


def split_by_balance(costs: Sequence[int], rooms: Sequence[int]) -> tuple[LayerRange, ...]:
    """Return the ranges whose fullest device is as little filled as possible.

    `costs` are bytes of layers, `rooms` bytes of devices.
    """
    check_device_count(len(costs), len(rooms))
    rooms = [max(1, room) for room in rooms]
    low, high = 0.0, sum(costs) / min(rooms) + 1.0  # at `high` any one device holds everything
    best = _fill(costs, rooms, high)
    assert best is not None
    for _ in range(40):
        middle = (low + high) / 2
        found = _fill(costs, rooms, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def split_by_filling(
    costs: Sequence[int], rooms: Sequence[int], *, backwards: bool = False
) -> tuple[LayerRange, ...] | None:
    """Return the ranges that fill one device after the other; None where layers are left over.

    `backwards` begins with the last device.
    """
    check_device_count(len(costs), len(rooms))
    if not backwards:
        return _fill(costs, rooms, 1.0)
    found = _fill(costs[::-1], rooms[::-1], 1.0)
    last = len(costs) - 1
    return found and tuple(LayerRange(last - end, last - first) for first, end in reversed(found))


def check_device_count(layers: int, devices: int) -> None:
    """Refuse more devices than layers."""
    if not 0 < devices <= layers:
        raise PlanError(
            f"{devices} devices cannot share {layers} layers.",
            hint=f"Name 1 to {layers} devices.",
        )


def _fill(
    costs: Sequence[int], rooms: Sequence[int], share: float
) -> tuple[LayerRange, ...] | None:
    """Return ranges that fill each device up to `share` of its room; None if layers are left."""
    ranges, first = [], 0
    for index, room in enumerate(rooms):
        most_end = len(costs) - (len(rooms) - index - 1)  # each later device needs a layer
        end, load = first, 0
        while end < most_end and load + costs[end] <= share * room:
            load += costs[end]
            end += 1
        if end == first:
            return None
        ranges.append(LayerRange(first, end - 1))
        first = end
    return tuple(ranges) if first == len(costs) else None
