"""Checks the cache of experts on a GPU: its rules, its fills, and what kernels compute meanwhile.

100,000 rounds of random picks are resolved as the model in plain Python says. Layers of true sizes
give the bits of all-hot ones while slots are given up and filled in every step of a captured graph.
With --bench: microseconds of a layer by misses, at the sizes of Qwen3.5-35B-A3B.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence

import torch

from headroom.experts.cache import POLICIES, RULES, Policy
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.expert_cache import COUNTERS, FILL_WORDS, Filling, LayerTable
from headroom.kernels.cuda.experts import ExpertTiles, few_rows
from headroom.kernels.cuda.matmul import half_rows
from headroom.kernels.ops import Picks
from tests.gpu.cache_layers import layer_of
from tests.gpu.check_experts import make_table, to_tiles
from tests.gpu.kept import keep_code

DEVICE = "cuda"


def check_rounds(policy: Policy, rows: int, rounds: int, seed: int) -> bool:
    """Random rounds of one layer, compared with the model after each."""
    rng = random.Random(seed)
    experts = rng.choice((20, 64, 128, 256))  # a byte tells them apart
    used = rng.choice((2, 4, 8))
    resident = sorted(rng.sample(range(experts), rng.randint(1, experts - 1)))
    pinned = rng.sample(resident, rng.randint(0, len(resident) // 2))
    most = min(experts, 32 * used)
    link = None if rng.random() < 0.3 else [0]
    while link is not None and len(link) <= most:
        link.append(min(link[-1] + rng.randint(0, 1), len(link)))
    layer = layer_of(policy, experts, resident, pinned, link, DEVICE)
    popular = sorted(range(experts), key=lambda expert: rng.random())
    good = True
    for number in range(rounds):
        span = rng.randint(used, experts)  # few popular experts, or all
        ids = torch.tensor(
            [
                [-1] * used if rng.random() < 0.05 else rng.sample(popular[:span], used)
                for _ in range(rows)
            ],
            dtype=torch.int32,
        )
        found = layer.resolve(ids, asks=link is not None)
        said = layer.model.resolve(ids.tolist(), link)
        expert_cache.fill(layer.filling)
        slots = {expert: slot + 1 for slot, expert in enumerate(layer.model.slots)}
        good &= layer.table.place.tolist() == [slots.get(e, 0) for e in range(experts)]
        left = set(said.left_to_cpu)
        good &= found.ids.tolist() == [
            [-1 if expert in left else expert for expert in row] for row in ids.tolist()
        ]
        if number % 16 == 0 or number == rounds - 1:
            good &= layer.experts_at() == list(range(experts))
            good &= layer.filling.slots[:, -1].tolist() == layer.model.slots
        if not good:
            print(f"FAIL {policy} x{rows} seed {seed}: round {number}", flush=True)
            return False
    counts = [getattr(layer.model.counts, name) for name in COUNTERS]
    return layer.table.counts.tolist() == counts


def check_all_rounds(rounds: int) -> bool:
    """All policies and numbers of rows."""
    began, each = time.perf_counter(), 200
    good, done = True, 0
    for seed in range(-(-rounds // each)):
        policy, rows = POLICIES[seed % 4], (1, 1, 2, 5, 8, 16, 32)[seed % 7]
        good &= check_rounds(policy, rows, each, seed)
        done += each
    spent = time.perf_counter() - began
    print(f"{'PASS' if good else 'FAIL'} {done} rounds in {spent:.0f} s", flush=True)
    return good


class FilledLayer:
    """Experts of one layer in host memory, some of them in slots, and all of them on the GPU."""

    def __init__(
        self,
        kinds: tuple[str, str, str],
        sizes: tuple[int, int, int],
        resident: Sequence[int],
        policy: Policy,
        repeat: int = 1,
    ) -> None:
        count, width, hidden = sizes
        self.every = to_tiles(make_table(kinds, count // repeat, width, hidden))
        pieces = [piece.repeat(repeat, 1) for piece in self.every.memory]
        parts = [piece.shape[1] for piece in pieces]
        blobs = torch.cat(pieces, dim=1)
        host = torch.empty(blobs.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(blobs)
        slots = blobs[list(resident)].clone()
        starts = torch.tensor([0, parts[0], parts[0] + parts[1]])
        place = torch.zeros(count, dtype=torch.int32)
        place[list(resident)] = torch.arange(1, len(resident) + 1).int()
        at = host.data_ptr() + torch.arange(count) * blobs.shape[1]
        there = slots.data_ptr() + (place.long() - 1) * blobs.shape[1]
        addresses = torch.where(place > 0, there, at)[:, None] + starts
        state = expert_cache.new_state(count, POLICIES.index(policy))
        words = torch.zeros(FILL_WORDS, dtype=torch.int32, device=DEVICE)
        filling = Filling(words, host, slots, parts[0] + parts[1])
        self.table = LayerTable(
            place=place.to(DEVICE),
            addresses=addresses.to(DEVICE),
            counts=torch.zeros(len(COUNTERS), dtype=torch.int64, device=DEVICE),
            state=state.to(DEVICE),
            filling=filling,
            starts=(parts[0], parts[0] + parts[1]),
        )
        quants = self.every.kinds
        self.tiles = ExpertTiles(
            self.table.addresses, quants, width, hidden, host.nbytes, (slots, host), filling
        )
        self.expert_bytes = blobs.shape[1]

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A layer as a step runs it."""
        picks = expert_cache.resolve(Picks(ids, weights), self.table, RULES, None)
        return few_rows(half_rows(x), *picks, self.tiles, "silu")


