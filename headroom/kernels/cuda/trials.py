"""Runs each family of kernels once on tiny inputs: compiled code must also launch."""

from collections.abc import Callable
from dataclasses import replace

import torch

from headroom.errors import KernelError
from headroom.formats.quants import BF16, Q4_K, QuantType
from headroom.kernels.cuda import (
    attention,
    delta_net,
    expert_cache,
    experts,
    experts_packed,
    experts_prefill,
    grouped,
    handover,
    matmul,
    norms,
    route,
    sampler,
)
from headroom.kernels.cuda.attention import DecodeShape, HeadNorms, Projected
from headroom.kernels.cuda.delta_net import DeltaNetRows, span_tables
from headroom.kernels.cuda.expert_cache import CpuRequest, Filling
from headroom.kernels.cuda.expert_rules import NO_POLICY
from headroom.kernels.cuda.experts import NO_ADDENDS, ExpertTiles
from headroom.kernels.cuda.experts_prefill import expert_group, sort_in_groups
from headroom.kernels.cuda.experts_scratch import SHARED_ROWS, sorted_rows
from headroom.kernels.cuda.matmul import RowNorm, half_rows, narrow_rows
from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.sizes import TILED, tile_bytes
from headroom.kernels.ops import (
    DeltaNetWeights,
    PagedKv,
    Picks,
    RecurrentState,
    RouterRule,
    Span,
    StepTables,
)
from headroom.kernels.weight import PLAIN_TYPES, Weight

ROWS, HIDDEN, DIM, PAGE = 2, 256, 128, 64
EXPERTS = USED = 2
LRU = 1  # a policy of expert_cache.cu
MANY = sorted_rows(EXPERTS, USED) + 2  # too many for products with packed tiles
VOCABULARY = 300


def _weight(quant: QuantType, device: torch.device) -> Weight:
    """Return a matrix of zeros in tiles."""
    plain = PLAIN_TYPES.get(quant.name)
    columns = HIDDEN if plain else quant.bytes_for(HIDDEN)
    data = torch.zeros(HIDDEN, columns, dtype=plain or torch.uint8, device=device)
    size = tile_bytes(quant, HIDDEN, HIDDEN)
    tiles = torch.empty(size, dtype=torch.uint8, device=device)
    pack(data, quant, HIDDEN, HIDDEN, tiles)
    return Weight(tiles, quant, HIDDEN, HIDDEN, matmul.TILES)


def _few_products(device: torch.device) -> torch.Tensor:
    """Multiply with every type that has tiles, since each type has its own kernel."""
    outs = []
    for quant in sorted(TILED, key=str):
        try:
            weight = _weight(quant, device)
            outs.append(matmul.matmul(torch.ones(ROWS, HIDDEN, device=device), weight, "f16"))
            _wait(device)
        except (KernelError, RuntimeError) as error:
            raise KernelError(f"{quant}: {error}") from error
    return torch.stack(outs)


def _many_products(device: torch.device) -> torch.Tensor:
    out = torch.empty(HIDDEN, HIDDEN, dtype=torch.bfloat16, device=device)
    return matmul.dequantise(_weight(Q4_K, device), out)


def _half_rows(device: torch.device) -> torch.Tensor:
    return narrow_rows(torch.ones(ROWS, HIDDEN, device=device), torch.float16).values


def _cache(device: torch.device) -> PagedKv:
    keys, values = torch.zeros(2, PAGE, 1, DIM, dtype=torch.bfloat16, device=device)
    return PagedKv(keys, values, BF16, BF16, PAGE)


def _tables(device: torch.device) -> StepTables:
    """Return the tables of a step with the first two rows of one sequence."""
    rows = torch.arange(ROWS, dtype=torch.int32, device=device)
    none, one = torch.zeros(ROWS, dtype=torch.int32, device=device), rows[:1]
    return StepTables(
        rows=ROWS,
        positions=rows,
        sequence=none,
        index=rows,
        starts=one,
        pages=one[None],
        kv_slots=rows.long(),
        state_slots=one,
    )


def _attend(device: torch.device, *, exact: bool) -> torch.Tensor:
    shape = DecodeShape(ROWS, 1, ROWS, 4, 1, DIM, PAGE, exact=exact)
    scratch = torch.zeros(shape.scratch_floats, device=device)
    queries = torch.ones(ROWS, 4, DIM, device=device)
    return attention.decode(queries, _cache(device), _tables(device), shape, scratch)


