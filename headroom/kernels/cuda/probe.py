"""Tries one kernel of every family of kernels, to see whether a GPU runs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from headroom.errors import KernelError, is_out_of_memory
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.expert_rules import NO_POLICY
from headroom.kernels.cuda.handover import WORDS
from headroom.kernels.cuda.matmul_shapes import ProductShape
from headroom.kernels.cuda.sizes import BF16_SM
from headroom.kernels.cuda.trials import run_trial

Q4_K, BF16 = 12, 30  # GGUF's numbers of types
FIRST = "norms"  # the family that is always tried, since its kernel is the smallest
NOT_TRIED = "not tried; see --kernels"


@dataclass(frozen=True, slots=True)
class Probe:
    """The kernel that is compiled for a family."""

    family: str
    source: str
    kernel: str
    defines: Mapping[str, int]
    sm: int = 75  # least compute capability that it is compiled for
    runs_sm: int = 75  # least that engines run it on; below, it is compiled and not launched


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of trying a kernel."""

    problem: str = ""  # why it does not run; "" if it does
    out_of_memory: bool = False  # whether the GPU has too little free memory


_HEADS = {"DIM": 128, "K_KIND": BF16, "V_KIND": BF16}
_PAGED = _HEADS | {"GROUP": 4, "PAGE": 64}
_KINDS = {"GATE": Q4_K, "UP": Q4_K, "DOWN": Q4_K}
_EXPERTS = _KINDS | {f"SHARED_{part}": Q4_K for part in _KINDS} | {"GELU": 0, "LANES": 4}
_SHARED = _EXPERTS | {"GROUPS": 1, "FILLS": 0, "STAGES": 1}
_CACHES = NO_POLICY.macros | WORDS | {"THREADS": 256}
_SORTED = {"A_KIND": Q4_K, "B_KIND": Q4_K, "GATED": 1, "GELU": 0, "WARPS": 2, "STAGES": 1}
_FEW = ProductShape(8, 8, 1, 1, 2).defines | {"KIND": Q4_K, "GROUPS": 1, "LANES": 4}
_GROUPED = {"ROWS": 64, "STAGES": 4}
_DELTA = {"HEADS": 32, "KEY_HEADS": 16, "TILED": 0, "TAPS": 4, "COLUMNS": 16}
_CHUNKS = _DELTA | {"COLUMNS": 32, "HELD": 64}
PROBES = (
    Probe("products of few rows", "matmul.cu", "product", _FEW),
    Probe("products of many rows", "dequant.cu", "dequantise", {"KIND": Q4_K, "WARPS": 4}),
    Probe("many rows in f16", "narrow.cu", "narrow_rows", {}),
    Probe("attention of few rows", "decode.cu", "decode", _PAGED | {"TILES": 1, "PARTS": 4}),
    Probe("attention in float32", "exact.cu", "decode_exact", _PAGED),
    Probe("attention of wide heads", "weigh.cu", "weigh", {"OUT_KIND": BF16}),
    Probe("rotation and cache", "rope.cu", "rope_write", _HEADS | {"HALF": 64, "Q_BF16": 0}),
    Probe("norms", "small.cu", "norm_rows", {"RESIDUAL": 0}),
    Probe("rows in f16", "activations.cu", "norm_rows", {"LANES": 4}),
    Probe("routers", "route.cu", "score", {"EXPERTS": 32, "SIGMOID": 0, "ROWS": 1}),
    Probe("routers with norms", "router.cu", "score_rows", {"EACH": 2, "ROWS": 1, "LANES": 4}),
    Probe("experts", "experts.cu", "gate_up", _EXPERTS),
    Probe("experts that rows share", "shared_picks.cu", "gate_up", _SHARED),
    Probe("experts of short prompts", "sorted.cu", "gate_up", _SORTED),
    Probe("unpacked experts", "unpack.cu", "unpack", _KINDS | {"WARPS": 4, "OUT_F16": 0}),
    Probe("grouped products in bf16", "grouped.cu", "grouped", _GROUPED | {"HALVES": 0}, 80),
    Probe("grouped products in f16", "grouped.cu", "grouped", _GROUPED | {"HALVES": 1}),
    Probe("experts of many rows in bf16", "many_experts.cu", "combine", {"GELU": 0}, runs_sm=80),
    Probe("experts of many rows in f16", "half_experts.cu", "activate", {"GELU": 0}),
    Probe("experts of the CPU", "handover.cu", "collect", WORDS),
    Probe("caches of experts", "expert_cache.cu", "resolve", _CACHES),
    Probe("gated linear attention, steps", "delta_net.cu", "recur", _DELTA),
    Probe("gated linear attention, prompts", "delta_chunks.cu", "run_chunks", _CHUNKS),
    Probe("sampler", "sampler.cu", "choose", {}),
)  # fmt: skip


def try_kernels(device: int, told: Callable[[str], None] = lambda family: None) -> dict[str, str]:
    """Run kernels of every family on a GPU; return by family why they do not run, "" if they do.

    `told` is called with each family before it is compiled, which takes seconds.
    """
    major, minor = torch.cuda.get_device_capability(device)
    sm, found = 10 * major + minor, {}
    for probe in PROBES:
        told(probe.family)
        found[probe.family] = _too_old(probe, sm) or _problem(probe, device, sm)
    return found


def expect_kernels(sm: int) -> dict[str, str]:
    """Return by family why a GPU would not run it, after `try_compiler` alone has succeeded.

    Families that the GPU is new enough for are NOT_TRIED, except the one that was tried."""
    return {x.family: _too_old(x, sm) or ("" if x.family == FIRST else NOT_TRIED) for x in PROBES}


def _too_old(probe: Probe, sm: int) -> str:
    return f"needs sm_{probe.sm}" if sm < probe.sm else ""


def slower_on(sm: int) -> str:
    """Return what a GPU of this compute capability computes differently; "" if nothing."""
    if sm >= BF16_SM:
        return ""
    return "products and attention compute in f16"


def try_compiler(device: int) -> Trial:
    """Compile the smallest kernel for a GPU and load it."""
    return _try(next(probe for probe in PROBES if probe.family == FIRST), device)


def _try(probe: Probe, device: int) -> Trial:
    return _trial(device, lambda: compile_kernel(probe.source, probe.kernel, probe.defines))


def _problem(probe: Probe, device: int, sm: int) -> str:
    """Compile a kernel and run its family; return why that fails, "" if it works."""
    problem = _try(probe, device).problem
    if problem or sm < probe.runs_sm:
        return problem
    return _trial(device, lambda: run_trial(probe.family, torch.device("cuda", device))).problem


def _trial(device: int, work: Callable[[], object]) -> Trial:
    try:
        with torch.cuda.device(device):  # starts CUDA, which may run out of memory
            work()
    except (KernelError, RuntimeError, OSError, AttributeError) as error:
        text = str(error).partition("\n")[0] if isinstance(error, RuntimeError) else str(error)
        return Trial(text or type(error).__name__, is_out_of_memory(error))
    return Trial()
