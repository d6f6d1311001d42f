"""Cases of routed experts that GPUs, and CPUs in their place, are held to."""

from headroom.kernels.ops import RouterRule

Kinds = tuple[str, str, str]
Case = tuple[Kinds, tuple[int, int, int], int, int, str]
# Experts of plain types, alone and mixed with packed ones; sizes that fill no tile.
PLAIN: list[Case] = [
    (("bf16", "bf16", "bf16"), (4, 40, 520), 3, 2, "silu"),
    (("f16", "f16", "f16"), (4, 264, 72), 5, 3, "gelu"),
    (("bf16", "f16", "bf16"), (4, 24, 40), 1, 2, "silu"),
    (("q4_k", "q4_k", "bf16"), (4, 96, 256), 9, 2, "silu"),
    (("f16", "bf16", "q8_0"), (4, 32, 72), 2, 2, "gelu"),
]
LARGE_PLAIN: list[Case] = [
    (("bf16", "bf16", "bf16"), (16, 768, 2048), 1, 8, "silu"),
    (("f16", "f16", "f16"), (16, 768, 2048), 32, 8, "silu"),
    (("bf16", "bf16", "bf16"), (16, 704, 2816), 100, 8, "gelu"),
]
# Of rows sorted by expert, some of whom have more than are multiplied at once: every type once, for
# compiling takes longer than running.
SORTED: list[Case] = [
    (("q4_k", "q4_k", "q6_k"), (4, 256, 512), 70, 2, "silu"),
    (("q5_k", "q8_0", "q4_0"), (3, 96, 256), 45, 2, "gelu"),
    (("q8_0", "q4_1", "q5_1"), (4, 64, 96), 11, 2, "silu"),
    (("iq4_nl", "q5_0", "iq4_nl"), (4, 64, 320), 20, 2, "silu"),
    (("bf16", "bf16", "bf16"), (4, 40, 520), 30, 2, "silu"),
    (("f16", "f16", "f16"), (4, 264, 72), 35, 3, "silu"),
]
REAL: list[Case] = [
    (("q4_k", "q4_k", "q6_k"), (32, 512, 2048), 40, 8, "silu"),
    (("q4_k", "q4_k", "q6_k"), (32, 512, 2048), 300, 8, "silu"),
    (("mxfp4", "mxfp4", "mxfp4"), (6, 1440, 2880), 90, 4, "silu"),
]
SORTED_ALONE: list[tuple[Kinds, tuple[int, int, int], int, int]] = [
    ((kind, kind, kind), (5, 256, 512), 60, 2) for kind in ("q4_k", "q8_0", "f16", "bf16")
]
# Routed experts with a shared expert, of equal and of different types and sizes.
SHARED: list[tuple[Kinds, Kinds, tuple[int, int, int], int, int]] = [
    (("q4_k", "q4_k", "q6_k"), ("q4_k", "q4_k", "q6_k"), (5, 256, 512), 256, 1),
    (("q4_k", "q4_k", "q6_k"), ("q8_0", "q5_0", "bf16"), (5, 256, 512), 296, 3),
    (("f16", "f16", "bf16"), ("f16", "q4_1", "f16"), (4, 40, 96), 24, 9),
]
# Of rows that share experts: one to four groups of eight rows may choose an expert.
ONCE: list[tuple[Kinds, Kinds, tuple[int, int, int], int, int]] = [
    (("q4_k", "q4_k", "q6_k"), ("q4_k", "q4_k", "q6_k"), (5, 256, 512), 256, 2),
    (("q4_k", "q5_k", "q8_0"), ("q8_0", "q5_0", "bf16"), (5, 296, 264), 40, 11),
    (("mxfp4", "q8_0", "q4_0"), ("f16", "f16", "q6_k"), (4, 264, 288), 520, 32),
    (("f16", "bf16", "bf16"), ("bf16", "q4_1", "f16"), (4, 40, 1096), 24, 17),
    (("iq4_nl", "q5_0", "q5_1"), ("q4_0", "q4_0", "iq4_nl"), (6, 64, 320), 64, 4),
]
# Of our grouped product: experts, outputs and columns; rows; experts of a row.
GROUPED = [
    ((256, 1024, 2048), 2048, 8),
    ((256, 2048, 512), 2048, 8),
    ((256, 1024, 2048), 33, 8),
    ((128, 1536, 2048), 2048, 8),
    ((8, 136, 72), 500, 2),
    ((60, 40, 424), 37, 4),
    ((1, 264, 40), 1000, 1),
    ((1000, 8, 8), 3000, 6),
]
MIXED = ("q4_k", "q4_k", "q6_k")
FEW: list[Case] = [
    (MIXED, (6, 256, 512), 1, 3, "silu"),
    (MIXED, (6, 256, 256), 5, 2, "gelu"),
    (("q4_k", "q5_k", "q8_0"), (5, 96, 256), 3, 2, "silu"),
    (("mxfp4", "q8_0", "q4_0"), (4, 160, 288), 2, 4, "gelu"),
    (("q8_0", "q4_1", "q5_1"), (4, 64, 96), 11, 2, "silu"),
    (("iq4_nl", "q5_0", "iq4_nl"), (4, 64, 320), 2, 2, "silu"),
    (("q6_k", "q6_k", "q4_k"), (4, 256, 512), 2, 2, "silu"),
    *PLAIN,
]
LARGE: list[Case] = [
    (MIXED, (32, 512, 2048), 1, 8, "silu"),
    (MIXED, (32, 512, 2048), 32, 8, "silu"),
    (MIXED, (16, 768, 2048), 100, 8, "silu"),
    *LARGE_PLAIN,
]
# Of experts chosen by the kernel that runs them: experts, width and hidden; the rule; a bias.
CHOSEN = [
    ((experts, 32, 256), RouterRule(used, scores, True, 1.5), scores == "sigmoid")
    for experts in (5, 128, 256, 1000)
    for scores, used in (("softmax", 4), ("sigmoid", 3))
]
# Of picks in groups: rows, experts, experts of a row, experts of a group.
PICKS = [(2048, 256, 8, 24), (40, 128, 8, 128), (3001, 60, 4, 7)]