def _wide_heads(device: torch.device) -> torch.Tensor:
    queries, keys, values = torch.ones(3, ROWS, 1, 512, dtype=torch.float16, device=device)
    return attention.attend_wide(queries, keys, values)


def _rope(device: torch.device) -> torch.Tensor:
    q, k = torch.ones(ROWS, 4 * DIM, device=device), torch.ones(ROWS, DIM, device=device)
    turns = torch.ones(ROWS, DIM // 2, device=device), torch.zeros(ROWS, DIM // 2, device=device)
    queries = torch.empty(ROWS, 4, DIM, device=device)
    projected, cache = Projected(q, k, k, 4, DIM), _cache(device)
    attention.rope_write(projected, HeadNorms(), turns, _tables(device), cache, queries, 1.0)
    return torch.cat((queries.flatten(), cache.keys.float().flatten()))


def _norms(device: torch.device) -> torch.Tensor:
    return norms.rms_norm(
        torch.ones(ROWS, HIDDEN, device=device), torch.ones(HIDDEN, device=device), 0.0
    )


def _normed_rows(device: torch.device) -> torch.Tensor:
    norm = RowNorm(torch.ones(HIDDEN, device=device), 0.0)
    half_rows(torch.ones(ROWS, HIDDEN, device=device), norm)
    return norm.weight


def _route(device: torch.device) -> torch.Tensor:
    weight = torch.ones(EXPERTS, HIDDEN, device=device)
    logits = route.score(torch.ones(ROWS, HIDDEN, device=device), weight)
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device=device)
    rule = RouterRule(USED, "softmax", True, 1.0)
    return route.route(logits, rule, None, counts)[1]


def _scored_rows(device: torch.device) -> torch.Tensor:
    ones = torch.ones(HIDDEN, device=device)
    weight = torch.ones(EXPERTS, HIDDEN, device=device)
    x = torch.ones(ROWS, HIDDEN, device=device)
    return route.scored_rows(x, weight, RowNorm(ones, 0.0), ones)[1]


def _table(device: torch.device) -> ExpertTiles:
    tiles = _weight(Q4_K, device).data.expand(EXPERTS, -1).contiguous()
    return experts.table_of([tiles] * 3, (Q4_K,) * 3, HIDDEN, HIDDEN)


def _picks(rows: int, device: torch.device) -> Picks:
    """Return the picks of rows that all pick the first experts."""
    ids = torch.arange(USED, dtype=torch.int32, device=device).expand(rows, -1).contiguous()
    return Picks(ids, torch.full((rows, USED), 0.5, device=device))


def _few_experts(device: torch.device, rows: int) -> torch.Tensor:
    x = half_rows(torch.ones(rows, HIDDEN, device=device))
    return experts.few_rows(x, *_picks(rows, device), _table(device), "silu")


def _sorted_experts(device: torch.device) -> torch.Tensor:
    x = narrow_rows(torch.ones(ROWS, HIDDEN, device=device), torch.float16)
    out = torch.empty(ROWS, HIDDEN, device=device)
    rest = (*NO_ADDENDS.arguments, out)
    experts_packed.sum_experts(x, _picks(ROWS, device), _table(device), "silu", rest)
    return out


def _unpacked_experts(device: torch.device) -> torch.Tensor:
    picks = sort_in_groups(_picks(ROWS, device)[0], EXPERTS, EXPERTS)
    out = torch.zeros(EXPERTS, 2 * HIDDEN, HIDDEN, dtype=torch.bfloat16, device=device)
    group = expert_group(picks, 0, EXPERTS)
    experts_prefill.unpack_some(_table(device), experts_prefill.ALL_EXPERTS, group, out, None)
    return out


