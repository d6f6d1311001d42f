"""Drawing tokens on the device: the engine's sampler, every setting a tensor of one number a row.

Two ways give the same tokens: `sample` in torch, for any device, and `sample_fast` in CUDA C++.
Neither waits for the device, and both may be captured in a graph that serves all requests.
"""

from dataclasses import dataclass, fields

import torch

from headroom.kernels.cuda.compile import compile_kernel, shared_bytes_of
from headroom.kernels.philox import KEY_STEPS, MASK, MULTIPLIERS, ROUNDS

SLICES = 64  # of a row, summed and searched by a block each
PENALTY_THREADS, SLICE_THREADS, CHOOSE_THREADS = 512, 256, 1024
# That sampler.cu sorts in shared memory, 16 bytes each, and besides has KEPT_BYTES of.
MOST_CANDIDATES, KEPT_BYTES = 4096, 4096


@dataclass(frozen=True, slots=True, eq=False)
class SamplerTables:
    """How each row's token is drawn; filled before a step."""

    temperature: torch.Tensor  # float64 [rows]; 0 takes the likeliest
    top_p: torch.Tensor  # float64; 1 keeps all
    min_p: torch.Tensor  # float64; 0 keeps all
    frequency: torch.Tensor  # float64
    repetition: torch.Tensor  # float32; 1 changes nothing
    presence: torch.Tensor  # float32
    top_k: torch.Tensor  # int64; 0 keeps all
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64: tokens before the one that is drawn
    draw: torch.Tensor  # int64: which of several answers with the same seed
    recent: torch.Tensor  # int64 [rows, most]: tokens that penalties look at; -1 is none
    bias_ids: torch.Tensor  # int64 [rows, most]: each token once; -1 is none
    bias: torch.Tensor  # float32 [rows, most]

    @staticmethod
    def allocate(rows: int, recent: int, biases: int, device: str) -> "SamplerTables":
        """Return tables for greedy rows without penalties."""
        doubles = ("temperature", "top_p", "min_p", "frequency")
        singles = ("repetition", "presence", "bias")
        wide = {"recent": recent, "bias_ids": biases, "bias": biases}
        start = {"top_p": 1, "repetition": 1, "recent": -1, "bias_ids": -1}
        made = {}
        for field in fields(SamplerTables):
            name = field.name
            plain = torch.float32 if name in singles else torch.int64
            made[name] = torch.full(
                (rows, wide[name]) if name in wide else (rows,),
                start.get(name, 0),
                dtype=torch.float64 if name in doubles else plain,
                device=device,
            )
        return SamplerTables(**made)


def sample(logits: torch.Tensor, tables: SamplerTables) -> torch.Tensor:
    """Draw a token (int64) for each row of `logits [rows, vocabulary]`, which stay as they are."""
    scores = penalise(logits, tables)
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    greedy = tables.temperature == 0
    values = scores.double() / torch.where(greedy, 1, tables.temperature)[:, None]
    ranked = torch.exp(values - values.amax(1, keepdim=True)).gather(1, order)
    ranked = _filter(ranked, tables)
    kept = torch.zeros_like(ranked).scatter_(1, order, ranked)
    bounds = kept.cumsum(1)
    point = uniform(tables.seed, tables.position, tables.draw) * bounds[:, -1]
    drawn = (bounds <= point[:, None]).sum(1)
    # Rounding can put the point on the last bound; the last token with any chance is meant then.
    places = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(kept > 0, places, 0).amax(1)
    return torch.where(greedy, order[:, 0], torch.minimum(drawn, last))


def penalise(logits: torch.Tensor, tables: SamplerTables) -> torch.Tensor:
    """Return logits after logit bias and the three penalties."""
    rows, vocabulary = logits.shape
    bias = torch.where(tables.bias_ids >= 0, tables.bias, 0)
    scores = logits.scatter_add(1, tables.bias_ids.clamp(min=0), bias)
    counts = torch.zeros(rows, vocabulary + 1, dtype=torch.int64, device=logits.device)
    places = torch.where(tables.recent >= 0, tables.recent, vocabulary)
    counts = counts.scatter_add_(1, places, torch.ones_like(places))[:, :vocabulary]
    repetition = tables.repetition[:, None]
    changed = torch.where(scores > 0, scores / repetition, scores * repetition)
    changed = changed - (tables.frequency[:, None] * counts).float()
    return torch.where(counts > 0, changed - tables.presence[:, None], scores)


