"""Compares streamed cold experts with hot ones on a GPU; --bench times layers and the link."""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headroom.experts import prefill
from headroom.experts.prefill import ColdStream, open_stream
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.experts import Addends
from headroom.kernels.cuda.experts_prefill import many_rows
from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Picks
from headroom.plan import experts as plan_experts
from headroom.plan.cost_model import (
    ColdLayer,
    ColdSpeeds,
    ExpertSize,
    expert_operations,
    pays_to_count,
)
from headroom.units import GIB, MIB
from tests.experts.cold_layers import PrefillStore, blobs_of, matrix_bytes, prefill_store
from tests.gpu.check_experts import Kinds, forced, make_table, pick_experts
from tests.gpu.check_matmul import random_weight
from tests.gpu.kept import keep_code

DEVICE = torch.device("cuda")
KINDS: Kinds = ("q4_k", "q4_k", "q6_k")
PLAIN: tuple[Kinds, ...] = (("bf16",) * 3, ("f16",) * 3)
SIZES = (24, 256, 512)  # of the small layer: experts, width, hidden
USED = 4
# Copies to an H200, without its CPU and with 16 cores of it.
LINK = ColdSpeeds(gpu=4e12, link=48e9, cpu=0.0, handover_s=1e-5, copy=55e9)
WITH_CPU = ColdSpeeds(gpu=4e12, link=48e9, cpu=75e9, handover_s=1e-5, copy=55e9, cpu_flops=460e9)


def open_layers(
    layers: list[PrefillStore], experts_a_buffer: int, pinned: bool, speeds: ColdSpeeds = LINK
) -> ColdStream:
    """A stream with buffers of so many experts."""
    size, tiles = layers[0].expert_bytes, layers[0].tiles
    plan_experts.BUFFER_BYTES = experts_a_buffer * size
    downs = plan_experts.downs_bytes(
        len(tiles.addresses), tiles.width, tiles.hidden, scratch.unpack_bytes()
    )
    each = plan_experts.buffer_bytes(size, len(tiles.addresses))
    total = plan_experts.STREAM_BUFFERS * each + downs
    memory = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    stream = open_stream(memory, size, len(tiles.addresses), pinned=pinned, speeds=speeds)
    for layer in layers:
        stream.add(layer.tiles, layer, "silu", 2.0)
    return stream


def check(
    cold_share: float, rows: int, counted: bool, pinned: bool, on_cpu: bool, kinds: Kinds = KINDS
) -> bool:
    """Two layers in turn, again and again, so that copies and computing run into each other."""
    prefill.most_counted_rows = lambda *facts: rows * counted  # type: ignore[assignment]
    count, width, hidden = SIZES
    tables = [make_table(kinds, count, width, hidden) for _ in range(2)]
    blobs = [blobs_of(table) for table in tables]
    cold = [torch.randperm(count)[: round(count * cold_share)].tolist() for _ in tables]
    halves = [
        prefill_store(*both, order)
        for both, order in zip(zip(tables, blobs, strict=True), cold, strict=True)
    ]
    if not pinned:
        for layer in halves:
            apart = layer.cold.clone()
            shift = apart.data_ptr() - layer.cold.data_ptr()
            layer.host_addresses[layer.host_addresses != 0] += shift
            layer.cold = apart
    hot = [prefill_store(*both, ()) for both in zip(tables, blobs, strict=True)]
    speeds = replace(LINK, copy=1e7, cpu=2e7, cpu_flops=1e12) if on_cpu else LINK
    # Three groups a layer.
    arena = scratch.Arena(
        torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE), 4 * width * hidden * 8
    )
    good, worst = True, 0.0
    with scratch.opened(arena):
        stream = open_layers(halves, 3, pinned, speeds)
        for _ in range(10):
            x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
            weights = torch.rand(rows, USED, device=DEVICE)
            ids = pick_experts(rows, count, USED)
            ids[torch.rand(ids.shape, device=DEVICE) < 0.1] = -1
            addends = Addends(torch.randn(rows, hidden, device=DEVICE))
            found = [layer.many_rows(x, Picks(ids, weights), addends) for layer in stream.layers]
            with forced(""):  # unpacked, as cold ones are
                wanted = [many_rows(x, ids, weights, layer.tiles, "silu", addends) for layer in hot]
            for a, b in zip(found, wanted, strict=True):
                apart = float((a - b).norm() / b.norm())
                worst = max(worst, apart if apart == apart else float("inf"))
                good = good and (worst < 0.02 if on_cpu else torch.equal(a, b))
    counts = stream.counts
    good = good and (counts.cpu_bytes > 0 or not on_cpu)
    what = f"cold {cold_share:.0%} x{rows} counted={counted} pinned={pinned} cpu={on_cpu} {kinds}"
    print(f"{'PASS' if good else 'FAIL'} {what}: {worst:.1e} {counts}", flush=True)
    return good


