"""The cost model: all rates and constants by which times are predicted and paths are chosen.

Five callers share the functions here, so that predictions and decisions agree:

- the plan shares layers among devices by the time of reading them (`plan/sharing.py`);
- the plan predicts tokens per second of a layout (`plan/predict.py`);
- the decode rule chooses who computes a layer's cold experts in steps of few rows
  (`choose_decode`, called by `experts/store.py`);
- exchanges of hot and cold experts must save more time than they take
  (`exchange_saves_seconds`, called by `experts/exchange.py`);
- the prefill rule chooses which cold experts are copied to the GPU in steps of many rows and which
  the CPU computes (`most_counted_rows`, `left_to_cpu`, called by `experts/prefill.py`).

A *pick* is one expert that the router chose for one row. A pick is *hot* if its expert is in GPU
memory and *cold* if it is in host memory. Rates are bytes per second unless they say otherwise.

The speeds of a device come in its `DeviceSpec`: measured by `headroom calibrate`, listed in
`machine/catalogue.py`, or, where neither is known, assumed in `machine/assumed.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, exp
from typing import Literal

from headroom.machine.devices import DeviceSpec
from headroom.plan.lines import cached_token_bytes, core_bytes, embed_bytes, head_bytes
from headroom.plan.settings import PlanSettings
from headroom.plan.shape import F32_BYTES, LayerShape, ModelShape

ColdPath = Literal["gpu", "cpu", "drop"]  # who computes cold experts in decode steps

# Share of a listed bandwidth or peak that kernels reach, until `headroom calibrate` has measured
# the machine.
LISTED_SHARE = 0.7
# Seconds of an empty request to the CPU inside a decode step and its answer, until measured.
ASSUMED_HANDOVER_S = 10e-6
# Share of the CPU's speed in large plain products that its expert kernels reach on 4-bit tiles with
# eight rows an expert, until that is measured: 26 of 144 GFLOP/s of one core, measured once beside
# other work.
EXPERT_KERNEL_SHARE = 0.2

# Decode steps. Seconds of the two kernels that ask the CPU and add its answers: an estimate.
HANDOVER_KERNELS_S = 4e-6
# The GPU's kernels for shared and hot experts of one row, apart from the bytes of the experts. One
# layer of Qwen3.5-35B-A3B took 17 us (H200, 2026-11), including copies of ids and rows that no step
# makes; so less is counted, an estimate.
HOT_KERNELS_S = 12e-6

# Worker processes: what one step of one row spends outside of their layers. Two workers of one
# machine (2 cores of an AMD EPYC, SmolLM2-135M in Q4_1, one thread each, 199 steps; 2026-11-20).
# Two thirds of the machine were busy otherwise, so these are lower quartiles.
# From the engine's message to the first worker's layers (0.60 ms), and from the last one's logits
# to the engine that has them (0.16 and 0.24 ms):
WORKER_STEP_S = 1.0e-3
# Rows from one worker to the next over gloo: to send them (0.11 ms), and to wake the receiver (0.04
# ms; the median is 0.19 ms):
WORKER_HANDOVER_S = 0.15e-3

# Prefill steps. Measured by tests/gpu/cold_phases.py with the experts of one layer of
# Qwen3.5-35B-A3B and 32 to 512 rows (H200 with 16 cores, 2026-11-16).
# Rows to the CPU and its answers back:
PREFILL_HANDOVER_S = 300e-6
# What the CPU reaches while copies read the same memory, as a share of what calibrate measures
# without them: 59 to 79 of 77 to 88 GB/s, and 450 to 580 of 725 to 793 GFLOP/s with several picks
# an expert.
CPU_READ_SHARE = 0.8
CPU_FLOPS_SHARE = 0.6
# Seconds to wait for the GPU and to read the picks back from it:
READ_BACK_S = 30e-6
# Host time to prepare and enqueue the copies of one layer, during which no copy runs: 1.1 to 2 ms.
ENQUEUE_S = 1.2e-3
# One row in all parts of a layer but the experts. Copies go on meanwhile, unless they wait for the
# router. A prompt of 512 rows of Qwen3.5-35B-A3B with all experts hot took 0.72 ms a layer, and
# experts 0.36 ms of that (H200, 2026-11).
OTHER_PARTS_ROW_S = 0.7e-6
# Counting first is chosen only if it is predicted to take at most this share of the time of copying
# everything: the estimates may be wrong by the rest.
COUNTING_WORTH = 0.8
MOST_STEP_ROWS = 1 << 16  # rows of a step that the prefill rule considers
# Mean picks an expert at which `expected_counts` stops: with so many, a copy beats every CPU.
MOST_MEAN_PICKS = 700.0

# An exchange of a hot and a cold expert must save the time of its copies within so many tokens:
# about two answers. A weighing, not a measurement: later texts may choose other experts.
EXCHANGE_HORIZON_TOKENS = 2048

# The share of the hot experts that a chunk of twice the length must keep to be chosen. A weighing,
# not a measurement: a prompt that copies its cold experts once a chunk takes twice as long in
# chunks of half the length, and 3 % fewer hot experts slow decode by 0.5 to 3 % by this model
# (Qwen3.6-35B-A3B in Q4_K_M and Q8_0 on the catalogue's 12 and 24 GB cards with 64 GiB of host
# memory).
KEPT_FOR_CHUNK = 0.97

# Bytes of a value in the experts with which `headroom calibrate` measures a CPU's kernels: two
# matrices in Q4_K and one in Q6_K, of 144 and 210 bytes for 256 values.
CALIBRATED_VALUE_BYTES = (2 * 144 + 210) / (3 * 256)
LEAST_PLAIN_BYTES = 2  # of a value that kernels need not unpack: f16, bf16, f32

# Sequences are shared among the steps of several stages only if that is predicted to take at most
# this share of the time of one step for all: the estimates may be wrong by the rest.
SHARING_WORTH = 0.9


def memory_rate(device: DeviceSpec) -> float:
    """Return the bytes per second at which a device's kernels read its own memory."""
    return device.bandwidth if device.measured else device.bandwidth * LISTED_SHARE


