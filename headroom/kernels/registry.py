"""Every kernel in order of preference, and the choice among them."""

from headroom.errors import KernelError
from headroom.kernels.ops import Case, Kernel
from headroom.kernels.reference import attention, matmul, norms
from headroom.kernels.reference.quantise import CACHE_TYPES


def _takes_any(case: Case) -> str | None:
    return None if case.quant.runs else f"{case.quant} is not a weight type"


def _takes_cache_types(case: Case) -> str | None:
    for kind in (case.k_type, case.v_type):
        if kind not in CACHE_TYPES:
            return f"{kind} is not a cache type ({', '.join(CACHE_TYPES)})"
    return None


KERNELS = (
    Kernel("embed", "reference", matmul.embed, _takes_any),
    Kernel("matmul", "reference", matmul.matmul, _takes_any),
    Kernel("rms_norm", "reference", norms.rms_norm, _takes_any),
    Kernel("rope", "reference", norms.rope, _takes_any),
    Kernel("gated_activation", "reference", norms.silu_and_multiply, _takes_any),
    Kernel("kv_write", "reference", attention.write_kv, _takes_cache_types),
    Kernel("attention", "reference", attention.attention, _takes_cache_types),
)


def pick(op: str, case: Case) -> Kernel:
    """Return the first kernel, in order of preference, that takes the case."""
    reasons = []
    for kernel in (kernel for kernel in KERNELS if kernel.op == op):
        if (reason := kernel.refuses(case)) is None:
            return kernel
        reasons.append(f"{kernel.backend}: {reason}")
    raise KernelError(f"No kernel runs {op} for {case}.", hint="; ".join(reasons))