def check_bits(kinds: tuple[str, str, str], rows: int, policy: Policy, slots: int) -> bool:
    """A captured layer whose slots change hands gives the bits of all-hot experts."""
    count, used, width, hidden = 32, 8, 512, 1024
    layer = FilledLayer(kinds, (count, width, hidden), range(slots), policy)
    x = torch.zeros(rows, hidden, device=DEVICE)
    ids = torch.full((rows, used), -1, dtype=torch.int32, device=DEVICE)
    kept, weights = ids.clone(), torch.zeros(rows, used, device=DEVICE)
    layer.run(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.copy_(ids)
        out = layer.run(x, kept, weights)
    good = True
    for _ in range(60):
        x.copy_(torch.randn(rows, hidden) * 0.3)
        ids.copy_(torch.stack([torch.randperm(count)[:used] for _ in range(rows)]).int())
        weights.copy_(torch.softmax(torch.randn(rows, used), 1))
        wanted = few_rows(half_rows(x), ids, weights, layer.every, "silu")
        out.fill_(float("nan"))
        graph.replay()
        good &= torch.equal(out, wanted)
    filled = int(layer.table.counts[COUNTERS.index("filled")])
    good &= filled > 0 or rows * used >= count
    told = f"{kinds} x{rows} {policy}, {slots} slots, {filled} fills"
    print(f"{'PASS' if good else 'FAIL'} bits {told}", flush=True)
    return good


def _layer_us(
    layers: Sequence[FilledLayer],
    steps: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: torch.Tensor,
) -> float:
    """Return the microseconds of one layer in a captured run of all steps."""
    ids = torch.zeros_like(steps[0])

    def work() -> None:
        for step in steps:
            for layer in layers:
                ids.copy_(step)
                layer.run(x, ids, weights)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(steps) / len(layers))
    return sorted(times)[3]


def bench() -> None:
    """A layer of 35B-A3B with a number of misses in every step, and without a cache."""
    count, used, slots = 256, 8, 102
    layers = [
        FilledLayer(("q4_k", "q4_k", "q6_k"), (count, 512, 2048), range(slots), "lru", 32)
        for _ in range(8)
    ]
    weights = torch.full((1, used), 1 / used, device=DEVICE)
    x = torch.randn(1, 2048, device=DEVICE)
    for misses in (0, 1, 2, 4, 8):
        fresh = list(range(slots, count))  # never used again before they are given up
        steps = []
        for turn in range(24):  # more new experts than slots, so that replays miss them again
            first = turn * misses % len(fresh)
            new = (fresh + fresh)[first : first + misses]
            steps.append(torch.tensor([[*range(used - misses), *new]]).int().to(DEVICE))
        us = _layer_us(layers, steps, x, weights)
        size = layers[0].expert_bytes * misses
        print(f"{misses} misses: {us:.1f} us a layer, {size / us / 1e3:.1f} GB/s", flush=True)


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--bench", action="store_true")
    given = parser.parse_args()
    keep_code()
    torch.manual_seed(0)
    good = True
    for kinds in (("q4_k", "q4_k", "q6_k"), ("q8_0",) * 3, ("bf16",) * 3):
        for rows, slots in ((1, 9), (1, 20), (2, 16), (8, 20), (16, 20)):
            for policy in ("lru", "counts") if rows == 1 else ("lru",):
                good &= check_bits(kinds, rows, policy, slots)
    if given.bench:
        bench()
    good &= check_all_rounds(given.rounds)
    print("ALL PASS" if good else "SOME FAILED")
    sys.exit(not good)


if __name__ == "__main__":
    main()