def compute_rate(device: DeviceSpec) -> float:
    """Return the operations per second of a device's products; 0 where nothing is known."""
    return device.flops if device.measured else device.flops * LISTED_SHARE


# ----------------------------------------------------------------------- reading layers


def weight_read_bytes(held: int, values: int, device: DeviceSpec, settings: PlanSettings) -> int:
    """Return the bytes that a step moves to read weights of `values` values, `held` bytes long.

    Kernels that unpack weights in every step also write them in float32 and read them again.
    """
    return held + (2 * values * F32_BYTES if _unpacks(device, settings) else 0)


def head_read_bytes(model: ModelShape, device: DeviceSpec, settings: PlanSettings) -> int:
    """Return the bytes that a step moves to read the head."""
    held = (embed_bytes if model.tied else head_bytes)(model, settings)
    values = model.embed_values if model.tied else model.head_values
    return weight_read_bytes(held, values, device, settings)


def head_read_seconds(model: ModelShape, device: DeviceSpec, settings: PlanSettings) -> float:
    """Return the time in which a decode step reads the head."""
    held = (embed_bytes if model.tied else head_bytes)(model, settings)
    values = model.embed_values if model.tied else model.head_values
    read_s = head_read_bytes(model, device, settings) / memory_rate(device)
    return read_s + conversion_seconds(held, values, device, settings)


def conversion_seconds(
    held: int, values: float, device: DeviceSpec, settings: PlanSettings
) -> float:
    """Return the seconds by which turning weights into floats outlasts reading their bytes.

    The C++ kernels of a CPU do this with every packed weight to multiply in f32. `headroom
    calibrate` measures how fast, with the kernels for experts; 0 where it was not measured.
    """
    native = device.kind == "cpu" and device.native and settings.kernels != "reference"
    packed = settings.weights == "packed" and held < LEAST_PLAIN_BYTES * values
    if not (native and packed and settings.compute_type == "f32" and device.experts):
        return 0.0
    return max(0.0, values * CALIBRATED_VALUE_BYTES / device.experts - held / memory_rate(device))


def _unpacks(device: DeviceSpec, settings: PlanSettings) -> bool:
    """Return whether kernels unpack weights in every step: the reference kernels of a CPU do."""
    plain = device.kind == "cpu" and (not device.native or settings.kernels == "reference")
    return plain and settings.weights == "packed"


