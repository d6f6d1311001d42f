"""The cases of the kernel table: inputs of every operation, over types and awkward sizes."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from headroom.formats.quants import BY_NAME, F32, QUANTS, QuantType
from headroom.kernels.ops import (
    Case,
    DeltaNetWeights,
    ExpertBiases,
    ExpertTable,
    PagedKv,
    Picks,
    RecurrentState,
    RouterRule,
    Span,
)
from headroom.kernels.reference.attention import write_kv
from headroom.kernels.types import PRODUCT_TYPES
from headroom.kernels.weight import PLAIN_TYPES, Weight, plain_type

WEIGHT_TYPES = [quant for quant in QUANTS if quant in PRODUCT_TYPES]
# Types of gate, up and down: equal, all different, plain next to packed.
EXPERT_TYPES = [
    ("f32", "f32", "f32"), ("q4_k", "q4_k", "q6_k"), ("q8_0", "q4_0", "f32"),
    ("f16", "q5_1", "bf16"), ("q4_1", "bf16", "q8_0"),
]  # fmt: skip
ROUTER_RULES = [
    RouterRule(used=3, scores="softmax", normalise=True, scale=1.0),
    RouterRule(used=1, scores="softmax", normalise=False, scale=1.0),
    RouterRule(used=8, scores="sigmoid", normalise=True, scale=2.5),
    RouterRule(used=2, scores="sigmoid", normalise=False, scale=0.5, softcap=1.5),
]
CACHE_PAIRS = [
    ("f32", "f32"), ("f16", "bf16"), ("q8_0", "f16"), ("q8_0", "q8_0"), ("q5_1", "q4_0"),
    ("q5_0", "q4_1"), ("q4_1", "q5_0"), ("q4_0", "q5_1"),
]  # fmt: skip
# Heads, KV heads, values of a head: groups of 1 to 16, sizes below and above one vector.
HEAD_SHAPES = [
    (1, 1, 16), (16, 1, 80), (5, 5, 96), (4, 2, 256), (8, 1, 512), (32, 2, 24), (64, 8, 32),
    (7, 1, 33),
]  # fmt: skip


@dataclass(frozen=True)
class Sized:
    """A case of an operation, and the sizes of its inputs."""

    op: str
    case: Case
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        types = [self.case.quant.name, self.case.k_type, self.case.v_type]
        types += [quant.name for quant in self.case.experts]
        return "-".join([self.op, *types, "x".join(map(str, self.sizes))])


def all_cases() -> list[Sized]:
    """Return cases of every operation over types and awkward sizes: odd, tiny, empty."""
    cases = []
    for quant in WEIGHT_TYPES:
        columns = 2 * max(quant.block, 24)
        for rows in (0, 1, 3, 16, 40):
            for out in (1, 37):
                cases.append(Sized("matmul", Case(quant=quant), (rows, out, columns)))
        cases.append(Sized("embed", Case(quant=quant), (5, 37, columns)))
    for rows in (0, 1, 7):
        cases += [Sized("rms_norm", Case(), (rows, width)) for width in (33, 36)]
        cases.append(Sized("rope", Case(), (rows, 3, 10, 4)))
        cases += [Sized("gated_activation", Case(), (rows, 33, gelu)) for gelu in (0, 1)]
    cases += [Sized("gated_activation", Case(), (90, 257, gelu)) for gelu in (0, 1)]
    for k_type, v_type in CACHE_PAIRS:
        case = Case(k_type=k_type, v_type=v_type)
        for rows in (0, 5):
            cases.append(Sized("kv_write", case, (rows, 2, 64)))
        for window, tree in ((0, 0), (5, 0), (0, 1), (5, 1)):
            cases.append(Sized("attention", case, (6, 2, 64, window, tree)))
    for heads, kv_heads, dim in HEAD_SHAPES:
        for k_type, v_type in (("f32", "f32"), ("f16", "bf16")):
            case = Case(k_type=k_type, v_type=v_type)
            cases.append(Sized("kv_write", case, (3, kv_heads, dim)))
            cases.append(Sized("attention", case, (heads, kv_heads, dim, 0, 0)))
            cases.append(Sized("attention", case, (heads, kv_heads, dim, 130, 1)))
    return cases + _expert_cases() + _delta_cases()


def _expert_cases() -> list[Sized]:
    cases = []
    for rows in (0, 1, 7):
        for rule in range(len(ROUTER_RULES)):
            cases += [Sized("route", Case(), (rows, 8, rule, bias)) for bias in (0, 1)]
    cases += [Sized("route", Case(), (90, 60, rule, 0)) for rule in range(len(ROUTER_RULES))]
    for names in EXPERT_TYPES:
        case = Case(experts=tuple(BY_NAME[name] for name in names))
        hidden = 256 if "q4_k" in names else 64
        for rows, gelu in ((0, 0), (1, 0), (7, 1), (90, 0)):
            cases.append(Sized("experts", case, (rows, hidden, hidden, gelu)))
        if "q4_k" not in names:
            cases.append(Sized("experts", case, (5, 32, 96, 0)))
    with_biases = Case(experts=(BY_NAME["mxfp4"],) * 3, biases=True)
    cases += [Sized("experts", with_biases, (rows, 64, 96, 2)) for rows in (0, 1, 7)]
    return cases


def _delta_cases() -> list[Sized]:
    cases = []
    for key_heads, value_heads, dim in ((1, 1, 128), (2, 6, 16), (2, 6, 33), (4, 4, 32), (2, 8, 7)):
        for tiled in (0, 1):
            for taps in (1, 4):
                sizes = (key_heads, value_heads, dim, taps, tiled)
                cases.append(Sized("delta_net", Case(), sizes))
    cases += [Sized("delta_net", Case(), (16, 48, 128, 4, tiled)) for tiled in (0, 1)]
    cases += [
        Sized("gated_norm", Case(), sizes)
        for sizes in ((0, 3, 16), (7, 6, 33), (2, 48, 128), (90, 1, 60))
    ]
    return cases


def make_inputs(sized: Sized, seed: int = 0) -> tuple[Any, ...]:
    """Return random inputs of an operation, in the order of its Protocol (kernels/ops.py)."""
    torch.manual_seed(seed)
    make = {
        "matmul": _matmul, "embed": _embed, "rms_norm": _rms_norm, "rope": _rope,
        "gated_activation": _gated, "kv_write": _kv_write, "attention": _attention,
        "route": _route, "experts": _experts,
        "delta_net": _delta_net, "gated_norm": _gated_norm,
    }[sized.op]  # fmt: skip
    return make(sized)


def random_weight(quant: QuantType, rows: int, columns: int) -> Weight:
    """Return a weight of random blocks whose values have ordinary magnitudes."""
    if quant.name in PLAIN_TYPES:
        return Weight(torch.randn(rows, columns).to(plain_type(quant.name)), quant, rows, columns)
    blocks = rows * columns // quant.block
    data = torch.randint(0, 256, (blocks, quant.block_bytes), dtype=torch.uint8)
    scale = (torch.rand(blocks) * 0.01 + 0.001).half().view(torch.uint8).view(blocks, 2)
    for offset in SCALE_OFFSETS[quant.name]:
        data[:, offset : offset + 2] = scale
    if quant.name == "mxfp4":
        data[:, 0] = torch.randint(118, 126, (blocks,))
    return Weight(data.view(rows, -1), quant, rows, columns)


SCALE_OFFSETS: dict[str, tuple[int, ...]] = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q4_k": (0, 2),
    "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "mxfp4": (),
}  # fmt: skip


def _matmul(sized: Sized) -> tuple[Any, ...]:
    rows, out, columns = sized.sizes
    weight = random_weight(sized.case.quant, out, columns)
    return torch.randn(rows, columns), weight, sized.case.dtype


def _embed(sized: Sized) -> tuple[Any, ...]:
    rows, vocab, columns = sized.sizes
    table = random_weight(sized.case.quant, vocab, columns)
    return torch.randint(0, vocab, (rows,)), table, torch.empty(rows, columns)


def _rms_norm(sized: Sized) -> tuple[Any, ...]:
    return torch.randn(sized.sizes), torch.randn(sized.sizes[1:]), 1e-5


def _rope(sized: Sized) -> tuple[Any, ...]:
    rows, heads, dim, half = sized.sizes
    angles = torch.randn(rows, half)
    return torch.randn(rows, heads, dim), angles.cos(), angles.sin()


def _gated(sized: Sized) -> tuple[Any, ...]:
    rows, columns, gelu = sized.sizes
    gate, up = 8 * torch.randn(rows, columns), torch.randn(rows, columns)
    return gate, up, "gelu" if gelu else "silu"


def _kv_write(sized: Sized) -> tuple[Any, ...]:
    rows, heads, dim = sized.sizes
    cache = empty_cache(sized.case.k_type, sized.case.v_type, 64, heads, dim)
    return (
        cache,
        torch.randperm(64)[:rows],
        torch.randn(rows, heads, dim),
        torch.randn(rows, heads, dim),
    )


def _attention(sized: Sized) -> tuple[Any, ...]:
    heads, kv_heads, dim, window, tree = sized.sizes
    cache = empty_cache(sized.case.k_type, sized.case.v_type, 1024, kv_heads, dim)
    write_kv(
        cache,
        torch.arange(1024),
        torch.randn(1024, kv_heads, dim),
        torch.randn(1024, kv_heads, dim),
    )
    pages = torch.randperm(64)  # pages of 16 tokens
    spans = (
        Span(0, 1, 0, pages[:1]),
        Span(1, 20, 245, pages[1:18], tree=random_tree(20) if tree else None),
        Span(21, 1, 511, pages[18:50]),
        Span(22, 2, 3, pages[50:51], tree=torch.eye(2, dtype=torch.bool) if tree else None),
    )
    return torch.randn(24, heads, dim), cache, spans, dim**-0.5, window


def random_tree(rows: int) -> torch.Tensor:
    """Return the mask of a random forest: a row's parent is an earlier row, or it has none."""
    mask = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        parent = int(torch.randint(-1, row, ()))
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def _route(sized: Sized) -> tuple[Any, ...]:
    rows, experts, rule, bias = sized.sizes
    logits = torch.randn(rows, experts)
    logits[:, 5] = logits[:, 2]  # ties
    given = torch.randn(experts) if bias else None
    return logits, ROUTER_RULES[rule], given, torch.arange(experts)