def _grouped_product(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    x = torch.ones(8, HIDDEN, dtype=dtype, device=device)
    weights = torch.ones(EXPERTS, HIDDEN, HIDDEN, dtype=dtype, device=device)
    ends = torch.tensor([3, 8], dtype=torch.int32, device=device)
    return torch.stack([grouped.product(x, weights, ends, rows) for rows in grouped.STAGES])


def _many_experts(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    x = narrow_rows(torch.ones(MANY, HIDDEN, device=device), dtype)
    return experts_prefill.many_rows(x, *_picks(MANY, device), _table(device), "silu")


def _handover(device: torch.device) -> torch.Tensor:
    """Resolve rows whose experts are all hot: no CPU thread is needed, and nothing waits."""
    box = handover.Mailbox.allocate(HIDDEN, 1, str(device))
    hot = torch.ones(EXPERTS, dtype=torch.int32, device=device)
    nothing = torch.zeros(USED + 1, dtype=torch.int32, device=device)
    table = expert_cache.static_table(hot, nothing)
    request = CpuRequest(torch.ones(ROWS, HIDDEN, device=device), box, 0)
    ids = expert_cache.resolve(_picks(ROWS, device), table, NO_POLICY, request).ids
    out = ids.float()
    handover.collect(torch.zeros(ROWS, HIDDEN, device=device), box, 0, last=True)
    return out


def _expert_cache(device: torch.device) -> torch.Tensor:
    """Fill the only slot of a layer with an expert that is read from the GPU's own memory."""
    slots = torch.zeros(1, 16, dtype=torch.uint8, device=device)
    host = torch.ones(EXPERTS, 16, dtype=torch.uint8, device=device)
    words = torch.zeros(expert_cache.FILL_WORDS, dtype=torch.int32, device=device)
    place = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
    place[1] = 1  # of the expert that no row picks
    table = replace(
        expert_cache.static_table(place, None),
        state=expert_cache.new_state(EXPERTS, LRU).to(device),
        filling=Filling(words, host, slots, 16),
    )
    ids = torch.tensor([[0, -1]], dtype=torch.int32, device=device)
    expert_cache.resolve(Picks(ids, torch.ones(1, USED, device=device)), table, NO_POLICY, None)
    expert_cache.fill(Filling(words, host, slots, 16))
    return slots.float()


def _delta(device: torch.device, rows: int) -> torch.Tensor:
    """Run gated linear attention on one sequence, with the kernels of few rows or of many."""
    heads, channels = 2, 4 * DIM
    weights = DeltaNetWeights(
        conv=torch.ones(channels, 4, device=device),
        decay=torch.full((heads,), -1.0, device=device),
        dt_bias=torch.zeros(heads, device=device),
        key_heads=1,
        tiled=False,
    )
    state = RecurrentState(
        torch.zeros(1, heads, DIM, DIM, device=device), torch.zeros(1, 3, channels, device=device)
    )
    beta, alpha = torch.ones(2, rows, heads, device=device)
    given = DeltaNetRows(torch.ones(rows, channels, device=device), beta, alpha)
    span = Span(0, rows, 0, torch.zeros(1, dtype=torch.int64), 0)
    tables = span_tables((span,), rows, device)
    run = delta_net.step if rows == ROWS else delta_net.prefill
    return run(given, weights, state, tables)


def _sampler(device: torch.device) -> torch.Tensor:
    tables = sampler.allocate_tables(ROWS, str(device))
    scratch = sampler.SamplerScratch.allocate(ROWS, VOCABULARY, str(device))
    out = torch.zeros(ROWS, dtype=torch.int64, device=device)
    logits = torch.zeros(ROWS, VOCABULARY, device=device)
    return sampler.sample_fast(logits, tables, scratch, out).float()


TRIALS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "products of few rows": _few_products,
    "products of many rows": _many_products,
    "many rows in f16": _half_rows,
    "attention of few rows": lambda device: _attend(device, exact=False),
    "attention in float32": lambda device: _attend(device, exact=True),
    "attention of wide heads": _wide_heads,
    "rotation and cache": _rope,
    "norms": _norms,
    "rows in f16": _normed_rows,
    "routers": _route,
    "routers with norms": _scored_rows,
    "experts": lambda device: _few_experts(device, 1),
    "experts that rows share": lambda device: _few_experts(device, SHARED_ROWS),
    "experts of short prompts": _sorted_experts,
    "unpacked experts": _unpacked_experts,
    "grouped products in bf16": lambda device: _grouped_product(device, torch.bfloat16),
    "grouped products in f16": lambda device: _grouped_product(device, torch.float16),
    "experts of many rows in bf16": lambda device: _many_experts(device, torch.bfloat16),
    "experts of many rows in f16": lambda device: _many_experts(device, torch.float16),
    "experts of the CPU": _handover,
    "caches of experts": _expert_cache,
    "gated linear attention, steps": lambda device: _delta(device, ROWS),
    "gated linear attention, prompts": lambda device: _delta(device, 70),
    "sampler": _sampler,
}


def run_trial(family: str, device: torch.device) -> None:
    """Run a family's kernels once, or raise an error that says why they do not run."""
    out = TRIALS[family](device)
    _wait(device)
    if not bool(torch.isfinite(out).all()):
        raise KernelError(f"The kernels of {family} return values that are not finite.")


def _wait(device: torch.device) -> None:
    """Wait for the device: errors of a kernel are raised by the next call that waits."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
