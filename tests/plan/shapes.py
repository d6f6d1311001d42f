"""Shapes and devices that the planner's tests share; sizes as published for the real models."""

from collections.abc import Sequence

from headroom.formats.quants import Q4_1, Q8_0
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import Plan, make_plan
from headroom.plan.settings import PlanSettings, PlanStage
from headroom.plan.shape import LayerPadding, LayerShape, ModelShape, OuterPadding, Padding
from headroom.units import GIB, MIB

KINDS = ("full", "window", "recurrent")
# Sizes that no sum of the others makes up for.
EMBED, HEAD, LOOKUP, NORM = 7_000_003 * 32, 11_000_027 * 32, 13_000_027 * 32, 4096 * 4


def cpu(gibibytes: float, taken: float = 0.0) -> DeviceSpec:
    """Return a CPU with so much memory, some of it taken by others."""
    total = int(gibibytes * GIB)
    return DeviceSpec(
        name="cpu",
        kind="cpu",
        total_bytes=total,
        available_bytes=total - int(taken * GIB),
        cores=4,
        flops=2e11,
    )


def gpu(gibibytes: float, name: str = "cuda:0", sm: int = 86) -> DeviceSpec:
    """Return an NVIDIA GPU with so much memory."""
    total = int(gibibytes * GIB)
    return DeviceSpec(
        name=name,
        kind="cuda",
        total_bytes=total,
        available_bytes=total,
        bandwidth=936e9,
        link=25e9,
        flops=7e13,
        sm=sm,
    )


def host(gibibytes: float) -> DeviceSpec:
    """Return host memory that runs no layers."""
    total = int(gibibytes * GIB)
    return DeviceSpec(
        name="host",
        kind="cpu",
        total_bytes=total,
        available_bytes=total,
        cores=8,
        runs_layers=False,
    )


def settings(**changes: object) -> PlanSettings:
    """Return settings of one sequence of 8192 tokens on the reference kernels, with changes."""
    values: dict[str, object] = {
        "context": 8192, "parallel": 1, "chunk": 512, "cache_tokens": 8192, "k_type": "f16",
        "v_type": "f16", "compute_type": "f32", "weights": "packed", "threads": 1,
    }  # fmt: skip
    return PlanSettings(**(values | changes))  # type: ignore[arg-type]


def smollm2() -> ModelShape:
    """SmolLM2-135M with matrices in Q4_1, the table in Q8_0 and norms in f32."""
    hidden, ffn, vocab = 576, 1536, 49152
    matrices = 2 * hidden * hidden + 2 * hidden * 192 + 3 * hidden * ffn
    layer = LayerShape(
        kind="full",
        core_bytes=Q4_1.bytes_for(matrices) + 2 * hidden * 4,
        core_values=matrices + 2 * hidden,
        float_values=2 * hidden,
        query_heads=9,
        kv_heads=3,
        key_dim=64,
        value_dim=64,
        ffn_width=ffn,
        # 576 columns are 192 short of three records of a GPU's tiles.
        tiles=LayerPadding(Padding(4608 * Q4_1.bytes_for(192))),
    )
    return ModelShape(
        name="smollm2",
        architecture="llama",
        hidden=hidden,
        vocab=vocab,
        context_limit=8192,
        layers=(layer,) * 30,
        embed_bytes=Q8_0.bytes_for(vocab * hidden),
        embed_values=vocab * hidden,
        norm_bytes=hidden * 4,
        norm_values=hidden,
        ffn_width=ffn,
        tiles=OuterPadding(embed=Padding(vocab * Q8_0.bytes_for(192))),
    )


def laguna() -> ModelShape:
    """Laguna-XS.2 as Q4_K_M: window layers, one dense layer, 39 layers of 256 experts."""
    return known_shape("laguna-xs.2:q4_k_m")


def qwen35_27b() -> ModelShape:
    """Qwen3.5-27B in BF16: 16 layers of attention, 48 recurrent ones."""
    return known_shape("qwen3.5-27b:bf16")


def layered(experts: tuple[int, ...], tied: bool, lookup: bool) -> ModelShape:
    """Return a model with a layer for each number of experts; every layer has its own sizes."""
    layers = tuple(
        LayerShape(
            kind=KINDS[index % 3],  # type: ignore[arg-type]
            core_bytes=(20 + index) * MIB + 1,
            core_values=40 * MIB,
            query_heads=8,
            kv_heads=8,
            key_dim=64,
            value_dim=64,
            window=512 if index % 3 == 1 else 0,
            ffn_width=1024,
            experts=count,
            experts_used=min(2, count),
            expert_width=512 if count else 0,
            expert_bytes=(3 + index) * MIB + 256 if count else 0,
            state_values=4096 if index % 3 == 2 else 0,
            state_heads=4,
            mixer_width=1024,
        )
        for index, count in enumerate(experts)
    )
    return ModelShape(
        name="layered",
        architecture="llama",
        hidden=512,
        vocab=8192,
        context_limit=4096,
        layers=layers,
        embed_bytes=EMBED,
        embed_values=EMBED,
        head_bytes=0 if tied else HEAD,
        head_values=0 if tied else HEAD,
        lookup_bytes=LOOKUP if lookup else 0,
        lookup_values=LOOKUP if lookup else 0,
        norm_bytes=NORM,
        norm_values=NORM // 4,
        ffn_width=1024,
    )


def hybrid_plan(gibibytes: float = 12) -> Plan:
    """Return the plan of a model whose experts a GPU of so much memory may not hold all."""
    return make_plan([laguna()], [gpu(gibibytes), host(64)], Options())


def stages_of(
    model: ModelShape, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> list[PlanStage]:
    """Return the devices that run layers, all with the same settings."""
    return [PlanStage(device, settings, model) for device in devices if device.runs_layers]