def uniform(seed: torch.Tensor, position: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Return the number in [0, 1) of each seed, position and draw: the bits of `philox.uniform`.

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


def _filter(ranked: torch.Tensor, tables: SamplerTables) -> torch.Tensor:
    """Set to zero what top-k, top-p and min-p take from probabilities, likeliest first."""
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    top_k = torch.where(tables.top_k > 0, tables.top_k, ranked.shape[1])[:, None]
    ranked = torch.where(rank < top_k, ranked, 0)
    reached = ranked.cumsum(1)
    target = tables.top_p[:, None] * reached[:, -1:]
    # A token is kept if those before it have not reached the target.
    before = torch.cat((torch.full_like(target, -1), reached[:, :-1]), dim=1)
    ranked = torch.where((before < target) | (rank == 0) | (tables.top_p[:, None] >= 1), ranked, 0)
    return torch.where(ranked < tables.min_p[:, None] * ranked[:, :1], 0, ranked)


@dataclass(frozen=True, slots=True, eq=False)
class SamplerScratch:
    """Memory that drawing works in."""

    scores: torch.Tensor  # float32 [rows, vocabulary]
    counts: torch.Tensor  # int32 [rows, vocabulary]; zeros between calls
    best: torch.Tensor  # int64 [rows, SLICES]
    masses: torch.Tensor  # float64 [rows, SLICES]

    @staticmethod
    def allocate(rows: int, vocabulary: int, device: str) -> "SamplerScratch":
        """Return scratch for so many rows of logits."""
        return SamplerScratch(
            scores=torch.empty(rows, vocabulary, device=device),
            counts=torch.zeros(rows, vocabulary, dtype=torch.int32, device=device),
            best=torch.empty(rows, SLICES, dtype=torch.int64, device=device),
            masses=torch.empty(rows, SLICES, dtype=torch.float64, device=device),
        )


def sample_fast(
    logits: torch.Tensor, tables: SamplerTables, scratch: SamplerScratch, out: torch.Tensor
) -> torch.Tensor:
    """Draw a token for each row of logits to `out [rows]` (int64), without sorting a vocabulary."""
    rows, vocabulary = logits.shape
    scores = scratch.scores[:rows].copy_(logits)
    compile_kernel("sampler.cu", "penalise")(
        (rows,),
        (PENALTY_THREADS,),
        (
            *(scores, scratch.counts, tables.recent, tables.bias_ids, tables.bias),
            *(tables.repetition, tables.frequency, tables.presence),
            *(vocabulary, tables.recent.shape[1], tables.bias_ids.shape[1]),
        ),
        early=True,
    )
    slices = ((SLICES, rows), (SLICE_THREADS,))
    compile_kernel("sampler.cu", "peaks")(*slices, (scores, scratch.best, vocabulary), early=True)
    args = (scores, scratch.best, tables.temperature, tables.top_k, scratch.masses, vocabulary)
    compile_kernel("sampler.cu", "masses")(*slices, args, early=True)
    most = candidates_for(shared_bytes_of(logits.device))
    compile_kernel("sampler.cu", "choose", {"MOST": most})(
        (rows,),
        (CHOOSE_THREADS,),
        (
            *(scores, scratch.best, scratch.masses, tables.temperature, tables.top_p),
            *(tables.min_p, tables.top_k, tables.seed, tables.position, tables.draw),
            *(out, vocabulary),
        ),
        shared_bytes=most * 16,
        early=True,
    )
    return out


def candidates_for(shared_bytes: int) -> int:
    """Return how many candidates a block can sort; where there are more it takes a longer way."""
    fits = shared_bytes >= 16 * MOST_CANDIDATES + KEPT_BYTES
    return MOST_CANDIDATES if fits else MOST_CANDIDATES // 2
