"""Known models: dimensions that a plan can be made from before anything is downloaded."""

from dataclasses import replace

from headroom.families.tables import Dims, pattern
from headroom.formats.mixes import MIXES

_QWEN35 = Dims(
    architecture="qwen35", layers=64, hidden=5120, vocab=248320, context=262144, heads=24,
    kv_heads=4, head_dim=256, ffn=17408, kinds=pattern(64, 4, "recurrent"), state_heads=48,
)  # fmt: skip
_QWEN35_MOE = Dims(
    architecture="qwen35moe", layers=40, hidden=2048, vocab=248320, context=262144, heads=16,
    kv_heads=2, head_dim=256, kinds=pattern(40, 4, "recurrent"), state_heads=32, experts=256,
    experts_used=8, expert_ffn=512, shared_ffn=512,
)  # fmt: skip
_GEMMA4_31B = Dims(
    architecture="gemma4", layers=60, hidden=5376, vocab=262144, context=262144, tied=True,
    heads=32, kv_heads=16, head_dim=256, ffn=21504, kinds=pattern(60, 6, "window"), window=1024,
    full_kv_heads=4, full_head_dim=512, keys_are_values=True, fused_experts=True,
)  # fmt: skip
_DRAFT_27B = Dims(
    architecture="dflash", layers=5, hidden=5120, vocab=248320, context=262144, heads=32,
    kv_heads=8, head_dim=128, ffn=17408, taps=5,
)  # fmt: skip

KNOWN: dict[str, Dims] = {
    "smollm2-135m": Dims(
        architecture="llama", layers=30, hidden=576, vocab=49152, context=8192, tied=True,
        heads=9, kv_heads=3, head_dim=64, ffn=1536,
    ),
    "qwen3-0.6b": Dims(
        architecture="qwen3", layers=28, hidden=1024, vocab=151936, context=40960, tied=True,
        heads=16, kv_heads=8, head_dim=128, ffn=3072,
    ),
    "qwen3-30b-a3b": Dims(
        architecture="qwen3moe", layers=48, hidden=2048, vocab=151936, context=40960, heads=32,
        kv_heads=4, head_dim=128, experts=128, experts_used=8, expert_ffn=768,
    ),
    "qwen3.5-27b": _QWEN35,
    "qwen3.6-27b": _QWEN35,
    "qwen3.5-35b-a3b": _QWEN35_MOE,
    "qwen3.6-35b-a3b": _QWEN35_MOE,
    "laguna-xs.2": Dims(
        architecture="laguna", layers=40, hidden=2048, vocab=100352, context=131072, heads=48,
        window_heads=64, kv_heads=8, head_dim=128, ffn=8192, kinds=pattern(40, 4, "window", 0),
        window=512, experts=256, experts_used=8, expert_ffn=512, shared_ffn=512, dense_layers=1,
    ),
    "gemma-4-e4b": Dims(
        architecture="gemma4", layers=42, hidden=2560, vocab=262144, context=131072, tied=True,
        heads=8, kv_heads=2, head_dim=256, ffn=10240, kinds=pattern(42, 6, "window"), window=512,
        full_kv_heads=2, full_head_dim=512, shared_kv_layers=18, side_width=256,
    ),
    "gemma-4-31b": _GEMMA4_31B,
    "gemma-4-26b-a4b": replace(
        _GEMMA4_31B, layers=30, kinds=pattern(30, 6, "window"), hidden=2816, heads=16, kv_heads=8,
        ffn=2112, full_kv_heads=2, experts=128, experts_used=8, expert_ffn=704,
    ),
    "qwen3.5-27b-dflash": _DRAFT_27B,
    "qwen3.6-27b-dflash": replace(_DRAFT_27B, window=2048, kinds=pattern(5, 5, "window")),
    "qwen3.6-35b-a3b-dflash": replace(
        _DRAFT_27B, layers=8, hidden=2048, kv_heads=4, ffn=6144, window=4096,
        kinds=pattern(8, 8, "window"),
    ),
    "gemma-4-31b-dflash": replace(
        _DRAFT_27B, hidden=5376, vocab=262144, heads=64, ffn=10752, window=2048, taps=6,
        kinds=pattern(5, 5, "window"),
    ),
}  # fmt: skip


def is_known(text: str) -> bool:
    """Whether a text names a built-in model, with or without a mix, right or wrong."""
    return text.lower().partition(":")[0] in KNOWN


def split_mix(text: str) -> tuple[str, str]:
    """Return a model's name and the mix that follows it after a colon, "" if none does."""
    base, _, last = text.rpartition(":")
    name = last.lower().replace("-", "_")
    return (base, name) if base and name in MIXES else (text, "")
