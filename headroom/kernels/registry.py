"""All kernels in order of preference, and `pick`, which chooses one."""

from collections.abc import Callable

from headroom.errors import KernelError
from headroom.kernels import experts_in_turn
from headroom.kernels.cuda import matmul as cuda_matmul
from headroom.kernels.cuda import norms as cuda_norms
from headroom.kernels.cuda.compile import refuses_device
from headroom.kernels.native import attention as native_attention
from headroom.kernels.native import delta_net as native_delta_net
from headroom.kernels.native import experts as native_experts
from headroom.kernels.native import matmul as native_matmul
from headroom.kernels.native import module
from headroom.kernels.native import norms as native_norms
from headroom.kernels.native import route as native_route
from headroom.kernels.ops import Case, Kernel
from headroom.kernels.reference import attention, delta_net, experts, matmul, norms, route
from headroom.kernels.reference.quantise import refuses_cache
from headroom.kernels.triton import attention as triton_attention
from headroom.kernels.triton import delta_net as triton_delta_net
from headroom.kernels.triton import experts as triton_experts
from headroom.kernels.triton import launch as triton_launch
from headroom.kernels.triton import matmul as triton_matmul
from headroom.kernels.triton import rows as triton_rows
from headroom.kernels.types import PRODUCT_TYPES
from headroom.kernels.weight import PLAIN_TYPES


def _refuses_type(case: Case) -> str | None:
    return None if case.quant.runs else f"{case.quant} is not a weight type"


def _refuses_table(case: Case) -> str | None:
    return _refuses_type(case) if case.layout == "rows" else f"reads rows, not {case.layout}"


def _refuses_cuda_table(case: Case) -> str | None:
    if case.quant not in PRODUCT_TYPES:
        return f"reads no tables of {case.quant}"
    return refuses_device(case)


def _refuses_product(case: Case) -> str | None:
    if case.dtype not in PLAIN_TYPES:
        return f"computes in {', '.join(PLAIN_TYPES)}, not {case.dtype}"
    return _refuses_type(case)


def _without_sinks(refuses: Callable[[Case], str | None]) -> Callable[[Case], str | None]:
    return lambda case: "has no sinks" if case.sinks else refuses(case)


def _without_biases(refuses: Callable[[Case], str | None]) -> Callable[[Case], str | None]:
    return lambda case: "adds no biases" if case.biases else refuses(case)


KERNELS = (
    Kernel("embed", "cuda", cuda_matmul.embed, _refuses_cuda_table),
    Kernel("matmul", "cuda", cuda_matmul.matmul, cuda_matmul.refuses, cuda_matmul.prepare),
    Kernel(
        "matmul",
        "cuda-plain",
        cuda_matmul.plain_matmul,
        cuda_matmul.refuses_plain,
        cuda_matmul.prepare_plain,
    ),
    Kernel(
        "matmul",
        "cuda-plain-f16",
        cuda_matmul.plain_matmul,
        cuda_matmul.refuses_plain_f16,
        cuda_matmul.prepare_plain_f16,
    ),
    Kernel("rms_norm", "cuda", cuda_norms.rms_norm, refuses_device),
    Kernel("gated_activation", "cuda", cuda_norms.gated_activation, refuses_device),
    Kernel("embed", "triton", triton_matmul.embed, triton_matmul.refuses_table),
    Kernel("matmul", "triton", triton_matmul.matmul, triton_matmul.refuses),
    Kernel("rms_norm", "triton", triton_rows.rms_norm, triton_launch.refuses),
    Kernel("rope", "triton", triton_rows.rope, triton_launch.refuses),
    Kernel("gated_activation", "triton", triton_rows.gated_activation, triton_launch.refuses),
    Kernel("kv_write", "triton", triton_attention.write_kv, triton_attention.refuses),
    Kernel(
        "attention",
        "triton",
        triton_attention.attention,
        _without_sinks(triton_attention.refuses),
    ),
    Kernel("route", "triton", triton_rows.route, triton_launch.refuses),
    Kernel(
        "experts",
        "triton",
        triton_experts.experts,
        _without_biases(triton_experts.refuses),
        triton_experts.prepare,
    ),
    Kernel("delta_net", "triton", triton_delta_net.delta_net, triton_launch.refuses),
    Kernel("gated_norm", "triton", triton_rows.gated_norm, triton_launch.refuses),
    Kernel("embed", "native", native_matmul.embed, native_matmul.refuses_table),
    Kernel("embed", "reference", matmul.embed, _refuses_table),
    Kernel(
        "matmul",
        "native-int8",
        native_matmul.matmul_int8,
        native_matmul.refuses_int8,
        native_matmul.prepare,
    ),
    Kernel(
        "matmul",
        "native-int24",
        native_matmul.matmul_int24,
        native_matmul.refuses_int24,
        native_matmul.prepare,
    ),
    Kernel(
        "matmul",
        "native-f32",
        native_matmul.matmul_f32,
        native_matmul.refuses_f32,
        native_matmul.prepare,
    ),
    Kernel("matmul", "reference", matmul.matmul, _refuses_product),
    Kernel("rms_norm", "native", native_norms.rms_norm, module.refuses),
    Kernel("rms_norm", "reference", norms.rms_norm, _refuses_type),
    Kernel("rope", "native", native_norms.rope, module.refuses),
    Kernel("rope", "reference", norms.rope, _refuses_type),
    Kernel("gated_activation", "native", native_norms.gated_activation, module.refuses),
    Kernel("gated_activation", "reference", norms.gated_activation, _refuses_type),
    Kernel("kv_write", "native", native_attention.write_kv, native_attention.refuses),
    Kernel("kv_write", "reference", attention.write_kv, refuses_cache),
    Kernel(
        "attention",
        "native",
        native_attention.attention,
        _without_sinks(native_attention.refuses),
    ),
    Kernel("attention", "reference", attention.attention, refuses_cache),
    Kernel("route", "native", native_route.route, module.refuses),
    Kernel("route", "reference", route.route, _refuses_type),
    Kernel(
        "experts",
        "native-int8",
        native_experts.experts,
        _without_biases(native_experts.refuses_int8),
        native_experts.prepare,
    ),
    Kernel(
        "experts",
        "native-int24",
        native_experts.experts,
        _without_biases(native_experts.refuses_int24),
        native_experts.prepare,
    ),
    Kernel(
        "experts",
        "native-f32",
        native_experts.experts,
        _without_biases(native_experts.refuses_f32),
        native_experts.prepare,
    ),
    Kernel(
        "experts",
        "native-in-turn",
        experts_in_turn.experts,
        experts_in_turn.refuses,
        experts_in_turn.prepare,
    ),
    Kernel("experts", "reference", experts.experts, _refuses_product, experts.prepare),
    Kernel("delta_net", "native", native_delta_net.delta_net, module.refuses),
    Kernel("delta_net", "reference", delta_net.delta_net, _refuses_type),
    Kernel("gated_norm", "native", native_delta_net.gated_norm, module.refuses),
    Kernel("gated_norm", "reference", delta_net.gated_norm, _refuses_type),
)


def pick(op: str, case: Case) -> Kernel:
    """Return the first kernel of an operation, in order of preference, that runs the case.

    Raises a KernelError with the reason of every kernel if none does.
    """
    reasons = []
    for kernel in (kernel for kernel in KERNELS if kernel.op == op):
        if (reason := kernel.refuses(case)) is None:
            return kernel
        reasons.append(f"{kernel.backend}: {reason}")
    raise KernelError(f"No kernel runs {op} with {case}.", hint="; ".join(reasons))