def _experts(sized: Sized) -> tuple[Any, ...]:
    rows, hidden, width, activation = sized.sizes
    table = random_experts(sized.case.experts, 10, hidden, width)
    if sized.case.biases:
        gate, up = torch.randn(10, width), torch.randn(10, width)
        table = replace(table, biases=ExpertBiases(gate, up, torch.randn(10, hidden)))
    ids, weights = random_choice(rows, 10, 3)
    name = ("silu", "gelu", "clamped")[activation]
    return torch.randn(rows, hidden), ids, weights, table, name, sized.case.dtype


def random_experts(
    kinds: tuple[QuantType, ...], count: int, hidden: int, width: int
) -> ExpertTable:
    """Return experts with random matrices of given types."""
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    parts = (
        tuple(random_weight(quant, *shape) for _ in range(count))
        for quant, shape in zip(kinds, shapes, strict=True)
    )
    return ExpertTable(*parts)


def random_choice(rows: int, experts: int, used: int) -> Picks:
    """Return random picks: different experts for each row, and their weights."""
    ids = torch.rand(rows, experts).argsort(dim=1)[:, :used].int()
    return Picks(ids, torch.rand(rows, used))


def _delta_net(sized: Sized) -> tuple[Any, ...]:
    key_heads, heads, dim, taps, tiled = sized.sizes
    spans = tuple(
        Span(first, rows, start, torch.empty(0, dtype=torch.int64), slot)
        for first, rows, start, slot in ((0, 1, 9, 3), (1, 6, 0, 0), (7, 2, 40, 1), (9, 1, 0, 4))
    )
    channels = (2 * key_heads + heads) * dim
    weights = DeltaNetWeights(
        conv=torch.randn(channels, taps),
        decay=-torch.rand(heads) - 0.1,
        dt_bias=torch.randn(heads),
        key_heads=key_heads,
        tiled=bool(tiled),
    )
    state = RecurrentState(
        torch.randn(5, heads, dim, dim) * 0.3, torch.randn(5, taps - 1, channels)
    )
    gates = torch.randn(10, heads), 3 * torch.randn(10, heads)
    return torch.randn(10, channels), *gates, weights, state, spans


def _gated_norm(sized: Sized) -> tuple[Any, ...]:
    gate = 8 * torch.randn(sized.sizes)
    return torch.randn(sized.sizes), gate, torch.randn(sized.sizes[2:]), 1e-6


def empty_cache(k_type: str, v_type: str, slots: int, heads: int, dim: int) -> PagedKv:
    """Return a KV cache of zeros with pages of 16 tokens."""
    stored = []
    for quant in (BY_NAME[k_type], BY_NAME[v_type]):
        if quant.name in PLAIN_TYPES:
            stored.append(torch.zeros(slots, heads, dim, dtype=plain_type(quant.name)))
        else:
            stored.append(torch.zeros(slots, heads, quant.bytes_for(dim), dtype=torch.uint8))
    return PagedKv(stored[0], stored[1], BY_NAME[k_type], BY_NAME[v_type], 16)


def plain_weight(values: torch.Tensor) -> Weight:
    """Return a float32 weight with given values."""
    return Weight(values, F32, values.shape[0], values.shape[1])
