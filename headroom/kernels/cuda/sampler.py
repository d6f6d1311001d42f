"""Draws tokens on a device by the rules of engine/sampler.py, with settings in tables.

`sample` uses torch and runs on any device, `sample_fast` uses CUDA C++; both draw the same tokens.
Neither waits for the device, and both may be captured in a graph that serves all requests.
"""

from dataclasses import dataclass

import torch

from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import compile_kernel, shared_bytes_of
from headroom.kernels.cuda.sampler_tables import (
    SLICES,
    TABLES,
    SamplerTables,
    build_tables,
    mask_words,
    sampler_scratch,
    table_buffer,
)
from headroom.kernels.philox import KEY_STEPS, MASK, MULTIPLIERS, ROUNDS

PENALTY_THREADS, SLICE_THREADS, CHOOSE_THREADS = 512, 256, 1024
# sampler.cu sorts candidates of 16 bytes in shared memory, and needs KEPT_BYTES more.
MOST_CANDIDATES, KEPT_BYTES = 4096, 4096


Tables = SamplerTables[torch.Tensor]


def allocate_tables(rows: int, device: str) -> Tables:
    """Return tables whose rows all take the likeliest token, without penalties."""
    return build_tables(
        lambda name: torch.full(
            table_buffer(name, rows).shape,
            TABLES[name].start,
            dtype=scratch.TORCH_DTYPES[TABLES[name].dtype],
            device=device,
        )
    )


