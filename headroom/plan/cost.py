"""Cost: tokens per second that a plan predicts, from the bytes it moves over each link."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.machine.devices import LISTED_SHARE, DeviceSpec
from headroom.plan.cost_model import ColdSpeeds, layer_seconds, speeds_of, usable_speeds
from headroom.plan.layout import DevicePlan, Layout, Pinning
from headroom.plan.lines import F32_BYTES, core_bytes, embed_bytes, head_bytes, kv_token_bytes
from headroom.plan.settings import PlanSettings
from headroom.plan.shape import LayerShape, ModelShape


@dataclass(frozen=True, slots=True)
class Prediction:
    """What speed to expect, and what keeps it from being higher."""

    decode_tokens_per_s: float  # one sequence, the context half full
    prefill_tokens_per_s: float
    bound_by: str  # the largest part of a decode step
    estimate: bool  # False once the speeds of all devices were measured


def predict(
    model: ModelShape, devices: Sequence[DeviceSpec], settings: PlanSettings, layout: Layout
) -> Prediction:
    """Return the speed of a layout; layers run one after the other, so times add up."""
    by_name = {device.name: device for device in devices}
    host = next((device for device in devices if device.kind == "cpu"), None)
    pinned = layout.host.pinning in (None, Pinning.PINNED)
    decode: dict[str, float] = {}
    prefill_s = 0.0
    for plan in layout.devices:
        device = by_name[plan.name]
        work = _StageWork(model, plan, settings)
        speeds = speeds_of(device, host or device)
        small = usable_speeds(speeds, settings.cold, pinned)
        for name, seconds in _decode_parts(work, device, small).items():
            decode[name] = decode.get(name, 0.0) + seconds
        prefill_s += _prefill_seconds(work, device, speeds)
    used = {plan.name for plan in layout.devices}
    if host is not None and any(line.name == "cold_experts" for line in layout.host.lines):
        used.add(host.name)
    measured = all(device.measured for device in devices if device.name in used)
    return Prediction(
        decode_tokens_per_s=1 / sum(decode.values()),
        prefill_tokens_per_s=settings.chunk / prefill_s,
        bound_by=max(decode, key=lambda name: decode[name]),
        estimate=not measured,
    )


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

    def weights(self, *, unpacking: bool) -> int:
        """Return the bytes read for all weights but experts; packed ones may be unpacked first."""
        held = core_bytes(self.layers, self.settings)
        values = sum(layer.core_values for layer in self.layers)
        if self.has_head:
            model = self.model
            held += (embed_bytes if model.tied else head_bytes)(model, self.settings)
            values += model.embed_values if model.tied else model.head_values
        return held + (2 * values * F32_BYTES if unpacking else 0)

    def remembered(self) -> int:
        """Return the bytes of cache and state that one token reads, the context half full."""
        half, total = max(1, self.settings.context // 2), 0
        for layer in self.layers:
            seen = min(half, layer.window) if layer.kind == "window" else half
            total += seen * kv_token_bytes(layer, self.settings.k_type, self.settings.v_type)
            total += 2 * (layer.state_values + layer.conv_values) * F32_BYTES  # read and written
        return total

    def hot_experts(self, *, every: bool) -> float:
        """Return the bytes of hot experts that one token visits, or of every one."""
        return sum(
            hot / layer.experts * layer.expert_bytes * (layer.experts if every else used)
            for layer, hot, used in self._routed()
        )

    def cold_experts(self) -> list[float]:
        """Return the bytes of cold experts that one token visits, by layer that has some.

        All experts are taken to be chosen equally often.
        """
        if self.settings.cold == "drop":
            return []
        shares = ((layer, 1 - hot / layer.experts, used) for layer, hot, used in self._routed())
        return [share * used * layer.expert_bytes for layer, share, used in shares if share]

    def cold_of_chunk(self) -> float:
        """Return the bytes of cold experts that the rows of a chunk visit, each of them once."""
        if self.settings.cold == "drop":
            return 0.0
        total = 0.0
        for layer, hot, used in self._routed():
            unused = (1 - used / layer.experts) ** self.settings.chunk
            total += (layer.experts - hot) * layer.expert_bytes * (1 - unused)
        return total

    def _routed(self) -> list[tuple[LayerShape, int, int]]:
        """Layers with experts, how many of those are hot, and how many a token visits."""
        counts = self.plan.hot_by_layer or (0,) * len(self.layers)
        both = zip(self.layers, counts, strict=True)
        return [(layer, hot, layer.experts_used) for layer, hot in both if layer.experts]

    def operations(self) -> float:
        """Return the multiplications and additions of one token."""
        values = sum(x.core_values + x.experts_used * x.expert_values for x in self.layers)
        return 2.0 * values


def _decode_parts(work: _StageWork, device: DeviceSpec, speeds: ColdSpeeds) -> dict[str, float]:
    """Return the seconds of one token by what they are spent on."""
    unpacking = _unpacks(device, work.settings)
    own = work.weights(unpacking=unpacking) + work.remembered()
    own_s = (own + work.hot_experts(every=False)) / _reached(device, device.bandwidth)
    parts = {f"memory of {device.name}": own_s}
    names = {
        "link": f"link of {device.name}",
        "cpu": "memory of the host",
        "both": f"link of {device.name} and memory of the host",
    }
    for cold_bytes in work.cold_experts():
        worker, seconds = layer_seconds(speeds, cold_bytes)
        parts[names[worker]] = parts.get(names[worker], 0.0) + seconds
    return parts


def _prefill_seconds(work: _StageWork, device: DeviceSpec, speeds: ColdSpeeds) -> float:
    """Return the seconds of one chunk: the slowest of memory, link and arithmetic.

    Cold experts are copied to the device while it computes.
    """
    unpacking = _unpacks(device, work.settings)
    moved = work.weights(unpacking=unpacking) + work.hot_experts(every=True)
    times = [moved / _reached(device, device.bandwidth)]
    if cold := work.cold_of_chunk():
        times.append(cold / speeds.copy)
    if device.flops:
        times.append(work.settings.chunk * work.operations() / _reached(device, device.flops))
    return max(times)


def _unpacks(device: DeviceSpec, settings: PlanSettings) -> bool:
    """Whether kernels unpack weights at every step: the plain ones of a CPU do."""
    plain = device.kind == "cpu" and (not device.native or settings.kernels == "reference")
    return plain and settings.weights == "packed"


def _reached(device: DeviceSpec, listed: float) -> float:
    return listed if device.measured else listed * LISTED_SHARE