def real_layer(cold_share: float) -> PrefillStore:
    """A layer of Qwen3.5-35B-A3B; all its experts are equal."""
    count, width, hidden = 256, 512, 2048
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    parts = []
    for kind, shape in zip(KINDS, shapes, strict=True):
        one = random_weight(kind, *shape)
        packed = torch.empty(tile_bytes(one.quant, *shape), dtype=torch.uint8, device=DEVICE)
        pack(one.data.to(DEVICE), one.quant, *shape, packed)
        parts.append(packed)
    blob = torch.cat(parts)
    kinds = tuple(BY_NAME[kind] for kind in KINDS)
    sizes = matrix_bytes(kinds, width, hidden)
    cold = round(count * cold_share)
    slots = blob.repeat(count - cold).view(count - cold, len(blob))
    rows = torch.empty(cold, len(blob), dtype=torch.uint8, pin_memory=True)
    rows.copy_(blob.cpu().expand(cold, -1))
    starts = torch.tensor([0, sizes[0], sizes[0] + sizes[1]])
    order = torch.randperm(count)  # any placement
    hot, host = torch.zeros(count, 3, dtype=torch.int64), torch.zeros(count, 3, dtype=torch.int64)
    for place, expert in enumerate(sorted(order[: count - cold].tolist())):
        hot[expert] = slots[place].data_ptr() + starts
    for place, expert in enumerate(sorted(order[count - cold :].tolist())):
        host[expert] = rows[place].data_ptr() + starts
    tiles = prefill.ExpertTiles(hot.to(DEVICE), kinds, width, hidden, slots.nbytes, (slots,))
    return PrefillStore(tiles, rows, host, len(blob))


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median time of some work, launches included."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 2]


