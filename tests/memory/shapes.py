"""Shapes and devices that the planner's tests share; sizes as published for the real models."""

from headroom.formats.quants import BF16, Q4_1, Q4_K, Q6_K, Q8_0
from headroom.memory.devices import DeviceSpec
from headroom.memory.shape import LayerShape, ModelShape
from headroom.units import GIB


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
    )


def laguna() -> ModelShape:
    """Laguna-XS.2 as Q4_K_M: window layers, one dense layer, 39 layers of 256 experts."""
    return ModelShape(
        name="laguna-xs.2",
        architecture="laguna",
        hidden=2048,
        vocab=100352,
        context_limit=131072,
        layers=tuple(_laguna_layer(index) for index in range(40)),
        embed_bytes=Q4_K.bytes_for(100352 * 2048),
        embed_values=100352 * 2048,
        head_bytes=Q6_K.bytes_for(100352 * 2048),
        head_values=100352 * 2048,
        norm_bytes=2048 * 4,
        norm_values=2048,
        ffn_width=8192,
    )


def _laguna_layer(index: int) -> LayerShape:
    heads, dense = 48 if index % 4 == 0 else 64, index == 0
    ffn = 8192 if dense else 512
    values = 2 * heads * 128 * 2048 + 2 * 1024 * 2048 + heads * 2048 + 3 * ffn * 2048
    floats = 2 * 2048 + 2 * 128 + (0 if dense else 256 * 2048 + 256)
    wide = index < 5 or index >= 35 or (index - 5) % 3 == 2  # layers whose down is Q6_K
    matrix = 512 * 2048
    expert = 2 * Q4_K.bytes_for(matrix) + (Q6_K if wide else Q4_K).bytes_for(matrix)
    return LayerShape(
        kind="full" if index % 4 == 0 else "window",
        window=0 if index % 4 == 0 else 512,
        core_bytes=Q4_K.bytes_for(values) + floats * 4,
        core_values=values + floats,
        float_values=floats,
        query_heads=heads,
        kv_heads=8,
        key_dim=128,
        value_dim=128,
        ffn_width=ffn,
        experts=0 if dense else 256,
        experts_used=0 if dense else 8,
        expert_width=0 if dense else 512,
        expert_bytes=0 if dense else expert,
        expert_values=0 if dense else 3 * matrix,
    )


def qwen35_27b() -> ModelShape:
    """Qwen3.5-27B in BF16: 16 layers of attention, 48 recurrent ones."""
    return ModelShape(
        name="qwen3.5-27b",
        architecture="qwen35",
        hidden=5120,
        vocab=248320,
        context_limit=262144,
        layers=tuple(_qwen35_layer(index) for index in range(64)),
        embed_bytes=BF16.bytes_for(248320 * 5120),
        embed_values=248320 * 5120,
        head_bytes=BF16.bytes_for(248320 * 5120),
        head_values=248320 * 5120,
        norm_bytes=5120 * 4,
        norm_values=5120,
        ffn_width=17408,
    )


def _qwen35_layer(index: int) -> LayerShape:
    ffn = 3 * 5120 * 17408
    if (index + 1) % 4 == 0:
        values = ffn + 5120 * (2 * 24 * 256 + 2 * 4 * 256 + 24 * 256)
        return LayerShape(
            kind="full",
            core_bytes=BF16.bytes_for(values),
            core_values=values,
            query_heads=24,
            kv_heads=4,
            key_dim=256,
            value_dim=256,
            ffn_width=17408,
        )
    values = ffn + 5120 * (10240 + 6144 + 96 + 6144)
    return LayerShape(
        kind="recurrent",
        core_bytes=BF16.bytes_for(values),
        core_values=values,
        ffn_width=17408,
        state_values=48 * 128 * 128,
        conv_values=3 * 10240,
        mixer_width=2 * 10240 + 2 * 6144,
        verify_values=16 * 128 + 48 * 128,
    )