def core_read_bytes(layer: LayerShape, device: DeviceSpec, settings: PlanSettings) -> int:
    """Return the bytes that a step moves to read a layer's weights but routed experts."""
    held = core_bytes([layer], settings)
    return weight_read_bytes(held, layer.core_values, device, settings)


def cache_read_bytes(layer: LayerShape, settings: PlanSettings, tokens: float) -> float:
    """Return the bytes of keys and values that a row reads in a layer after so many tokens.

    A layer without a cache of its own reads the cache of another layer.
    """
    seen = min(tokens, layer.window) if layer.window else tokens
    return seen * cached_token_bytes(layer, settings.k_type, settings.v_type)


def state_move_bytes(layer: LayerShape) -> int:
    """Return the bytes of a sequence's recurrent state that a step moves: all, read and written."""
    return 2 * (layer.state_values + layer.conv_values) * F32_BYTES


def row_move_bytes(layer: LayerShape, settings: PlanSettings) -> float:
    """Return the bytes of caches and states that a row of a decode step moves in a layer.

    The context is half full.
    """
    cache = cache_read_bytes(layer, settings, max(1, settings.context // 2))
    return cache + state_move_bytes(layer)


def layer_read_seconds(
    layer: LayerShape, device: DeviceSpec, settings: PlanSettings, hit_rate: float = 1.0
) -> float:
    """Return the time in which a device reads what a decode step of one token needs of a layer.

    The context is half full. Of the token's routed experts the share `hit_rate` is in the device's
    memory; the time of the others is not part of the result (`cold_seconds`).
    """
    core = core_read_bytes(layer, device, settings)
    picks = hit_rate * layer.experts_used
    experts = picks * layer.expert_bytes
    read_s = (core + row_move_bytes(layer, settings) + experts) / memory_rate(device)
    held, values = core_bytes([layer], settings), layer.core_values
    return (
        read_s
        + conversion_seconds(held, values, device, settings)
        + conversion_seconds(int(experts), picks * layer.expert_values, device, settings)
    )


def worker_step_seconds(workers: int) -> float:
    """Return what a step spends on its way from the engine through worker processes and back."""
    return WORKER_STEP_S + (workers - 1) * WORKER_HANDOVER_S if workers else 0.0


def token_operations(layers: Sequence[LayerShape]) -> float:
    """Return the operations of one token's matrix products in these layers."""
    values = sum(x.core_values + x.experts_used * x.expert_values for x in layers)
    return 2.0 * values


# -------------------------------------------------------------------------- cold experts


@dataclass(frozen=True, slots=True)
class ColdSpeeds:
    """How fast a GPU and its host's CPU compute experts."""

    gpu: float  # kernels of the GPU that read its own memory
    link: float  # kernels of the GPU that read host memory in place; 0: they cannot
    cpu: float  # the CPU's expert kernels that read host memory; 0: the CPU is not asked
    handover_s: float  # seconds of an empty request of the CPU in a decode step and its answer
    copy: float = 0.0  # copies from host memory to the GPU
    cpu_flops: float = 0.0  # operations per second of the CPU's expert kernels, some rows an expert
    measured: bool = False  # on this machine, by headroom calibrate

    @property
    def cpu_takes_prefill(self) -> bool:
        """Whether the CPU may compute experts in prefill steps."""
        return self.cpu > 0 and self.cpu_flops > 0

    @property
    def without_cpu(self) -> "ColdSpeeds":
        """The speeds of this machine if the CPU is not asked."""
        return replace(self, cpu=0.0, cpu_flops=0.0)


def cold_speeds_of(gpu: DeviceSpec, host: DeviceSpec) -> ColdSpeeds:
    """Return the measured speeds of a GPU and its host, or estimates where none were measured."""
    copy = gpu.link if gpu.measured else gpu.link * LISTED_SHARE
    return ColdSpeeds(
        gpu=memory_rate(gpu),
        link=gpu.link_read or copy,
        cpu=(host.experts or memory_rate(host)) if host.native else 0.0,
        handover_s=gpu.handover_s or ASSUMED_HANDOVER_S,
        copy=copy,
        cpu_flops=host.expert_flops or EXPERT_KERNEL_SHARE * compute_rate(host),
        measured=bool(gpu.link_read and host.experts),
    )


def decode_speeds(speeds: ColdSpeeds, cold: str, pinned: bool) -> ColdSpeeds:
    """Return the speeds, 0 for paths that may not be used for cold experts in decode steps.

    `cold` is the setting of that name. A GPU reads host memory in place only if it is pinned. If
    neither GPU nor CPU may read the experts in place, they are copied one by one.
    """
    cpu = 0.0 if cold == "gpu" else speeds.cpu
    link = speeds.link if pinned and cold != "cpu" else 0.0
    return replace(speeds, cpu=cpu, link=link if link or cpu else speeds.copy)


def prefill_speeds(speeds: ColdSpeeds, cold: str) -> ColdSpeeds:
    """Return the speeds that the prefill rule uses under the setting `cold`.

    With `gpu` or `drop` the user wants nothing from the CPU.
    """
    return speeds if cold in ("auto", "cpu") else speeds.without_cpu


# ---------------------------------------------------------------------------- the decode rule


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Who computes a layer's cold picks in decode steps."""

    path: ColdPath
    # Entry n: of n cold picks of a row, those whose experts the GPU reads in place.
    in_place: tuple[int, ...]


def row_seconds(speeds: ColdSpeeds, expert_bytes: int, hot: int, cold: int, in_place: int) -> float:
    """Return the time of one row's experts if the GPU reads `in_place` of the cold ones.

    GPU and CPU work at the same time; the slower one counts. Infinite if a side is asked that
    cannot do it.
    """
    by_cpu = cold - in_place
    if (by_cpu and not speeds.cpu) or (in_place and not speeds.link):
        return float("inf")
    gpu_s = HOT_KERNELS_S + hot * expert_bytes / speeds.gpu
    if in_place:
        gpu_s += in_place * expert_bytes / speeds.link
    cpu_s = speeds.handover_s + by_cpu * expert_bytes / speeds.cpu if by_cpu else 0.0
    return max(gpu_s, cpu_s)


def best_in_place(speeds: ColdSpeeds, expert_bytes: int, used: int) -> tuple[int, ...]:
    """Return, for 0 to `used` cold picks of a row, how many of them the GPU should read."""
    return tuple(
        min(
            range(cold + 1),
            key=lambda in_place: row_seconds(speeds, expert_bytes, used - cold, cold, in_place),
        )
        for cold in range(used + 1)
    )


def link_shares(
    speeds: ColdSpeeds, expert_bytes: int, used: int, most: int, *, fills: bool = False
) -> tuple[int, ...]:
    """Return, for 0 to `most` misses of a step, how many of them should cross the link.

    A step of several rows may miss more experts than one row uses. GPU and CPU work at the same
    time; one more miss never makes the link's best share smaller, and at most by one larger.

    With `fills`, experts that cross the link may stay in GPU memory. Then the first miss always
    crosses: most steps have no other, and a cache that is never filled loses more (of a trace as of
    Qwen3-30B-A3B, 40 % resident, one sequence, 6 % are misses with it and 10 % without).
    """
    shares = [0, 1] if fills and most else [0]
    for misses in range(len(shares), most + 1):
        hot = max(0, used - misses)
        nearby = (shares[-1], shares[-1] + 1)
        shares.append(min(nearby, key=lambda n: row_seconds(speeds, expert_bytes, hot, misses, n)))
    return tuple(shares)


def decode_seconds(
    speeds: ColdSpeeds, expert_bytes: int, hit_rate: float, choice: DecodeChoice
) -> float:
    """Return the expected time of one row's experts, each pick hot with probability `hit_rate`."""
    used = len(choice.in_place) - 1
    seconds = HANDOVER_KERNELS_S if choice.path == "cpu" else 0.0
    for cold, in_place in enumerate(choice.in_place):
        chance = comb(used, cold) * (1 - hit_rate) ** cold * hit_rate ** (used - cold)
        if chance:
            read = 0 if choice.path == "drop" else cold
            seconds += chance * row_seconds(speeds, expert_bytes, used - cold, read, in_place)
    return seconds


def cold_seconds(
    speeds: ColdSpeeds, expert_bytes: int, hit_rate: float, choice: DecodeChoice
) -> float:
    """Return the expected time that cold picks add to the time of one row's hot picks."""
    used = len(choice.in_place) - 1
    hot_s = HOT_KERNELS_S + used * hit_rate * expert_bytes / speeds.gpu
    return max(0.0, decode_seconds(speeds, expert_bytes, hit_rate, choice) - hot_s)


def choose_decode(
    speeds: ColdSpeeds,
    expert_bytes: int,
    used: int,
    hit_rate: float,
    cold: str = "auto",
    even_rate: float | None = None,
) -> DecodeChoice:
    """Return who computes a layer's cold picks: as the setting `cold` says, or the quickest way.

    Under `auto` the CPU is asked if it saves more than the two kernels that ask it take; it then
    shares the cold picks with the GPU where the GPU may read host memory. `even_rate` is the hit
    rate if all experts are chosen equally often, which a text may bring. If the CPU would save more
    then than the kernels cost until then, they are part of the step, too: the share of the CPU
    follows its speed (`experts/controller.py`), but a captured step gets no new kernels.
    """
    by_gpu = DecodeChoice("gpu", tuple(range(used + 1)))
    none = (0,) * (used + 1)
    if cold == "gpu":
        return by_gpu
    if cold == "cpu":
        return DecodeChoice("cpu", none)
    if cold == "drop":
        return DecodeChoice("drop", none)
    shared = DecodeChoice("cpu", best_in_place(speeds, expert_bytes, used))

    def saved_s(rate: float) -> float:
        alone_s = decode_seconds(speeds, expert_bytes, rate, by_gpu)
        return alone_s - decode_seconds(speeds, expert_bytes, rate, shared)

    now_s, even_s = saved_s(hit_rate), saved_s(hit_rate if even_rate is None else even_rate)
    return shared if now_s > 0 or (even_s > 0 and even_s > -now_s) else by_gpu


# ----------------------------------------------------------------------------------- exchanges


def exchange_speeds(speeds: ColdSpeeds | None, cold: str, pinned: bool) -> ColdSpeeds | None:
    """Return the speeds by which exchanges must pay under the setting `cold`.

    None if cold experts take no time, because they are left out, or if no speeds are known.
    """
    if speeds is None or cold == "drop":
        return None
    return decode_speeds(speeds, cold, pinned)


def exchange_saves_seconds(speeds: ColdSpeeds, expert_bytes: int, picks_per_token: float) -> float:
    """Return the time that an exchange saves over EXCHANGE_HORIZON_TOKENS tokens.

    `picks_per_token` is how many cold picks of a token become hot ones. A cold pick is read by GPU
    and CPU together where both may; rows of a step that share an expert are not considered.
    """
    pick_s = expert_bytes / (speeds.link + speeds.cpu) - expert_bytes / speeds.gpu
    return EXCHANGE_HORIZON_TOKENS * picks_per_token * pick_s


def exchange_takes_seconds(speeds: ColdSpeeds, copied_bytes: int) -> float:
    """Return the time in which an exchange sends so many bytes over the link."""
    return copied_bytes / (speeds.copy or speeds.link)


# --------------------------------------------------------------------------- the prefill rule


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """Bytes of one expert, and the operations of one pick of it."""

    bytes: int
    operations: int


def expert_operations(width: int, hidden: int) -> int:
    """Return the operations of one pick: three products, one multiply and one add a weight."""
    return 6 * width * hidden


@dataclass(frozen=True, slots=True)
class ColdLayer:
    """The cold experts of a layer, and what a prefill step expects of them."""

    size: ExpertSize
    experts: int  # that are cold
    picks: float  # cold picks expected of one row
    ahead_bytes: int  # staging bytes: the most that is copied before the step reaches the layer


def most_counted_rows(layer: ColdLayer, speeds: ColdSpeeds) -> int:
    """Return the most rows of a step that should wait for the picks before it copies experts."""
    low, high = 0, MOST_STEP_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        if pays_to_count(middle, layer, speeds):
            low = middle
        else:
            high = middle - 1
    return low


def pays_to_count(rows: int, layer: ColdLayer, speeds: ColdSpeeds) -> bool:
    """Return whether a step should wait for its picks before it copies experts.

    Without waiting, all cold experts are copied, beginning while the layer before still computes.
    With waiting, unused experts are not copied, and the CPU takes those that `left_to_cpu` gives
    it; but no copy of this layer begins before its router is done.

    The estimate leaves out three things. Cold experts are taken to differ in their picks by chance
    alone; where some are chosen far less than others, counting is worth more. A GPU that computes
    for longer than copies take gains nothing from fewer copies. Kernels that were launched ahead
    run out while the host waits.
    """
    counted_s = counted_seconds(rows, layer, speeds)
    return counted_s < COUNTING_WORTH * streamed_seconds(layer, speeds)


def prefill_seconds(rows: int, layer: ColdLayer, speeds: ColdSpeeds) -> float:
    """Return the time of a layer's cold experts in a step of many rows, by the way it takes."""
    if pays_to_count(rows, layer, speeds):
        return counted_seconds(rows, layer, speeds)
    return streamed_seconds(layer, speeds)


def streamed_seconds(layer: ColdLayer, speeds: ColdSpeeds) -> float:
    """Return the time to copy all cold experts of a layer to the GPU."""
    return layer.experts * layer.size.bytes / speeds.copy


def counted_seconds(rows: int, layer: ColdLayer, speeds: ColdSpeeds) -> float:
    """Return the time of a layer's cold experts if the step waits for its picks first."""
    counts = expected_counts(rows * layer.picks, layer.experts)
    lost_s = min(rows * OTHER_PARTS_ROW_S, layer.ahead_bytes / speeds.copy)
    return READ_BACK_S + ENQUEUE_S + lost_s + _share(counts, layer.size, speeds).seconds


def expected_counts(picks: float, experts: int) -> dict[int, int]:
    """Return the picks that each expert gets if chance alone decides, by expert, fewest first.

    Expert i of n gets the (i + 0.5) / n quantile of a Poisson distribution. The sum may differ
    from `picks` by a few.
    """
    mean = min(picks / max(1, experts), MOST_MEAN_PICKS)
    counts: dict[int, int] = {}
    count, chance = 0, exp(-mean)
    reached = chance
    for expert in range(experts):
        while reached < (expert + 0.5) / experts and chance:
            count += 1
            chance *= mean / count
            reached += chance
        counts[expert] = count
    return counts


def left_to_cpu(counts: Mapping[int, int], size: ExpertSize, speeds: ColdSpeeds) -> frozenset[int]:
    """Return the cold experts that the CPU should compute, of those that were picked.

    `counts` has the picks of each cold expert. The CPU takes the experts with the fewest picks, as
    many as let the slower of copies and CPU finish soonest; both work at the same time.
    """
    return _share(counts, size, speeds).by_cpu


def prefill_cpu_seconds(counts: Iterable[int], size: ExpertSize, speeds: ColdSpeeds) -> float:
    """Return the time in which the CPU computes experts with so many picks, while copies run."""
    read_s = size.bytes / (CPU_READ_SHARE * speeds.cpu)
    pick_s = size.operations / (CPU_FLOPS_SHARE * speeds.cpu_flops)
    return sum(max(read_s, count * pick_s) for count in counts)


@dataclass(frozen=True, slots=True)
class _Share:
    by_cpu: frozenset[int]  # experts that the CPU computes; the others are copied
    seconds: float  # until both sides are done


def _share(counts: Mapping[int, int], size: ExpertSize, speeds: ColdSpeeds) -> _Share:
    """Return the quickest way to share picked experts between copies and the CPU."""
    picked = sorted((count, expert) for expert, count in counts.items() if count)
    copy_s = size.bytes / speeds.copy
    best, best_s = 0, len(picked) * copy_s
    if not speeds.cpu_takes_prefill:
        return _Share(frozenset(), best_s)
    cpu_s = PREFILL_HANDOVER_S
    for taken, (count, _) in enumerate(picked, 1):
        cpu_s += prefill_cpu_seconds([count], size, speeds)
        if cpu_s >= best_s:
            break  # more experts take the CPU longer still
        slower = max(cpu_s, (len(picked) - taken) * copy_s)
        if slower < best_s:
            best, best_s = taken, slower
    return _Share(frozenset(expert for _, expert in picked[:best]), best_s)