def bench(cold_share: float, unpack_bytes: int, buffer_bytes: int) -> None:
    """Four layers, one after another, as a chunk runs them, but for all that is no expert."""
    layers = [real_layer(cold_share) for _ in range(4)]
    size = layers[0].expert_bytes
    arena = scratch.Arena(
        torch.empty(unpack_bytes + GIB // 2, dtype=torch.uint8, device=DEVICE), unpack_bytes
    )
    prefill.most_counted_rows = lambda *facts: 0  # type: ignore[assignment]
    with scratch.opened(arena):
        stream = open_layers(layers, buffer_bytes // size, True)
        for rows in (512, 2048):
            x = torch.randn(rows, 2048, device=DEVICE).bfloat16()
            picks = Picks(pick_experts(rows, 256, 8), torch.rand(rows, 8, device=DEVICE))
            out = torch.zeros(rows, 2048, device=DEVICE)

            def chunk(x=x, picks=picks, out=out) -> None:  # type: ignore[no-untyped-def]
                for layer in stream.layers:
                    layer.many_rows(x, picks, Addends(residual=out), out)

            took = seconds(chunk) / len(layers)
            moved = sum(layer.cold.nbytes for layer in layers) / len(layers)
            print(
                f"BENCH cold {cold_share:.0%} x{rows}, {unpack_bytes >> 20} MiB unpacked, buffers "
                f"of {buffer_bytes >> 20} MiB: {took * 1e6:.0f} us a layer, link "
                f"{moved / took / 1e9:.1f} GB/s, 40 layers {rows / took / 40:.0f} tok/s",
                flush=True,
            )


def bench_counted(rows: int, hits: float) -> None:
    """Time layers with a share `hits` of hot picks: copy all cold experts, or picked ones only."""
    layers = [real_layer(0.4) for _ in range(4)]
    hot = layers[0].host_addresses[:, 0] == 0  # numbers of all layers are as good as these
    chances = torch.where(hot, hits / hot.sum(), (1 - hits) / (~hot).sum())
    ids = torch.multinomial(chances.expand(rows, -1), 8).int().to(DEVICE)
    for layer in layers[1:]:
        layer.tiles, layer.host_addresses = layers[0].tiles, layers[0].host_addresses
        layer.cold = layers[0].cold
    x, weights = (
        torch.randn(rows, 2048, device=DEVICE).bfloat16(),
        torch.rand(rows, 8, device=DEVICE),
    )
    arena = scratch.Arena(torch.empty(GIB + GIB // 2, dtype=torch.uint8, device=DEVICE), GIB)
    for counted, speeds in ((False, LINK), (True, LINK), (True, WITH_CPU)):
        prefill.most_counted_rows = lambda *facts, counted=counted: rows * counted
        with scratch.opened(arena):
            stream = open_layers(layers, 64 * MIB // layers[0].expert_bytes, True, speeds)
            out = torch.zeros(rows, 2048, device=DEVICE)

            def chunk(stream=stream, out=out) -> None:  # type: ignore[no-untyped-def]
                for layer in stream.layers:
                    layer.many_rows(x, Picks(ids, weights), Addends(residual=out), out)

            took = seconds(chunk) / len(layers)
        size = ExpertSize(layers[0].expert_bytes, expert_operations(512, 2048))
        cold = ColdLayer(size, 102, 8 * (1 - hits), 2 * 64 * MIB)
        print(
            f"BENCH hits {hits:.0%} x{rows} counted={counted} cpu={speeds.cpu_takes_prefill}: "
            f"{took * 1e6:.0f} us a layer; the rule counts: {pays_to_count(rows, cold, speeds)}",
            flush=True,
        )


def bench_link() -> None:
    """Copies from pinned memory, nothing else running."""
    source = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    took = seconds(lambda: [target.copy_(source, non_blocking=True) for _ in range(16)]) / 16
    print(f"BENCH link: {len(source) / took / 1e9:.1f} GB/s")


def main() -> None:
    """Run every case, then the times if asked for."""
    keep_code()
    torch.manual_seed(0)
    cases: list[tuple[Any, ...]] = [
        (share, rows, counted, True, False)
        for share in (0.0, 0.3, 0.6, 1.0)
        for rows in (40, 300)
        for counted in (False, True)
    ]
    cases += [(0.6, 300, False, False, False), (1.0, 100, True, False, False)]
    if MODULE is not None:
        cases += [(0.6, 40, True, True, True), (1.0, 100, True, False, True)]
        cases += [(0.6, 40, True, True, True, kinds) for kinds in PLAIN]
    cases += [(0.6, 300, False, True, False, kinds) for kinds in PLAIN]
    for case in cases:
        try:
            check(*case)
        except Exception:
            print("FAIL", case)
            traceback.print_exc(limit=6)
    if "--bench" in sys.argv:
        bench_link()
        for share in (1.0, 0.4, 0.0):
            bench(share, GIB, 64 * MIB)
        bench(0.4, GIB, 32 * MIB)
        bench(0.4, 96 * MIB, 64 * MIB)
        for rows, hits in ((128, 0.9), (512, 0.9), (512, 0.6), (2048, 0.9)):
            bench_counted(rows, hits)


if __name__ == "__main__":
    main()
