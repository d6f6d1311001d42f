"""Every CUDA source compiles for every GPU that is to run it, where NVRTC is at hand."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from headroom.experts.cache import RULES
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import experts_packed, grouped, handover
from headroom.kernels.cuda.compile import SOURCES, read_source
from headroom.kernels.cuda.matmul_scratch import lanes_for
from headroom.kernels.cuda.matmul_shapes import Gpu, Product, shape_for
from headroom.kernels.cuda.pack import WARPS
from headroom.kernels.cuda.probe import PROBES, Probe
from headroom.kernels.cuda.sizes import TILED, record_bytes
from headroom.kernels.types import PACKED
from tests.nvrtc import compile_source, missing

MAIN = 90  # the GPU for which all macros are tried
OTHERS = (75, 80, 86, 89, 120)
USUAL = (86, 120)  # other GPUs that are always compiled for, with one set of macros
# Sources with special code for the oldest GPU: all macros are compiled for it, too.
OLDEST = 75
OWN_WAYS = (*("activations.cu", "decode.cu", "experts.cu", "grouped.cu", "matmul.cu", "sorted.cu"),)

Defines = dict[str, int]


def _id(kind: str) -> int:
    return BY_NAME[kind].ggml_id


def _attention(dim: int, kind: str, **more: int) -> Defines:
    return {"DIM": dim, "GROUP": 4, "PAGE": 64, "K_KIND": _id(kind), "V_KIND": _id(kind)} | more


def _delta(columns: int, tiled: int = 0) -> Defines:
    return {"HEADS": 32, "KEY_HEADS": 16, "TILED": tiled, "TAPS": 4, "COLUMNS": columns}


def _experts(gate: str, down: str, gelu: int) -> Defines:
    kinds = {"GATE": _id(gate), "UP": _id(gate), "DOWN": _id(down)}
    shared = {"SHARED_GATE": _id(gate), "SHARED_UP": _id("q8_0"), "SHARED_DOWN": _id(down)}
    others = {"GELU": gelu, "LANES": 4 << 3 * gelu, "AHEAD": 1 - gelu, "STAGES": 2 - gelu}
    return kinds | shared | others


def _sorted(first: str, second: str, gated: int, memory: int = 228 << 10) -> Defines:
    pair = BY_NAME[first], BY_NAME[second]
    shape = experts_packed.packed_shape_for(pair, memory - 1024, memory)
    kinds = {"A_KIND": _id(first), "B_KIND": _id(second), "GATED": gated, "GELU": gated}
    return kinds | {"WARPS": shape.warps, "STAGES": shape.stages}


def _product(kind: str, groups: int) -> Defines:
    product = Product(512, 20, record_bytes(BY_NAME[kind]), 8 * groups)
    rows = {"GROUPS": groups, "LANES": lanes_for(8 * groups)}
    return shape_for(product, Gpu()).defines | {"KIND": _id(kind)} | rows


KINDS = sorted(quant.name for quant in PACKED)
PLAIN = sorted(quant.name for quant in TILED - PACKED)
# The macros that launchers give, by source.
DEFINES: dict[str, list[Defines]] = {
    "activations.cu": [{"LANES": 4}, {"LANES": 32, "GELU": 1}],
    "attention.cu": [
        {"DIM": 256, "PAGE": 1, "BASE2": 1, "GATE": 1, "GATE_PER_HEAD": 0},
        {"DIM": 512, "PAGE": 1, "BASE2": 0, "GATE": 2, "GATE_PER_HEAD": 1},
        {"DIM": 128, "PAGE": 64, "KIND": _id("q8_0"), "OUT_KIND": _id("bf16")},
        {"DIM": 64, "PAGE": 64, "KIND": _id("q4_1"), "OUT_KIND": _id("f32")},
    ],
    "decode.cu": [
        _attention(256, "f16", TILES=2, PARTS=4),
        _attention(512, "bf16", TILES=2, PARTS=2),
        _attention(64, "q8_0", TILES=4, PARTS=4),
        _attention(80, "q5_1", TILES=1, PARTS=2),
        _attention(512, "f16", TILES=1, PARTS=1),
    ],
    "delta_chunks.cu": [_delta(64) | {"HELD": 64}, _delta(32, tiled=1) | {"HELD": 128}],
    "delta_net.cu": [_delta(16), _delta(32, tiled=1)],
    "dequant.cu": [
        {"KIND": _id(kind), "WARPS": 4, "OUT_F16": number % 2}
        for number, kind in enumerate((*KINDS, *PLAIN))
    ],
    "exact.cu": [_attention(256, "f32"), _attention(512, "q5_0"), _attention(64, "bf16")],
    "experts.cu": [
        _experts(*kinds)
        for kinds in (
            ("q4_k", "q6_k", 0),
            ("q8_0", "q5_1", 1),
            ("bf16", "bf16", 0),
            ("f16", "f16", 1),
            ("q4_k", "bf16", 0),
        )
    ]
    + [
        _experts("q4_k", "q6_k", 0) | {"EXPERTS": 256, "SIGMOID": 0},
        _experts("q4_k", "q6_k", 0) | {"FILLS": 1, "AHEAD": 1},
    ],
    "expert_cache.cu": [
        RULES.macros | handover.WORDS | {"THREADS": 256},
        RULES.macros | handover.WORDS | {"THREADS": 1024, "EXPERTS": 512, "SIGMOID": 1},
    ],
    "grouped.cu": [
        {"ROWS": rows, "STAGES": stages, "HALVES": halves}
        for halves in (0, 1)
        for rows, stages in grouped.STAGES.items()
    ],
    "half_experts.cu": [{"GELU": 0}, {"GELU": 1}],
    "handover.cu": [handover.WORDS],
    "many_experts.cu": [{"GELU": 0}, {"GELU": 1}],
    "marker.cu": [{}],
    "matmul.cu": [_product(kind, 1 + number % 4) for number, kind in enumerate(KINDS)],
    "narrow.cu": [{}],
    "picks.cu": [{}],
    "pack.cu": [{"KIND": _id(kind), "WARPS": WARPS} for kind in (*KINDS, *PLAIN)],
    "rope.cu": [
        {"DIM": 256, "HALF": 32, "K_KIND": _id(kind), "V_KIND": _id(kind), "Q_BF16": number % 2}
        for number, kind in enumerate(("f16", "f32", "bf16", "q8_0", "q5_1", "q4_0"))
    ],
    "route.cu": [
        {"EXPERTS": 256, "SIGMOID": 0},
        {"EXPERTS": 60, "SIGMOID": 1},
        {"EXPERTS": 32, "SIGMOID": 0, "ROWS": 4},
    ],
    "router.cu": [
        {"EACH": 2, "ROWS": 1, "LANES": 4},
        {"EACH": 5, "ROWS": 4, "LANES": 32},
        {"EACH": 8, "ROWS": 4, "LANES": 8},
    ],
    "sampler.cu": [{}, {"MOST": 2048}],
    "shared_picks.cu": [
        _experts(*kinds) | {"LANES": lanes, "GROUPS": groups, "FILLS": fills}
        for kinds, lanes, groups, fills in (
            (("q4_k", "q6_k", 0), 32, 2, 0),
            (("q8_0", "q5_1", 1), 8, 1, 1),
            (("bf16", "bf16", 0), 32, 4, 0),
            (("q4_k", "bf16", 0), 32, 4, 1),
        )
    ],
    "small.cu": [
        {"RESIDUAL": number % 2, "GELU": number % 2, "KIND": _id(kind)}
        for number, kind in enumerate(("f32", "f16", "bf16", *KINDS))
    ],
    "sorted.cu": [
        _sorted("q4_k", "q4_k", gated=1),
        _sorted("q8_0", "q4_1", gated=1, memory=100 << 10),
        _sorted("bf16", "bf16", gated=0, memory=64 << 10),
    ],
    "sorted_rows.cu": [{"X_F16": 0}, {"X_F16": 1}],
    "spread.cu": [{"ADD": 0, "WIDE": 4}, {"ADD": 1, "WIDE": 1}],
    "unpack.cu": [
        {"GATE": _id(gate), "UP": _id(up), "DOWN": _id(down), "WARPS": 4, "OUT_F16": half}
        for gate, up, down, half in (
            ("q4_k", "q4_k", "q6_k", 0),
            ("q8_0", "q5_1", "bf16", 1),
            ("mxfp4", "f16", "q5_k", 0),
        )
    ],
    "weigh.cu": [{"OUT_KIND": _id(kind)} for kind in ("f16", "bf16")],
}
# Other pairs of the same values, each of which takes seconds.
OTHER_DELTA_CHUNKS = [
    _delta(32, tiled=1) | {"HELD": 64},
    _delta(64, tiled=1) | {"HELD": 128},
    _delta(32) | {"HELD": 128},
]


def test_every_source_is_listed() -> None:
    with_kernels = {
        path.name for path in SOURCES.glob("*.cu") if re.search("__global__", path.read_text())
    }
    assert with_kernels == set(DEFINES)


def for_oldest(source: str) -> list[Defines]:
    """What the oldest GPU is given of a source: products of sorted rows in f16 alone."""
    return [defines for defines in DEFINES[source] if defines.get("HALVES", 1)]


def complaints_of(source: str, defines: Defines, arch: int) -> str:
    """What the compiler says against a source, "" where it takes it."""
    said = compile_source(source, defines, arch)
    return f"{source} {defines} for sm_{arch}:\n{said}" if said else ""


@pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
@pytest.mark.parametrize("source", DEFINES)
def test_a_source_compiles_with_all_macros(source: str) -> None:
    with ThreadPoolExecutor(2) as threads:  # the compiler runs outside of Python's lock
        found = threads.map(lambda defines: complaints_of(source, defines, MAIN), DEFINES[source])
        assert [said for said in found if said] == []


@pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
@pytest.mark.parametrize("source", OWN_WAYS)
def test_a_source_compiles_with_all_macros_for_the_oldest_gpu(source: str) -> None:
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(
            lambda defines: complaints_of(source, defines, OLDEST), for_oldest(source)
        )
        assert [said for said in found if said] == []


@pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
@pytest.mark.parametrize("source", DEFINES)
def test_a_source_compiles_for_cards_that_many_have(source: str) -> None:
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda arch: complaints_of(source, DEFINES[source][0], arch), USUAL)
        assert [said for said in found if said] == []


@pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
@pytest.mark.parametrize("kernel", PROBES, ids=lambda kernel: kernel.family)
def test_what_doctor_tries_compiles(kernel: Probe) -> None:
    assert complaints_of(kernel.source, dict(kernel.defines), MAIN) == ""
    kernels = read_source(kernel.source).split('extern "C" __global__')[1:]
    assert any(re.search(rf"\b{kernel.kernel}\(", text.split("{")[0]) for text in kernels)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
@pytest.mark.parametrize("defines", OTHER_DELTA_CHUNKS)
def test_delta_net_in_chunks_compiles_with_other_macros(defines: Defines) -> None:
    assert complaints_of("delta_chunks.cu", defines, MAIN) == ""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
@pytest.mark.parametrize(
    ("source", "arch"),
    [(x, arch) for x in DEFINES for arch in OTHERS],
)
def test_a_source_compiles_for_every_gpu(source: str, arch: int) -> None:
    tried = DEFINES[source] if arch > OLDEST else for_oldest(source)
    for defines in (tried[0], tried[-1]):
        assert complaints_of(source, defines, arch) == ""