def sample(logits: torch.Tensor, tables: Tables, masks: torch.Tensor | None = None) -> torch.Tensor:
    """Draw a token (int64) for each row of `logits [rows, vocabulary]`, which stay as they are.

    With `masks [rows, words]` (int32), only tokens whose bit is set are drawn.
    """
    scores = penalise(logits, tables)
    if masks is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        allowed = masks[:, ids // 32] >> (ids % 32).int() & 1
        scores = torch.where(allowed != 0, scores, -torch.inf)
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    greedy = tables.temperature == 0
    values = scores.double() / torch.where(greedy, 1, tables.temperature)[:, None]
    ranked = torch.exp(values - values.amax(1, keepdim=True)).gather(1, order)
    ranked = _filter(ranked, tables)
    kept = torch.zeros_like(ranked).scatter_(1, order, ranked)
    bounds = kept.cumsum(1)
    point = uniform(tables.seed, tables.position, tables.draw) * bounds[:, -1]
    drawn = (bounds <= point[:, None]).sum(1)
    # Rounding can put the random point on the last bound; then the last possible token is drawn.
    places = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(kept > 0, places, 0).amax(1)
    return torch.where(greedy, order[:, 0], torch.minimum(drawn, last))


def sample_into(
    logits: torch.Tensor, tables: Tables, out: torch.Tensor, masks: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw by `sample` to `out [rows]`: with masks the limited rows, without masks the others."""
    mine = (tables.limited != 0) == (masks is not None)
    return out.copy_(torch.where(mine, sample(logits, tables, masks), out))


def penalise(logits: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Return logits after logit bias and the three penalties."""
    rows, vocabulary = logits.shape
    bias = torch.where(tables.bias_ids >= 0, tables.bias, 0)
    scores = logits.scatter_add(1, tables.bias_ids.clamp(min=0), bias)
    counts = torch.zeros(rows, vocabulary + 1, dtype=torch.int64, device=logits.device)
    places = torch.where(tables.recent >= 0, tables.recent, vocabulary)
    counts = counts.scatter_add_(1, places, torch.ones_like(places))[:, :vocabulary]
    repetition = tables.repetition_penalty[:, None]
    changed = torch.where(scores > 0, scores / repetition, scores * repetition)
    changed = changed - (tables.frequency_penalty[:, None] * counts).float()
    return torch.where(counts > 0, changed - tables.presence_penalty[:, None], scores)


def uniform(seed: torch.Tensor, position: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Return `philox.uniform` of each row's seed, position and draw, with the same bits.

    Products of 32-bit words overflow int64, whose wrap-around keeps the 64 bits that are read.
    """
    low, high = seed & MASK, seed >> 32 & MASK
    a, b, c, d = position & MASK, position >> 32 & MASK, draw & MASK, draw >> 32 & MASK
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            (second >> 32 & MASK) ^ b ^ low,
            second & MASK,
            (first >> 32 & MASK) ^ d ^ high,
            first & MASK,
        )
        low, high = (low + KEY_STEPS[0]) & MASK, (high + KEY_STEPS[1]) & MASK
    return ((a >> 5) * (1 << 26) + (b >> 6)).double() / (1 << 53)


def _filter(ranked: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Set to zero the probabilities (likeliest first) that top-k, top-p and min-p drop."""
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    top_k = torch.where(tables.top_k > 0, tables.top_k, ranked.shape[1])[:, None]
    ranked = torch.where(rank < top_k, ranked, 0)
    reached = ranked.cumsum(1)
    target = tables.top_p[:, None] * reached[:, -1:]
    # A token is kept if the tokens before it have not reached top-p together.
    before = torch.cat((torch.full_like(target, -1), reached[:, :-1]), dim=1)
    ranked = torch.where((before < target) | (rank == 0) | (tables.top_p[:, None] >= 1), ranked, 0)
    return torch.where(ranked < tables.min_p[:, None] * ranked[:, :1], 0, ranked)


@dataclass(frozen=True, slots=True, eq=False)
class SamplerScratch:
    """Memory that `sample_fast` works in; see `ScratchBuffers`."""

    scores: torch.Tensor
    counts: torch.Tensor  # zeros between calls
    best: torch.Tensor
    masses: torch.Tensor

    @staticmethod
    def allocate(rows: int, vocabulary: int, device: str) -> "SamplerScratch":
        """Return scratch for so many rows of logits."""
        parts = (
            torch.zeros(buffer.shape, dtype=scratch.TORCH_DTYPES[buffer.dtype], device=device)
            for buffer in sampler_scratch(rows, vocabulary)
        )
        return SamplerScratch(*parts)


def sample_fast(
    logits: torch.Tensor,
    tables: Tables,
    memory: SamplerScratch,
    out: torch.Tensor,
    masks: torch.Tensor | None = None,  # int32 [rows, words]: the tokens that may be drawn
) -> torch.Tensor:
    """Draw tokens to `out [rows]` (int64): with masks for limited rows, without for the others.

    No vocabulary is sorted.
    """
    rows, vocabulary = logits.shape
    limited = (tables.limited, int(masks is not None))
    scores = memory.scores[:rows].copy_(logits)
    compile_kernel("sampler.cu", "penalise")(
        (rows,),
        (PENALTY_THREADS,),
        (
            *(scores, memory.counts, tables.recent, tables.bias_ids, tables.bias),
            *(tables.repetition_penalty, tables.frequency_penalty, tables.presence_penalty),
            *(vocabulary, tables.recent.shape[1], tables.bias_ids.shape[1], *limited),
        ),
        early=True,
    )
    slices = ((SLICES, rows), (SLICE_THREADS,))
    # Without masks the kernel does not read them; it takes an address all the same.
    given = tables.limited if masks is None else masks
    words = mask_words(vocabulary)
    compile_kernel("sampler.cu", "peaks")(
        *slices, (scores, memory.best, given, words, vocabulary, *limited), early=True
    )
    args = (scores, memory.best, tables.temperature, tables.top_k, memory.masses, vocabulary)
    compile_kernel("sampler.cu", "masses")(*slices, (*args, *limited), early=True)
    most = candidates_for(shared_bytes_of(logits.device))
    compile_kernel("sampler.cu", "choose", {"MOST": most})(
        (rows,),
        (CHOOSE_THREADS,),
        (
            *(scores, memory.best, memory.masses, tables.temperature, tables.top_p),
            *(tables.min_p, tables.top_k, tables.seed, tables.position, tables.draw),
            *(out, vocabulary, *limited),
        ),
        shared_bytes=most * 16,
        early=True,
    )
    return out


def candidates_for(shared_bytes: int) -> int:
    """Return how many candidates a block can sort; with more, sampler.cu searches for bounds."""
    fits = shared_bytes >= 16 * MOST_CANDIDATES + KEPT_BYTES
    return MOST_CANDIDATES if fits else MOST_CANDIDATES // 2
