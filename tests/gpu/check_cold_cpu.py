"""Compares cold experts that the CPU computes with all-hot ones, inside captured graphs.

Needs the C++ module. With --bench: the hand-over's time, and microseconds of a layer at the sizes
of Qwen3.5-35B-A3B by path and share of hot picks.
"""

import sys
import time
import traceback
from collections.abc import Callable

import torch

from headroom.experts.cache import RULES
from headroom.experts.decode import DecodeResolver, DecodeWorker
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import expert_cache, handover
from headroom.kernels.cuda.expert_cache import CpuRequest
from headroom.kernels.cuda.experts import ExpertTiles, few_rows
from headroom.kernels.cuda.matmul import half_rows
from headroom.kernels.cuda.measure import handover_seconds
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.ops import Picks
from headroom.plan.cost_model import ColdSpeeds, DecodeChoice, best_in_place
from tests.experts.cold_layers import DecodeStore
from tests.gpu.check_experts import Kinds, make_table, to_tiles
from tests.gpu.kept import keep_code

DEVICE = "cuda"
USED = 8
MIX: Kinds = ("q4_k", "q4_k", "q6_k")
BY_CPU = DecodeChoice("cpu", (0,) * (USED + 1))
MIXED = DecodeChoice("cpu", (0, 0, 0, 1, 1, 1, 2, 2, 2))


def gpu_store(pieces: list[torch.Tensor], kinds: Kinds, width: int, hot: list[int]) -> DecodeStore:
    """A layer whose cold experts a GPU and a CPU read in the same pinned memory."""
    sizes = [piece.shape[1] for piece in pieces]
    slots = torch.cat(pieces, dim=1)  # on the GPU: all of them, of which the hot are used
    host = torch.empty(slots.shape, dtype=torch.uint8, pin_memory=True).copy_(slots)
    starts = torch.tensor([0, sizes[0], sizes[0] + sizes[1]])
    apart = torch.arange(len(slots))[:, None] * slots.shape[1]
    is_hot = torch.zeros(len(slots), dtype=torch.int32)
    is_hot[hot] = 1
    here, there = host.data_ptr() + apart + starts, slots.data_ptr() + apart + starts
    cold = torch.where(is_hot[:, None] == 1, 0, here).contiguous()
    where = torch.where(is_hot[:, None] == 1, there, here).to(DEVICE)
    quants = tuple(BY_NAME[kind] for kind in kinds)
    hidden = {512: 2048}.get(width, 512)
    tiles = ExpertTiles(where, quants, width, hidden, slots.nbytes, (slots, host))
    return DecodeStore(None, host, tiles, is_hot.to(DEVICE), cold)  # type: ignore[arg-type]


def captured(work: Callable[[], None], begin: Callable[[], None]) -> Callable[[], None]:
    """Capture work as a graph; return what replays it."""
    begin()
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        begin()
        graph.replay()

    return replay


def pick(rows: int, count: int) -> Picks:
    """Random experts and weights of rows."""
    ids = torch.stack([torch.randperm(count)[:USED] for _ in range(rows)]).int()
    return Picks(ids, torch.softmax(torch.randn(rows, USED), 1))


def check(share: float, rows: int, choice: DecodeChoice, kinds: Kinds = MIX) -> bool:
    """A layer of which a share is hot, replayed with new rows and picks."""
    count, width, hidden = 20, 256, 512
    every = to_tiles(make_table(kinds, count, width, hidden))
    hot = torch.randperm(count)[: int(share * count)].tolist()
    store = gpu_store(list(every.memory), kinds, width, hot)
    compute = DecodeWorker(DEVICE)
    part = compute.add(store, USED, "silu", choice)
    compute.start()
    x, out = (torch.zeros(rows, hidden, device=DEVICE) for _ in range(2))
    ids = torch.full((rows, USED), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros(rows, USED, device=DEVICE)

    def layer() -> None:
        part.ask(x, ids, weights)
        few_rows(half_rows(x), ids, weights, store.tiles, "silu", out=out)
        part.add_answers(out)

    replay, worst = captured(layer, compute.begin_step), 0.0
    for _ in range(5):
        picks = pick(rows, count)
        x.copy_(torch.randn(rows, hidden) * 0.3)
        ids.copy_(picks.ids)
        weights.copy_(picks.weights)
        wanted = few_rows(half_rows(x), ids.clone(), weights, every, "silu")
        replay()
        torch.cuda.synchronize()
        worst = max(worst, float((out - wanted).norm() / wanted.norm()))
    compute.check()
    counts = compute.counts()
    compute.close()
    good = worst < 0.002 and (share == 1.0 or counts.cpu_bytes > 0)
    named = f"{share:.0%} hot x{rows} left {choice.in_place[-1]} {kinds}"
    print(f"{'PASS' if good else 'FAIL'} {named}: {worst:.1e} {counts}", flush=True)
    return good


def check_drop() -> bool:
    """Cold picks are left out."""
    ids = torch.tensor([[0, 1], [1, 1]], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[0.25, 0.5], [0.5, 0.5]], device=DEVICE)
    handover.drop(ids, weights, torch.tensor([1, 0], dtype=torch.int32, device=DEVICE))
    good = ids.tolist() == [[0, -1], [-1, -1]] and weights.tolist() == [[0.75, 0.0], [0.0, 0.0]]
    print(f"{'PASS' if good else 'FAIL'} drop", flush=True)
    return good


