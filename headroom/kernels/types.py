"""The types of weights that products read as they lie in files; the planner imports this too."""

from headroom.formats.quants import BF16, BY_NAME, F16, F32

# Packed types with kernels in C++, CUDA and Triton.
PACKED = frozenset(
    BY_NAME[name]
    for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "q4_k", "q5_k", "q6_k")
)
PRODUCT_TYPES = PACKED | {F32, F16, BF16}
