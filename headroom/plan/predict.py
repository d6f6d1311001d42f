"""predict(): the tokens per second of a plan, by the cost model and the bytes of its layout."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headroom.machine.devices import DeviceSpec
from headroom.plan.cost_model import (
    SHARING_WORTH,
    ColdLayer,
    ColdSpeeds,
    DecodeChoice,
    ExpertSize,
    choose_decode,
    cold_seconds,
    cold_speeds_of,
    compute_rate,
    core_read_bytes,
    decode_speeds,
    head_read_bytes,
    head_read_seconds,
    layer_read_seconds,
    memory_rate,
    prefill_seconds,
    prefill_speeds,
    row_move_bytes,
    token_operations,
    worker_step_seconds,
)
from headroom.plan.experts import STREAM_BUFFERS, buffer_bytes
from headroom.plan.layout import DevicePlan, Layout, Pinning
from headroom.plan.settings import PlanSettings, PlanStage
from headroom.plan.shape import LayerShape, ModelShape


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a decode step of any number of rows takes on one device, in seconds."""

    weights_s: float  # reading what every row needs: all weights but routed experts
    row_s: float  # reading a row's caches and states, and computing its cold experts
    picks_s: float  # reading a row's routed experts in the device's memory
    experts_s: float  # reading all of those: rows that pick the same expert share it
    products_s: float  # arithmetic of a row; 0 where the device's speed is not known

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step: the slower of memory and arithmetic."""
        experts_s = min(rows * self.picks_s, self.experts_s)
        return max(self.weights_s + rows * self.row_s + experts_s, rows * self.products_s)


NO_COST = StepCost(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """What the layers of one device take."""

    device: str
    decode_s: float  # a token of one sequence, with its cold experts
    prefill_s: float  # a chunk of a prompt
    step_cost: StepCost = NO_COST


@dataclass(frozen=True, slots=True)
class Prediction:
    """The speed to expect, and what limits it."""

    decode_tokens_per_s: float  # one sequence, the context half full
    prefill_tokens_per_s: float
    bound_by: str  # what the largest part of a decode step is spent on
    estimate: bool  # False once the speeds of all devices in use were measured
    stages: tuple[StagePrediction, ...]  # one for each device that runs layers

    def decode_share(self, stage: StagePrediction) -> float:
        """Return the share of a token's time that a stage takes."""
        return stage.decode_s * self.decode_tokens_per_s

    def pays_to_share(self, sequences: int, steps: int) -> bool:
        """Return whether sequences decode faster if they are shared among several steps.

        The stages then work on different steps at the same time, but each step reads all weights
        again. That gains nothing where reading them is what a step's time goes to.
        """
        costs = [stage.step_cost for stage in self.stages]
        rows = -(-sequences // steps)
        shared_s = steps * max(cost.seconds(rows) for cost in costs)
        return shared_s < SHARING_WORTH * sum(cost.seconds(sequences) for cost in costs)


def predict(
    stages: Sequence[PlanStage], devices: Sequence[DeviceSpec], layout: Layout
) -> Prediction:
    """Return the speed of a layout. Layers run one after another, so their times add up."""
    host = next((device for device in devices if device.kind == "cpu"), None)
    pinned = layout.host.pinning in (None, Pinning.PINNED)
    decode: defaultdict[str, float] = defaultdict(float)  # seconds by what they are spent on
    parts: list[StagePrediction] = []
    for stage, plan in zip(stages, layout.devices, strict=True):
        device, settings = stage.device, stage.settings
        work = _StageWork(stage.model, plan, settings)
        speeds = cold_speeds_of(device, host or device)
        in_decode = decode_speeds(speeds, settings.cold, pinned)
        own = _decode_parts(work, device, in_decode)
        for name, seconds in own.items():
            decode[name] += seconds
        prefill_s = _prefill_seconds(work, device, prefill_speeds(speeds, settings.cold))
        cost = _step_cost(work, device, in_decode)
        parts.append(StagePrediction(plan.name, sum(own.values()), prefill_s, cost))
    prefill_s = sum(part.prefill_s for part in parts)
    if workers := sum(stage.settings.worker for stage in stages):
        decode["messages between processes"] = worker_step_seconds(workers)
        prefill_s += worker_step_seconds(workers)
    used = {plan.name for plan in layout.devices}
    if host is not None and any(line.name == "cold_experts" for line in layout.host.lines):
        used.add(host.name)
    measured = all(device.measured for device in devices if device.name in used)
    return Prediction(
        decode_tokens_per_s=1 / sum(decode.values()),
        prefill_tokens_per_s=stages[0].settings.chunk / prefill_s,
        bound_by=max(decode, key=lambda name: decode[name]),
        estimate=not measured,
        stages=tuple(parts),
    )


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """A layer with routed experts, some of which a plan keeps in the device's memory."""

    shape: LayerShape
    hot: int  # experts

    @property
    def hit_rate(self) -> float:
        """The share of picks that are hot if all experts are chosen equally often."""
        return self.hot / self.shape.experts

    def decode_choice(self, speeds: ColdSpeeds, cold: str) -> DecodeChoice:
        """Return who computes the cold picks of a row under the setting `cold`."""
        if cold == "cpu" and not speeds.cpu:
            cold = "gpu"  # the CPU has no C++ kernels: its reference kernels are counted as copies
        shape = self.shape
        return choose_decode(speeds, shape.expert_bytes, shape.experts_used, self.hit_rate, cold)

    def decode_seconds(self, speeds: ColdSpeeds, choice: DecodeChoice) -> float:
        """Return the seconds that the cold picks of a row add to a decode step."""
        return cold_seconds(speeds, self.shape.expert_bytes, self.hit_rate, choice)

    def prefill_seconds(self, rows: int, speeds: ColdSpeeds) -> float:
        """Return the seconds of the cold experts in a prefill step of so many rows."""
        shape = self.shape
        layer = ColdLayer(
            size=ExpertSize(shape.expert_bytes, 2 * shape.expert_values),
            experts=shape.experts - self.hot,
            picks=shape.experts_used * (1 - self.hit_rate),
            ahead_bytes=STREAM_BUFFERS * buffer_bytes(shape.expert_bytes, shape.experts),
        )
        return prefill_seconds(rows, layer, speeds)


@dataclass(frozen=True, slots=True)
class _StageWork:
    """Bytes and operations of the layers of one device."""

    model: ModelShape
    plan: DevicePlan
    settings: PlanSettings

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        first, last = self.plan.layers
        return self.model.layers[first : last + 1]

    @property
    def has_head(self) -> bool:
        return self.plan.layers[1] == len(self.model.layers) - 1

    @property
    def hot_by_layer(self) -> tuple[int, ...]:
        """Hot experts of each layer; 0 where a layer has none."""
        return self.plan.hot_by_layer or (0,) * len(self.layers)

    def head_read_bytes(self, device: DeviceSpec) -> int:
        """Return the bytes that a step moves to read the head; 0 if another device has it."""
        return head_read_bytes(self.model, device, self.settings) if self.has_head else 0

    def head_read_seconds(self, device: DeviceSpec) -> float:
        """Return the time in which a decode step reads the head; 0 if another device has it."""
        return head_read_seconds(self.model, device, self.settings) if self.has_head else 0.0

    def weight_read_bytes(self, device: DeviceSpec) -> int:
        """Return the bytes that a prefill step moves to read the weights of this device."""
        core = sum(core_read_bytes(layer, device, self.settings) for layer in self.layers)
        hot = sum(layer.hot * layer.shape.expert_bytes for layer in self.routed())
        return core + hot + self.head_read_bytes(device)

    def token_read_seconds(self, device: DeviceSpec) -> float:
        """Return the time in which one token reads what the device holds."""
        return self.head_read_seconds(device) + sum(
            layer_read_seconds(layer, device, self.settings, hot / max(1, layer.experts))
            for layer, hot in zip(self.layers, self.hot_by_layer, strict=True)
        )

    def routed(self) -> list[RoutedLayer]:
        """Return the layers with experts."""
        both = zip(self.layers, self.hot_by_layer, strict=True)
        return [RoutedLayer(shape, count) for shape, count in both if shape.experts]

    def with_cold(self) -> Counter[RoutedLayer]:
        """Return the layers whose cold experts cost time, and how many are equal to each.

        Dropped experts cost no time.
        """
        if self.settings.cold == "drop":
            return Counter()
        return Counter(layer for layer in self.routed() if layer.hot < layer.shape.experts)


def _decode_parts(work: _StageWork, device: DeviceSpec, speeds: ColdSpeeds) -> dict[str, float]:
    """Return the seconds of one token, by what they are spent on."""
    parts = {f"memory of {device.name}": work.token_read_seconds(device)}
    for layer, count in work.with_cold().items():
        choice = layer.decode_choice(speeds, work.settings.cold)
        name = _worker_name(device, choice)
        parts[name] = parts.get(name, 0.0) + count * layer.decode_seconds(speeds, choice)
    return parts


def _step_cost(work: _StageWork, device: DeviceSpec, speeds: ColdSpeeds) -> StepCost:
    """Return what a decode step takes, the context half full, by what grows with its rows."""
    rate, settings = memory_rate(device), work.settings
    core_s = sum(layer_read_seconds(layer, device, settings, 0.0) for layer in work.layers)
    kept_s = sum(row_move_bytes(layer, settings) for layer in work.layers) / rate
    whole_s = work.token_read_seconds(device) - work.head_read_seconds(device)
    routed = work.routed()
    picked = sum(x.hit_rate * x.shape.experts_used * x.shape.expert_values for x in routed)
    hot = sum(x.hot * x.shape.expert_values for x in routed)
    picks_s = whole_s - core_s
    cold_s = 0.0
    for layer, count in work.with_cold().items():
        choice = layer.decode_choice(speeds, settings.cold)
        cold_s += count * layer.decode_seconds(speeds, choice)
    operations = token_operations(work.layers)
    if work.has_head:
        operations += 2.0 * (work.model.head_values or work.model.embed_values)
    return StepCost(
        weights_s=core_s - kept_s + work.head_read_seconds(device),
        row_s=kept_s + cold_s,
        picks_s=picks_s,
        experts_s=picks_s * hot / picked if picked else 0.0,
        products_s=operations / compute_rate(device) if device.flops else 0.0,
    )


def _worker_name(device: DeviceSpec, choice: DecodeChoice) -> str:
    """Return what is busy with cold experts, as a plan's table says it."""
    if choice.path == "gpu":
        return f"link of {device.name}"
    shared = any(choice.in_place)
    return f"link of {device.name} and memory of the host" if shared else "memory of the host"


def _prefill_seconds(work: _StageWork, device: DeviceSpec, speeds: ColdSpeeds) -> float:
    """Return the seconds of one chunk: the slowest of memory, cold experts and arithmetic.

    Cold experts come to the device while it computes.
    """
    rows = work.settings.chunk
    times = [
        work.weight_read_bytes(device) / memory_rate(device),
        sum(n * layer.prefill_seconds(rows, speeds) for layer, n in work.with_cold().items()),
    ]
    if device.flops:
        times.append(rows * token_operations(work.layers) / compute_rate(device))
    return max(times)