def check_limit() -> bool:
    """A CPU that never answers is given up."""
    box = handover.Mailbox.allocate(512, 1, DEVICE)
    nothing = torch.zeros(USED + 1, dtype=torch.int32, device=DEVICE)
    table = expert_cache.static_table(torch.zeros(20, dtype=torch.int32, device=DEVICE), nothing)
    picks = Picks(*(t.to(DEVICE) for t in pick(1, 20)))
    x = torch.ones(1, 512, device=DEVICE)
    start = time.perf_counter()
    expert_cache.resolve(picks, table, RULES, CpuRequest(x, box, 0))
    handover.collect(x, box, 0, last=True, limit_ms=200)
    torch.cuda.synchronize()
    spent = time.perf_counter() - start
    good = box.failed and 0.15 < spent < 5 and bool((x == 1).all())
    print(f"{'PASS' if good else 'FAIL'} gives up after {spent * 1e3:.0f} ms", flush=True)
    return good


def bench_layers(stores: list[DecodeStore], choice: DecodeChoice | None, hit: float) -> None:
    """Microseconds of a layer's experts, one row; None: the GPU reads all that is cold."""
    compute = DecodeWorker(DEVICE)
    parts: list[DecodeResolver | None] = [
        None
        if choice is None
        else DecodeResolver(store.lookup, compute.add(store, USED, "silu", choice))
        for store in stores
    ]
    if choice is not None:
        compute.start()
    x, out = torch.randn(1, 2048, device=DEVICE), torch.zeros(1, 2048, device=DEVICE)
    weights, rounds = torch.full((1, USED), 1 / USED, device=DEVICE), 10
    cold = torch.rand(rounds, len(stores), USED) >= hit
    # Lower halves of the ids are hot.
    half = len(stores[0].blobs) // 2
    picks = [
        [(torch.randperm(half)[:USED] + half * cold[turn, at]).int()[None].to(DEVICE)
         for at in range(len(stores))]
        for turn in range(rounds)
    ]  # fmt: skip
    ids = torch.zeros(1, USED, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        for turn in picks:
            for at, (store, part) in enumerate(zip(stores, parts, strict=True)):
                ids.copy_(turn[at])
                if part is not None:
                    part.resolve(x, Picks(ids, weights))
                few_rows(half_rows(x), ids, weights, store.tiles, "silu", out=out)
                if part is not None:
                    part.add_answers(out)

    replay = captured(step, compute.begin_step if choice is not None else lambda: None)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / rounds / len(stores))
    name = "gpu" if choice is None else f"cpu, left {choice.in_place}"
    size = stores[0].expert_bytes * float(cold.float().sum(2).mean())
    us = sorted(times)[3]
    print(
        f"hit {hit:.0%} {name}: {us:.1f} us a layer, {size / us / 1e3:.1f} GB/s of cold experts",
        flush=True,
    )
    if choice is not None:
        print(f"    {compute.counts()}", flush=True)
        compute.check()
        compute.close()


def bench() -> None:
    """The hand-over, and layers by path."""
    handover_s = handover_seconds(DEVICE)
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    sink = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    handover.read_all(pinned, sink)
    torch.cuda.synchronize()
    start = time.perf_counter()
    handover.read_all(pinned, sink)
    torch.cuda.synchronize()
    link = pinned.nbytes / (time.perf_counter() - start)
    print(f"hand-over {handover_s * 1e6:.1f} us, kernels read {link / 1e9:.1f} GB/s, "
          f"{POOL.ops.threads} threads")  # fmt: skip
    stores = []
    for _ in range(4):
        some = to_tiles(make_table(MIX, 8, 512, 2048))
        pieces = [piece.repeat(32, 1) for piece in some.memory]  # 256 experts, apart in memory
        stores.append(gpu_store(pieces, MIX, 512, list(range(128))))
    shared = best_in_place(ColdSpeeds(4e12, link, 90e9, handover_s), stores[0].expert_bytes, USED)
    for hit in (1.0, 0.9, 0.6, 0.0):
        bench_layers(stores, None, hit)
        bench_layers(stores, BY_CPU, hit)
        bench_layers(stores, DecodeChoice("cpu", shared), hit)


def main() -> None:
    """Check, then time."""
    if MODULE is None:
        print("FAIL: the C++ module is not built")
        sys.exit(1)
    keep_code()
    torch.manual_seed(0)
    POOL.set(max(1, torch.get_num_threads() - 1))  # one core is the engine's
    good = True
    cases = [
        lambda share=share, rows=rows, choice=choice: check(share, rows, choice)
        for share in (0.0, 0.3, 0.6, 1.0)
        for rows in (1, 2, 7, 32)
        for choice in (BY_CPU, MIXED)
    ]
    plain = [
        lambda kind=kind, rows=rows: check(0.3, rows, MIXED, kinds=(kind, kind, kind))
        for kind in ("f16", "bf16")
        for rows in (1, 7)
    ]
    for case in (*cases, *plain, check_drop, check_limit):
        try:
            good = case() and good
        except Exception:
            traceback.print_exc()
            good = False
    if "--bench" in sys.argv:
        bench()
    print("ALL PASS" if good else "SOME FAILED")
    sys.exit(not good)


if __name__ == "__main__":
    main()
